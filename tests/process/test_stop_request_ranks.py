"""All ranks stop between the same two steps, whichever of them a signal has reached."""

from __future__ import annotations

import os
import signal

import torch

from lockstep.comm.communicator import Communicator
from lockstep.launch.worker import StopRequest
from lockstep.testing.worlds import run_processes

Stop = tuple[int, str]  # the step before which a rank stopped, and why


def steps_until_stopped(comm: Communicator, signals: dict[int, tuple[int, int]]) -> Stop:
    """signals: rank -> (step in whose middle it comes, which)."""
    stop = StopRequest(comm, has_launcher=True)
    try:
        for step in range(200):
            if stop.agreed():
                return step, stop.reason
            number = torch.ones(1)
            at, which = signals.get(comm.rank, (-1, 0))
            if step == at:
                os.kill(os.getpid(), which)
            comm.all_reduce(number)
            assert int(number) == comm.world_size
        return 200, stop.reason
    finally:
        stop.close()


def many_runs(comm: Communicator) -> list[Stop]:
    """What this rank saw in each."""
    runs: list[dict[int, tuple[int, int]]] = [
        {},
        {1: (17, signal.SIGUSR1)},
        {0: (3, signal.SIGTERM), 2: (3, signal.SIGINT)},
        {2: (0, signal.SIGHUP)},
        {0: (9, signal.SIGINT), 1: (40, signal.SIGTERM)},
        dict.fromkeys(range(3), (5, signal.SIGTERM)),
    ]
    return [steps_until_stopped(comm, signals) for signals in runs]


def test_ranks_stop_before_the_same_step_for_the_same_reason() -> None:
    seen = run_processes(3, many_runs)
    assert seen[0] == seen[1] == seen[2]
    assert [step for step, _ in seen[0]] == [200, 18, 4, 1, 10, 6]
    assert [reason for _, reason in seen[0]] == ["", "SIGUSR1", "SIGTERM", "SIGHUP", "SIGINT", "SIGTERM"]
