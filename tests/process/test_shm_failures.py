"""Ranks on shared memory that stay away, leave or are interrupted: who waits learns it, and why."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comm_cases import same
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Work
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, CommError, PeerLost, TransportClosed
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from shm_ranks import goes_on, share, shared

SHORT_S = 0.3  # for an operation that must time out


# ---------------------------------------------------------------------- ranks that stay away


def until_it_raises(call: Callable[[], object]) -> None:
    """What the others have said before they gave up may be enough for one more operation, not for two."""
    for _ in range(2):
        call()


def _waited(operate: Callable[[Communicator], Work], group: Communicator) -> None:
    """Wait twice: the second time says the same."""
    work = operate(group)
    first = second = None
    try:
        work.wait()
    except CommError as error:
        first = error
    try:
        work.wait()
    except CommError as error:
        second = error
    assert work.is_done()
    assert first is second
    if first is not None:
        raise first


def skipped(comm: Communicator) -> None:
    """Rank 1 does not come; then it comes too late."""
    for operate in (
        lambda group: group.all_reduce(torch.ones(3)),
        lambda group: group.all_reduce(torch.ones(300_000), async_op=True),
        lambda group: group.all_reduce(group.empty(300_000).fill_(1)),
        lambda group: group.all_gather_into_tensor(torch.ones(3 * group.world_size), torch.ones(3)),
        lambda group: group.barrier(async_op=True),
    ):
        ours = share(comm, timeout_s=SHORT_S)
        if ours.rank == 1:
            comm.barrier()
            with pytest.raises(PeerLost, match=r"gave up: it waited too long") as lost:
                until_it_raises(functools.partial(_waited, operate, ours))
            assert lost.value.rank in {0, 2}
        else:
            with pytest.raises(CollectiveTimeout, match=rf"rank 1 did not come within {SHORT_S:g} s. Next: ") as late:
                _waited(operate, ours)
            assert late.value.missing == (1,)
            comm.barrier()
        comm.barrier()
        refused_after_a_failure(ours)
        ours.close()
        comm.barrier()


def refused_after_a_failure(ours: Communicator) -> None:
    """Nothing can be begun in a group that is not in step any more."""
    peer = (ours.rank + 1) % ours.world_size
    for work in (ours.barrier(async_op=True), ours.isend(torch.ones(1), peer), ours.irecv(torch.ones(1), peer)):
        with pytest.raises(CommError, match="an earlier operation failed on this rank") as refused:
            work.wait()
        assert isinstance(refused.value.__cause__, CommError)


def test_a_rank_that_skips_an_operation() -> None:
    run_processes(3, skipped)


def limits_of_one_wait(comm: Communicator) -> None:
    """`wait(timeout_s)` is obeyed, also while an earlier operation is under way, or another thread waits longer."""
    with shared(comm) as ours:
        if ours.rank == 0:
            works = [ours.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
            with pytest.raises(CommError):  # nothing overtakes the first, so that one is given up
                works[2].wait(0.05)
            with pytest.raises(CollectiveTimeout, match=r"rank 1 did not come within 0\.05 s") as raised:
                works[0].wait()
            assert raised.value.missing == (1,)
        comm.barrier()
    with shared(comm) as ours:
        if ours.rank == 0:
            longer, shorter = (ours.irecv(torch.ones(1), 1, tag=tag) for tag in (1, 2))
            waiting = threading.Thread(target=longer.wait)
            waiting.start()
            with pytest.raises(
                CollectiveTimeout, match=r"within 0\.1 s. Next: find why rank 1 did not send with tag 2"
            ):
                shorter.wait(0.1)
            assert not longer.is_done()
            ours.isend(torch.ones(1), 1, tag=3).wait()
            waiting.join()
        else:
            ours.recv(torch.ones(1), 0, tag=3)
            ours.send(torch.ones(1), 0, tag=1)
        goes_on(ours)  # a receive that was given up harms nobody


def test_the_limit_of_one_wait() -> None:
    run_processes(2, limits_of_one_wait)


def withdrawn(comm: Communicator) -> None:
    """A send that was given up, or whose communicator was closed, is never received: the tensor may have changed."""
    for count in (300_000, 3000):
        for in_segment in (True, False):
            for closes in (True, False):
                ours = share(comm)
                tensor = (ours.empty(count) if in_segment else torch.empty(count)).fill_(7)
                if ours.rank == 0:
                    work = ours.isend(tensor, 1)
                    if closes:
                        ours.close()
                    with pytest.raises(TransportClosed if closes else CollectiveTimeout):
                        work.wait(0.05)
                    tensor.fill_(0)
                comm.barrier()
                if ours.rank == 1:
                    with pytest.raises((PeerLost, CollectiveTimeout)):
                        ours.irecv(tensor, 0).wait(SHORT_S)
                    assert tensor.eq(7).all()
                comm.barrier()
                ours.close()


def test_a_send_that_was_given_up() -> None:
    run_processes(2, withdrawn)


def stopped(comm: Communicator) -> str:
    """A rank that is stopped is named; once it goes on it learns that the others did not wait."""
    ours = share(comm, timeout_s=1.0)
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(PeerLost) as lost:
            until_it_raises(ours.barrier)
        ours.close()
        return str(lost.value.rank)
    with pytest.raises(CollectiveTimeout) as late:
        ours.barrier()
    assert late.value.missing == (1,)
    os.kill(pids[1], signal.SIGCONT)
    assert wait_until(lambda: _state_of(pids[1]) != "T", 5)
    ours.close()
    return "timeout"


def _state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_rank_that_is_stopped() -> None:
    assert run_processes(2, stopped) == ["timeout", "0"]


# ---------------------------------------------------------------------- ranks that leave


def closed_by_one(comm: Communicator) -> None:
    for operate in (
        lambda group: group.all_reduce(torch.ones(300_000)),
        lambda group: group.barrier(async_op=True).wait(),
        lambda group: group.recv(torch.ones(5), 1),
        lambda group: group.send(torch.ones(5000), 1),
    ):
        ours = share(comm)
        if ours.rank == 1:
            ours.close()
        else:
            with pytest.raises(PeerLost, match="rank 1 has closed this communicator") as lost:
                operate(ours)
            assert lost.value.rank == 1
        comm.barrier()
        ours.close()


def test_a_rank_that_closes() -> None:
    run_processes(3, closed_by_one)


def leaves_the_process(comm: Communicator, how: str) -> int | None:
    ours = share(comm)
    group = ours.split(0)
    assert group is not None
    if ours.rank == 1:
        if how == "raises":
            raise ValueError("out of data")
        if how == "exits":
            atexit._run_exitfuncs()
        os._exit(0)
    with pytest.raises(PeerLost) as lost:
        group.all_reduce(torch.ones(300_000))
    with pytest.raises(PeerLost) as of_the_parent:
        ours.recv(torch.ones(3), 1)
    assert of_the_parent.value.rank == 1
    return lost.value.rank


@pytest.mark.parametrize("how", ["raises", "exits", "ends at once"])
def test_a_rank_that_leaves(how: str) -> None:
    with pytest.raises(RankFailed) as raised:
        run_processes(3, leaves_the_process, how)
    assert raised.value.errors.keys() == {1}
    assert raised.value.errors[1].message == ("out of data" if how == "raises" else "exited with code 0")
    assert raised.value.results == {0: 1, 2: 1}


def _into(raised: list[BaseException], operate: Callable[[Communicator], object], group: Communicator) -> None:
    try:
        operate(group)
    except CommError as error:
        raised.append(error)


def closed_while_waiting(comm: Communicator) -> None:
    """Closing ends the waits of this rank's other threads, and what nobody waits for yet."""
    for operate in (
        lambda group: group.all_reduce(torch.ones(3)),
        lambda group: group.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda group: group.recv(torch.ones(3), 1),
        lambda group: group.recv(torch.ones(3)),
        lambda group: group.send(torch.ones(300_000), 1),
    ):
        ours = share(comm)
        if ours.rank == 0:
            raised: list[BaseException] = []
            waiting = threading.Thread(target=_into, args=(raised, operate, ours))
            waiting.start()
            unread = ours.irecv(torch.ones(1), 1, tag=9)
            ours.close()
            waiting.join()
            assert [type(error) for error in raised] == [TransportClosed]
            with pytest.raises(TransportClosed):
                unread.wait()
            with pytest.raises(TransportClosed):
                ours.barrier()
        comm.barrier()
        ours.close()


