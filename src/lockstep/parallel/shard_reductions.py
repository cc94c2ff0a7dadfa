"""The reductions of one backward of all units: what is under way, what is told, what parameters get of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch.nn import Parameter

from lockstep.errors import CollectiveTimeout, PeerLost
from lockstep.parallel.buckets import starts_of
from lockstep.parallel.shard_flight import BufferPool, Flight
from lockstep.parallel.shard_gradients import ShardGradients


@final
class Losses:
    """Notes, around what waits for others, that some are gone: a rank that has heard of it would wait again in vain."""

    are_known = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, CollectiveTimeout | PeerLost):
            self.are_known = True


@final
class ShardReductions:
    """The gradients of all groups, in the order in which they are reduced.

    Collective: `launch` and `finish`, on every rank of the root's mesh, in the same order.
    """

    def __init__(self, gradients: Sequence[ShardGradients], losses: Losses) -> None:
        self.gradients = gradients
        self.flights = 1  # reductions that may be under way at once
        # where each group begins among all parameters
        self._starts, self.num_params = starts_of([len(each.group.params) for each in gradients])
        self._losses = losses
        self._in_flight: list[tuple[ShardGradients, Flight]] = []
        self._pool = BufferPool()
        self.begin()

    def begin(self) -> None:
        """A backward begins."""
        self.used = [0] * self.num_params  # per parameter, 1 where this rank has added a gradient

    def make_room(self, gradients: ShardGradients) -> None:
        """Let gradients go where they are reduced from, as soon as many have come and no reduction has the buffer."""
        if self._in_flight and self._in_flight[0][1].may_finish(in_need=gradients.many_wait):
            self._finish_oldest()
        if gradients.many_wait and len(self._in_flight) < self.flights:
            gradients.lay_waiting(self._pool)

    def launch(self, place: int) -> None:
        """Begin to reduce a group."""
        gradients = self.gradients[place]
        for index, used in enumerate(gradients.used, self._starts[place]):
            self.used[index] |= used
        while len(self._in_flight) >= self.flights:
            self._finish_oldest()
        self._in_flight.append((gradients, gradients.launch(self._pool)))

    def _finish_oldest(self) -> None:
        gradients, flight = self._in_flight[0]
        with self._losses:
            flight.wait(self._pool)  # raised out of here, it is still what the other ranks wait for
        del self._in_flight[0]
        gradients.take(flight)

    def finish(self) -> None:
        """Return when nothing is under way."""
        while self._in_flight:
            self._finish_oldest()
        self._pool.trim()

    def hand_out(self, used: list[int]) -> None:
        """Let all parameters that any rank used have their gradients; then call the hooks, of which one may step and
        clear many."""
        handed: list[Parameter] = []
        for gradients, start in zip(self.gradients, self._starts, strict=True):
            handed += gradients.hand_out(used[start : start + len(gradients.group.params)])
        for param in handed:
            for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(param)

    def discard(self) -> None:
        """Forget the gradients of this step: it failed on some rank."""
        self._in_flight.clear()
        for gradients in self.gradients:
            gradients.discard()
