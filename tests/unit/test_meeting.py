"""What launchers at one meeting point say of each other: several of them, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from lockstep.errors import LaunchError
from lockstep.launch.channel import Channel
from lockstep.launch.meeting import Machine, Meeting, _known, contradiction

Join = Callable[..., Meeting]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def join(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Join:
    """One more machine comes to the meeting point. pid: also its name in these tests."""
    monkeypatch.setattr("lockstep.comm.preflight.NOTICE_S", -1.0)
    monkeypatch.setattr("lockstep.launch.meeting._LINGER_S", 0.0)
    channel = Channel(HashStore(), "lockstep/run", "127.0.0.1", 29500)

    def one(pid: int, *, least: int = 2, most: int = 2, **given: Any) -> Meeting:
        return Meeting(channel, machine(pid, **given), least, most, 9.0, lambda text: said.append(f"{pid}: {text}"))

    return one


def machine(pid: int, **given: Any) -> Machine:
    made = Machine(run="ours", nnodes="2", node_rank=None, processes=1, host="vm", pid=pid)
    made.update(given)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return made


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, ""),
        ({"node_rank": 0}, {"node_rank": 1}, ""),
        ({"processes": 1}, {"processes": 2}, ""),
        (
            {"nnodes": "2"},
            {"nnodes": "3"},
            "machines disagree on --nnodes at h:1: vm (pid 5) was started with 2, vm (pid 6) with 3. Give all the same",
        ),
        (
            {"node_rank": 1},
            {"node_rank": 1},
            "--node-rank 1 was given twice at h:1: to vm (pid 5) and vm (pid 6). "
            "Give each machine its own, 0 to 1, and each run its own port",
        ),
        (
            {"node_rank": 0},
            {},
            "machine 0 on vm (pid 5) and vm (pid 6) have different --rdzv-backend: give all machines the same",
        ),
    ],
)
def test_what_machines_contradict_each_other_in(first: Any, second: Any, expected: str) -> None:
    assert contradiction(machine(6, **second), machine(5, **first), "h:1", 2) == expected


def test_contradiction_is_said_on_all_that_wait(join: Join) -> None:
    first = join(5)
    with pytest.raises(LaunchError, match="disagree on --nnodes") as raised:
        join(6, nnodes="3")
    assert first.problem() == str(raised.value)


def test_contradiction_is_what_torchs_rendezvous_failed_of(join: Join) -> None:
    """It fails at once where the port of machine 0 is taken, maybe before another machine has said why."""
    first = join(5, node_rank=0)
    with pytest.raises(LaunchError, match=r"given twice.* to vm .pid 5. and vm .pid 6.") as raised:
        join(6, node_rank=0)
    assert first.late() == str(raised.value)


def test_who_joins_is_compared_with_who_holds_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though that has only signed the store by then, and comes to tell of itself a moment later."""
    channel, holder = Channel(HashStore(), "lockstep/run", "127.0.0.1", 29500), machine(5, node_rank=0)
    late = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: channel.append("machine", holder))
    monkeypatch.setattr("lockstep.launch.channel.time", late)
    mine = machine(6, node_rank=0)
    known = _known(channel, holder, mine, lambda text: None)
    with pytest.raises(LaunchError, match="given twice"):
        Meeting(known, mine, 2, 2, 9.0, lambda text: None)


def test_run_that_has_begun_is_left_alone(join: Join) -> None:
    both = [join(5, node_rank=0), join(6, node_rank=1)]
    for one in both:
        one.begins()
    with pytest.raises(LaunchError, match="given twice"):
        join(7, node_rank=1)
    assert [one.problem() for one in both] == ["", ""]
    assert all(one.late().startswith("a machine has come to 127.0.0.1:29500 and is not heard any more") for one in both)


def test_who_is_missing_is_said_once(join: Join, said: list[str]) -> None:
    where = join(5, node_rank=0, least=3, most=3)
    where.problem()
    where.problem()
    assert len(said) == 1
    at = "127.0.0.1:29500"
    assert said[0] == (
        f"5: waiting for machines 1, 2 at {at}, which no other machine can reach, up to 9 s: the same command with "
        "its own --node-rank starts it; here: machine 0 on vm (pid 5)"
    )
    join(6, node_rank=2, least=3, most=3)
    assert where.late() == (
        f"machine 1 never came to {at} in 9 s; came: machine 0 on vm (pid 5), machine 2 on vm (pid 6). "
        "Look at its output: it was not started, has ended, or was given another address or port"
    )


def test_of_machines_that_have_all_come_one_may_have_fallen_silent(join: Join, said: list[str]) -> None:
    first, _ = join(5), join(6)
    first.problem()
    both = "vm (pid 5), vm (pid 6)"
    awaited = "all 2 machines (--nnodes) to begin, or a place among them"
    assert said == [f"5: waiting for {awaited}, at 127.0.0.1:29500; here: {both}"]
    assert first.late() == (
        f"a machine has come to 127.0.0.1:29500 and is not heard any more: one of {both}. "
        "Its launcher has ended or stands still, or the network is cut"
    )


def test_machine_of_another_run_is_mentioned_and_not_counted(join: Join, said: list[str]) -> None:
    ours = join(5)
    join(6, run="theirs", nnodes="7")
    ours.problem()
    assert "waiting for 1 more machine at" in said[0]
    assert said[0].endswith("vm (pid 5); and vm (pid 6), but with --rdzv-id 'theirs', not 'ours'")


def test_machines_that_may_come_and_that_have_no_place(join: Join, said: list[str]) -> None:
    first = join(5, least=1, nnodes="1:2")
    first.problem()
    join(6, least=1, nnodes="1:2")
    join(7, least=1, nnodes="1:2").problem()
    assert "1 of 2 machines are at" in said[0]
    assert "waiting for all 2 machines (--nnodes) to begin, or a place among them" in said[1]


def test_other_numbers_of_processes_are_mentioned(join: Join, said: list[str]) -> None:
    join(5)
    join(6, processes=2)
    assert said == ["6: --nproc-per-node is 2 here and 1 on vm (pid 5): is it meant?"]


def test_runs_at_one_store_tell_each_other_nothing(join: Join) -> None:
    join(5).store.set("stop", "1")
    assert not join(6, run="theirs").store.check(["stop"])
    assert join(7, nnodes="2").store.check(["stop"])
