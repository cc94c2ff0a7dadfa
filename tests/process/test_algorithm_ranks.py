"""Collectives made of messages between processes: on every transport, and where a rank dies in the middle of one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lockstep
from algorithm_cases import check_moves, check_reductions
from comm_cases import same
from host_ranks import hosts
from lockstep.comm.algorithms.choice import ALGORITHMS
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CommError, PeerFailed, PeerLost
from lockstep.observe.guard import Guard
from lockstep.observe.recording import GuardLayer
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from shm_ranks import share, shared


def every_algorithm(comm: Communicator) -> None:
    for numel, dtype in ((0, torch.bfloat16), (1, torch.float64), (1025, torch.int64), (70_001, torch.float32)):
        check_reductions(comm, numel, dtype, "sum", root=numel % comm.world_size)
        check_moves(comm, numel, dtype, root=(numel + 1) % comm.world_size)
    for dtype in (torch.float16, torch.uint8, torch.bool, torch.complex64, torch.int16):
        check_reductions(comm, 101, dtype, "sum")
        check_moves(comm, 101, dtype)
    for reduce in ("mean", "min", "max", "product"):
        check_reductions(comm, 101, torch.float32, reduce)
    large = comm.empty(1_000_001).fill_(comm.rank + 1.0)  # over the belt, and where it lies in the segment
    for name in ALGORITHMS["all_reduce"]:
        tensor = large.clone()
        comm.all_reduce(tensor, algorithm=name)
        same(tensor, torch.full_like(tensor, float(sum(range(1, comm.world_size + 1)))))
    part = comm.split(0 if comm.rank else None)
    if part is not None:
        check_reductions(part, 9, torch.float32, "sum")


def over_shared_memory(comm: Communicator) -> None:
    with shared(comm) as ours:
        every_algorithm(ours)


def over_hosts(comm: Communicator) -> None:
    with hosts(comm, (0, 0, 1)) as ours:
        assert ours.transport.name == "shm+gloo"
        every_algorithm(ours)


@pytest.mark.parametrize("on", [every_algorithm, over_shared_memory, over_hosts])
def test_every_algorithm_on_three_processes(on: Callable[[Communicator], None]) -> None:
    run_processes(3, on)


# ------------------------------------------------------------------ a rank that is killed


class Killed(TransportLayer):
    """The process ends when it comes to this step of its third collective."""

    def __init__(self, inner: Transport, step: int) -> None:
        super().__init__(inner)
        self.step = step
        self.collectives = 0

    def submit(self, op: CommOp) -> Work:
        self.collectives += op.algorithm is not None
        if self.collectives == 3 and op.parts and f"step {self.step}" in op.parts[0].label:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Killed:
        return Killed(inner, self.step)


def killed_in_the_middle(comm: Communicator, name: str, over_memory: bool) -> str:
    ours = share(comm) if over_memory else comm
    if comm.rank == 1:
        ours = Communicator(Killed(ours.transport, step=1))

    def train() -> None:
        while True:
            ours.all_reduce(torch.ones(30_001), algorithm=name, label="gradient")

    with pytest.raises(PeerLost) as raised:
        train()
    ours.close()
    return str(raised.value)


@pytest.mark.parametrize("name", ["ring", "tree"])
@pytest.mark.parametrize("over_memory", [True, False], ids=["shm", "gloo"])
def test_a_rank_that_is_killed_in_the_middle(name: str, over_memory: bool) -> None:
    """All others hear of it, also those that exchange nothing with it: within seconds, the limit being a minute."""
    with pytest.raises(RankFailed) as raised:
        run_processes(3, killed_in_the_middle, name, over_memory)
    assert raised.value.errors.keys() == {1}
    assert raised.value.errors[1].message == "killed by SIGKILL"
    assert raised.value.results.keys() == {0, 2}
    assert all(f"'gradient: all_reduce by {name}, step" in text for text in raised.value.results.values())


# ------------------------------------------------------------------ under a guard


def guarded(rank: int, file: str, case: str) -> tuple[list[str], str]:
    """What the guard of this rank has recorded, and what the rank was told at the end."""
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        lockstep.init(rank=rank, world_size=3, file=file, timeout_s=50, verbose=False) as comm,
    ):
        assert isinstance(comm.transport, GuardLayer)
        guard = comm.transport.guard
        assert isinstance(guard, Guard)
        before = guard.recorder.started
        for name in ALGORITHMS["all_reduce"]:
            comm.all_reduce(torch.ones(70_001), algorithm=name, label="gradient")
        comm.barrier(algorithm="dissemination")
        records = guard.records(before, guard.recorder.started)
        assert all(record.left_ns and not record.is_message for record in records)
        told = ""
        if case == "kill":
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(PeerFailed) as lost:
                comm.all_reduce(torch.ones(70_001), algorithm="ring")
            told = str(lost.value)
        elif case == "other":
            with pytest.raises(CommError) as other:
                comm.all_reduce(torch.ones(4), algorithm="ring" if rank else "tree")
            told = f"{type(other.value).__name__}: {other.value}"
    assert bool(said.getvalue()) <= (case != "well"), said.getvalue()
    return [f"{record.text} {record.label}".strip() for record in records], told


@pytest.mark.parametrize("mode", ["on", "check"])
def test_a_guard_records_one_collective_and_says_nothing(tmp_path: Path, mode: str) -> None:
    ranks = run_processes(3, guarded, str(tmp_path / "meet"), "well", connect=False, env={"LOCKSTEP_GUARD": mode})
    wanted = [f"all_reduce float32 [70001] sum by {name} gradient" for name in ALGORITHMS["all_reduce"]]
    assert [records for records, _ in ranks] == [[*wanted, "barrier by dissemination"]] * 3


def test_a_guard_names_the_rank_that_was_killed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as raised:
        run_processes(3, guarded, str(tmp_path / "meet"), "kill", connect=False, env={"LOCKSTEP_EVIDENCE": ""})
    assert raised.value.errors.keys() == {2}
    for _, told in raised.value.results.values():
        assert re.search(r"rank 2\b.*(killed|gone|ended)", told, re.DOTALL), told


def test_a_guard_names_who_chose_another_algorithm(tmp_path: Path) -> None:
    env = {"LOCKSTEP_EVIDENCE": "", "LOCKSTEP_HANG_S": "2"}
    for _, told in run_processes(3, guarded, str(tmp_path / "meet"), "other", connect=False, env=env):
        assert "CollectiveMismatch" in told
        assert "all_reduce float32 [4] sum by ring" in told
        assert "all_reduce float32 [4] sum by tree" in told
        assert "they differ in algorithm" in told
