"""Where a thread is, in a few lines that can be compared with another rank's."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from lockstep.observe.call_site import is_users, users_stack
from lockstep.observe.native import standing

_DEEPEST = 40  # frames that are kept, the innermost
# code that is at an operation until it returns; `torch_watch` says more behind its name
_CALLS = ("torch/distributed/distributed_c10d.py", "lockstep/comm/", "observe/recording.py", "observe/torch_watch.py")
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "ipdb", "pudb")
# torch's own wrappers of what is not compiled, or has been, lie in the same folders
_COMPILERS = (f"torch{os.sep}_dynamo{os.sep}convert_frame.py", f"torch{os.sep}_inductor{os.sep}compile_fx.py")


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """The user's frames from the outermost to `frame`, the innermost last: "train.py:31 train_step"."""
    return users_stack(frame)[-_DEEPEST:]


def activity_of(frame: FrameType | None) -> str:
    """What a thread is at that may take long without anything wrong: "compile", "debugger", or ""."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_COMPILERS):
            return "compile"
        within = any(f"{os.sep}{one}{os.sep}" in name for one in _DEBUGGERS)
        if within or os.path.basename(name).removesuffix(".py") in _DEBUGGERS:
            return "debugger"
        frame = frame.f_back
    return ""


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of another thread, None where it has none that is whole; of this one, who asks for it."""
    if thread_id == threading.get_ident():
        return sys._getframe(1)
    frame = _of_threads(sys._current_frames).get(thread_id)
    return frame if frame is not None and isinstance(frame.f_code, CodeType) else None


def is_in_torch(thread_id: int) -> bool:
    """Whether a thread stands in C++ that torch's Python or ours has called, or waits in there for a thread of ours."""
    name = _file_of(thread_id)
    is_torchs = not is_users(name) and any(f"{os.sep}{one}{os.sep}" in name for one in ("torch", "lockstep"))
    return is_torchs or standing() == thread_id


def is_in_call(thread_id: int) -> bool:
    """Whether a thread is in a call that exchanges something with other ranks: it has not returned yet."""
    name = _file_of(thread_id)
    return any(one in name for one in _CALLS) or standing() == thread_id


def _file_of(thread_id: int) -> str:
    """Of the code that a thread is in; where it waits there for another thread, not Python's own for that."""
    frame = frame_of(thread_id)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def backward_frame() -> FrameType | None:
    """The innermost frame of a thread that has called autograd, which it waits for; None where none has."""
    frames = _of_threads(sys._current_frames).values()
    return next((frame for frame in frames if getattr(frame.f_code, "co_name", "") == "_engine_run_backward"), None)


def handled_by(thread_id: int) -> BaseException | None:
    """The error whose `finally` or `except` a thread stands in."""
    found = _of_threads(sys._current_exceptions).get(thread_id)
    return found[1] if isinstance(found, tuple) else found  # until Python 3.11 it is of three


def _of_threads(all_of: Callable[[], dict[int, Any]]) -> dict[int, Any]:
    is_on = sys.version_info < (3, 11, 9) and gc.isenabled()  # else the program may ask for it, or change it, meanwhile
    gc.disable() if is_on else None  # it stands still for ever where garbage is collected in that call (gh-106883)
    try:
        return all_of()
    finally:
        gc.enable() if is_on else None
