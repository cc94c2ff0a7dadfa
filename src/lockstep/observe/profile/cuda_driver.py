"""A few calls of CUDA's driver, for what torch does in a way that a guard cannot have.

Where a GPU hangs its queue fills up, and who adds to it waits: torch records an event with Python locked, so that the
guard's thread, which is to say that, would wait too. And to ask for an event while another thread captures a graph
breaks that graph, unless the driver is told that it may be asked: torch has no call for that. Events and streams are
numbers here. A call that fails raises RuntimeError and leaves no error behind for the program.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any, final

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it waits for no other stream, nor another one for it
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CALLS = {
    "cuDeviceGet": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_void_p, c_size_t, c_void_p),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
}


@cache
def driver() -> Any:
    """The library that torch has loaded; None where it is another maker's."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _CALLS.items():
            getattr(library, name).argtypes = types
    except (OSError, AttributeError):
        return None
    return library


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Within, events may be asked for while another thread captures a graph."""
    library, mode = driver(), c_int(_RELAXED)
    if library is not None:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # it has the former one then
    try:
        yield
    finally:
        if library is not None:
            library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@final
class Device:
    """One GPU as torch numbers it, in the context that torch uses. Any thread may call."""

    def __init__(self, ordinal: int) -> None:
        library, self._context, number = driver(), c_void_p(), c_int()
        library.cuDeviceGet(ctypes.byref(number), ordinal)
        library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), number)  # without it all calls fail
        self._driver = library
        self._enter, self._leave, self._left = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2, c_void_p()
        self._capturing, self._record = library.cuStreamIsCapturing, library.cuEventRecord

    def record(self, event: int, stream: int) -> bool:
        """Whether that was done: not while the stream is being captured, as the event would be a part of the graph."""
        is_capturing = c_int()
        _check(self._enter(self._context))
        try:
            if self._capturing(stream, ctypes.byref(is_capturing)) or is_capturing.value:
                return False
            _check(self._record(event, stream))
        finally:
            self._leave(ctypes.byref(self._left))
        return True

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """Within, all below may be called."""
        with beside_captures():
            _check(self._enter(self._context))
            try:
                yield
            finally:
                self._leave(ctypes.byref(self._left))

    def event(self) -> int:
        """A new one, with a time."""
        made = c_void_p()
        _check(self._driver.cuEventCreate(ctypes.byref(made), 0))
        return made.value or 0

    def stream(self) -> int:
        """One that nobody else has."""
        made = c_void_p()
        _check(self._driver.cuStreamCreate(ctypes.byref(made), _NON_BLOCKING))
        return made.value or 0

    def copy_to_host(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Have the stream do that. to: where memory is pinned."""
        _check(self._driver.cuMemcpyDtoHAsync_v2(to, source, nbytes, stream))

    def has_fired(self, event: int) -> bool:
        """Without waiting."""
        code = self._driver.cuEventQuery(event)
        _check(0 if code == _NOT_READY else code)
        return code == 0

    def apart_ns(self, first: int, second: int) -> int:
        """Of two events that have fired, within seven digits."""
        milliseconds = c_float()
        _check(self._driver.cuEventElapsedTime(ctypes.byref(milliseconds), first, second))
        return round(1e6 * milliseconds.value)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"error {code} of CUDA's driver")
