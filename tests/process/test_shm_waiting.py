"""Ranks that sleep are woken: with slices of sleep as long as the limit, one lost wake would be a timeout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import comm_cases
import comm_cases_large
from comm_programs import Run, program
from lockstep.comm.communicator import Communicator
from lockstep.comm.shm import control, messages
from lockstep.testing.worlds import run_processes
from shm_ranks import LIMIT_S, shared

WITHOUT = {"objects_that_cannot_travel", "all_reduce_around_every_border", "broadcast_around_every_border"}  # long


@contextlib.contextmanager
def long_sleep(switch_s: float) -> Iterator[None]:
    """Nobody looks around by itself, and threads change at `switch_s`."""
    before = control._SLICE_S, messages._SLICE_S, sys.getswitchinterval()
    control._SLICE_S = messages._SLICE_S = 10 * LIMIT_S
    sys.setswitchinterval(switch_s)
    try:
        yield
    finally:
        control._SLICE_S, messages._SLICE_S = before[:2]
        sys.setswitchinterval(before[2])


def sound_asleep(comm: Communicator) -> None:
    cases = {**comm_cases.CASES, **comm_cases_large.CASES}
    with long_sleep(1e-3), shared(comm) as ours:
        for name, case in cases.items():
            if name not in WITHOUT:
                case(ours)


def programs_sound_asleep(comm: Communicator) -> None:
    for number in range(6):
        with long_sleep((1e-3, 1e-5, 1e-6)[number % 3]), shared(comm) as ours:
            Run(ours).run(program(seed=number, length=60))


def test_no_wake_is_lost_in_any_case() -> None:
    run_processes(2, sound_asleep, timeout_s=LIMIT_S)


def test_no_wake_is_lost_in_random_programs() -> None:
    run_processes(3, programs_sound_asleep, timeout_s=LIMIT_S)
