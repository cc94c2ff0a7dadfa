"""Numbers that lie on a device, read by another thread than the rank's, never waiting for what is not there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lockstep.observe.profile.cuda_driver import beside_captures
from lockstep.observe.profile.notes import Later
from lockstep.observe.profile.stream_event import StreamEvent


def read_later(values: Mapping[str, Sequence[Any]]) -> Later:
    """A call that gives the sum of each value's parts, numbers or CUDA tensors; None until the device has come so far.

    To be made by the thread that computes them. They are read on a stream of their own: a device that hangs, in a
    collective say, does not hold up who calls.
    """
    cuda = sys.modules["torch"].cuda
    on_devices = [part for parts in values.values() for part in parts if hasattr(part, "device")]
    try:
        if on_devices and cuda.is_current_stream_capturing():  # nothing is computed; an event would be of the graph
            return dict
        for part in on_devices:
            _make_ready(part.device, part.dtype)
        events = [StreamEvent(device) for device in {part.device for part in on_devices}]
    except RuntimeError:  # CUDA has failed: the program's own next call says so
        return dict

    def read() -> dict[str, float] | None:
        try:
            events[:] = [event for event in events if not event.has_come()]
            if events:
                return None
            with beside_captures():
                return {name: sum(_number(part) for part in parts) for name, parts in values.items()}
        except RuntimeError:
            return {}

    return read


def _number(part: Any) -> float:
    if not hasattr(part, "device"):
        return part
    with sys.modules["torch"].cuda.stream(_stream(part.device)):
        return part.item()


@cache
def _stream(device: Any) -> Any:
    return sys.modules["torch"].cuda.Stream(device)


@cache
def _make_ready(device: Any, dtype: Any) -> None:
    """What reading such a number takes: a stream, and memory that torch keeps for the next one. See `StreamEvent`."""
    with beside_captures():
        _stream(device)
        sys.modules["torch"].empty((), dtype=dtype, pin_memory=True)
