"""The table of cases on every transport and world size: threads and Gloo processes give the same, which is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import comm_cases
from lockstep.testing.worlds import run_processes, run_threads


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_every_case(run: Callable[..., list[Any]], world_size: int) -> None:
    assert run(world_size, comm_cases.run_all) == [list(comm_cases.CASES)] * world_size
