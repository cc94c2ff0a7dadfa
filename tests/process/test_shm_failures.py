"""Ranks on shared memory that disagree, stay away, leave or are interrupted: who waits learns it, and why."""

from __future__ import annotations

import atexit
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
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, ConfigError, PeerLost, TransportClosed
from lockstep.testing.failures import RankFailed
from lockstep.testing.waiting import wait_until
from lockstep.testing.worlds import run_processes
from shm_ranks import share, shared

SHORT_S = 0.3  # for an operation that must time out


def goes_on(comm: Communicator) -> None:
    """The group is in step."""
    for count in (3, 300_000):
        tensor = torch.full((count,), float(comm.rank))
        comm.all_reduce(tensor)
        same(tensor, torch.full((count,), float(sum(range(comm.world_size)))))


# ---------------------------------------------------------------------- ranks that disagree


def different_calls(comm: Communicator) -> list[tuple[Callable[[], Work], Callable[[], Work], str]]:
    """What rank 1 calls, what the others call, and words that the error has on every rank."""
    W, rank = comm.world_size, comm.rank
    few, many = torch.ones(6), torch.ones(300_000)
    near = comm.empty(300_000).fill_(1)
    lists = [torch.ones(2) for _ in range(W)]
    other_lists = [torch.ones(2 + r % 2) for r in range(W)]

    def scatter_reduced(inputs: list[Tensor]) -> Work:
        return comm.reduce_scatter(torch.zeros_like(inputs[rank]), inputs)

    return [
        (comm.barrier, lambda: comm.all_reduce(few), "rank 1: barrier"),
        (lambda: comm.all_reduce(few), lambda: comm.broadcast(many), "rank 1: all_reduce float32 6 elements sum"),
        (lambda: comm.all_reduce(few.double()), lambda: comm.all_reduce(few), "rank 1: all_reduce float64"),
        (lambda: comm.all_reduce(few[:5]), lambda: comm.all_reduce(few), "5 elements"),
        (lambda: comm.all_reduce(few), lambda: comm.all_reduce(near), "300000 elements"),
        (lambda: comm.all_reduce(near), lambda: comm.all_reduce(few, async_op=True), "300000 elements"),
        (lambda: comm.all_reduce(few, "max"), lambda: comm.all_reduce(few), "6 elements max"),
        (lambda: comm.broadcast(few, 1), lambda: comm.broadcast(few, 0), "root=1"),
        (lambda: comm.reduce(few, 1), lambda: comm.reduce(few, 0), "root=0"),
        (lambda: comm.all_to_all(lists, lists), lambda: comm.all_gather(lists, lists[0]), "rank 1: all_to_all float32"),
        (lambda: scatter_reduced(lists), lambda: scatter_reduced(other_lists), "same sizes on every rank"),
        (
            lambda: comm.reduce(near, 0),
            lambda: comm.reduce_scatter_tensor(near[: 300_000 // W], near),
            "rank 1: reduce ",
        ),
    ]


def disagree(comm: Communicator) -> None:
    with shared(comm) as ours:
        for call_of_one, call, words in different_calls(ours):
            with pytest.raises(CollectiveMismatch, match=words) as raised:
                (call_of_one if ours.rank == 1 else call)().wait()
            assert f"on rank {ours.rank}" in str(raised.value)
            goes_on(ours)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_call_different_things(world_size: int) -> None:
    run_processes(world_size, disagree)


def sizes_that_do_not_fit(comm: Communicator) -> None:
    """Only the rank whose room is wrong can tell; the others have what they asked for."""
    with shared(comm) as ours:
        for count in (4, 200_000):
            mine = torch.full((count,), float(ours.rank))
            room = [torch.zeros(count) for _ in range(2)]
            wrong = [torch.zeros(count + 1) if r != ours.rank else torch.zeros(count) for r in range(2)]
            calls: list[Callable[[list[Tensor]], Work]] = [
                lambda outputs, mine=mine: ours.all_gather(outputs, mine),
                lambda outputs, mine=mine: ours.all_to_all(outputs, [mine, mine]),
                lambda outputs, mine=mine: ours.gather(mine, outputs if ours.rank == 0 else None, 0),
            ]
            for call in calls:
                if ours.rank == 0:
                    with pytest.raises(CollectiveMismatch, match=rf"room for {4 * count + 4} bytes from rank 1, which"):
                        call(wrong)
                else:
                    call(room)
                goes_on(ours)
            given = [torch.ones(count), torch.ones(count + 2)] if ours.rank == 0 else None
            if ours.rank == 1:
                with pytest.raises(CollectiveMismatch, match=rf"from rank 0, which gives {4 * count + 8}"):
                    ours.scatter(mine, given, 0)
            else:
                ours.scatter(mine, given, 0)
            goes_on(ours)


def test_sizes_that_do_not_fit() -> None:
    run_processes(2, sizes_that_do_not_fit)


def messages_that_do_not_fit(comm: Communicator) -> None:
    with shared(comm) as ours:
        for count, in_segment in ((3, False), (3000, False), (300_000, False), (300_000, True)):
            for wrong in (torch.zeros(count + 1), torch.zeros(count, dtype=torch.int32)):
                if ours.rank == 0:
                    sent = ours.empty(count).fill_(2) if in_segment else torch.full((count,), 2.0)
                    work = ours.isend(sent, 1)
                    if count > 1024:
                        with pytest.raises(CollectiveMismatch, match="rank 1 expects another dtype or size"):
                            work.wait()
                    work = ours.isend(sent, 1)
                    work.wait()
                else:
                    with pytest.raises(CollectiveMismatch, match=rf"but rank 0 sent {4 * count}"):
                        ours.recv(wrong, 0)
                    right = torch.zeros(count)
                    ours.recv(right, 0)
                    same(right, torch.full((count,), 2.0))
        goes_on(ours)


def test_messages_that_do_not_fit() -> None:
    run_processes(2, messages_that_do_not_fit)


def of_another_device(comm: Communicator) -> None:
    """A tensor that is not in this machine's memory is refused before anything is sent, also a default device's."""
    with shared(comm) as ours:
        there = torch.ones(6, device="meta")
        for call in (
            lambda: ours.all_reduce(there),
            lambda: ours.all_gather_into_tensor(torch.ones(6 * ours.world_size), there),
            lambda: ours.broadcast(there),
            lambda: ours.send(there, 1 - ours.rank),
            lambda: ours.irecv(there, 1 - ours.rank),
        ):
            with pytest.raises(ConfigError, match="of a tensor on meta: this communicator is for tensors on the CPU"):
                call()
        with torch.device("meta"):
            assert {ours.empty(count).device.type for count in (0, 5)} == {"cpu"}
            group = ours.split(0)
            assert group is not None
            ours.all_reduce(torch.ones(300_000, device="cpu"))
            group.close()
        goes_on(ours)


def test_tensors_of_another_device() -> None:
    run_processes(2, of_another_device)


# ---------------------------------------------------------------------- ranks that stay away


def until_it_raises(call: Callable[[], object]) -> None:
    """What the others have said before they gave up may be enough for one more operation, not for two."""
    for _ in range(2):
        call()


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
                until_it_raises(lambda: operate(ours).wait())
            assert lost.value.rank in {0, 2}
        else:
            work = None
            with pytest.raises(CollectiveTimeout, match=rf"rank 1 did not come within {SHORT_S:g} s. Next: ") as late:
                work = operate(ours)
                work.wait()
            assert late.value.missing == (1,)
            if work is not None:
                assert work.is_done()
                with pytest.raises(CollectiveTimeout) as again:
                    work.wait()
                assert again.value is late.value
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

            def wait(operate: Any = operate, ours: Communicator = ours, raised: list[BaseException] = raised) -> None:
                try:
                    operate(ours)
                except CommError as error:
                    raised.append(error)

            waiting = threading.Thread(target=wait)
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
        before = threading.active_count()
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
        assert wait_until(lambda: threading.active_count() == before, 5)


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


def interrupted_often(comm: Communicator) -> int:
    """Interrupts at any point of an operation: closing works afterwards, and the peer learns of it."""
    heard = 0
    for round_ in range(20):
        ours = share(comm)
        if ours.rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            tensor = torch.ones(3)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.00013 * round_)
                while True:
                    ours.all_reduce(tensor)
                    ours.isend(tensor, 1).wait()
                    ours.recv(tensor, 1)
            except KeyboardInterrupt:
                heard += 1
            ours.close()
        else:
            tensor = torch.ones(3)
            with pytest.raises(PeerLost):
                while True:
                    ours.all_reduce(tensor)
                    ours.recv(tensor, 0)
                    ours.send(tensor, 0)
            ours.close()
    return heard


@pytest.mark.limit_s(25)
def test_ctrl_c_at_any_moment() -> None:
    assert run_processes(2, interrupted_often)[0] == 20
