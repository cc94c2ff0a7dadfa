"""Where a thread is, in a few lines that can be compared with another rank's."""

from __future__ import annotations

import os
import sys
import time
from types import CodeType, FrameType
from typing import NamedTuple, final

from lockstep.observe.call_site import users_stack

_DEEPEST = 40  # frames that are kept, the innermost
_BUSY = 0.05  # of the time on a core: less is waiting
_ASKED = 8  # looks, after which a busy thread is asked where it is
_MOVED_BYTES = 256 << 10  # read or written since the last look
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "ipdb", "pudb")
_COMPILERS = (f"torch{os.sep}_dynamo{os.sep}", f"torch{os.sep}_inductor{os.sep}")


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """The user's frames from the outermost to `frame`, the innermost last: "train.py:31 train_step"."""
    return users_stack(frame)[-_DEEPEST:]


def activity_of(frame: FrameType | None) -> str:
    """What a thread is at that may take long without anything wrong: "compile", "debugger", or ""."""
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _COMPILERS):
            return "compile"
        if os.path.basename(name).removesuffix(".py") in _DEBUGGERS or any(
            f"{os.sep}{d}{os.sep}" in name for d in _DEBUGGERS
        ):
            return "debugger"
        frame = frame.f_back
    return ""


class Stand(NamedTuple):
    """Where a thread is."""

    stack: tuple[str, ...]  # of a busy thread the one of a few looks ago
    activity: str  # see `activity_of`
    unmoved_s: float  # for how long it has been there without doing anything


@final
class Motion:
    """Whether a thread gets on: its place changes, it uses a core, or the process reads or writes.

    The frames of a thread that runs are in motion too: CPython 3.11 shows some that are half made. So a busy thread is
    hardly ever asked where it is, and one that waits always.
    """

    def __init__(self, thread_id: int) -> None:
        self._thread = thread_id
        self._clock = time.pthread_getcpuclockid(thread_id) if hasattr(time, "pthread_getcpuclockid") else None
        self._cpu_s = self._looked_s = 0.0
        self._moved_bytes = self._looks = 0
        self._stand = Stand((), "", 0.0)

    def look(self, now_s: float) -> Stand:
        """Where it is, at `now_s` of a clock that never goes back."""
        passed_s, self._looked_s = now_s - self._looked_s if self._looks else 0.0, now_s
        cpu_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        moved = transferred_bytes()
        is_busy = cpu_s - self._cpu_s > _BUSY * passed_s or moved - self._moved_bytes > _MOVED_BYTES
        self._cpu_s, self._moved_bytes, before = cpu_s, moved, self._stand
        frame = frame_of(self._thread) if not is_busy or self._looks % _ASKED == 0 else None
        self._looks += 1
        stack = before.stack if frame is None else stack_of(frame)
        activity = before.activity if frame is None else activity_of(frame)
        unmoved_s = 0.0 if is_busy or stack != before.stack else before.unmoved_s + passed_s
        self._stand = Stand(stack, activity, unmoved_s)
        return self._stand


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of another thread; None where it has none that is whole."""
    frame = sys._current_frames().get(thread_id)
    return frame if frame is not None and isinstance(frame.f_code, CodeType) else None


def transferred_bytes() -> int:
    """What this process has read and written so far; 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    try:
        with open("/proc/self/io", "rb") as file:
            lines = file.read().split()
    except OSError:
        return 0
    return int(lines[1]) + int(lines[3])


def is_traced() -> bool:
    """True while another process debugs this one; a debugger within it is known by its frames."""
    try:
        with open("/proc/self/status", "rb") as file:
            return any(line.startswith(b"TracerPid:") and line.split()[1] != b"0" for line in file)
    except OSError:
        return False
