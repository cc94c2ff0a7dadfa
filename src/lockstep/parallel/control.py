"""The small message that goes round at the end of every synchronised backward."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch.nn import Parameter

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE
from lockstep.errors import ModelMismatch, NonFiniteGradient, ReplicaDrift
from lockstep.observe.gradients import GradientWatch, NonFiniteWarning, faults_in_words, scaler_is_active
from lockstep.parallel.backward import step_is_lost

# One int32 vector, summed over ranks:
#   [0, W)      what each rank says of itself, in its own word
#   [W, W + P)  how many ranks used parameter p since the last synchronisation, and 2**16 times how many froze it
_GAVE_UP, _IS_FAULTY, _FROZE_SOME, _LOCAL = 1, 2, 4, 8  # the last: times one more than its local steps
_FROZE = 1 << 16
_LOCAL_MAX = 1 << 20


class Report(NamedTuple):
    """What one rank says of its backward."""

    gave_up: bool = False  # it raised in the middle
    frozen: Sequence[int] = ()  # parameters that have come to require no gradient
    is_faulty: bool = False  # of its gradients some are not finite
    local_steps: int = -1  # steps since the last synchronisation that it made by itself; -1: does not count

    def word(self) -> int:
        """As it travels."""
        flags = _GAVE_UP * self.gave_up + _IS_FAULTY * self.is_faulty + _FROZE_SOME * bool(self.frozen)
        return flags + _LOCAL * min(self.local_steps + 1, _LOCAL_MAX)


@final
class ControlMessage:
    """What the ranks say of their backward, and how many used each parameter.

    Collective: every rank of `comm` makes one per synchronised backward; making it does not block.
    """

    def __init__(self, comm: Communicator, used: bytearray, report: Report) -> None:
        self._comm = comm
        self._frozen = report.frozen
        counts = torch.zeros(comm.world_size + len(used), dtype=torch.int32)  # [W + P]
        counts[comm.rank] = report.word()
        if used:
            counts[comm.world_size :] = torch.frombuffer(used, dtype=torch.uint8)
        for index in report.frozen:
            counts[comm.world_size + index] += _FROZE
        self._counts = counts.to(comm.device)
        self.work = DONE if comm.world_size == 1 else comm.all_reduce(self._counts, async_op=True, label="ddp.control")

    def used_by(self) -> list[int]:
        """How many ranks used each parameter; to be read after `work.wait()`."""
        return (self._counts[self._comm.world_size :] % _FROZE).tolist()

    def verify(self, names: Sequence[str], watch: GradientWatch) -> None:
        """Look at what the others said, after `work.wait()`; what is wrong is raised on every rank alike.

        Collective where something is: then its details are asked for.
        Raises: PeerFailed, ReplicaDrift, ModelMismatch, NonFiniteGradient.
        """
        words = self._counts[: self._comm.world_size].tolist()
        if failed := [rank for rank, word in enumerate(words) if word & _GAVE_UP]:
            raise step_is_lost(self._comm.rank, failed, "backward")
        self._verify_local_steps(words)
        if any(word & _FROZE_SOME for word in words):
            self._verify_frozen(names)
        if any(word & _IS_FAULTY for word in words):
            self._tell_faults(watch)

    def _verify_local_steps(self, words: Sequence[int]) -> None:
        steps = {rank: word // _LOCAL - 1 for rank, word in enumerate(words) if word >= _LOCAL}
        if len(set(steps.values())) > 1:
            own = [rank for rank, count in steps.items() if count]
            raise ReplicaDrift(
                f"rank {self._comm.rank}: rank {_list(own)} changed the parameters with gradients that were not "
                f"averaged (optimizer.step() after a backward inside no_sync), in {_list(list(steps.values()))} steps "
                f"on ranks {_list(list(steps))}: the replicas are not one model any more. Enter no_sync for the same "
                "microbatches on every rank, and step after a backward outside of it. Go on from the last checkpoint.",
                own,
            )

    def _verify_frozen(self, names: Sequence[str]) -> None:
        world_size = self._comm.world_size
        counts = enumerate(self._counts[world_size:].tolist())
        by_some = [i for i, count in counts if count % _FROZE and 0 < count // _FROZE < world_size]
        if by_some:
            frozen = self._comm.all_gather_object([names[i] for i in self._frozen if i in by_some], label="ddp.control")
            who = "; ".join(f"rank {rank}: {', '.join(map(repr, fqns))}" for rank, fqns in enumerate(frozen) if fqns)
            raise ModelMismatch(
                f"rank {self._comm.rank}: parameters were frozen (requires_grad=False) on some ranks after the module "
                f"was wrapped, and trained on others: {who}. Freeze the same parameters on every rank, between the "
                "same two steps. This step has no gradients on any rank."
            )

    def _tell_faults(self, watch: GradientWatch) -> None:
        mine = [[str(fault) for fault in watch.faults], bool(watch.faults) and scaler_is_active()]
        said = self._comm.all_gather_object(mine, label="ddp.control")
        watch.is_on = False  # what comes after the first is its consequence, or a GradScaler's trying
        if any(has_scaler for _, has_scaler in said):
            return
        words = faults_in_words({rank: faults for rank, (faults, _) in enumerate(said) if faults}, watch.step)
        if watch.is_strict:
            raise NonFiniteGradient(f"rank {self._comm.rank}: {words}. This step has no gradients on any rank.")
        warnings.warn(f"rank {self._comm.rank}: {words}. This is said once.", NonFiniteWarning, stacklevel=2)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@final
class LocalSteps:
    """Counts how often parameters changed between a backward without synchronisation and the next forward."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.count = 0
        self._params = params
        self._version: int | None = None  # of all parameters, after the last such backward

    def backward_ended(self) -> None:
        """A backward has left gradients of this rank only."""
        self._version = sum(param._version for param in self._params)

    def forward_begins(self) -> None:
        """The parameters are used as they are now."""
        if self._version is not None:
            self.count += self._version != sum(param._version for param in self._params)
            self._version = None

    def synchronised(self) -> None:
        """All ranks have met."""
        self.count, self._version = 0, None
