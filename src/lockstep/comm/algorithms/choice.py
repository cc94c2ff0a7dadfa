"""Which algorithms there are for a collective, and how one of them carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

from lockstep.comm.algorithms import chain, dissemination, halving, naive, pairwise, ring, tree
from lockstep.comm.algorithms.wire import Wire
from lockstep.comm.op import Algorithm, CommOp, Kind, Work
from lockstep.comm.operands import check_reducible, pieces, writing_to
from lockstep.errors import CommError, ConfigError, UnsupportedArgument

if TYPE_CHECKING:
    from lockstep.comm.communicator import Communicator

ALGORITHMS: dict[Kind, dict[str, Callable[..., None]]] = {
    "all_reduce": {
        "ring": ring.all_reduce,
        "halving_doubling": halving.all_reduce,
        "tree": tree.all_reduce,
        "naive": naive.all_reduce,
    },
    "reduce": {"tree": tree.reduce, "naive": naive.reduce},
    "broadcast": {"tree": tree.broadcast, "chain": chain.broadcast, "naive": naive.broadcast},
    "all_gather": {"ring": ring.all_gather},
    "reduce_scatter": {"ring": ring.reduce_scatter},
    "all_to_all": {"pairwise": pairwise.all_to_all},
    "barrier": {"dissemination": dissemination.barrier},
}


def by_messages(comm: Communicator, op: CommOp, algorithm: str) -> CommOp:
    """`op`, to be carried out by messages of `comm`.

    Raises: ConfigError for an algorithm that does not exist, or a dtype that cannot be reduced.
    """
    choices = ALGORITHMS[op.kind]
    if algorithm not in choices:
        raise ConfigError(f"algorithm={algorithm!r}: {op.kind} has {', '.join(choices)}; None is the transport's own")
    if op.async_op:
        why = "with algorithm= the caller itself moves one message after the other; leave one of the two out"
        raise UnsupportedArgument("async_op=True", why)
    check_reducible(op)
    return op._replace(algorithm=Algorithm(algorithm, partial(MessagesWork, comm, algorithm)))


@final
class MessagesWork(Work):
    """A collective that the first `wait` carries out. The limit is the communicator's, for each message."""

    def __init__(self, comm: Communicator, name: str, op: CommOp) -> None:
        self._comm = comm
        self._name = name
        self._op: CommOp | None = op  # None once it has ended
        self._error: CommError | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        op, self._op = self._op, None
        if op is not None:
            with writing_to(op.outputs):
                self._run(op)
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        return self._op is None

    def _run(self, op: CommOp) -> None:
        """A rank that cannot go on lets the others know: they wait in its messages, not in those of the one it lost."""
        title = f"{op.label}: " * bool(op.label) + f"{op.kind} by {self._name}"
        wire = Wire(self._comm, title)
        try:
            ALGORITHMS[op.kind][self._name](wire, *_arguments(op, wire))
        except ConfigError:  # the same on all ranks, and before anything was sent
            raise
        except CommError as error:
            self._error = error
            self._comm.transport.abort(error)
        except BaseException as error:
            self._error = CommError(f"{title} on rank {wire.rank}: ended by {type(error).__name__}: {error}")
            self._comm.transport.abort(self._error)
            if not isinstance(error, Exception):  # an interrupt
                raise
            self._error.__cause__ = error


def _arguments(op: CommOp, wire: Wire) -> Sequence[Any]:
    """What an algorithm for this kind takes after the wire."""
    W = wire.world_size
    if op.kind == "all_reduce":
        return op.outputs[0].view(-1), op.reduce
    if op.kind == "reduce":
        total = op.outputs[0].copy_(op.inputs[0]) if op.outputs else op.inputs[0].clone()
        return total.view(-1), op.peer, op.reduce
    if op.kind == "broadcast":
        return op.outputs[0].view(-1), op.peer
    if op.kind == "all_gather":
        return pieces(op.outputs, W), op.inputs[0].view(-1)
    if op.kind == "reduce_scatter":
        return op.outputs[0].view(-1), pieces(op.inputs, W), op.reduce
    if op.kind == "all_to_all":
        return pieces(op.outputs, W), pieces(op.inputs, W)
    return ()
