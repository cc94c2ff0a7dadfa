"""Numbers that lie on a device, read by another thread than the rank's, never waiting for what is not there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.observe.profile.cuda_driver import beside_captures
from lockstep.observe.profile.notes import Later
from lockstep.observe.profile.stream_event import StreamEvent, copy_to_host

# Numbers in memory that a device writes to by itself: those that nobody uses by type, and all of them, for to let go of
# one the driver has things to do, see `StreamEvent`, and a device may still write to it.
_free: dict[Any, list[Any]] = {}
_made: list[Any] = []
_taking = threading.Lock()


def read_later(values: Mapping[str, Sequence[Any]]) -> Later:
    """A call that gives the sum of each value's parts, numbers or CUDA tensors; None until the device has come so far.

    To be made by the thread that computes them, which copies them: what they are now is what is read. Who reads calls
    nothing of CUDA but whether the copies are there, so a device that hangs, in a collective say, does not hold it up.
    """
    cuda = sys.modules["torch"].cuda
    devices = {part.device for parts in values.values() for part in parts if hasattr(part, "device")}
    try:
        if devices and cuda.is_current_stream_capturing():  # nothing is computed; an event would be of the graph
            return dict
        copies = {name: [_copied(part) for part in parts] for name, parts in values.items()}
        events = [StreamEvent(device) for device in devices]
    except RuntimeError:  # CUDA has failed: the program's own next call says so
        return dict
    sums: dict[str, float] = {}

    def read() -> dict[str, float] | None:
        with _taking:  # a logger reads them, too
            try:
                events[:] = [event for event in events if not event.has_come()]
            except RuntimeError:
                return {}
            if events:
                return None
            for name in [*copies]:
                sums[name] = sum(map(_taken, copies.pop(name)))
            return sums

    return read


def _copied(part: Any) -> Any:
    """A number, or where the current stream copies that tensor's to."""
    if not hasattr(part, "device"):
        return part
    try:
        copy = _free.setdefault(part.dtype, []).pop()
    except IndexError:
        with beside_captures():
            copy = sys.modules["torch"].empty(1, dtype=part.dtype, pin_memory=True)
        _made.append(copy)
    copy_to_host(copy, part)
    return copy


def _taken(copy: Any) -> float:
    if not hasattr(copy, "device"):
        return copy
    number = copy.item()
    _free[copy.dtype].append(copy)
    return number
