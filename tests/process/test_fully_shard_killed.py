"""`kill -9` of a rank in the middle of a sharded step: the others hear of it, by its name, and nothing stays."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lockstep
from killed_steps import die, train_and_die, wait_for_survivors
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import Work
from lockstep.errors import CommError, PeerLost
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_processes
from shard_models import MLP_UNITS, large, mlp
from shard_sides import seeded
from shm_ranks import LIMIT_S, named_memory, named_since, share

VICTIM = 1


def trained_and_killed(comm: Communicator, folder: str, is_shared: bool, place: str) -> list[CommError]:
    """Rank 1 dies at `place`; what the others hear."""
    ours = share(comm) if is_shared else comm
    model = seeded(mlp)
    for name in MLP_UNITS:
        lockstep.fully_shard(model.get_submodule(name), mesh=ours)
    lockstep.fully_shard(model, mesh=ours)
    heard = train_and_die(model, place if comm.rank == VICTIM else None)
    wait_for_survivors(comm, folder)
    if is_shared:
        ours.close()
    return heard


def die_in_a_gather(comm: Communicator, folder: str) -> str:
    """Rank 1 dies between two operations of a gather; what the others hear."""
    model = seeded(large)
    for unit in (*MLP_UNITS, ""):
        lockstep.fully_shard(model.get_submodule(unit), mesh=comm, reshard_after_forward=2)
    model(torch.randn(4, 8)).sum().backward()
    gather, gathers = Communicator.all_gather, itertools.count()

    def gather_or_die(*args: Any, **kwargs: Any) -> Work:
        if comm.rank == VICTIM and next(gathers) == 1:
            die()
        return gather(*args, **kwargs)

    with mock.patch.object(Communicator, "all_gather", gather_or_die), pytest.raises(PeerLost) as heard:
        model(torch.randn(4, 8)).sum().backward()
    wait_for_survivors(comm, folder)
    return str(heard.value)


def test_a_rank_that_is_killed_in_a_gather(tmp_path: Path) -> None:
    """Whoever hears of it starts nothing more: in a tree of broadcasts that could wait for ranks that are gone too."""
    with pytest.raises(RankFailed) as raised:
        run_processes(4, die_in_a_gather, str(tmp_path), timeout_s=LIMIT_S)
    assert raised.value.errors.keys() == {VICTIM}, str(raised.value)


@pytest.mark.parametrize(
    ("place", "is_shared"),
    [("forward", True), ("backward", True), ("optimizer", True), ("backward", False)],
    ids=["forward", "backward", "optimizer", "backward-gloo"],
)
def test_a_rank_that_is_killed(place: str, is_shared: bool, tmp_path: Path) -> None:
    before = named_memory()
    with pytest.raises(RankFailed) as raised:
        run_processes(3, trained_and_killed, str(tmp_path), is_shared, place, timeout_s=LIMIT_S)
    assert raised.value.errors.keys() == {VICTIM}, str(raised.value)
    assert raised.value.errors[VICTIM].message == "killed by SIGKILL"
    for first, *later in raised.value.results.values():
        assert isinstance(first, PeerLost)
        assert first.rank == VICTIM or not is_shared  # Gloo cannot always say who
        assert len(later) >= 1  # whoever goes on all the same is told again, and does not hang
    assert not named_since(before)
