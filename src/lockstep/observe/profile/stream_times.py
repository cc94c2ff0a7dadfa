"""When a GPU came to where the thread of a step was.

The thread of a program that computes on CUDA only queues what its GPU does later: its own times say nothing of forward,
backward, or collectives of NCCL. So with each stamp of the thread an event is recorded on the stream that it queues to
at that moment. Once the events of a step have fired, its stamps get the times of the stream; all that is made of stamps
then tells what the GPU did. Of what runs on another stream than the phases do (the gathering of a sharded model, a copy
ahead) it is known when it ran, not that anybody stood for it.

The thread of the steps records, in three microseconds; who takes the steps asks what has fired, and waits for nothing.
No torch is imported here.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.profile.cuda_driver import Device, driver
from lockstep.observe.profile.stream_event import an_event

if TYPE_CHECKING:
    from lockstep.observe.flight import Record
    from lockstep.observe.profile.phases import Step

_EVENTS_MAX = 8192  # of one step
_PROBE_NS, _LOOKS = 1_000_000_000, 200  # between two probes of the GPU's clock; at an event that fires at once
_POLL_S = 0.001


def is_in_use() -> bool:
    """Whether this process computes on CUDA."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and cuda.is_initialized() and driver() is not None


def peak_mib(device: int | None) -> int:
    """Most memory that torch has had of `device`, or of the current one of the thread of the steps, which asks.

    Another thread has another current one, and would wait for torch's lock while the program holds it for a device.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda.max_memory_allocated(device) >> 20 if cuda is not None and cuda.is_initialized() else 0


@final
class Times:
    """One step: when the stream came to where its thread was."""

    def __init__(self, home: Mapping[int, int], aside: Mapping[int, int], before: Times | None = None) -> None:
        """By the thread's times, in order. aside: on other streams. before: of the step before."""
        self.aside = aside
        self.ran: dict[int, tuple[int, int]] = {}  # operations on other streams: from, to
        self.before = before
        self._home = home
        self._threads = [*home]

    def at(self, thread_ns: int) -> int:
        """Of a moment without a stamp that of the last one before it: nothing is known to have been queued since."""
        place = bisect_right(self._threads, thread_ns) - 1
        if place >= 0:
            return self._home[self._threads[place]]
        return min(thread_ns, self._home[self._threads[0]]) if self.before is None else self.before.at(thread_ns)

    def stood(self, began_ns: int, ended_ns: int) -> tuple[int, int]:
        """How long the stream did for which the thread stood; no longer than that where only its end has a stamp."""
        since, until = self.at(began_ns), self.at(ended_ns)
        return (since if began_ns in self._home else max(since, until - (ended_ns - began_ns))), until


@final
class Events:
    """Of one step, by the thread's times: an event, and whether its stream is another one than that of the phases."""

    __slots__ = ("found", "home", "last", "queued")

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, bool]] = {}
        self.last: dict[int, int] = {}  # of each stream: the event that fires last
        self.home = 0  # the stream of the last phase
        self.queued: set[int] = set()  # operations that the GPU carries out: the thread's times say nothing of them


@final
class Stamped(list[Any]):
    """Marks or waits of a step: where one is added, which ends with its time, an event is recorded."""

    __slots__ = ("_is_mark", "events", "gpu")

    def __init__(self, gpu: StreamClock, events: Events, ones: Sequence[Any], *, is_mark: bool = False) -> None:
        super().__init__(ones)
        self.gpu, self._is_mark, self.events = gpu, is_mark, events

    def append(self, one: Any) -> None:
        super().append(one)
        self.gpu.record(self.events, one[-1], is_mark=self._is_mark)


