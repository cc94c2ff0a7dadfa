"""Events of torch's that a thread which may not wait can ask: they are used again, and none ever ends.

To make or end an event, stream or piece of pinned memory the driver waits until no thread copies to or from memory that
is not pinned (`tensor.cpu()`, `.tolist()`). Behind a collective that hangs such a copy has no end, and the guard, which
is to tell of that, must not wait for it: so all that is asked by its thread is made by the program's, and kept.
No torch is imported here.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, final

from lockstep.observe.profile.cuda_driver import beside_captures

_free: dict[int, list[Any]] = {}  # of each device


@final
class StreamEvent:
    """Behind all that the current stream of `device`, or of the current one, was given."""

    __slots__ = ("_event", "_home")

    def __init__(self, device: Any = None) -> None:
        """In the thread of the program.  Raises: RuntimeError where CUDA has failed."""
        cuda = sys.modules["torch"].cuda
        stream = cuda.current_stream(device)
        self._home = _free.setdefault(stream.device_index, [])
        if self._home:
            self._event = self._home.pop()
        else:
            self._event = cuda.Event()
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._event))
        self._event.record(stream)

    def has_come(self) -> bool:
        """Whether the stream has. Not to be asked again after a True. Raises: RuntimeError where CUDA has failed."""
        with beside_captures():
            has_come = self._event.query()
        if has_come:
            self._home.append(self._event)
        return has_come
