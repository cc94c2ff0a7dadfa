"""Ranks that use their groups in another order: said as soon as each is seen in its call twice."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from guarded_programs import is_left_alone, is_named

import lockstep
from lockstep.errors import CollectiveMismatch
from lockstep.observe import deadlock, scene
from lockstep.observe.lookout import Lookout
from lockstep.observe.settings import EVIDENCE
from lockstep.testing.worlds import run_processes

_LOOKS = 20


def reduce(group: Any) -> None:
    dist.all_reduce(torch.ones(4), group=group)


def reduce_and_wait(group: Any) -> None:
    dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()


def gather(group: Any) -> None:
    dist.all_gather_into_tensor(torch.ones(8), torch.ones(4), group=group)


def in_other_order(call: Callable[[Any], None], rank: int, folder: Path) -> None:
    """No time is long enough to tell by how long they stand still."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    with pytest.MonkeyPatch.context() as patch:
        for module in (deadlock, scene):
            patch.setattr(module, "STILL_S", math.inf)
        for group in reversed(groups) if rank else groups:
            call(group)


@pytest.mark.parametrize("call", [reduce, reduce_and_wait, gather])
def test_groups_in_another_order_are_named_by_where_the_ranks_are(call: Callable[[Any], None], tmp_path: Path) -> None:
    words = (
        "DEADLOCK",
        "groups in different order, or a call left out: rank 0 -> rank 1 -> rank 0",
        "raised Collective",
    )
    is_named(partial(in_other_order, call), words, tmp_path)


def ours_in_other_order(rank: int, folder: str) -> str:
    """As above, of `lockstep.init`; what is raised."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (deadlock, scene):
            patch.setattr(module, "STILL_S", math.inf)
        try:
            with lockstep.init(rank=rank, world_size=2, file=f"{folder}/meet", timeout_s=50, verbose=False) as comm:
                groups = [comm.split(0), comm.split(0)]
                for group in reversed(groups) if rank else groups:
                    assert group is not None
                    group.all_reduce(torch.ones(4))
        except CollectiveMismatch as error:
            return str(error)
    return ""


def test_so_are_groups_of_our_own(tmp_path: Path) -> None:
    env = {EVIDENCE: str(tmp_path / "evidence")}
    for said in run_processes(2, ours_in_other_order, str(tmp_path), connect=False, env=env):
        assert "groups in different order, or a call left out: rank 0 -> rank 1 -> rank 0" in said


def begun_and_left(rank: int, folder: Path) -> torch.Tensor:
    """Rank 0 has only begun what rank 1 has yet to come to, and stands in another call of that line."""
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    tensor, looks, look = torch.ones(4), 0, Lookout.look
    enough = threading.Event()

    def looked(of: Lookout, **how: bool) -> None:
        nonlocal looks
        look(of, **how)
        looks += 1
        if looks > _LOOKS:
            enough.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lookout, "look", looked)
        if rank == 0:
            work, _ = dist.all_reduce(tensor, group=first, async_op=True), enough.wait(5)
            dist.all_reduce(tensor, group=second)
            work.wait()
        else:
            dist.all_reduce(tensor, group=second)
            dist.all_reduce(tensor, group=first)
    return tensor


def test_an_operation_that_was_only_begun_is_not_stood_in(tmp_path: Path) -> None:
    is_left_alone(begun_and_left, tmp_path)
