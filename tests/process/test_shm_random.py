"""Random programs on shared memory and on threads: every result of every rank is what the model says."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_programs import Run, Step, programs
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_processes, run_threads
from shm_ranks import on_shm

_QUICK = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def run_programs(comm: Communicator, batch: list[list[Step]]) -> int:
    return sum(Run(comm).run(program) for program in batch)


def run_programs_on_shm(comm: Communicator, batch: list[list[Step]]) -> list[object]:
    """Each program on memory of its own."""
    return [on_shm(comm, lambda ours, program=program: Run(ours).run(program)) for program in batch]


@pytest.mark.parametrize(("world_size", "examples"), [(2, 25), (3, 25), (5, 12)])
def test_programs_on_shared_memory(world_size: int, examples: int) -> None:
    @settings(_QUICK, max_examples=examples)
    @given(st.lists(programs, min_size=1, max_size=3))
    def run(batch: list[list[Step]]) -> None:
        run_processes(world_size, run_programs_on_shm, batch)

    run()


@settings(_QUICK, max_examples=10)
@given(programs)
def test_programs_on_threads(program: list[Step]) -> None:
    """The model is right: threads share nothing with shared memory but `tree_reduce`."""
    run_threads(3, run_programs, [program])
