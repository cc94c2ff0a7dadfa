"""Sharded training on ranks that are threads equals whole copies whose gradients are added in one order, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shard_programs
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_threads
from shard_sides import Side, difference

EXACT = (
    *shard_programs.EVERYWHERE,
    *shard_programs.AGAINST_ONE_PROCESS,
    *shard_programs.OF_EACH_RANK,
    *shard_programs.ROUNDED_BY_TORCH,
    *shard_programs.REFUSED_BY_TORCH,
)


def both_sides(comm: Communicator, program: Callable[[Side], Any], tolerance: float | None) -> str | None:
    ours = program(Side("ours", comm, mesh=comm))
    return difference(ours, program(Side("plain", comm)), tolerance)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("program", EXACT, ids=lambda program: program.__name__)
def test_equals_whole_copies(program: Callable[[Side], Any], world_size: int) -> None:
    assert run_threads(world_size, both_sides, program, None) == [None] * world_size


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("program", shard_programs.ROUNDED, ids=lambda program: program.__name__)
def test_equals_whole_copies_but_for_roundings(program: Callable[[Side], Any], world_size: int) -> None:
    assert run_threads(world_size, both_sides, program, 1e-6) == [None] * world_size
