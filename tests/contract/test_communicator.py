"""The tables of cases on every transport and world size: all give the same, which is torch's on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import comm_cases
import comm_cases_large
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_processes, run_threads
from shm_ranks import on_polling_shm, on_shm

TABLES = {"cases": comm_cases.CASES, "large": comm_cases_large.CASES}


def run_table(comm: Communicator, table: str) -> list[str]:
    """Every case, one after the other on one communicator; the names of those that passed."""
    for case in TABLES[table].values():
        case(comm)
    return list(TABLES[table])


def run_table_on_shm(comm: Communicator, table: str, polling: bool) -> object:
    return (on_polling_shm if polling else on_shm)(comm, lambda ours: run_table(ours, table))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_every_case(run: Callable[..., list[Any]], world_size: int) -> None:
    assert run(world_size, run_table, "cases") == [list(comm_cases.CASES)] * world_size


@pytest.mark.parametrize(("run", "world_size"), [(run_threads, 3), (run_processes, 2), (run_processes, 3)])
def test_every_large_case(run: Callable[..., list[Any]], world_size: int) -> None:
    assert run(world_size, run_table, "large") == [list(comm_cases_large.CASES)] * world_size


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("world_size", "polling"), [(1, False), (2, False), (3, False), (4, False), (2, True)])
def test_every_case_on_shared_memory(world_size: int, polling: bool, table: str) -> None:
    assert run_processes(world_size, run_table_on_shm, table, polling) == [list(TABLES[table])] * world_size


@pytest.mark.parametrize("world_size", [5, 8])
def test_many_ranks_on_shared_memory(world_size: int) -> None:
    assert run_processes(world_size, run_table_on_shm, "cases", polling=False) == [list(comm_cases.CASES)] * world_size
