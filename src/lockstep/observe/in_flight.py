"""For the first steps of a run of stock torch: whether a tensor was written to between a collective and its wait().

The collective is let end before its call returns, so whatever changes the tensor from there to the wait is the user's.
Nothing is copied, and nobody gets other values than without the check. One that does not end soon, because another rank
first has something else to say to this one, is not checked. What only reads too early leaves no trace.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple, final

from torch import Tensor

from lockstep.errors import CommError
from lockstep.observe.tensor_digest import digests

_PATIENCE_S, _PAUSE_S = 1.0, 0.0002
_KEPT = 256


class Flight(NamedTuple):
    """A tensor as it was when its collective had ended."""

    work: weakref.ref[Any]
    tensor: weakref.ref[Tensor]
    place: int  # where its values lie
    digest: int
    what: str


def changed_in_flight(what: str, tensor: str) -> CommError:
    """what: the operation, its line, step and rank. tensor: which one of it."""
    return CommError(
        f"{what}: {tensor}, was changed while the operation was under way, between its start and its wait(). Outside "
        f"of this check some ranks get the old values and some the new. Next: call wait() before the tensor is used"
    )


@final
class InFlight:
    """The asynchronous collectives of one process that nobody has waited for yet."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}  # by id of the work

    def started(self, work: Any, tensor: Tensor, what: str) -> None:
        """A collective that works on `tensor` has been called. Blocks until it has ended, a second at most."""
        place = tensor.untyped_storage().data_ptr()
        for key, flight in tuple(self._flights.items()):  # of other threads too
            if flight.place == place or flight.work() is None:
                self._flights.pop(key, None)  # what comes later works on the same values, and that may be meant
        deadline = time.monotonic() + _PATIENCE_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_S)
        if len(self._flights) < _KEPT:
            flight = Flight(weakref.ref(work), weakref.ref(tensor), place, digests([tensor])[0], what)
            self._flights[id(work)] = flight

    def waited(self, work: Any) -> CommError | None:
        """It is waited for; what is to be raised where its tensor is not as it was."""
        flight = self._flights.pop(id(work), None)
        if flight is None or flight.work() is not work:
            return None
        tensor = flight.tensor()
        if tensor is None or digests([tensor])[0] == flight.digest:
            return None
        return changed_in_flight(flight.what, f"its {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
