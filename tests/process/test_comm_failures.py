"""Real processes over Gloo that fail: who survives learns it in seconds, and in one sentence."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, CommError, ConfigError, PeerLost, TransportClosed
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes


def killed_in_an_all_reduce(comm: Communicator) -> tuple[str, str | None, int | None]:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        while True:
            comm.all_reduce(torch.ones(100_000), label="gradient")

    with pytest.raises(PeerLost) as raised:
        train()
    cause = raised.value.__cause__
    return str(raised.value), None if cause is None else type(cause).__name__, raised.value.rank


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_killed(world_size: int) -> None:
    with pytest.raises(RankFailed, match=f"rank 1 of {world_size} in killed_in_an_all_reduce") as raised:
        run_processes(world_size, killed_in_an_all_reduce, timeout_s=30)
    assert raised.value.errors.keys() == {1}
    assert raised.value.errors[1].message == "killed by SIGKILL"
    for rank, (message, cause, lost) in raised.value.results.items():
        assert f"'gradient', 400000 bytes) on rank {rank} of {world_size} (gloo): lost the connection to" in message
        assert "all_reduce float32 [100000] sum (seq" in message
        assert cause == "RuntimeError"
        assert lost == (1 if world_size == 2 else None)
    assert raised.value.results.keys() == set(range(world_size)) - {1}


def left_in_a_reduce_scatter(comm: Communicator) -> None:
    """It is several exchanges: each says who was lost, also the next one, which may not even begin."""
    whole, part = torch.ones(comm.world_size, 200_000), torch.empty(200_000)
    comm.reduce_scatter_tensor(part, whole)
    assert torch.equal(part, torch.full_like(part, comm.world_size))
    if comm.rank == 1:
        comm.close()
        return
    works = [comm.reduce_scatter_tensor(part.clone(), whole, async_op=True, label="gradient") for _ in range(2)]
    for work in (*works, comm.reduce_scatter_tensor(part, whole, async_op=True, label="gradient")):
        for _ in range(2):
            with pytest.raises(PeerLost, match=r"reduce_scatter float32 sum .*'gradient'.*: lost the connection to"):
                work.wait()


def test_a_rank_that_leaves_during_a_reduce_scatter() -> None:
    run_processes(3, left_in_a_reduce_scatter, timeout_s=20)


def stay_until(path: str, others: int) -> None:
    """Stay alive, outside of any operation, until so many other ranks have left their mark."""
    assert wait_until(lambda: len(list(Path(path).iterdir())) >= others, timeout_s=6)


def timeouts(comm: Communicator, path: str) -> list[str]:
    """Rank 2 never comes: to a group, to a group of a group. Nobody may wait for the 30 minutes of a new group."""
    pair = comm.split(0 if comm.rank in (1, 2) else 1)
    nested = comm.split(0)
    assert pair is not None
    assert nested is not None
    inner = nested.split(0)
    assert inner is not None
    assert inner.timeout_s == comm.timeout_s == 1.5
    if comm.rank == 2:
        stay_until(path, others=2)
        return []
    texts = []
    calls = [lambda: pair.all_reduce(torch.ones(3), async_op=True).wait(0.3)] if comm.rank == 1 else []
    for call in (*calls, inner.barrier):
        with pytest.raises(CommError) as raised:
            call()
        texts.append(f"{type(raised.value).__name__}: {raised.value}")
    (Path(path) / str(comm.rank)).touch()
    return texts


def test_ranks_that_never_come(tmp_path: Path) -> None:
    zero, one, two = run_processes(3, timeouts, str(tmp_path), timeout_s=1.5)
    assert two == []
    assert one[0].startswith("CollectiveTimeout: all_reduce float32 [3] sum (seq 0, 12 bytes) on rank 0 of 2")
    assert "not every rank came within 0.3 s. Next:" in one[0]
    kinds = {zero[0].split(":")[0], one[1].split(":")[0]}  # the first to give up closes the other's connection
    assert "CollectiveTimeout" in kinds
    assert kinds <= {"CollectiveTimeout", "PeerLost"}


def waits_and_polls(comm: Communicator, path: str) -> list[str]:
    if comm.rank == 1:
        stay_until(path, others=1)
        return []
    texts = []
    unmatched = comm.irecv(torch.ones(1), 1, tag=5)
    assert not unmatched.is_done()  # a thread waits from now on
    for limit_s in (0.05, None):
        with pytest.raises(CollectiveTimeout) as raised:
            unmatched.wait(limit_s)
        texts.append(str(raised.value))
    assert unmatched.is_done()
    with pytest.raises(CommError) as after:
        comm.send(torch.ones(1), 1)
    texts.append(str(after.value))
    failed = comm.isend(torch.ones(1), 1)  # does not raise for what another rank has caused
    assert failed.is_done()
    for _ in range(2):
        with pytest.raises(CommError):
            failed.wait()
    (Path(path) / "0").touch()
    return texts


def test_a_receive_without_a_send(tmp_path: Path) -> None:
    soon, late, after = run_processes(2, waits_and_polls, str(tmp_path), timeout_s=1)[0]
    assert "recv float32 (seq 0, from rank 1, tag 5, 4 bytes) on rank 0 of 2 (gloo): not every rank came" in soon
    assert "within 0.05 s" in soon
    assert "within 1 s" in late
    assert "an earlier operation timed out on this rank" in after


def looks_without_waiting(comm: Communicator, path: str) -> None:
    """A limit below torch's millisecond is a limit: torch takes it for none."""
    comm.barrier()  # a receive that is given up closes the connection, which the other rank may not have made yet
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"within 0 s"):
            comm.irecv(torch.ones(1), 1).wait(0.0)
        (Path(path) / "0").touch()
    else:
        stay_until(path, others=1)


