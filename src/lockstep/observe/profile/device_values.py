"""Numbers that lie on a device, read by another thread than the rank's, never waiting for what is not there."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.observe.profile.notes import Later

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED of CUDA's driver


def read_later(values: Mapping[str, Sequence[Any]]) -> Later:
    """A call that gives the sum of each value's parts, numbers or CUDA tensors; None until the device has come so far.

    To be made by the thread that computes them. They are read on a stream of their own: a device that hangs, in a
    collective say, does not hold up who calls.
    """
    cuda = sys.modules["torch"].cuda
    devices = {part.device for parts in values.values() for part in parts if hasattr(part, "device")}
    events: list[Any] = []
    try:
        if cuda.is_current_stream_capturing():  # nothing is computed, and an event would be a part of the graph
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
        except RuntimeError:
            keep_for_good(events)
            return {}

    return read


def _number(part: Any) -> float:
    if not hasattr(part, "device"):
        return part
    with sys.modules["torch"].cuda.stream(side_stream(part.device)):
        return part.item()


@cache
def side_stream(device: Any) -> Any:
    """A stream of the device, for who is not in the way of the program's own."""
    return sys.modules["torch"].cuda.Stream(device)


def keep_for_good(events: Sequence[Any]) -> None:
    """While CUDA fails torch prints a line for each event that goes, behind what the program's error says."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object([*events]))


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """To ask for an event within. While a graph is captured, that would break it, in whichever thread it is done.

    Unless CUDA is told that this thread knows what it does: torch has no call for that.
    """
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # it has the former one then
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Callable[..., Any]:
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # another maker's
        return lambda mode: None
