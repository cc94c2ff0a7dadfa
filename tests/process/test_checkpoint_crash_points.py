"""A process is killed, stopped or fails at any system call of a save or load: the old state or the new one is there.

LOCKSTEP_CRASH_POINTS=all takes every call of a save and a load, with every fault; where a scenario makes these calls
again, all that change something, with every fault, and a fifth of those that only look, which LOCKSTEP_SEED chooses.
Else a share of both. Being killed at a call that only looks is being killed at the next that changes something.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from checkpoint_crashes import (
    LOAD,
    SCENARIOS,
    Copies,
    Sample,
    changes,
    faults_of,
    problems_after_load,
    problems_after_save,
    problems_of_leftover,
    sample_of,
    state,
)
from crash_points import (
    NOTHING,
    STOP,
    Action,
    Begin,
    calls_of,
    forking_workers,
    run_with_fault,
    started,
    stopped_after,
    strace_works,
)
from lockstep.checkpoint.generation import CommitMode

pytestmark = [
    pytest.mark.skipif(not strace_works(), reason="strace is not installed, or may not trace here"),
    pytest.mark.limit_s(300),
]
WORKERS = 2
MODES: tuple[CommitMode, ...] = ("rename", "marker")
AGAIN = 0.2  # of the calls that only look, where another scenario makes them too
_SHOWN = 3  # problems in full


class Report(NamedTuple):
    """What a worker has found."""

    calls: list[str]
    cases: int
    problems: list[str]


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Report]]]:
    with forking_workers(WORKERS) as run:
        yield run


def _judge(reports: Sequence[Report], sample: Sample, least: int) -> None:
    """Raises: AssertionError with all that was found."""
    first, *others = ([call.split(":")[0] for call in report.calls] for report in reports)
    assert all(calls == first for calls in others), "the workers do not make the same calls"
    cases = sum(report.cases for report in reports)
    problems = [problem for report in reports for problem in report.problems]
    kinds = Counter(problem.split("\n")[1][:90] for problem in problems)
    assert not problems, "\n".join(
        [
            f"{len(problems)} problems in {cases} cases of {len(first)} calls (LOCKSTEP_SEED={sample.seed})",
            *(f"{count} x {text}" for text, count in kinds.most_common()),
            *problems[:_SHOWN],
        ]
    )
    assert cases >= least, f"only {cases} cases were tried"


# ------------------------------------------------------------------ saving


def _crash(worker: int, root: Path, name: str, mode: CommitMode, sample: Sample) -> Report:
    scenario, copies = SCENARIOS[name], Copies(root / str(worker), mode)
    with copies.new(is_there=scenario.is_there) as place:
        calls = calls_of(scenario.action(place))
    cases = [(call, fault) for call in calls for fault in faults_of(call, scenario) if sample.takes(call, fault)]
    problems = []
    for call, fault in cases[worker::WORKERS]:
        with copies.new(is_there=scenario.is_there) as place:
            outcome = run_with_fault(scenario.action(place), call, fault)
            found = problems_after_save(place, scenario, outcome, fault)
            problems += [f"{fault.name} at {call}\n    {problem}" for problem in found]
    return Report([str(call) for call in calls], len(cases[worker::WORKERS]), problems)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_save_that_dies_or_fails_anywhere_leaves_the_old_state_or_the_new_one(
    workers: Callable[..., list[Report]], tmp_path: Path, name: str, mode: CommitMode
) -> None:
    most = 1 if name == "save" else AGAIN
    shares = (1, 0.2) if (name, mode) == ("save", "rename") else (0.3, 0.05)
    sample = sample_of(*shares, most=most)
    _judge(workers(_crash, tmp_path, name, mode, sample), sample, 10)


# ------------------------------------------------------------------ loading


def _fail_loading(worker: int, root: Path, sample: Sample) -> Report:
    copies = Copies(root / str(worker), "rename")
    with copies.new() as place:
        place.save(20, 2, keep=2)
        before = place.files()
        calls = calls_of(LOAD.action(place))
        cases = [(call, fault) for call in calls for fault in faults_of(call, LOAD) if sample.takes(call, fault)]
        problems = []
        for call, fault in cases[worker::WORKERS]:
            outcome = run_with_fault(LOAD.action(place), call, fault)
            found = problems_after_load(outcome, fault)
            found += ["the directory is changed"] if place.files() != before else []
            problems += [f"{fault.name} at {call}\n    {problem}" for problem in found]
    return Report([str(call) for call in calls], len(cases[worker::WORKERS]), problems)


def test_load_that_fails_anywhere_raises_or_gives_one_of_the_states_and_changes_nothing(
    workers: Callable[..., list[Report]], tmp_path: Path
) -> None:
    sample = sample_of(1, 0.99)
    _judge(workers(_fail_loading, tmp_path, sample), sample, 40)


# ------------------------------------------------------------------ left over from an earlier generation


def _leave_over(worker: int, root: Path, name: str, mode: CommitMode, sample: Sample) -> Report:
    scenario, copies = SCENARIOS[name], Copies(root / str(worker), mode)
    with copies.new() as place:
        calls = calls_of(scenario.action(place))
    # Stopped after a call is stopped before the next.
    last = max(index for index, call in enumerate(calls) if changes(call))
    cases = [index for index, following in enumerate(calls[1 : last + 1]) if sample.takes(following, STOP)]
    problems = []
    for index in cases[worker::WORKERS]:
        with copies.new() as place, stopped_after(scenario.action(place), calls[index]) as child:
            with place.open() as later:
                later.save(30, state(4))
                later.save(50, state(5))
            child.go_on()
            found = problems_of_leftover(place, scenario, child.outcome(), calls[: index + 1])
            problems += [f"stopped before {calls[index + 1]}\n    {problem}" for problem in found]
    return Report([str(call) for call in calls], len(cases[worker::WORKERS]), problems)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["save", "again"])
def test_process_left_over_from_an_earlier_generation_cannot_commit(
    workers: Callable[..., list[Report]], tmp_path: Path, name: str, mode: CommitMode
) -> None:
    most = 1 if name == "save" else AGAIN
    shares = (1, 0.3 if name == "again" else 0.1) if mode == "rename" else (0.4, 0.05)
    sample = sample_of(*shares, most=most)
    _judge(workers(_leave_over, tmp_path, name, mode, sample), sample, 5)


# ------------------------------------------------------------------ a disk that is full


def _fill_up(worker: int, root: Path, mode: CommitMode) -> Report:
    scenario, copies, problems = SCENARIOS["save"], Copies(root / str(worker), mode), []
    limits = range(0, 700, 50)
    for limit in limits[worker::WORKERS]:
        with copies.new() as place, started(_with_room(scenario.action(place), limit)) as child:
            child.release()
            assert child.task() > 0
            outcome = child.outcome()
            found = problems_after_save(place, scenario, outcome, NOTHING)
            found += ["it has saved"] if outcome.code == 0 and limit < 600 else []
            problems += [f"files of {limit} bytes\n    {problem}" for problem in found]
    return Report([], len(limits[worker::WORKERS]), problems)


def _with_room(action: Action, limit: int) -> Action:
    """`action` where no file can become longer than `limit` bytes: a write ends short, the next fails."""

    def limited(begin: Begin) -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return action(begin)

    return limited


@pytest.mark.parametrize("mode", MODES)
def test_disk_that_fills_up_in_the_middle_of_a_file_leaves_the_old_state(
    workers: Callable[..., list[Report]], tmp_path: Path, mode: CommitMode
) -> None:
    _judge(workers(_fill_up, tmp_path, mode), sample_of(1, 1), 14)
