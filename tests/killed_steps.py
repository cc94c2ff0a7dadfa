"""A sharded model in training, whose rank is killed in the middle of a step; what the other ranks hear of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn

from lockstep.comm.communicator import Communicator
from lockstep.comm.waiting import wait_until
from lockstep.errors import CommError
from shard_sides import ADAMW
from shm_ranks import LIMIT_S


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(model: nn.Sequential, place: str | None) -> list[CommError]:
    """Die at `place` in the third of five steps; with None, what this rank hears then and from what it tries after."""
    optimizer = ADAMW(model.parameters())
    heard: list[CommError] = []
    for step in range(5):
        dies_at = place if step == 2 else None
        if dies_at == "forward":
            model[1].register_forward_hook(die)
        try:
            out = model(torch.randn(4, 8))
            if dies_at == "backward":
                out.register_hook(die)
            out.sum().backward()
            if dies_at == "optimizer":
                optimizer.register_step_post_hook(die)
            optimizer.step()
            optimizer.zero_grad()
        except CommError as error:
            heard.append(error.with_traceback(None))
    return heard


def wait_for_survivors(comm: Communicator, folder: str) -> None:
    """Return when every rank but the one that was killed has heard of it, so that nobody hears it by another's end."""
    (Path(folder) / f"heard{comm.rank}").touch()
    assert wait_until(lambda: len(list(Path(folder).glob("heard*"))) == comm.world_size - 1, LIMIT_S)
