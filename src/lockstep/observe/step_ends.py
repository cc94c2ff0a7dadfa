"""The end of a step of one rank: what is needed at once is done, the rest is left to whoever takes the record up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, final

from lockstep.observe.account import JOIN, Account
from lockstep.observe.call_site import call_site
from lockstep.observe.causes import Causes
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.lookout import Lookout
from lockstep.observe.native import in_c, read_in_c
from lockstep.observe.profile.step_clock import Ended

if TYPE_CHECKING:
    from lockstep.observe.torch_groups import WatchedGroup  # it imports the guard, which imports this module

_LEFT_MAX = 256  # steps

Started = tuple["WatchedGroup", int, str]  # a group, torch's number of its last operation, the line


@final
@read_in_c
class StepEnds:
    """Those of the rank whose thread calls."""

    __slots__ = ("__dict__", "operations")

    def __init__(self, recorder: FlightRecorder, account: Account, lookout: Lookout, causes: Causes) -> None:
        self.recorder, self._account, self._lookout, self._causes = recorder, account, lookout, causes
        self.operations = 0  # started by the end of the last step that was taken up

    def step_done(self, started: Sequence[Started] = ()) -> None:
        """This rank has ended a step; what was found meanwhile is raised here.

        started: what C++ has started in it and is still to be entered. That can wait, as all that is not needed here:
        see `FlightRecorder.take_up`.
        """
        recorder, now_ns = self.recorder, monotonic_ns()
        if JOIN not in self._account.activities:  # some ranks have steps there that others have not
            step, clock = recorder.step + 1, recorder.clock
            is_followed = not clock.is_marked and get_ident() == clock.owner
            ended = clock.cut(step, now_ns) if is_followed else None
            if started or recorder.left:
                recorder.left.append(partial(self.take_up, step, now_ns, ended, started))
            else:
                self.take_up(step, now_ns, ended, started)
            recorder.set_step(step)  # now that whoever enters finds what is of the one before
            if is_followed and clock.after_step is not None and step >= clock.after_from:
                clock.after_step(step)
        elif started:
            recorder.left.append(partial(_enter, started, recorder.step, now_ns))
        if len(recorder.left) > _LEFT_MAX:  # the guard's thread is held up
            recorder.take_up()
        if self._lookout.finding is not None:
            self._causes.raise_if_found()

    def passing(self, groups: Sequence[WatchedGroup] = ()) -> Callable[[str, int, int], int]:
        """As `step_done`, for steps that are only counted or marked by the program: see `Passing.passed`.

        groups: all there are; no more is known of others.
        """
        return Passing(self, self._account, self._lookout, groups).passed

    def take_up(self, step: int, now_ns: int, ended: Ended | None, started: Sequence[Started], tokens: int = 0) -> None:
        """Do what is left to be done of `step`, which ended at `now_ns`."""
        recorder = self.recorder
        if started:
            _enter(started, step - 1, now_ns)
        self._account.has_ended(now_ns)
        self.operations = recorder.started
        if ended is not None:
            recorder.clock.keep(ended, recorder.started, tokens)


@final
@read_in_c
class Passing:
    """Ends steps that are only counted, see `pace`, and such as their own program has marked."""

    __slots__ = ("_activities", "_ended_ns", "_ends", "_followed", "_left", "_lookout", "_recorder", "_take_up")

    def __init__(self, ends: StepEnds, account: Account, lookout: Lookout, groups: Sequence[WatchedGroup]) -> None:
        self._ends, self._recorder, self._lookout, self._left = ends, ends.recorder, lookout, ends.recorder.left
        self._activities, self._ended_ns, self._take_up = account.activities, account.ended_ns, ends.take_up
        self._followed = [(watched, watched.group) for watched in groups]

    @in_c
    def passed(self, site: str, named: int, tokens: int) -> int:
        """The rank has ended a step; its number, or 0 where `StepEnds.step_done` has to end it.

        site: the line whose backward has started what C++ has. named: the number that the program gives the step; 0:
        none of its own.
        """
        recorder, left, started = self._recorder, self._left, list[Started]()
        clock = recorder.clock
        is_odd = self._lookout.finding is not None or self._activities or clock.summed_ns or get_ident() != clock.owner
        if is_odd or len(left) > _LEFT_MAX or not (clock.is_brief or clock.is_plain()):
            return 0
        for watched, group in self._followed:
            of_torch = group()
            if of_torch is None:  # gone, and another one has come
                return 0
            if not watched.inside:
                number = of_torch._get_sequence_number_for_group()
                if number != watched.seen:
                    started.append((watched, number, site or call_site()))
        now_ns, step = monotonic_ns(), recorder.step + 1
        named = named or step
        is_brief = clock.is_brief
        waits = () if is_brief else clock.waits
        ended: Ended = named, clock.began_ns, now_ns, clock.samples, waits, clock.marks, (), None, is_brief
        clock.step, clock.began_ns, clock.samples, clock.marks = named, now_ns, 0, [(clock.rest, now_ns)]
        if not is_brief:
            clock.waits = []
        if started or left:
            left.append(partial(self._take_up, step, now_ns, ended, started, tokens))
        else:  # whoever enters next would do it, and that costs five times as much
            self._take_up(step, now_ns, ended, started, tokens)
        recorder.set_step(step)
        return step


def _enter(started: Iterable[Started], step: int, now_ns: int) -> None:
    for watched, number, site in started:
        watched.catch_up(number, site, step=step, now_ns=now_ns)
