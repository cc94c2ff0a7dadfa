"""`kill -9` of a rank on shared memory at any moment: the others hear of it, by its name, and nothing stays."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Work
from lockstep.comm.shm_transport import ShmTransport
from lockstep.comm.waiting import wait_until
from lockstep.errors import CommError, PeerLost
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from shm_ranks import LIMIT_S, named_memory, named_since, share


class Heard(NamedTuple):
    """What a survivor learned."""

    lost: int | None
    after_s: float  # since the kill; for a look at, never asserted


def traffic(comm: Communicator, hub: int, draw: random.Random) -> None:
    """Any operation, the same on all ranks. Messages go between `hub` and the others."""
    W, rank = comm.world_size, comm.rank
    count = draw.choice((1, 3000, 200_000, 700_000))
    kind = draw.randrange(7)
    near = draw.random() < 0.5
    tensor = (comm.empty(count) if near else torch.empty(count)).fill_(1)
    if kind == 0:
        comm.all_reduce(tensor)
    elif kind == 1:
        for work in [comm.all_reduce(tensor, async_op=True) for _ in range(5)]:
            work.wait()
    elif kind == 2:
        comm.all_gather_into_tensor(torch.empty(W * count), tensor)
    elif kind == 3:
        comm.reduce_scatter_tensor(torch.empty(count), torch.ones(W * count))
    elif kind == 4:
        comm.broadcast(tensor, draw.randrange(W))
    elif kind == 5:
        group = comm.split(0)
        assert group is not None
        group.all_reduce(tensor)
        group.close()
    else:
        peers = [peer for peer in range(W) if peer != rank] if rank == hub else [hub]
        works: list[Work] = [comm.isend(tensor, peer) for peer in peers]
        works += [comm.irecv(torch.empty(count), peer) for peer in peers]
        for work in works:
            work.wait()


def for_ever(call: Callable[[], object]) -> None:
    while True:
        call()


def die_soon(after_s: float, mark: Path) -> None:
    def die() -> None:
        mark.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(after_s, die)
    timer.daemon = True
    timer.start()


def survive(comm: Communicator, seed: int, folder: str) -> Heard:
    draw = random.Random(seed)
    victim = draw.randrange(comm.world_size)
    after_s = draw.uniform(0, 0.03)
    ours = share(comm)
    mark = Path(folder) / "killed"
    if comm.rank == victim:
        die_soon(after_s, mark)
    with pytest.raises(PeerLost) as raised:
        for_ever(lambda: traffic(ours, victim, draw))
    heard = time.monotonic()
    (Path(folder) / f"heard{comm.rank}").touch()
    others = comm.world_size - 1
    assert wait_until(lambda: len(list(Path(folder).glob("heard*"))) == others, LIMIT_S)  # nobody closes before
    ours.close()
    return Heard(raised.value.rank, heard - float(mark.read_text()))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_killed(world_size: int, seed: int, tmp_path: Path) -> None:
    victim = random.Random(seed).randrange(world_size)
    with pytest.raises(RankFailed) as raised:
        run_processes(world_size, survive, seed, str(tmp_path), timeout_s=60)
    assert raised.value.errors.keys() == {victim}, str(raised.value)
    assert raised.value.errors[victim].message == "killed by SIGKILL"
    assert [heard.lost for heard in raised.value.results.values()] == [victim] * (world_size - 1)


def two_at_once(comm: Communicator) -> set[int | None]:
    ours = share(comm)
    ours.barrier()
    if comm.rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    lost: set[int | None] = set()
    for operate in (ours.barrier, lambda: ours.recv(torch.ones(1), 1), lambda: ours.send(torch.ones(9000), 2)):
        with pytest.raises(CommError) as raised:
            operate()
        lost.add(raised.value.rank if isinstance(raised.value, PeerLost) else None)
    return lost


def test_two_ranks_that_are_killed_at_once() -> None:
    with pytest.raises(RankFailed) as raised:
        run_processes(4, two_at_once)
    assert raised.value.errors.keys() == {1, 2}
    for lost in raised.value.results.values():
        assert lost <= {1, 2, None}
        assert lost & {1, 2}


def killed_while_meeting(comm: Communicator, step: int, before: bool) -> tuple[str, set[str]]:
    """Rank 1 dies before or after it has spoken in this exchange; what the others raise, and what has a name then."""
    exchanges = 0
    before_they_meet = named_memory()

    def exchange(value: Any) -> list[Any]:
        nonlocal exchanges
        exchanges += 1
        dies = comm.rank == 1 and exchanges == step
        if dies and before:
            os.kill(os.getpid(), signal.SIGKILL)
        answers = comm.all_gather_object(value)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return answers

    def meet_and_work() -> None:
        transport = ShmTransport.meet(
            exchange,
            rank=comm.rank,
            world_size=comm.world_size,
            global_ranks=comm.global_ranks,
            timeout_s=LIMIT_S,
        )
        try:
            Communicator(transport).barrier()
        finally:
            transport.close()

    name = ""
    try:
        meet_and_work()
    except CommError as error:
        name = type(error).__name__
    return name, named_since(before_they_meet)


@pytest.mark.parametrize(("step", "before"), [(1, True), (1, False), (2, True), (2, False)])
def test_a_rank_that_is_killed_while_they_meet(step: int, before: bool) -> None:
    with pytest.raises(RankFailed) as raised:
        run_processes(3, killed_while_meeting, step, before)
    assert raised.value.errors.keys() == {1}
    assert list(raised.value.results.values()) == [("PeerLost", set())] * 2


def makes_and_dies(comm: Communicator) -> None:
    share(comm).barrier()
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_stays_where_all_are_killed() -> None:
    before = named_memory()
    with pytest.raises(RankFailed):
        run_processes(3, makes_and_dies)
    assert not named_since(before)
