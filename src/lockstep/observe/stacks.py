"""Where a thread is, in a few lines that can be compared with another rank's."""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any, NamedTuple, final

from lockstep.comm.preflight import read_proc, state_and_cpu_s
from lockstep.observe.call_site import is_users, users_stack

_DEEPEST = 40  # frames that are kept, the innermost
_BUSY = 0.05  # of the time on a core: less is waiting
_ASKED_S = 1.0  # after which a busy thread is asked where it is
_LOOPS = 8  # times that it was seen in a loop, which tell that
_MOVED_BYTES = 64 << 10  # read or written from look to look: a slow download moves more, who waits next to nothing
CHILDREN = "its own processes"  # such as the workers of a DataLoader: an activity of who waits for them
_CHILDREN_S, _CHILDREN_CPU_S = 5.0, 0.25  # they work who have used so much of a core in so long
_DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "ipdb", "pudb")
_STDLIB = os.path.dirname(threading.__file__) + os.sep
# modules of Python that a program asks whether something has come
_ASKING = ("_collections_abc", "codecs", "concurrent", "fnmatch", "genericpath", "glob", "multiprocessing", "ntpath")
_ASKING += ("os", "pathlib", "posixpath", "queue", "selectors", "signal", "socket", "stat", "subprocess", "threading")
_ASKING_TORCH = f"torch{os.sep}cuda{os.sep}streams.py"
_OURS = tuple(os.path.dirname(os.path.dirname(__file__)) + f"{os.sep}{part}{os.sep}" for part in ("comm", "observe"))
_FOR = ("FOR_ITER", "GET_ANEXT")
# what makes a `for` over it a `while`, with so many arguments: of itertools, and `iter` of a function
_ENDLESS = {"count": (0, 1, 2), "cycle": (1,), "repeat": (1,), "iter": (2,)}
_GENERATOR = 0x20  # inspect.CO_GENERATOR
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
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


class Stand(NamedTuple):
    """Where a thread is."""

    stack: tuple[str, ...]  # of a busy thread the one of a few looks ago
    activity: str  # see `activity_of`
    unmoved_s: float  # for how long it has been there without doing anything, but for asking a device
    looping_s: float = 0.0  # for how long it has waited in one loop, and busy


