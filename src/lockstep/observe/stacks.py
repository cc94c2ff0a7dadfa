"""Where a thread is, in a few lines that can be compared with another rank's."""

from __future__ import annotations

import os
import sys
import time
from types import CodeType, FrameType
from typing import NamedTuple, final

from lockstep.observe.call_site import is_users, users_stack

_DEEPEST = 40  # frames that are kept, the innermost
_BUSY = 0.05  # of the time on a core: less is waiting
_ASKED_S = 1.0  # after which a busy thread is asked where it is
_LOOPS = 8  # times that it was asked, which tell a loop
_MOVED_BYTES = 256 << 10  # read or written since the last look
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
    looping_s: float = 0.0  # for how long it has been in one loop of the user's, and busy


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
        self._moved_bytes = 0
        self._asked_s = -_ASKED_S
        self._stand = Stand((), "", 0.0)
        self._loop = Loop()

    def look(self, now_s: float) -> Stand:
        """Where it is, at `now_s` of a clock that never goes back."""
        passed_s, self._looked_s = now_s - self._looked_s if self._looked_s else 0.0, now_s
        cpu_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        moved = transferred_bytes()
        is_busy = cpu_s - self._cpu_s > _BUSY * passed_s or moved - self._moved_bytes > _MOVED_BYTES
        self._cpu_s, self._moved_bytes, before = cpu_s, moved, self._stand
        is_asked = not is_busy or now_s - self._asked_s >= _ASKED_S
        self._asked_s = now_s if is_asked else self._asked_s
        frame = frame_of(self._thread) if is_asked else None
        stack = before.stack if frame is None else stack_of(frame)
        activity = before.activity if frame is None else activity_of(frame)
        unmoved_s = 0.0 if is_busy or stack != before.stack else before.unmoved_s + passed_s
        looping_s = before.looping_s
        if unmoved_s >= _ASKED_S:  # less may be a machine that has much else to do
            self._loop, looping_s = Loop(), 0.0
        elif is_busy and frame is not None:
            looping_s = self._loop.see(frame, now_s)
        self._stand = Stand(stack, activity, unmoved_s, looping_s)
        return self._stand


@final
class Loop:
    """Tells a loop that does not end from long work, as far as one can: by where a busy thread is, time after time.

    All calls around it are at the same line, and beneath is nothing but the user's own code. An evaluation is seen in
    torch's code nearly every time.
    """

    def __init__(self) -> None:
        self._around: list[tuple[CodeType, int]] = []  # calls and their lines, the outermost first
        self._within: CodeType | None = None  # what the last of them has called
        self._began_s = 0.0
        self._seen = 0

    def see(self, frame: FrameType | None, now_s: float) -> float:
        """The thread is at `frame` at `now_s`. For how long it has been in one loop; 0 while that is not known."""
        frames: list[tuple[CodeType, int]] = []
        while frame is not None:
            frames.append((frame.f_code, frame.f_lineno or 0))
            frame = frame.f_back
        frames.reverse()
        pairs = enumerate(zip(self._around, frames[:-1], strict=False))
        same = next((at for at, (before, now) in pairs if before != now), min(len(self._around), len(frames) - 1))
        within = self._within if same == len(self._around) else self._around[same][0]
        if not self._seen or frames[same][0] is not within:
            same, within, self._began_s, self._seen = len(frames) - 1, frames[-1][0], now_s, 0
        self._around, self._within = frames[:same], within
        is_own = all(is_users(code.co_filename) for code, _ in frames[same:])
        self._seen = self._seen + 1 if is_own else 0
        return now_s - self._began_s if self._seen >= _LOOPS else 0.0


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
