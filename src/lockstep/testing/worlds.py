"""Run a function on several ranks and get what each returned: as threads (milliseconds) or as real processes.

    def total(comm, start):
        tensor = torch.tensor([start + comm.rank])
        comm.all_reduce(tensor)
        return tensor.item()

    assert run_threads(3, total, 10) == [33, 33, 33]
    assert run_processes(3, total, 10) == [33, 33, 33]

Nothing here is imported by the rest of lockstep.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.testing.failures import RankError, RankFailed, RankTimeout, thread_stacks
from lockstep.testing.pool import Environment, ProcessPool

GRACE_S = 5.0  # beyond the limit: the limit of an operation is the same, and its error says more


def run_threads(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 30.0, **kwargs: Any
) -> list[Any]:
    """`fn(comm, *args, **kwargs)` on every rank as a thread of this process; what each returned, in rank order.

    `timeout_s` is also the limit of each operation. Arguments are shared, not copied. The global random generator of
    torch is shared too: give each rank its own `torch.Generator`.
    Raises: RankFailed with the first failure; RankTimeout with the stacks of all ranks.
    """
    __tracebackhide__ = True  # pytest shows the ranks' own traces, which are in the error
    world = LocalWorld(world_size, timeout_s)
    results: dict[int, Any] = {}
    errors: dict[int, RankError] = {}

    def body(rank: int) -> None:
        comm = Communicator(world.transports[rank])
        try:
            results[rank] = fn(comm, *args, **kwargs)
            world.rank_left(rank)
        except BaseException as error:  # noqa: BLE001 - raised again, with its rank, in the caller's thread
            errors[rank] = RankError.of(error)
            world.rank_left(rank, error)
        finally:
            comm.close()

    threads = [Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)]
    deadline = time.monotonic() + timeout_s + GRACE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and (left := deadline - time.monotonic()) > 0:
            thread.join(min(left, 0.2))
            if errors:
                deadline = min(deadline, min(error.at for error in tuple(errors.values())) + GRACE_S)
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        only_late, stacks = not errors, thread_stacks(threads)
        for rank in late:
            world.rank_left(rank, TimeoutError("the test gave up"))
        for rank in late:
            threads[rank].join(0.2)  # those that wait in an operation end now
        if only_late:
            raise RankTimeout(late, timeout_s, getattr(fn, "__qualname__", repr(fn)), stacks)
    if errors:
        for rank in set(late) - set(errors):
            errors[rank] = RankError("Hang", "did not finish after the others had failed", "", None, time.monotonic())
        raise RankFailed(errors, results, world_size, getattr(fn, "__qualname__", repr(fn)))
    return [results[rank] for rank in range(world_size)]


def run_processes(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    env: Environment | Sequence[Environment] | None = None,
    connect: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """`fn(comm, *args, **kwargs)` on every rank as a process of its own, over Gloo; what each returned, in rank order.

    `fn` must be importable (a function of a module); it, its arguments and its result travel between the processes. The
    processes are kept for the next call with this world size. Each call gets a fresh default group of
    `torch.distributed`, so torch's own functions work inside `fn` too. `timeout_s` is the limit of the whole call and
    of each operation; not of starting the processes, before the first call.
    `env`: changes to the environment, one mapping for all ranks or one per rank; a value of None removes the variable.
    `connect=False`: no group is made, and `fn` gets its rank in place of the communicator.
    Raises: RankFailed with the first failure; RankTimeout with the stacks of all ranks.
    """
    __tracebackhide__ = True
    pool = _pools.get(world_size) or _pools.setdefault(world_size, ProcessPool(world_size))
    return pool.run(fn, args, kwargs, timeout_s=timeout_s, env=env, connect=connect)


def close_pools() -> None:
    """End all processes that `run_processes` keeps."""
    while _pools:
        _pools.popitem()[1].close()


_pools: dict[int, ProcessPool] = {}
atexit.register(close_pools)