@final
class Motion:
    """Whether a thread gets on: its place changes, it uses a core or waits for a disk, or the process reads or writes.

    The frames of a thread that runs are in motion too: CPython 3.11 shows some that are half made. So a busy thread is
    hardly ever asked where it is, and one that waits always.
    """

    def __init__(self, thread_id: int) -> None:
        self._thread = thread_id
        is_own = thread_id == threading.get_ident()  # the number that a Thread keeps is that from before a fork
        self._task = f"/proc/self/task/{threading.get_native_id() if is_own else 0}/"
        self._clock = time.pthread_getcpuclockid(thread_id) if hasattr(time, "pthread_getcpuclockid") else None
        self._cpu_s = self._looked_s = 0.0
        self._moved_bytes = self._looks = 0  # until they were read last; since then
        self.has_begun = False  # to be set where the thread begins what it is in too shortly to be seen: a forward
        self._asked_s = -_ASKED_S
        self._stand = Stand((), "", 0.0)
        self._children = (0.0, 0.0, -_CHILDREN_S)  # since when they are looked at, what they had used, when they worked
        self._loop = Loop()
        self.queues: list[Callable[[], bool]] = []  # whether a device still has to do what was begun for it
        self._spot: tuple[object, ...] = ()  # where the thread was, on a core, when it was asked last
        self._spot_s = 0.0  # since when it has been there
        self._spins = False

    @property
    def stand(self) -> Stand:
        """Where it was at the last look."""
        return self._stand

    def begin_anew(self) -> None:
        """Nothing is known of the time since the last look."""
        self._stand, self._loop, self._spot = Stand((), "", 0.0), Loop(), ()

    def look(self, now_s: float) -> Stand:
        """Where it is, at `now_s` of a clock that never goes back."""
        passed_s, self._looked_s = now_s - self._looked_s if self._looked_s else 0.0, now_s
        cpu_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        is_busy, before = cpu_s - self._cpu_s > _BUSY * passed_s, self._stand
        self._cpu_s, self._looks = cpu_s, self._looks + 1
        if is_busy and now_s - self._asked_s < _ASKED_S and not self._loop.seen:  # as nearly always: no more to know
            spun_s = before.unmoved_s + passed_s if self._spins and not self.has_begun else 0.0
            self._stand = Stand(before.stack, before.activity, spun_s)
            return self._stand
        is_on_core, moved = is_busy, transferred_bytes()
        has_moved = moved - self._moved_bytes > _MOVED_BYTES * self._looks or self.has_begun
        self.has_begun, self._moved_bytes, self._looks = False, moved, 0
        is_busy = is_busy or has_moved or state_and_cpu_s(self._task + "stat")[0] == "D"
        is_asked = not is_busy or now_s - self._asked_s >= _ASKED_S
        self._asked_s = now_s if is_asked else self._asked_s
        frame = frame_of(self._thread) if is_asked else None
        stack = before.stack if frame is None else stack_of(frame)
        if before.stack and stack[-1].startswith(f"observe{os.sep}"):
            stack = before.stack  # an error has unwound it, and it tells of that
        activity = before.activity if frame is None else activity_of(frame)
        unmoved_s = 0.0 if is_busy or stack != before.stack else before.unmoved_s + passed_s
        if is_asked:
            unmoved_s = max(unmoved_s, self._spun_s(frame if is_on_core and not has_moved else None, now_s))
        looping_s = before.looping_s
        if unmoved_s >= _ASKED_S and activity in ("", CHILDREN):
            activity = CHILDREN if self._do_children_work(now_s) else ""
        if has_moved or unmoved_s >= _ASKED_S:  # less may be a machine that has much else to do
            self._loop, looping_s = Loop(), 0.0
        elif is_busy and frame is not None:
            looping_s = self._loop.see(frame, now_s)
        del frame  # which is this one, where a thread looks at itself: it would keep what all its callers hold
        self._stand = Stand(stack, activity, unmoved_s, looping_s)
        return self._stand

    def is_queued(self) -> bool:
        """Whether a device still has to do something that ranks do together."""
        return any(queue() for queue in self.queues)

    def _spun_s(self, frame: FrameType | None, now_s: float) -> float:
        """For how long the thread, which uses a core at `frame`, has done so to ask a device whether it is through.

        CUDA has a thread that waits for it go round, within one call, and nothing but that tells it from work. What a
        process has in a device's queue ends after what came before, so whoever stands there waits for that as well.
        """
        spot = _spot_of(frame) if frame is not None and self.is_queued() else ()
        if not spot or spot != self._spot:
            self._spot, self._spot_s = spot, now_s
        self._spins = now_s > self._spot_s
        return now_s - self._spot_s

    def _do_children_work(self, now_s: float) -> bool:
        """Whether the processes that this thread has started do, or did a moment ago."""
        pids = read_proc(self._task + "children").split()
        used_s = sum(state_and_cpu_s(f"/proc/{pid.decode()}/stat")[1] for pid in pids)
        since_s, before_s, worked_s = self._children
        has_worked = 0 < now_s - since_s <= _CHILDREN_S and used_s - before_s >= _CHILDREN_CPU_S
        if has_worked or now_s - since_s > _CHILDREN_S:
            worked_s = now_s if has_worked else worked_s
            since_s, before_s = now_s, used_s
        self._children = since_s, before_s, worked_s
        return now_s - worked_s < _CHILDREN_S


def _spot_of(frame: FrameType | None) -> tuple[object, ...]:
    """The instruction that a thread is at, and all that it was called from."""
    spot: list[object] = []
    while frame is not None:
        spot += [frame.f_code, frame.f_lasti]
        frame = frame.f_back
    return tuple(spot)


