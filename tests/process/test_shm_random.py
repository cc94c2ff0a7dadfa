"""Random programs on shared memory and on threads: every result of every rank is what the model says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from comm_programs import Run, Step, programs
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_processes, run_threads
from shm_ranks import on_shm

QUICK = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def run_on_shm(comm: Communicator, batch: list[list[Step]]) -> list[object]:
    """Each program on memory of its own."""
    return [on_shm(comm, lambda ours, program=program: Run(ours).run(program)) for program in batch]


def run_program(comm: Communicator, program: list[Step]) -> int:
    return Run(comm).run(program)


@pytest.mark.parametrize(("world_size", "examples"), [(2, 10), (3, 10), (5, 2)])
def test_programs_on_shared_memory(world_size: int, examples: int) -> None:
    checked = 0

    @settings(QUICK, max_examples=examples)
    @given(st.lists(programs, min_size=3, max_size=3))
    def run(batch: list[list[Step]]) -> None:
        nonlocal checked
        checked += sum(sum(row) for row in run_processes(world_size, run_on_shm, batch, timeout_s=20))

    run()
    assert checked > 10 * world_size * examples


@settings(QUICK, max_examples=10)
@given(programs)
def test_programs_on_threads(program: list[Step]) -> None:
    """The model is right: what threads do has nothing in common with shared memory but the order of a sum."""
    run_threads(3, run_program, program, timeout_s=10)
