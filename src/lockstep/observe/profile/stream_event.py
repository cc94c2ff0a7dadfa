"""Events that a thread which may not wait can ask: they are used again, and none ever ends.

To make or end an event, stream or piece of pinned memory the driver waits until no thread copies to or from memory that
is not pinned (`tensor.cpu()`, `.tolist()`). Behind a collective that hangs such a copy has no end, and the guard, which
is to tell of that, must not wait for it: so all that is asked by its thread is made by the program's, and kept.
No torch is imported here.
"""

from __future__ import annotations

import sys
from typing import Any, final

from lockstep.observe.profile.cuda_driver import Device, driver

_gpus: dict[int, tuple[Device, list[int]]] = {}  # by number, with the events that nobody uses


def an_event(gpu: Device, free: list[int]) -> int:
    """One of those that nobody uses; a new one where there is none, or another thread has taken the last."""
    try:
        return free.pop()
    except IndexError:
        with gpu.asked():
            return gpu.event()


def _gpu_of(number: int) -> tuple[Device, list[int]]:
    if number not in _gpus:
        _gpus[number] = Device(number), []
    return _gpus[number]


def copy_to_host(copy: Any, tensor: Any) -> None:
    """Have the current stream write the only element of `tensor` into `copy`, of its type and in pinned memory.

    Torch would note the stream with that memory, and make an event when it is let go of: where CUDA has failed by then
    it cannot, and ends the process.  Raises: RuntimeError where CUDA has failed.
    """
    if driver() is None:
        copy.copy_(tensor.detach().reshape(1), non_blocking=True)
        return
    gpu, _ = _gpu_of(tensor.device.index)
    stream = sys.modules["torch"]._C._cuda_getCurrentRawStream(tensor.device.index)
    with gpu.asked():
        gpu.copy_to_host(copy.data_ptr(), tensor.data_ptr(), tensor.element_size(), stream)


@final
class StreamEvent:
    """Behind all that the current stream of `device`, or of the current one, was given."""

    __slots__ = ("_event", "_free", "_gpu")

    def __init__(self, device: Any = None) -> None:
        """In the thread of the program.  Raises: RuntimeError where CUDA has failed."""
        torch = sys.modules["torch"]
        self._event: Any
        if driver() is None:  # another maker's: as torch has it
            self._gpu, self._event = None, torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
            return
        number = torch.cuda.current_device() if device is None else device.index
        self._gpu, self._free = _gpu_of(number)
        self._event = an_event(self._gpu, self._free)
        self._gpu.record(self._event, torch._C._cuda_getCurrentRawStream(number))

    def has_come(self) -> bool:
        """Whether the stream has. Not to be asked again after a True.  Raises: RuntimeError where CUDA has failed."""
        if self._gpu is None:
            return self._event.query()
        with self._gpu.asked():
            has_come = self._gpu.has_fired(self._event)
        if has_come:
            self._free.append(self._event)
        return has_come
