"""Ranks that run out of batches at different times: one without goes on in step with the others, and does not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_rows, broadcast_values
from lockstep.errors import DataError
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.outputs import output_tensors
from lockstep.parallel.shard_context import context_of
from lockstep.parallel.shard_unit import ShardUnit

Batch = TypeVar("Batch")

_NONE, _OLD, _OWN = range(3)  # a rank has had no batch at all; only old ones; one of its own now


@final
class ShardedParticipant:
    """A model that is cut over the ranks, and has to be in step with theirs."""

    def __init__(self, unit: ShardUnit) -> None:
        self._unit = unit

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return context_of(self._unit).comm  # another one, if a larger model was made of this one meanwhile

    def take_part(self, counts: bool, active_ranks: int | None) -> None:
        """From now on this rank's gradients count, or are zeros; they are divided by `active_ranks`, None for all."""
        context = context_of(self._unit)
        context.counts = counts
        for gradients in context.gradients:
            gradients.active_ranks = active_ranks


@final
class ReplicaParticipant:
    """A model of which every rank has a whole copy. Gradients are always divided by the number of all ranks."""

    def __init__(self, replica: DistributedDataParallel) -> None:
        self._replica = replica
        self._hook: RemovableHandle | None = None

    @property
    def comm(self) -> Communicator:
        """The ranks."""
        return self._replica.reducer.comm

    def take_part(self, counts: bool, active_ranks: int | None) -> None:
        """From now on this rank's gradients count, or are zeros."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None if counts else self._replica.register_forward_hook(_without_gradient)


Participant = ShardedParticipant | ReplicaParticipant


def _without_gradient(replica: Any, inputs: Any, output: Any) -> None:
    """The outputs of a forward get zeros in backward, and so does all that comes before them."""
    for tensor in output_tensors(output):
        tensor.register_hook(torch.zeros_like)


@final
class JoinedBatches(Generic[Batch]):
    """The batches of this rank, then its last one again until every rank has used up its own.

    A sharded model needs all ranks in every step: each holds a piece of the parameters, and of the optimizer's state.
    So a rank that has run out runs the loop's body too, on a batch that it has seen, and its gradients count as zeros.

        for batch in (batches := model.join(loader)):
            loss = model(batch).loss        # batches.has_own says whether this loss is one to report
            loss.backward(); optimizer.step(); optimizer.zero_grad()

    Collective: every rank, each time a batch is asked for.
    Raises: DataError on every rank where one had no batch at all, and the others' cannot stand in for it.
    """

    def __init__(self, participant: Participant, batches: Iterable[Batch], divide_by_initial_world_size: bool) -> None:
        self.has_own = True
        self.active_ranks = participant.comm.world_size  # that still have batches of their own
        self._participant = participant
        self._batches = batches
        self._divides_by_all = divide_by_initial_world_size

    def __iter__(self) -> Iterator[Batch]:
        comm, nothing = self._participant.comm, object()
        self.has_own, self.active_ranks = True, comm.world_size
        own = iter(self._batches)
        batch: Any = nothing
        try:
            while True:
                following = next(own, nothing) if self.has_own else nothing
                self.has_own = following is not nothing
                batch = following if self.has_own else batch
                word = _OWN if self.has_own else _NONE if batch is nothing else _OLD
                said = all_gather_rows(comm, torch.tensor([word], device=comm.device), "join").view(-1).tolist()
                active = [rank for rank, word in enumerate(said) if word == _OWN]
                self.active_ranks = len(active)
                if not active:
                    return
                if _NONE in said:
                    batch = _stand_in(comm, batch, is_lacking=batch is nothing, source=active[0])
                self._participant.take_part(self.has_own, None if self._divides_by_all else len(active))
                yield batch
        finally:
            self._participant.take_part(True, None)


def _stand_in(comm: Communicator, batch: Any, is_lacking: bool, source: int) -> Any:
    """Rank `source`'s batch on the ranks that lack one; their own on the others.  Collective."""
    leaves, structure = _pytree.tree_flatten(batch if comm.rank == source else None)
    text, problem = "", ""
    if not all(isinstance(leaf, Tensor | str | int | float | bool | None) for leaf in leaves):
        problem = "it holds more than tensors and JSON values"
    elif comm.rank == source:
        try:
            text = _pytree.treespec_dumps(structure)
        except (TypeError, NotImplementedError) as error:
            problem = str(error)
    text, problem = comm.broadcast_object([text, problem], source, label="join")
    if problem:
        raise DataError(
            f"a rank has no batch at all, and rank {source}'s cannot be sent to it as a stand-in: {problem}. Give "
            "every rank at least one"
        )
    received = [v.cpu() if isinstance(v, Tensor) else v for v in broadcast_values(comm, leaves, source, "join")]
    return _pytree.tree_unflatten(received, _pytree.treespec_loads(text)) if is_lacking else batch
