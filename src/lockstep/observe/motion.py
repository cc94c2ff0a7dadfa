"""Whether a thread gets on, and where it stands if not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple, final

from lockstep.comm.kernel import read_proc, state_and_cpu_s
from lockstep.observe.stacks import activity_of, frame_of, stack_of
from lockstep.observe.waiting_loop import Loop

_BUSY = 0.05  # of the time on a core: less is waiting
_ASKED_S = 1.0  # after which a busy thread is asked where it is
_MOVED_BYTES = 64 << 10  # read or written from look to look: a slow download moves more, who waits next to nothing
CHILDREN = "its own processes"  # such as the workers of a DataLoader: an activity of who waits for them
_CHILDREN_S, _CHILDREN_CPU_S = 5.0, 0.25  # they work who have used so much of a core in so long


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
        self.thread_id = thread_id
        is_own = thread_id == threading.get_ident()  # the number that a Thread keeps is that from before a fork
        self._task = f"/proc/self/task/{threading.get_native_id() if is_own else 0}/"
        self._clock = time.pthread_getcpuclockid(thread_id) if hasattr(time, "pthread_getcpuclockid") else None
        self._cpu_s = self._looked_s = 0.0
        self._moved_bytes = self._looks = 0  # until they were read last; since then
        # to be set where it begins what it is in too shortly to be seen, as a forward, or what it stood in has ended
        self.has_begun = False
        self._asked_s = -_ASKED_S
        self.stand = Stand((), "", 0.0)  # at the last look
        self._children = (0.0, 0.0, -_CHILDREN_S)  # since when they are looked at, what they had used, when they worked
        self._loop = Loop()
        self.queues: list[Callable[[], bool]] = []  # whether a device still has to do what was begun for it
        self.queued: Callable[[], dict[str, int]] = dict  # which collectives it has not come to: as in a status
        self._spot: tuple[object, ...] = ()  # where the thread was, on a core, when it was asked last
        self._spot_s = 0.0  # since when it has been there
        self._spins = False

    def begin_anew(self) -> None:
        """Nothing is known of the time since the last look."""
        self.stand, self._loop, self._spot = Stand((), "", 0.0), Loop(), ()

    def look(self, now_s: float) -> Stand:
        """Where it is, at `now_s` of a clock that never goes back."""
        passed_s, self._looked_s = now_s - self._looked_s if self._looked_s else 0.0, now_s
        cpu_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        is_busy, before = cpu_s - self._cpu_s > _BUSY * passed_s, self.stand
        self._cpu_s, self._looks = cpu_s, self._looks + 1
        if is_busy and now_s - self._asked_s < _ASKED_S and not self._loop.seen:  # as nearly always: no more to know
            spun_s = before.unmoved_s + passed_s if self._spins and not self.has_begun else 0.0
            self.stand = Stand(before.stack, before.activity, spun_s)
            return self.stand
        is_on_core, moved = is_busy, transferred_bytes()
        has_moved = moved - self._moved_bytes > _MOVED_BYTES * self._looks or self.has_begun
        self.has_begun, self._moved_bytes, self._looks = False, moved, 0
        is_busy = is_busy or has_moved or state_and_cpu_s(self._task + "stat")[0] == "D"
        is_asked = not is_busy or now_s - self._asked_s >= _ASKED_S
        self._asked_s = now_s if is_asked else self._asked_s
        frame = frame_of(self.thread_id) if is_asked else None
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
        self.stand = Stand(stack, activity, unmoved_s, looping_s)
        return self.stand

    def is_queued(self) -> bool:
        """Whether a device still has to do something that ranks do together."""
        return any(queue() for queue in self.queues)

    def _spun_s(self, frame: FrameType | None, now_s: float) -> float:
        """For how long the thread, which uses a core at `frame`, has done so to ask a device whether it is through.

        CUDA has a thread that waits for it go round, within one call, and nothing but that tells it from work. What a
        process has in a device's queue ends after what came before, so whoever stands there waits for that as well.
        """
        frames = walk_stack(frame) if frame is not None and self.is_queued() else ()
        spot = tuple([(one.f_code, one.f_lasti) for one, _ in frames])  # its instruction, and what that was called from
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


def transferred_bytes() -> int:
    """What this process has read and written so far; 0 where the system does not tell."""
    words = read_proc("/proc/self/io").split()
    return int(words[1]) + int(words[3]) if words else 0


def is_traced() -> bool:
    """True while another process debugs this one; a debugger within it is known by its frames."""
    after = read_proc("/proc/self/status").partition(b"\nTracerPid:")[2].split(maxsplit=1)
    return bool(after) and after[0] != b"0"