def test_closing_ends_all_waits() -> None:
    run_processes(2, closed_while_waiting)


def forgotten(comm: Communicator) -> None:
    """A communicator that nobody holds any more: its pending operation still ends, then its threads do."""
    with shared(comm) as ours:
        before = set(threading.enumerate())
        group = ours.split(0)
        assert group is not None
        tensor, received = torch.ones(3), torch.zeros(3)
        works = [group.all_reduce(tensor, async_op=True), group.irecv(received, 1 - ours.rank)]
        works.append(group.isend(torch.full((3,), 5.0), 1 - ours.rank))
        held = weakref.ref(group.transport)
        group.cycle = group  # type: ignore[attr-defined]
        del group
        for work in works:
            work.wait()
        same(tensor, torch.full((3,), 2.0))
        same(received, torch.full((3,), 5.0))
        del works, work
        assert wait_until(lambda: _collected(held), 5)
        assert wait_until(lambda: set(threading.enumerate()) <= before, 5)


def _collected(held: weakref.ref[Any]) -> bool:
    gc.collect()
    return held() is None


def test_a_communicator_that_nobody_holds() -> None:
    run_processes(2, forgotten)


# ---------------------------------------------------------------------- Ctrl-C


def interrupted(comm: Communicator) -> None:
    for operate in (
        lambda group: group.all_reduce(torch.ones(3)),
        lambda group: group.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda group: group.recv(torch.ones(3), 1),
        lambda group: group.send(torch.ones(300_000), 1),
    ):
        ours = share(comm)
        if ours.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                operate(ours)
            ours.close()
            with pytest.raises(TransportClosed):
                ours.barrier()
        else:
            with pytest.raises(PeerLost) as lost:
                ours.recv(torch.ones(3), 0, tag=5)
            assert lost.value.rank == 0
        comm.barrier()
        ours.close()


@pytest.mark.limit_s(25)  # less than the operations' own limit
def test_ctrl_c_ends_every_wait() -> None:
    run_processes(2, interrupted)


def _traffic(group: Communicator, tensor: Tensor) -> None:
    peer = 1 - group.rank
    while True:
        group.all_reduce(tensor)
        sending = group.isend(tensor, peer)
        group.recv(tensor, peer)
        sending.wait()


def interrupted_often(comm: Communicator) -> int:
    """Interrupts at any point of an operation: closing works afterwards, and the peer learns of it."""
    heard = 0
    for round_ in range(8):
        ours = share(comm)
        if ours.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            tensor = torch.ones(3)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0004 * round_)
                _traffic(ours, tensor)
            except KeyboardInterrupt:
                heard += 1
            ours.close()
        else:
            tensor = torch.ones(3)
            with pytest.raises(PeerLost):
                _traffic(ours, tensor)
            ours.close()
    return heard


@pytest.mark.limit_s(25)
def test_ctrl_c_at_any_moment() -> None:
    assert run_processes(2, interrupted_often)[0] == 8
