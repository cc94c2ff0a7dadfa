"""Random programs on random ranks: no alarm while all keep to one program, and the right name once one does not."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rank_sights import LIMITS, PaperRank, found_in, world

from lockstep.observe.diagnosis import diagnose
from lockstep.observe.status import Sight

TEXTS = ("all_reduce float32 [4] sum", "all_reduce float32 [4] max", "all_gather int64", "barrier")


class Call(NamedTuple):
    text: str
    site: str
    group: str


class Program(NamedTuple):
    size: int
    groups: dict[str, tuple[int, ...]]
    steps: list[list[Call]]  # of all ranks; who is in the group makes the call


@st.composite
def programs(draw: st.DrawFn, least: int = 2, steps: tuple[int, int] = (0, 6)) -> Program:
    """A few collectives that every step makes, some that only some steps make; in the world and a smaller group."""
    size = draw(st.integers(least, 5))
    members = draw(st.sets(st.integers(0, size - 1), min_size=2))
    groups = {"world": tuple(range(size)), "few": tuple(sorted(members))}
    lines = st.integers(1, 3)
    calls = st.builds(
        lambda text, line, group: Call(text, f"train.py:{line} step", group),
        st.sampled_from(TEXTS),
        lines,
        st.sampled_from(["world", "world", "few"]),
    )
    body = draw(st.lists(calls, min_size=1, max_size=4))
    seldom = draw(st.lists(calls, max_size=2))
    rhythm = draw(st.integers(2, 4))
    number = draw(st.integers(*steps))
    return Program(size, groups, [body + (seldom if step % rhythm == 1 else []) for step in range(number)])


# ------------------------------------------------------------------ all keep to the program


class Execution:
    """Ranks that run a program: an operation ends once all of its group have begun it."""

    def __init__(self, program: Program, random: Random) -> None:
        self.program, self.random = program, random
        self.ranks = world(program.size)
        self.now_s = 0.0
        self.entered_s = dict.fromkeys(range(program.size), 0.0)
        self.todo = {one.rank: self._calls(one.rank) for one in self.ranks}
        self.sights: dict[int, tuple[Sight, float]] = {}
        for one in self.ranks:
            for name, members in program.groups.items():
                if one.rank in members:
                    one.group(name, members)

    def _calls(self, rank: int) -> list[Call | None]:
        """What it will do; None where a step ends."""
        calls: list[Call | None] = []
        for step in self.program.steps:
            calls += [call for call in step if rank in self.program.groups[call.group]]
            calls.append(None)
        return calls

    def may_end(self, one: PaperRank) -> bool:
        (number,) = one.open
        record = one.records[number]
        members = self.program.groups[record.group]
        return all(self.ranks[rank].folds[record.group].count > record.seq for rank in members)

    def advance(self) -> bool:
        """One rank does one thing; False where all are done."""
        able = [one for one in self.ranks if (self.may_end(one) if one.open else self.todo[one.rank])]
        if not able:
            assert not any(self.todo.values())
            return False
        one = self.random.choice(able)
        if one.open:
            one.open.clear()
        else:
            call = self.todo[one.rank].pop(0)
            if call is None:
                one.step += 1
            else:
                one.open.add(one.call(call.text, call.site, call.group))
                self.entered_s[one.rank] = self.now_s
        return True

    def passes(self, time_s: float) -> None:
        """Nobody stays in an operation for seconds once all are there."""
        for one in self.ranks:
            if time_s >= 1 and one.open and self.may_end(one):
                one.open.clear()
        self.now_s += time_s

    def look(self) -> dict[int, Sight]:
        """Some ranks have spoken just now, the others less than a second ago."""
        for one in self.ranks:
            spoke_s = self.sights[one.rank][1] if one.rank in self.sights else -9.0
            if self.now_s - spoke_s > 0.9 or self.random.random() < 0.6:
                if one.open:
                    (number,) = one.open
                    one.open_s = self.now_s - self.entered_s[one.rank]
                    one.is_at(one.records[number].site, unmoved_s=one.open_s)
                elif self.todo[one.rank]:
                    one.is_at("model.py:1 forward", unmoved_s=self.random.random())
                else:
                    one.finishes()
                self.sights[one.rank] = (one.sight(), self.now_s)
        return {rank: Sight(sight.status, self.now_s - at_s, False) for rank, (sight, at_s) in self.sights.items()}


@settings(max_examples=60, deadline=None)
@given(programs(), st.integers(0, 1 << 32))
def test_ranks_that_keep_to_one_program_raise_no_alarm(program: Program, seed: int) -> None:
    """Whatever runs ahead, whoever is slow, and although the sights are not of one moment."""
    random = Random(seed)
    run = Execution(program, random)
    is_going = True
    while is_going:
        is_going = run.advance()
        run.passes(random.choice([0.0, 0.0, 0.1, 0.5, 4.0, 30.0]))
        sights = run.look()
        finding = diagnose(random.randrange(program.size), sights, lambda r: run.ranks[r].kept_records(), LIMITS)
        if finding is not None:  # after a minute it is mentioned that one is slow
            assert (finding.kind, finding.is_certain) == ("waiting", False), finding.text


@settings(max_examples=60, deadline=None)
@given(programs(steps=(1, 5)), st.lists(st.integers(0, 40), min_size=5, max_size=5))
def test_no_mark_differs_wherever_the_ranks_are(program: Program, cuts: list[int]) -> None:
    """Any part of the program that each of them may have behind it, with nothing open."""
    ranks = world(program.size)
    for one in ranks:
        played(one, program, cuts[one.rank])
    sights = {one.rank: one.sight() for one in ranks}
    assert diagnose(0, sights, lambda rank: ranks[rank].kept_records(), LIMITS) is None


def played(one: PaperRank, program: Program, most: int = 1 << 30) -> None:
    """At most so many of its operations."""
    for name, members in program.groups.items():
        if one.rank in members:
            one.group(name, members)
    for step in program.steps:
        for call in step:
            if one.rank in program.groups[call.group]:
                if most <= 0:
                    return
                most -= 1
                one.call(call.text, call.site, call.group)
        one.step += 1


# ------------------------------------------------------------------ one does not


@pytest.mark.parametrize("fault", ["skip", "extra", "change"])
@settings(max_examples=50, deadline=None)
@given(programs(steps=(5, 8)), st.data())
def test_a_rank_that_leaves_the_program_is_named(fault: str, program: Program, data: st.DataObject) -> None:
    """One call of one rank is left out, put in or another; all go on as if nothing were wrong."""
    at = data.draw(st.integers(2, len(program.steps) - 3), label="step")
    index = data.draw(st.integers(0, len(program.steps[at]) - 1), label="call")
    call = program.steps[at][index]
    assume(any(later.group == call.group for step in program.steps[at + 1 :] for later in step))  # it goes on
    members = program.groups[call.group]
    guilty = data.draw(st.sampled_from(members), label="rank")
    step = list(program.steps[at])
    if fault == "skip":
        del step[index]
    elif fault == "extra":
        text = data.draw(st.sampled_from([*TEXTS, "broadcast float32 [9] root=0"]), label="text")
        step.insert(index, Call(text, "train.py:99 more", call.group))
    else:
        text = data.draw(st.sampled_from([text for text in TEXTS if text != call.text]), label="text")
        step[index] = call._replace(text=text)
    other = program._replace(steps=[*program.steps[:at], step, *program.steps[at + 1 :]])
    ranks = world(program.size)
    for one in ranks:
        played(one, other if one.rank == guilty else program)
    finding = found_in(ranks)
    assert guilty in finding.culprits, finding.text
    assert f"group {call.group}" in finding.text
    assert finding.is_certain, finding.text
    if len(members) > 2:
        assert finding.culprits == (guilty,), finding.text
    if finding.culprits == members:
        assert "look for a condition that" not in finding.text  # which is true, or false, on all of them?


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("text", ["broadcast float32 [4] root=3", "broadcast float32 [3] root=1"])
def test_of_two_without_steps_the_one_that_calls_other_than_always_at_that_line_is_named(
    guilty: int, text: str
) -> None:
    ranks, usual = world(2), "broadcast float32 [4] root=1"
    for time in range(6):
        for one in ranks:
            one.call(text if one.rank == guilty and time == 5 else usual, "train.py:1 step")
    found = found_in(ranks)
    assert found.culprits == (guilty,), found.text
    assert "they differ in " in found.text
    ranks = world(2)
    for one in ranks:
        one.call(text if one.rank == guilty else usual, "train.py:1 step")
    assert found_in(ranks).culprits == (0, 1)


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_step_with_more_calls_is_known_from_the_second_one_where_python_makes_them(guilty: int) -> None:
    """In which DDP, whose calls are C++'s, rebuilds its buckets."""
    ranks = world(2)
    for step, calls in enumerate([1, 2, 1, 1, 2, 1, 1]):
        for one in ranks:
            for _ in range(calls - (one.rank == guilty and step == 4)):
                one.call(TEXTS[0], "train.py:1 step")
            one.step += 1
    assert guilty in found_in(ranks).culprits  # both have made as many in other steps


@pytest.mark.parametrize("begun", [0, 300])
def test_a_step_that_was_left_out_soon_after_a_restart_is_found(begun: int) -> None:
    """The steps before it are no time in which the ranks had nothing in common."""
    ranks = world(3)
    for one in ranks:
        one.step = begun
        one.status_fields["step_before"] = begun
    for step in range(6):
        for one in ranks:
            one.calls("train.py:7 train")
            one.step -= step == 3 and one.rank == 1
    assert (found_in(ranks).kind, found_in(ranks).culprits) == ("steps", (1,))
