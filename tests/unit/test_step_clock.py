"""The phases of a step add up to the step, whatever the thread does and whoever else asks."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.observe.profile import step_clock
from lockstep.observe.profile.phases import (
    BACKWARD,
    DATA,
    EXPOSED,
    FORWARD,
    OTHER,
    PHASES,
    Step,
    Values,
    outermost,
    spans_in,
    step_of,
    worked_out,
)
from lockstep.observe.profile.step_clock import MARKS, WAITS, StepClock


class Time:
    """A clock that goes on by one, two, three ... at each look."""

    def __init__(self) -> None:
        self.now = self.pace = 0

    def __call__(self) -> int:
        self.pace += 1
        self.now += self.pace
        return self.now


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    monkeypatch.setattr(step_clock, "monotonic_ns", Time())
    clock = StepClock()
    clock.close_reader = lambda: None
    return clock


ACTS = st.lists(st.sampled_from(["data", "forward", "backward", "wait", "within", "end", "step"]), max_size=60)


@given(ACTS)
def test_phases_add_up_to_the_step(acts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_clock, "monotonic_ns", Time())
        clock = StepClock()
        clock.close_reader = lambda: None
        open_waits: list[int] = []  # since when
        done = 0
        for number, act in enumerate(acts):
            if act in PHASES:
                clock.switch(PHASES.index(act))
            elif act in ("wait", "within"):
                open_waits.append(step_clock.monotonic_ns())
            elif act == "end" and open_waits:
                clock.waited(number, open_waits.pop(), step_clock.monotonic_ns())
            elif act == "step":
                done += 1
                clock.step_done(done, number)
        left = [*map(step_of, clock._left)]
        steps = list(clock.steps)
    assert [step.step for step in steps] == list(range(1, done + 1))
    for raw, step in zip(left, steps, strict=True):
        spent_ns = step.summed_ns
        assert tuple(spent_ns) == by_moments(raw)
        assert sum(spent_ns) == step.ended_ns - step.began_ns
        assert min(spent_ns) >= 0
        waits = outermost(raw.waits, raw.began_ns)
        assert waits == step.waits
        ends = [time for _, began_ns, ended_ns in waits for time in (began_ns, ended_ns)]
        assert ends == sorted(ends)
        assert sum(ended_ns - began_ns for _, began_ns, ended_ns in waits) == spent_ns[EXPOSED]
        spans = spans_in(step, 1000)
        spent = [0] * len(PHASES)
        for (phase, at), (_, until) in itertools.pairwise([*spans, (OTHER, step.ended_ns)]):
            spent[phase] += until - at
        assert tuple(spent) == spent_ns, "spans are the phases, with their times"
        assert all(before != after for (before, _), (after, _) in itertools.pairwise(spans))
        for most in (1, 3):
            few = spans_in(step, most)
            assert len(few) <= most
            assert set(few) <= set(spans)
            assert few[:1] == spans[:1]
    for before, after in itertools.pairwise(steps):
        assert (before.ended_ns, before.operations[1]) == (after.began_ns, after.operations[0])


def by_moments(step: Step) -> tuple[int, ...]:
    """In each phase, nanosecond by nanosecond."""
    spent = [0] * len(PHASES)
    for moment in range(step.began_ns, step.ended_ns):
        is_waiting = any(began <= moment < ended for _, began, ended in step.waits)
        spent[EXPOSED if is_waiting else [phase for phase, at in step.marks if at <= moment][-1]] += 1
    return tuple(spent)


def test_span_lasts_until_the_next_and_the_shortest_are_left_out_where_there_are_many() -> None:
    marks = (DATA, 0), (FORWARD, 10), (BACKWARD, 400), (OTHER, 1000), (FORWARD, 1005), (BACKWARD, 1300)
    waits = (0, 600, 900), (1, 900, 901), (2, 1600, 2000)
    step = Step(1, 0, 2000, 0, 0, (0, 3), waits, marks)
    every = spans_in(step, 100)
    assert every == [
        (DATA, 0),
        (FORWARD, 10),
        (BACKWARD, 400),
        (EXPOSED, 600),
        (BACKWARD, 901),
        (OTHER, 1000),
        (FORWARD, 1005),
        (BACKWARD, 1300),
        (EXPOSED, 1600),
    ]
    assert spans_in(step, 8) == [span for span in every if span != (OTHER, 1000)]
    assert spans_in(step._replace(marks=()), 100) == []


def test_wait_inside_a_wait_counts_once(read: StepClock) -> None:
    read.switch(BACKWARD)
    read.waited(7, 4, 5)
    read.waited(8, 3, 6)
    assert read.switch(OTHER) == BACKWARD
    read.step_done(1, 9)
    (step,) = read.steps
    assert outermost(step.waits, step.began_ns) == [(8, 3, 6)]
    assert worked_out(step).summed_ns[EXPOSED] == 3


def test_other_threads_change_nothing(read: StepClock) -> None:
    read.switch(FORWARD)

    def elsewhere() -> None:
        assert read.switch(DATA) == -1
        read.waited(3, 1, 2)
        read.step_done(4, 4)
        read.restart()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not read.steps
    assert read.switch(-1) == -1
    assert read.switch(OTHER) == FORWARD
    read.step_done(1, 0)
    assert (read.steps[0].samples, read.steps[0].waits) == (0, [])


def test_nothing_is_kept_for_nobody(read: StepClock) -> None:
    read.close_reader = None
    read.waited(1, 1, 2)
    read.step_done(1, 1)
    read.close_reader = lambda: None
    read.step_done(2, 5)
    assert [(step.step, step.operations, step.waits) for step in read.steps] == [(2, (1, 5), [])]


def test_what_was_before_the_first_mark_belongs_to_no_step(read: StepClock) -> None:
    for marks_before_it_ends in (2, 2 * MARKS):
        clock = StepClock()
        clock.close_reader, clock.begins_with_mark = (lambda: None), True
        clock.rest = FORWARD
        clock.restart()
        began_ns = step_clock.monotonic_ns()
        for _ in range(marks_before_it_ends):
            clock.switch(DATA)
        clock.step_done(1, 0)
        clock.step_done(2, 0)
        first, second = clock.steps
        assert first.began_ns > began_ns
        assert sum(first.summed_ns) == first.ended_ns - first.began_ns == sum(first.summed_ns[DATA : DATA + 1])
        assert second.began_ns == first.ended_ns


@pytest.mark.parametrize(("trains", "phase"), [(False, OTHER), (True, FORWARD)])
def test_what_was_before_the_beginning_that_is_given_belongs_to_no_step(
    read: StepClock, trains: bool, phase: int
) -> None:
    """Of a program that has ended no step; what comes before a backward is forward, and else nobody knows."""
    read.rest = FORWARD
    read.begins_with_mark = True
    for at in (DATA, FORWARD, DATA, BACKWARD if trains else FORWARD):
        read.switch(at)
    marks = [*read.marks]
    began_ns = marks[2][1] + 1
    read.begin_at(began_ns, 5)
    read.step_done(1, operations=9)
    (step,) = read.steps
    assert (step.began_ns, step.operations) == (began_ns, (5, 9))
    assert step.marks == [(phase, began_ns), marks[3], (BACKWARD if trains else OTHER, marks[4][1])]


def test_wait_after_many_phases_of_one_step_is_kept(read: StepClock) -> None:
    """As of gradients that are summed over thousands of microbatches, and sent in the end."""
    for number in (7, 8):
        for _ in range(3 * MARKS):
            read.switch(FORWARD)
        read.waited(number, step_clock.monotonic_ns(), step_clock.monotonic_ns())
    read.step_done(1, 0)
    read.step_done(2, 0)
    assert [[wait[0] for wait in step.waits] for step in read.steps] == [[7, 8], []]


def test_values_are_asked_for_once_a_step_and_who_wants_to_be_called_later_is(read: StepClock) -> None:
    asked, told = list[int](), list[int]()

    def values(step: int) -> Values:
        asked.append(step)
        return lambda: ({"step": step}, None)

    read.values, read.after_step, read.after_from = values, told.append, 3
    for step in range(1, 5):
        read.step_done(step, 0)
    assert (asked, told, read.step) == ([1, 2, 3, 4], [3, 4], 4)
    assert [step.values and step.values()[0] for step in read.steps] == [{"step": step} for step in asked]


def test_of_a_step_without_end_only_the_sums_and_the_last_waits_are_kept(read: StepClock) -> None:
    for number in range(10 * WAITS):
        read.switch(FORWARD)
        read.waited(number, step_clock.monotonic_ns(), step_clock.monotonic_ns())
        read.switch(BACKWARD)
    assert len(read.waits) < WAITS
    read.step_done(1, 0)
    read.switch(DATA)
    read.step_done(2, 0)
    long, short = read.steps
    assert sum(long.summed_ns) == long.ended_ns - long.began_ns
    assert [wait[0] for wait in long.waits] == list(range(9 * WAITS, 10 * WAITS))
    assert spans_in(long, 100) == []
    assert sum(short.summed_ns) == short.ended_ns - short.began_ns
    assert [phase for phase, _ in spans_in(short, 100)] == [OTHER, DATA]


def test_of_a_brief_step_the_data_is_timed_and_the_rest_is_as_in_one_that_was(read: StepClock) -> None:
    read.values = lambda step: lambda: ({"step": step}, None)
    for phase in (DATA, FORWARD, BACKWARD, OTHER):
        read.switch(phase)
    read.waited(3, read.marks[-2][1], read.marks[-1][1])
    read.step_done(1, 4)
    for step in (2, 3):
        read.is_brief = True
        assert read.switch(FORWARD) < 0
        read.switch(DATA)
        read.samples += 5
        read.switch(OTHER)
        read.waited(3 + step, read.marks[-1][1], read.marks[-1][1] + 2)
        assert [phase for phase, _ in read.so_far(9)] == [OTHER, DATA, OTHER]
        read.step_done(step, 4 + step)
    read.switch(FORWARD)
    read.step_done(4, 9)
    timed, *brief, last = read.steps
    like = timed.summed_ns
    assert (timed.is_brief, last.is_brief, read.is_brief) == (False, False, False)
    assert [one.step for one in brief] == [2, 3]
    assert [one.operations for one in brief] == [(4, 6), (6, 7)]
    assert [one.samples for one in brief] == [5, 5]
    assert timed.values is not None
    assert last.values is not None
    for one in brief:
        spent = one.summed_ns
        assert one.is_brief
        assert one.values is None
        assert (one.marks, one.waits) == ((), ())
        assert sum(spent) == one.ended_ns - one.began_ns
        assert 0 < spent[DATA] < sum(spent)
        rest, whole = sum(spent) - spent[DATA], sum(like) - like[DATA]
        for phase in (FORWARD, BACKWARD, EXPOSED):
            assert spent[phase] == min(rest, 2 * whole) * like[phase] // whole
    assert last.marks[0][1] == brief[-1].ended_ns


def test_what_a_brief_step_takes_beyond_twice_the_one_that_was_timed_is_nobodys_part(read: StepClock) -> None:
    read.keep((1, 0, 1000, 0, (), [], (0, 300, 400, 100, 150, 50), None, False), 0)
    read.keep((2, 1000, 2500, 0, (), [(OTHER, 1000)], (), None, True), 0)
    read.keep((3, 2500, 12500, 0, (), [(OTHER, 2500)], (), None, True), 0)
    _, usual, stalled = read.steps
    assert list(usual.summed_ns) == [0, 450, 600, 150, 225, 75]
    assert list(stalled.summed_ns) == [0, 600, 800, 200, 300, 8100]


def test_brief_steps_in_a_row_that_share_a_line_of_the_record_are_told_as_one(read: StepClock) -> None:
    """From step 2048 on a line has four, the last a multiple of four, unless that is listed."""
    read.keep((2048, 0, 1000, 0, (), [], (0, 300, 400, 100, 150, 50), None, False), 8)
    numbers, told = [*range(2049, 2055), 2058, 2059, 2060, 2061], list[Step]()
    for at, number in enumerate(numbers, 1):
        began_ns, long_ns = 1000 * at, 500 * (number == 2050)
        marks = [(OTHER, began_ns), (DATA, began_ns + 100), (OTHER, began_ns + 150)]
        read.keep((number, began_ns, began_ns + 1000 + long_ns, at, (), marks, (), None, True), 8 + 3 * at, 10)
        if number == 2054:  # a reader comes meanwhile
            told += read.steps
            read.steps.clear()
    told += read.steps
    assert [(step.step, step.together) for step in told] == [(2048, 1), (2052, 4), (2054, 2), (2060, 3), (2061, 1)]
    assert [step.longest_ns for step in told[1:]] == [1500, 1000, 1000, 1000]
    assert [step.operations for step in told] == [(0, 8), (8, 20), (20, 26), (26, 35), (35, 38)]
    assert [step.tokens for step in told[1:]] == [40, 20, 30, 10]
    assert [step.samples for step in told[1:]] == [1 + 2 + 3 + 4, 5 + 6, 7 + 8 + 9, 10]
    for step in told[1:]:
        spent, long_ns = step.summed_ns, 500 * (step.step == 2052)
        assert sum(spent) == 1000 * step.together + long_ns
        assert spent[DATA] == 50 * step.together
        assert spent[FORWARD] == (950 * step.together + long_ns) * 300 // 1000


def test_one_step_that_stood_still_while_it_was_timed_is_no_model_for_others(read: StepClock) -> None:
    """Of the last five the one of middle length is."""
    now_ns = 0
    for step, exposed_ns in enumerate((100, 110, 90, 1_000_000, 105, 95, 2_000_000, 120), 1):
        began_ns, now_ns = now_ns, now_ns + 100 + exposed_ns
        read.keep((step, began_ns, now_ns, 0, (), [], (0, 60, 40, exposed_ns, 0, 0), None, False), 0)
        read.keep((step, now_ns, now_ns + 200, 0, (), [(OTHER, now_ns)], (), None, True), 0)
        now_ns += 200
    shares = [one.summed_ns[EXPOSED] / 200 for one in read.steps if one.is_brief]
    exposed = (100, 100, 100, 100, 105, 105, 105, 120)  # of which the middle one is, the shorter of two
    assert shares == [int(200 * ns / (100 + ns)) / 200 for ns in exposed]


def test_a_first_step_that_is_brief_has_what_was_timed(read: StepClock) -> None:
    read.is_brief = True
    read.switch(DATA)
    read.step_done(1, 0)
    (step,) = read.steps
    assert sum(step.summed_ns) == step.ended_ns - step.began_ns


def test_who_ends_a_step_says_whether_the_next_is_brief(read: StepClock) -> None:
    """Such a step ends like any other: with its operations, tokens and samples, and where the next one begins."""
    read.switch(FORWARD)
    read.step_done(1, 3, 10, is_brief=True)
    for step in (2, 3):
        read.switch(DATA)
        read.samples += step
        read.switch(FORWARD)
        read.waited(3, read.marks[-1][1], read.marks[-1][1] + 1)
        read.step_done(step, 3 * step, 10 * step, is_brief=step == 2)
    read.switch(BACKWARD)
    assert read.marks[-1][0] == BACKWARD
    read.step_done(4, 20)
    steps = [*read.steps]
    assert [step.is_brief for step in steps] == [False, True, True, False]
    assert [step.operations for step in steps] == [(0, 3), (3, 6), (6, 9), (9, 20)]
    assert [step.tokens for step in steps] == [10, 20, 30, 0]
    assert [step.samples for step in steps] == [0, 2, 3, 0]
    assert all(one.ended_ns == other.began_ns for one, other in itertools.pairwise(steps))