@pytest.mark.limit_s(25)  # less than the operation's own limit
def test_a_receive_that_is_only_looked_at(tmp_path: Path) -> None:
    run_processes(2, looks_without_waiting, str(tmp_path), timeout_s=40)


def interrupted(comm: Communicator) -> str:
    """A signal is heard during a wait that nobody will end."""
    if comm.rank == 1:
        with pytest.raises(CommError):
            comm.recv(torch.ones(1), 0)
        return "lost"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(1))
    comm.close()
    return "interrupted"


@pytest.mark.limit_s(25)  # less than the operation's own limit
def test_ctrl_c_ends_a_wait() -> None:
    assert run_processes(2, interrupted, timeout_s=30) == ["interrupted", "lost"]


def reductions_that_gloo_lacks(comm: Communicator) -> None:
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
        for call in (
            lambda t: comm.all_reduce(t),
            lambda t: comm.reduce(t, 0),
            lambda t: comm.reduce_scatter_tensor(t[: 6 // comm.world_size], t),
        ):
            with pytest.raises(ConfigError, match=rf"of {dtype}: gloo cannot compute the sum of this dtype; convert"):
                call(torch.ones(6).to(dtype))
    comm.barrier()


def test_dtypes_that_gloo_cannot_reduce() -> None:
    run_processes(2, reductions_that_gloo_lacks)


def over_the_user_s_group(rank: int, path: str) -> None:
    with pytest.raises(ConfigError, match=r"lockstep.init\(\)"):
        TorchTransport.over()
    dist.init_process_group("gloo", init_method=path, rank=rank, world_size=3)
    comm = Communicator(TorchTransport.over())
    assert comm.timeout_s == 1800.0
    assert comm.transport.name == "gloo"
    pair = dist.new_group([2, 0], timeout=timedelta(seconds=7))
    if rank != 1:
        ours = Communicator(TorchTransport.over(pair))
        assert (ours.global_ranks, ours.timeout_s) == ((0, 2), 7.0)
        assert ours.all_gather_object(rank) == [0, 2]
        part = ours.split(0, key=-rank)
        assert part is not None
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=part.transport.process_group)  # torch knows the group, too
        assert tensor.item() == 2.0
        assert dist.get_process_group_ranks(part.transport.process_group) == [2, 0]
        part.close()
        ours.close()
    again = Communicator(TorchTransport.over())
    for parent in (comm, again):  # two transports over one group: the names of their parts must not meet
        child = parent.split(rank % 2)
        assert child is not None
        assert child.all_gather_object(rank) == ([0, 2] if rank % 2 == 0 else [1])
    for each in (comm, again):
        each.close()
        with pytest.raises(TransportClosed):
            each.barrier()
    dist.barrier()  # closing ours left the user's group alone
    dist.destroy_process_group()


def test_a_group_that_the_user_made(tmp_path: Path) -> None:
    run_processes(3, over_the_user_s_group, (tmp_path / "meet").as_uri(), connect=False)