@final
class Loop:
    """Tells waiting in a loop from long work, as far as one can: by where a busy thread is, time after time.

    Whoever waits goes round a `while` and asks, be it in his own code or in what Python has for that; a `for` ends with
    its data, unless it is one of `_ENDLESS`. Work is seen in what does it nearly every time: an evaluation in torch's
    code.
    """

    def __init__(self) -> None:
        self._place: tuple[object, ...] = ()
        self._began_s = 0.0
        self.seen = 0  # times

    def see(self, frame: FrameType | None, now_s: float) -> float:
        """The thread is at `frame` at `now_s`. For how long it has waited in one loop; 0 while that is not known."""
        place = _waiting_loop(frame)
        if not place or place != self._place:
            self._place, self._began_s, self.seen = place, now_s, 0
        self.seen += bool(place)
        return now_s - self._began_s if self.seen >= _LOOPS else 0.0


def _waiting_loop(frame: FrameType | None) -> tuple[object, ...]:
    """The `while` that the thread goes round and the calls around it; () where it does anything else."""
    while frame is not None and _asks(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None:
        code, at = frame.f_code, frame.f_lasti
        within = [loop for loop in _loops_of(code) if loop.first <= at <= loop.last + 2]  # it rests behind the jump
        if within or not (is_users(code.co_filename) or code.co_flags & _GENERATOR):
            break
        frame = frame.f_back
    else:
        return ()
    loop = min(within, key=lambda one: one.last - one.first, default=None)
    if loop is None or loop.ends:
        return ()
    around: list[object] = []
    while frame := frame.f_back:
        around += [frame.f_code, frame.f_lineno]
    return code, loop, *around


class _Loop(NamedTuple):
    """Of a piece of code: its first and last instruction."""

    first: int
    last: int
    ends: bool  # by itself: a `for`


@lru_cache(64)
def _loops_of(code: CodeType) -> tuple[_Loop, ...]:
    """None of a generator: who goes round that is whoever wants its next value."""
    if code.co_flags & _GENERATOR:
        return ()
    every = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]  # to which a long jump goes
    offsets = [one.offset for one in every]
    return tuple(
        _Loop(one.argval, one.offset, _ends(every, bisect_left(offsets, one.argval)))
        for one in every
        if one.opcode in _JUMPS and one.argval <= one.offset and "NO_INTERRUPT" not in one.opname  # that is an `await`
    )


def _ends(every: Sequence[dis.Instruction], head: int) -> bool:
    """Whether the loop whose first instruction is that one ends by itself, as most `for` do."""
    if every[head].opname not in _FOR:
        return False
    if every[head - 1].opname != "GET_ITER":
        return True
    first = next(at for at in range(head, -1, -1) if every[at].starts_line or at == 0)
    loads = [one for one in every[first : head - 1] if one.opname != "PUSH_NULL"]
    path = [*takewhile(lambda one: one.opname in ("LOAD_ATTR", "LOAD_METHOD"), loads[1:])]
    callee = [*loads[:1], *path][-1:]
    return not any(every[head - 2].argval in _ENDLESS.get(one.argval, ()) for one in callee)


@lru_cache(256)
def _asks(file: str) -> bool:
    """Whether code of this file is there to ask whether something has come."""
    if file.startswith("<frozen "):
        return file[len("<frozen ") : -1] in _ASKING
    if file.startswith(_OURS) or file.endswith(_ASKING_TORCH):
        return True
    first = file.removeprefix(_STDLIB).partition(os.sep)[0]
    return file.startswith(_STDLIB) and first.removesuffix(".py") in _ASKING


def frame_of(thread_id: int) -> FrameType | None:
    """The innermost frame of another thread, None where it has none that is whole; of this one, who asks for it."""
    if thread_id == threading.get_ident():
        return sys._getframe(1)
    frame = _of_threads(sys._current_frames).get(thread_id)
    return frame if frame is not None and isinstance(frame.f_code, CodeType) else None


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


def transferred_bytes() -> int:
    """What this process has read and written so far; 0 where the system does not tell."""
    words = read_proc("/proc/self/io").split()
    return int(words[1]) + int(words[3]) if words else 0


def is_traced() -> bool:
    """True while another process debugs this one; a debugger within it is known by its frames."""
    after = read_proc("/proc/self/status").partition(b"\nTracerPid:")[2].split(maxsplit=1)
    return bool(after) and after[0] != b"0"
