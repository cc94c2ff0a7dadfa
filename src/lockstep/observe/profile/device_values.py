"""Numbers that lie on a device, read by another thread than the rank's, never waiting for what is not there."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from lockstep.observe.profile.cuda_driver import beside_captures
from lockstep.observe.profile.notes import Later


def read_later(values: Mapping[str, Sequence[Any]]) -> Later:
    """A call that gives the sum of each value's parts, numbers or CUDA tensors; None until the device has come so far.

    To be made by the thread that computes them. They are read on a stream of their own: a device that hangs, in a
    collective say, does not hold up who calls.
    """
    cuda = sys.modules["torch"].cuda
    devices = {part.device for parts in values.values() for part in parts if hasattr(part, "device")}
    events: list[Any] = []
    try:
        if devices and cuda.is_current_stream_capturing():  # nothing is computed; an event would be part of the graph
            return dict
        events += [cuda.current_stream(device).record_event() for device in devices]
    except RuntimeError:  # CUDA has failed: the program's own next call says so
        return dict

    def read() -> dict[str, float] | None:
        try:
            with beside_captures():
                if not all(event.query() for event in events):
                    return None
                return {name: sum(_number(part) for part in parts) for name, parts in values.items()}
        except RuntimeError:  # torch prints a line for each event that goes while CUDA fails, behind the program's own
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(events))
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