@final
class StreamClock:
    """Of one thread and one device: the thread records, and who takes its steps asks what has come."""

    def __init__(self, owner: int, device: int | None) -> None:
        """device: None is the current one."""
        torch = sys.modules["torch"]
        self.device: int = torch.cuda.current_device() if device is None else device
        self.events: Events | None = None  # of the step under way
        self.is_over = False  # CUDA has failed, or it is not waited for any longer
        self._owner = owner
        self._gpu = Device(self.device)
        self._stream_of = torch._C._cuda_getCurrentRawStream
        self._free: list[int] = []  # events of no step
        self._last: tuple[int, int] | None = None  # one of none either, and when it fired
        self._times: Times | None = None  # of the last step
        self._probe = self._idle = 0  # an event, and a stream of its own; made here, see `StreamEvent`
        try:
            with self._gpu.asked():
                self._probe, self._idle = self._gpu.event(), self._gpu.stream()
        except RuntimeError:
            self._give_up()
        self._probed_ns = -_PROBE_NS

    # ------------------------------------------------------------------ the thread of the steps

    def begin(self, marks: Sequence[Any]) -> tuple[Stamped, Stamped]:
        """A step has begun with `marks`; its marks and waits from now on."""
        events = self.events = Events()
        self.record(events, marks[-1][-1], is_mark=True)
        return Stamped(self, events, marks, is_mark=True), Stamped(self, events, ())

    def end(self, at_ns: int) -> None:
        """The step under way, if there is one, has ended."""
        self.stamp(at_ns)
        self.events = None

    def leave(self) -> None:
        """The times of the step under way will be its thread's."""
        events, self.events = self.events, None
        if events is not None:
            self._free += [event for event, _ in events.found.values()]

    def time(self) -> int:
        """time.monotonic_ns, with a stamp where that is of the thread of the steps."""
        now_ns = monotonic_ns()
        if get_ident() == self._owner:
            self.stamp(now_ns)
        return now_ns

    def stamp(self, at_ns: int) -> None:
        """The thread is there now, or one that works for it."""
        if self.events is not None:
            self.record(self.events, at_ns)

    def record(self, events: Events, at_ns: int, *, is_mark: bool = False) -> None:
        """Never raises: an error of CUDA's comes to the program by itself."""
        found = events.found
        if self.is_over or at_ns in found or len(found) >= _EVENTS_MAX:
            return
        stream = self._stream_of(self.device)
        try:
            event = an_event(self._gpu, self._free)
            if not self._gpu.record(event, stream):
                self._free.append(event)
                return
        except RuntimeError:
            self._give_up()
            return
        if is_mark:
            events.home = stream
        found[at_ns] = event, stream != events.home
        events.last[stream] = event

    def expects(self, number: int) -> bool:
        """Whether the stream's times of that operation, which a GPU carries out, will be known."""
        if self.events is None:
            return False
        self.events.queued.add(number)
        return True

    # ------------------------------------------------------------------ who takes the steps

    def have_fired(self, events: Events, until_ns: int = 0) -> bool:
        """Whether it is known by now what the step's times are, or that they will not be.

        until_ns: how long to wait for that; who does asks no more.
        """
        while not self.is_over:
            try:
                with self._gpu.asked():
                    if all(map(self._gpu.has_fired, events.last.values())):
                        return True
            except RuntimeError:
                break
            if not until_ns:
                return False
            if monotonic_ns() > until_ns:
                break
            time.sleep(_POLL_S)
        self._give_up()
        return True

    def times_of(self, events: Events, needed_ns: Iterable[int]) -> Times | None:
        """Of a step whose events `have_fired`; None where one that is needed is not there.

        needed_ns: when its phases began, and its end. A graph may have been captured there.
        """
        times = None
        if not self.is_over and all(at_ns in events.found for at_ns in needed_ns):
            try:
                with self._gpu.asked():
                    times = self._times_of(events.found)
            except RuntimeError:
                self._give_up()
        kept = None if self._last is None else self._last[0]
        self._free += [event for event, _ in events.found.values() if event is not kept]
        return times

    def _times_of(self, found: Mapping[int, tuple[int, bool]]) -> Times:
        stamps = sorted(found)
        first, last = found[stamps[0]][0], found[stamps[-1]][0]
        passed_ns = {at_ns: self._gpu.apart_ns(first, found[at_ns][0]) for at_ns in stamps}
        # an event fires after it was recorded, and had fired when that was seen
        low_ns = max(at_ns - passed for at_ns, passed in passed_ns.items())
        high_ns = monotonic_ns() - max(passed_ns.values())
        guess_ns = low_ns if self._last is None else self._last[1] + self._gpu.apart_ns(self._last[0], first)
        probed = self._probed(first)
        low_ns, high_ns = (low_ns, high_ns) if probed is None else (max(low_ns, probed[0]), min(high_ns, probed[1]))
        first_ns = max(low_ns, min(guess_ns, high_ns))
        home: dict[int, int] = {}
        aside: dict[int, int] = {}
        reached_ns = first_ns
        for at_ns in stamps:
            if found[at_ns][1]:
                aside[at_ns] = first_ns + passed_ns[at_ns]
            else:  # a stream that the phases change to may have been there before
                home[at_ns] = reached_ns = max(reached_ns, first_ns + passed_ns[at_ns])
        if self._last is not None:
            self._free.append(self._last[0])
        self._last = last, first_ns + passed_ns[stamps[-1]]
        if self._times is not None:
            self._times.before = None
        self._times = Times(home, aside, self._times)
        return self._times

    def _probed(self, first: int) -> tuple[int, int] | None:
        """(from, to): when `first` fired, as an event says that fires when it is recorded, its stream being idle.

        Else a program that never waits for its GPU would not show how far the clocks drift apart.
        """
        if monotonic_ns() - self._probed_ns < _PROBE_NS:
            return None
        self._probed_ns = monotonic_ns()
        self._gpu.record(self._probe, self._idle)
        for _ in range(_LOOKS):
            if self._gpu.has_fired(self._probe):
                seen_ns, apart_ns = monotonic_ns(), self._gpu.apart_ns(first, self._probe)
                return self._probed_ns - apart_ns, seen_ns - apart_ns
        self._probed_ns -= _PROBE_NS - _PROBE_NS // 10  # soon again: another process has the GPU now
        return None

    def _give_up(self) -> None:
        """Of no step more is known than its thread's times."""
        self.is_over, self.events = True, None


# ------------------------------------------------------------------ a step


def on_stream(step: Step, times: Times) -> Step:
    """The step as the stream had it. Nobody stood for what ran on other streams."""
    waits: list[tuple[int, int, int]] = []
    for number, began_ns, ended_ns in step.waits:
        if began_ns in times.aside or ended_ns in times.aside:
            times.ran[number] = times.aside.get(began_ns, began_ns), times.aside.get(ended_ns, ended_ns)
        else:
            waits.append((number, *times.stood(began_ns, ended_ns)))
    marks = [(phase, times.at(at_ns)) for phase, at_ns in step.marks]
    ends = times.at(step.began_ns), times.at(step.ended_ns)
    return step._replace(began_ns=ends[0], ended_ns=ends[1], waits=waits, marks=marks, times=times)


def as_seen(record: Record, times: Times, ends: Mapping[int, int]) -> Record:
    """When the stream came to an operation, and when it had gone past it. ends: of those that it stood for."""
    if record.number in times.ran:
        entered_ns, left_ns = times.ran[record.number]
    else:
        entered_ns = times.aside.get(record.entered_ns) or times.at(record.entered_ns)
        left_ns = ends.get(record.number) or (record.left_ns and max(entered_ns, record.left_ns))
    return record._replace(entered_ns=entered_ns, left_ns=left_ns)
