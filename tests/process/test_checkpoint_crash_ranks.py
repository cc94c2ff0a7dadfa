"""One of two ranks is killed or fails at a system call of a save: the other one hears of it, and no state is mixed.

LOCKSTEP_CRASH_POINTS=all takes every call of a save; of the other ways to save, which make these calls again, all that
change something, and a fifth of those that only look, which LOCKSTEP_SEED chooses. Else a share of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_crashes import Copies, Place, Sample, number_of, sample_of, state, tried
from crash_points import (
    EIO,
    KILL,
    Action,
    Begin,
    Call,
    Fault,
    Outcome,
    calls_in,
    forking_workers,
    in_first_thread,
    injection,
    started,
    strace_works,
)
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.generation import CommitMode
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport

pytestmark = [
    pytest.mark.skipif(not strace_works(), reason="strace is not installed, or may not trace here"),
    pytest.mark.limit_s(300),
]
WORKERS = 2
LIMIT_S = 20.0  # of every operation between the ranks
_HEARD = ("Checkpoint", "StaleGeneration", "PeerLost", "CommError", "CollectiveTimeout")


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    with forking_workers(WORKERS) as run:
        yield run


def _save(place: Place, rank: int, is_async: bool) -> Action:
    """As rank of two: state 2 as step 20, then, looked at, state 3 as step 30."""

    def action(begin: Begin) -> None:
        rendezvous = place.folder.with_name(f"{place.folder.name}.rendezvous").as_uri()
        with (
            Communicator(TorchTransport.fresh(rendezvous, rank, 2, LIMIT_S)) as comm,
            Checkpointer(place.folder, comm, keep=1, commit=place.mode) as checkpointer,
        ):
            checkpointer.save(20, state(2), shards={rank: _shard(rank, 2)})
            save = _save_in_background if is_async else _save_at_once
            save(checkpointer, rank, begin)

    return action


def _save_at_once(checkpointer: Checkpointer, rank: int, begin: Begin) -> None:
    begin()
    checkpointer.save(30, state(3), shards={rank: _shard(rank, 3)})


def _save_in_background(checkpointer: Checkpointer, rank: int, begin: Begin) -> None:
    """The calls of the thread that writes; what is saved has changed by then."""
    changing = state(3)

    def act() -> None:
        pending = checkpointer.save_async(30, changing, shards={rank: _shard(rank, 3)})
        changing["model"]["embed"].zero_()
        pending.wait()

    in_first_thread(act)(begin)


def _shard(rank: int, number: int) -> dict[str, Any]:
    return {"number": number, "rng": torch.full((5 + rank,), 10 * number + rank)}


def _newest(place: Place) -> int:
    """Which state loads, in one process, with what was each rank's own."""
    with place.open() as checkpointer:
        loaded = checkpointer.load(shards=(0, 1))
    assert loaded is not None, "load finds nothing"
    number = number_of(loaded.state)
    for rank in range(2):
        assert torch.equal(loaded.shards[rank]["rng"], _shard(rank, number)["rng"]), f"shard {rank} is of another save"
    return number


def _run(place: Place, looked_at: int, is_async: bool, options: Sequence[str]) -> tuple[Outcome, Outcome]:
    """How the rank that is looked at ends, and how the other does."""
    actions = [_save(place, rank, is_async) for rank in range(2)]
    with started(actions[looked_at]) as child, started(actions[1 - looked_at]) as other:
        other.task()
        with child.traced(options) as strace:
            child.release()
            other.release()
            assert strace.stdout is not None
            return child.outcome(strace.stdout.read()), other.outcome()


def _problems(place: Place, outcome: Outcome, other: Outcome, fault: Fault) -> list[str]:
    problems = []
    if outcome.code != -9 if fault is KILL else outcome.code not in (0, 1):
        problems.append(f"it ended with {outcome.code} {outcome.said}")
    if other.code not in (0, 1) or (other.code == 1 and not other.said.startswith(_HEARD)):
        problems.append(f"the other rank ended with {other.code} {other.said}")
    if fault is EIO and outcome.code != other.code:
        problems.append(f"one has saved: {outcome.code} {outcome.said}, {other.code} {other.said}")
    number = tried(lambda: _newest(place), problems)
    if number not in ((3,) if 0 in (outcome.code, other.code) else (2, 3)):
        problems.append(f"loads state {number}")
    return problems


def _crash(worker: int, root: Path, mode: CommitMode, is_async: bool, sample: Sample) -> tuple[int, list[str]]:
    copies, problems = Copies(root / str(worker), mode), []
    cases: list[tuple[int, Call, Fault]] = []
    for rank in range(2):
        with copies.new(is_there=False) as place:
            outcome, other = _run(place, rank, is_async, ["-s", "0"])
            assert (outcome.code, other.code) == (0, 0), (outcome, other)
            calls = [call for call in calls_in(outcome.lines) if f"{place.folder}/" in call.text]  # not how ranks meet
        cases += [(rank, c, fault) for c in calls for fault in (KILL, EIO) if sample.takes(c, fault, f"rank {rank}")]
    for rank, call, fault in cases[worker::WORKERS]:
        with copies.new(is_there=False) as place:
            found = _problems(place, *_run(place, rank, is_async, injection(call, fault)), fault)
            problems += [f"rank {rank}: {fault.name} at {call}\n    {problem}" for problem in found]
    return len(cases[worker::WORKERS]), problems


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("mode", ["rename", "marker"])
def test_rank_that_dies_or_fails_while_saving_leaves_one_state_of_all_ranks(
    workers: Callable[..., list[Any]], tmp_path: Path, mode: CommitMode, is_async: bool
) -> None:
    sample = sample_of(0.2, 0.05, most=1 if (mode, is_async) == ("rename", False) else 0.2)
    reports = workers(_crash, tmp_path, mode, is_async, sample)
    cases = sum(count for count, _ in reports)
    problems = [problem for _, found in reports for problem in found]
    shown = "\n".join(problems[:4])
    assert not problems, f"{len(problems)} problems in {cases} cases (LOCKSTEP_SEED={sample.seed})\n{shown}"
    assert cases > 3, f"only {cases} cases were tried"
