"""A rank that is aborted while it waits for what never comes: it goes on at once, with the error it was given."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from host_ranks import hosts, on_hosts
from lockstep.comm import torch_names
from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport
from lockstep.comm.transport import LentTransport, Transport, TransportLayer
from lockstep.comm.waiting import wait_until
from lockstep.errors import CommError, PeerFailed, PeerLost
from lockstep.testing.worlds import run_processes, run_threads
from shm_ranks import share

W = 3  # rank 0 is aborted, rank 1 waits in the same collective, rank 2 comes late; over Gloo rank 1 does not come
SOON_S = 5.0  # far below the limit of an operation
HALF_WAY_S = 15.0  # limit of an operation that Gloo itself does not end
ERROR = "rank 2 raised ValueError at train.py:31"
_WAITING = {"sleep", "_block", "wait", "wait_for", "acquire", "take"}

Make = Callable[[Communicator], contextlib.AbstractContextManager[Communicator]]
Call = Callable[[], object]
Operation = Callable[[Communicator], Call]  # begins it; what is returned blocks


def all_reduce(group: Communicator) -> Call:
    return lambda: group.all_reduce(torch.ones(7))


def large_all_reduce(group: Communicator) -> Call:
    return lambda: group.all_reduce(group.empty(300_001).fill_(1))


def asynchronous(group: Communicator) -> Call:
    works = [group.all_reduce(torch.ones(5, 3), "mean", async_op=True) for _ in range(3)]
    return works[2].wait


def two_way(group: Communicator) -> Call:
    """Of the kinds that go between hosts without a leader."""
    size = group.world_size
    return lambda: group.all_to_all([torch.ones(4)] * size, [torch.ones(4)] * size)


def reduce_scatter(group: Communicator) -> Call:
    return lambda: group.reduce_scatter_tensor(torch.ones(3), torch.ones(3 * group.world_size))


def strided_gather(group: Communicator) -> Call:
    rows = torch.ones(3, 2 * group.world_size)[:, ::2]
    return lambda: group.all_gather_into_tensor(rows, torch.ones(3))


def recv(group: Communicator) -> Call:
    return lambda: group.recv(torch.ones(4), group.world_size - 1, tag=3)


def recv_from_any(group: Communicator) -> Call:
    return lambda: group.recv(torch.ones(4))


def send(group: Communicator) -> Call:
    work = group.isend(torch.ones(2_000_000), group.world_size - 1)
    return work.wait


def polled_recv(group: Communicator) -> Call:
    work = group.irecv(torch.ones(4), group.world_size - 1)
    work.is_done()  # over Gloo a thread waits from now on
    return work.wait


COLLECTIVES = (all_reduce, large_all_reduce, asynchronous, two_way, reduce_scatter, strided_gather)
MESSAGES = (recv, recv_from_any, send, polled_recv)


@contextlib.contextmanager
def aborting(transport: Transport, when: Callable[[], bool]) -> Iterator[None]:
    """Abort, from another thread, as soon as `when()` holds; neither the call itself nor the body may block then."""
    began_s: list[float] = []
    took_s: list[float] = []

    def abort() -> None:
        if wait_until(when, SOON_S):
            began_s.append(time.monotonic())
            transport.abort(PeerFailed(ERROR, 2))
            took_s.append(time.monotonic() - began_s[0])

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        ended_s = time.monotonic()
        thread.join()
    assert took_s
    assert took_s[0] < SOON_S
    assert ended_s - began_s[0] < SOON_S


def is_blocked(thread: int) -> Callable[[], bool]:
    """Whether this thread is in the innermost function of some wait, twice in a row."""

    def look() -> bool:
        frame = sys._current_frames().get(thread)
        # Python 3.11 may give a frame that is just ending, in whose memory something else is by now
        return getattr(getattr(frame, "f_code", None), "co_name", "") in _WAITING

    return lambda: look() and look()


def raises_it(call: Call) -> None:
    """`call` fails with the error of the abort, and with what the transport says about its own operation below it."""
    with pytest.raises(PeerFailed) as raised:
        call()
    assert (str(raised.value), raised.value.rank) == (ERROR, 2)
    assert isinstance(raised.value.__cause__, CommError)


def nothing_begins(group: Communicator) -> None:
    """Every later operation fails in the same way, a second abort changes nothing, and closing still works."""
    group.transport.abort(CommError("another"))
    for operation in (*COLLECTIVES, *MESSAGES):
        raises_it(lambda begin=operation: begin(group)())
    raises_it(lambda: group.transport.split([list(range(group.world_size))]))
    raises_it(lambda: group.batch_send_recv([group.send_op(torch.ones(1), 1), group.recv_op(torch.ones(1), 1)]))


def peers_notice(group: Communicator, call: Call) -> None:
    """The others need no abort to get on; but over Gloo a rank hears only of those it exchanges with.

    Rank 1 may be through with its own host, and wait for rank 2, which lost rank 0 before it sent anything.
    """
    with pytest.raises(CommError) as raised:
        until_it_raises(call)
    assert isinstance(raised.value, PeerLost) or "an earlier operation" in str(raised.value), repr(raised.value)
    if "gloo" in group.transport.name:
        group.transport.abort(raised.value)  # passed on, as a guard does


def until_it_raises(call: Call) -> None:
    """What the aborted rank had said before may be enough for one more operation, not for two."""
    for _ in range(2):
        call()


def is_sub_group_of(make: Make) -> Make:
    """The same, where what is waited in is a part of a part of what is aborted."""

    @contextlib.contextmanager
    def part(comm: Communicator) -> Iterator[Communicator]:
        with make(comm) as whole:
            outer = whole.split(0, key=whole.rank)
            assert outer is not None
            inner = outer.split(0)
            assert inner is not None
            inner.whole = whole  # type: ignore[attr-defined]
            yield inner

    return part


def ended(comm: Communicator, make: Make, operations: Sequence[Operation]) -> None:
    """Rank 0 blocks in each of these, in a group of its own, and is aborted there."""
    for operation in operations:
        with make(comm) as group:
            before = group.all_reduce(torch.ones(2), async_op=True)
            wait_until(before.is_done, SOON_S)
            if comm.rank == 0:
                begun = operation(group)
                whole = getattr(group, "whole", group)
                with aborting(whole.transport, is_blocked(threading.get_ident())):
                    raises_it(begun)
                if whole is not group:
                    nothing_begins(whole)
                nothing_begins(group)
                comm.send(torch.ones(1), 2)
            elif comm.rank == 2:
                comm.recv(torch.ones(1), 0)
            if operation in COLLECTIVES and (comm.rank == 2 or (comm.rank == 1 and group.transport.name != "gloo")):
                peers_notice(group, lambda begin=operation, ranks=group: begin(ranks)())
            comm.barrier()
            before.wait()  # had ended, and stays so
        comm.barrier()


def untimely(comm: Communicator, make: Make) -> None:
    """Aborted before anything was asked, twice, with works nobody waits for, after all has ended, and after closing."""
    with make(comm) as group:
        comm.barrier()  # the others have made it too: before that they lose the one that aborts
        if comm.rank == 0:
            group.transport.abort(PeerFailed(ERROR, 2))
            nothing_begins(group)
        comm.barrier()
    with make(comm) as group:
        comm.barrier()
        if comm.rank == 0:
            works = [group.all_reduce(torch.ones(9), async_op=True) for _ in range(3)]
            group.transport.abort(PeerFailed(ERROR, 2))
            assert wait_until(lambda: all(work.is_done() for work in works), SOON_S)
            raises_it(works[1].wait)
            raises_it(works[1].wait)
        comm.barrier()
    with make(comm) as group:
        tensor = torch.full((100_000,), float(comm.rank))
        work = group.all_reduce(tensor, async_op=True)
        assert wait_until(work.is_done, SOON_S)
        comm.barrier()
        group.transport.abort(PeerFailed(ERROR, 2))
        work.wait()
        assert tensor.tolist() == [3.0] * 100_000
    group.transport.abort(PeerFailed(ERROR, 2))
    comm.barrier()


def racing(comm: Communicator, make: Make) -> None:
    """At any moment of a stream of operations: what ended well has the right result, the rest has the error."""
    for round_ in range(4):
        with make(comm) as group:
            ended: list[int] = []
            enough = 3 + 5 * round_
            waits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if comm.rank == 0:
                waits = aborting(group.transport, lambda done=ended, last=enough: len(done) > last)
            elif "gloo" in group.transport.name:
                waits = aborting(group.transport, comm.irecv(torch.ones(1), 0).is_done)
            error: CommError | None = None
            with waits:
                while error is None:
                    tensor = torch.full((1 + 20_000 * (len(ended) % 2),), float(comm.rank + 1))
                    try:
                        group.all_reduce(tensor, async_op=len(ended) % 3 == 0).wait()
                        assert tensor.eq(6).all()
                        ended.append(1)
                    except CommError as raised:
                        error = raised
                if comm.rank == 0 and "gloo" in group.transport.name:
                    comm.send(torch.ones(1), 1)
                    comm.send(torch.ones(1), 2)
            assert comm.rank != 0 or str(error) == ERROR
            comm.barrier()


def half_way(comm: Communicator) -> None:
    """Rank 0 has part of what rank 1 sends when that is stopped. Gloo ends such a transfer at its limit only.

    Neither the wait nor the end of the group takes so long.
    """
    short = TorchTransport(comm.transport.process_group, "cpu", HALF_WAY_S).split([[0, 1]])
    assert short is not None
    pids = comm.all_gather_object(os.getpid())
    tensor = torch.full((40_000_000,), float(comm.rank))
    with Communicator(short) as group:
        group.barrier()
        if comm.rank == 0:
            work = group.broadcast(tensor, 1, async_op=True)
            while tensor[0] == 0:
                pass
            os.kill(pids[1], signal.SIGSTOP)
            with aborting(short, is_blocked(threading.get_ident())):
                raises_it(work.wait)
            assert 0 < tensor.sum() < tensor.numel()
            os.kill(pids[1], signal.SIGCONT)
            comm.send(torch.ones(1), 1)
        else:
            with aborting(short, comm.irecv(torch.ones(1), 0).is_done), pytest.raises(CommError):
                group.broadcast(tensor, 1)
        comm.barrier()
    if comm.rank == 0:  # closed, while Gloo still waits
        assert "lockstep-group-end" in [thread.name for thread in threading.enumerate()]


def everything(comm: Communicator, make: Make) -> None:
    ended(comm, make, (*COLLECTIVES, *MESSAGES))
    ended(comm, is_sub_group_of(make), (all_reduce, asynchronous, recv))
    untimely(comm, make)
    racing(comm, make)


# ---------------------------------------------------------------------- what may be aborted


def part_of(comm: Communicator) -> Communicator:
    """Another group of the same ranks over the same transport."""
    transport = comm.transport.split([list(range(comm.world_size))])
    assert transport is not None
    return Communicator(transport)


def on_shm(comm: Communicator) -> Communicator:
    return share(comm)


class PassOn(TransportLayer):
    def over(self, inner: Transport) -> PassOn:
        return PassOn(inner)


def under_layers(comm: Communicator) -> Communicator:
    """Lent to a torch group, and under two layers."""
    return Communicator(PassOn(PassOn(LentTransport(part_of(comm).transport, comm))))


@contextlib.contextmanager
def beside(comm: Communicator) -> Iterator[Communicator]:
    """What ranks with GPUs have for tensors in host memory, by their own group: the group is what is aborted."""
    with part_of(comm) as whole:
        inner = Communicator(torch_names.host_transport(PassOn(whole.transport)))
        assert isinstance(inner.transport, PassOn), "who watches over the group does over it, too"
        inner.whole = whole  # type: ignore[attr-defined]
        yield inner


def ended_beside(comm: Communicator) -> None:
    ended(comm, beside, (all_reduce, large_all_reduce, recv))
    with beside(comm) as group:
        work = group.all_reduce(torch.ones(1), async_op=True) if comm.rank == 0 else None
    # closed at once, though nobody has come
    del work
    comm.barrier()


@contextlib.contextmanager
def two_hosts(comm: Communicator) -> Iterator[Communicator]:
    with hosts(comm, (0, 0, 1)) as group:
        yield group


def two_hosts_of_threads(comm: Communicator) -> Communicator:
    return on_hosts(part_of(comm), (0, 1, 0))


def test_ranks_that_are_threads() -> None:
    run_threads(W, everything, part_of)


def test_under_layers() -> None:
    run_threads(W, everything, under_layers)


def test_threads_on_two_hosts() -> None:
    run_threads(W, everything, two_hosts_of_threads)


def test_gloo() -> None:
    run_processes(W, everything, part_of, timeout_s=20)


def test_gloo_beside_gpus() -> None:
    run_processes(W, ended_beside, timeout_s=20)


def test_gloo_half_way() -> None:
    run_processes(2, half_way)


def test_shared_memory() -> None:
    run_processes(W, everything, on_shm, timeout_s=20)


def test_two_hosts() -> None:
    run_processes(W, everything, two_hosts)
