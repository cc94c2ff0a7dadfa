"""One message or collective as a record, and the handle of its completion.

Everything that ranks say to each other is a `CommOp`. A transport turns it into moving bytes; a layer reads it on the
way.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import CommError

Kind = Literal[
    "send", "recv", "batch_send_recv", "barrier",
    "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all",
]  # fmt: skip
Reduction = Literal["sum", "mean", "min", "max", "product"]
REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "min", "max", "product")
COLLECTIVE_TAG = 2**31 - 2  # of messages that a collective is made of; users have the tags below


class CommOp(NamedTuple):
    """What one rank asks of its communicator: immutable, and the only thing that crosses the seam.

    `inputs` are read and `outputs` are written; a tensor in both is worked on in place. All are contiguous.
    What each kind holds on rank r of W (root = `peer`):

        send                inputs (t,)                                    peer = destination
        recv                outputs (t,)                                   peer = source
        batch_send_recv     parts = the sends and recvs, started together
        broadcast           inputs (t,) on the root; outputs (t,) on all   peer = source
        reduce              inputs (t,); outputs (t,) on the root          peer = destination
        all_reduce          inputs (t,) and outputs (t,), the same tensor
        gather              inputs (t,); outputs (o_0 .. o_W-1) on the root    peer = destination
        all_gather          inputs (t,); outputs (o_0 .. o_W-1), or one flat tensor of W * t.numel() elements
        scatter             inputs (i_0 .. i_W-1) on the root; outputs (t,)    peer = source
        reduce_scatter      inputs (i_0 .. i_W-1), or one flat tensor of W * t.numel(); outputs (t,), maybe of a wider
                            dtype, in which is added then
        all_to_all          inputs (i_0 .. i_W-1); outputs (o_0 .. o_W-1)
        barrier             nothing
    """

    seq: int  # number of this collective in its communicator; messages (send, recv) have a count of their own
    kind: Kind
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    peer: int | None = None  # rank within the communicator; None: no root, or receive from any rank
    reduce: Reduction | None = None
    tag: int = 0  # matches a send with its recv
    label: str = ""  # what it is for, in the caller's words: "bucket3", "init.weights"
    parts: tuple[CommOp, ...] = ()
    async_op: bool = True  # False: the caller waits at once, so a transport may do the work in `wait`
    algorithm: Algorithm | None = None  # carries this collective out by messages, in place of the transport

    @property
    def reduction(self) -> Reduction:
        """`reduce` of a kind that has one."""
        assert self.reduce is not None
        return self.reduce

    @property
    def partner(self) -> int:
        """`peer` of a kind that names one."""
        assert self.peer is not None
        return self.peer

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side; for all_reduce the size of its tensor."""
        if self.parts:
            return sum(part.nbytes for part in self.parts)
        return max(sum(t.nbytes for t in self.inputs), sum(t.nbytes for t in self.outputs))


def signature(op: CommOp) -> str:
    """What must be equal on every rank for a collective to make sense, as one line a person can read.

    Gathering kinds may have uneven sizes, so their shapes are left out.
    """
    words: list[str] = [op.kind]
    tensors = op.inputs or op.outputs
    if tensors:
        words.append(str(tensors[0].dtype).removeprefix("torch."))
    if op.kind in ("broadcast", "reduce", "all_reduce") and tensors:
        words.append(str(list(tensors[0].shape)))
    if op.reduce is not None:
        words.append(op.reduce)
        if op.outputs and op.outputs[0].dtype != op.inputs[0].dtype:
            words.append("in " + str(op.outputs[0].dtype).removeprefix("torch."))
    if op.peer is not None and op.kind not in ("send", "recv"):
        words.append(f"root={op.peer}")
    if op.algorithm is not None:
        words.append(f"by {op.algorithm.name}")
    return " ".join(words)


ONE_ORDER = (  # where ranks have called different operations
    "Next: find the branch or loop that runs differently on these ranks; every rank must call the same operations in "
    "the same order"
)


def describe(op: CommOp) -> str:
    """The signature with what only this rank knows: number, peer, label, sizes."""
    text = f"{signature(op)} (seq {op.seq}"
    if op.kind in ("send", "recv"):
        text += f", {'to' if op.kind == 'send' else 'from'} rank {'any' if op.peer is None else op.peer}"
        text += f", tag {op.tag}" if op.tag != COLLECTIVE_TAG else ""
    if op.label:
        text += f", {op.label!r}"
    return text + f", {op.nbytes} bytes)"


class Work(abc.ABC):
    """The completion of one submitted operation."""

    ended_ns = 0  # by time.monotonic_ns; 0 where who carries it out does not say when that was

    @abc.abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the outputs may be read: by this thread (CPU) or by the current stream (GPU).

        timeout_s: None means the communicator's own limit. A second call returns at once, or raises the same
        error again.
        Raises: CommError (timeout, peer lost, mismatch).
        """

    @abc.abstractmethod
    def is_done(self) -> bool:
        """True once the operation has ended, well or badly; never blocks."""

    def source_rank(self) -> int | None:
        """For a finished recv from any rank: the rank the message came from. None for every other operation."""
        return None


class Algorithm(NamedTuple):
    """A way to carry out collectives by messages, see `comm/algorithms/`."""

    name: str
    start: Callable[[CommOp], Work]  # what a transport does with an `op` that asks for it; its messages pass all layers


class DoneWork(Work):
    """Work that ended before it was returned: well, or with `error`."""

    def __init__(self, error: CommError | None = None) -> None:
        self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        return True


DONE = DoneWork()


class ThenWork(Work):
    """Work with one more local step, run once, by the first `wait`: a division, a copy back into strided memory.

    Other threads that wait return after it; where it raises, the next `wait` runs it again.
    """

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        self._work = work
        self._then: Callable[[], object] | None = then
        self._at_it = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(timeout_s)
        if self._then is not None:
            with self._at_it, torch.no_grad():
                if self._then is not None:
                    self._then()
                    self._then = None  # not before: after an error no `wait` may say that the result is there

    def is_done(self) -> bool:
        return self._work.is_done()

    def source_rank(self) -> int | None:
        return self._work.source_rank()


class AllWork(Work):
    """Several works as one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def is_done(self) -> bool:
        return all(work.is_done() for work in self._works)
