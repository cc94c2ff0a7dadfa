"""Torch's Flight Recorder is not asked while a group is made or used for the first time: a process may die of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import default_group
from guarded_programs import small
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.guard import Guard
from lockstep.observe.settings import GuardSettings
from lockstep.observe.sights import flight_path
from lockstep.observe.torch_flight_recorder import TorchFlightRecorder
from lockstep.observe.torch_watch import attach
from lockstep.testing.worlds import run_processes

_PLACES = {
    "all_reduce": (dist.ProcessGroup, "allreduce"),
    "new_group": (distributed_c10d, "_new_process_group_helper"),
    "wrap": (dist, "_verify_params_across_processes"),
}
_OFTEN = 6


def asked(rank: int, world_size: int, folder: str) -> dict[str, list[bool]]:
    """By what a rank does, several times: whether torch was asked when the guard looked within."""
    found: dict[str, list[bool]] = {name: [] for name in _PLACES}
    looks: list[None] = []
    recorder = FlightRecorder(flight_path(folder, rank), rank, world_size)
    guard = Guard(recorder, Board(folder, recorder, range(world_size)), GuardSettings(evidence="", look_s=60.0))
    with pytest.MonkeyPatch.context() as patch:
        look = TorchFlightRecorder.look
        patch.setattr(TorchFlightRecorder, "look", lambda self: looks.append(None) or look(self))

        def looked(name: str) -> None:
            before = len(looks)
            guard.look()
            found[name].append(len(looks) > before)

        def spied(name: str, old: Any) -> Any:
            def new(*args: Any, **kwargs: Any) -> Any:
                looked(name)
                return old(*args, **kwargs)

            return new

        for name, (owner, attribute) in _PLACES.items():
            patch.setattr(owner, attribute, spied(name, getattr(owner, attribute)))
        undo = attach(guard)
        try:
            with default_group("gloo", folder, rank, world_size):
                group = dist.new_group()
                found["new_group"].clear()  # those of the default group
                for _ in range(_OFTEN):
                    dist.all_reduce(torch.ones(3), group=group)
                for _ in range(2):
                    DistributedDataParallel(small(), process_group=dist.new_group())
        finally:
            undo()
            guard.close()
    return found


def test_torch_is_asked_of_what_is_known_only(tmp_path: Path) -> None:
    for found in run_processes(2, asked, 2, str(tmp_path), connect=False):
        assert [found["all_reduce"][at] for at in (0, -1)] == [False, True]
        assert found["new_group"]
        assert not any(found["new_group"])
        assert found["wrap"] == [False, False]
