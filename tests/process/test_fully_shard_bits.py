"""Sharded training has the same bits wherever the ranks are and however parameters become whole."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.comm.communicator import Communicator
from lockstep.parallel.shard_context import context_of, unit_of
from lockstep.testing.worlds import run_processes, run_threads
from shard_models import MLP_UNITS, mlp
from shard_sides import ADAMW, Side, seeded
from shm_ranks import shared


def trained(comm: Communicator, mesh: Any, sharing: bool = True) -> str:
    """A hash of weights and gradients after five steps."""
    side = Side("ours", comm, mesh)
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    assert isinstance(model, nn.Module)
    unit = unit_of(model)
    assert unit is not None
    context_of(unit).wholes.sharing = sharing
    optimizer = ADAMW(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        model(side.batch(step, 6, 8)).pow(2).mean().backward()
        optimizer.step()
    is_shared = sharing and comm.transport.name in ("shm", "threads")
    assert {group.is_shared for group in context_of(unit).groups} == {is_shared}
    bits = b"".join(torch.stack([t]).numpy().tobytes() for t in side.snapshot(model).values() if t is not None)
    return hashlib.sha256(bits).hexdigest()


def on_threads(comm: Communicator) -> list[str]:
    return [trained(comm, comm), trained(comm, comm, sharing=False)]


def on_processes(comm: Communicator) -> list[str]:
    found = [trained(comm, comm)]
    with shared(comm) as ours:
        found += [trained(ours, ours), trained(ours, ours, sharing=False)]
        if comm.world_size == 4:
            found += [trained(group, group.mesh(replica=2, shard=2)) for group in (comm, ours)]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_way_has_the_same_bits(world_size: int) -> None:
    """Gloo, shared memory and threads; with shared parameters, gathered ones, and 2 x 2 ranks that replicate too."""
    by_rank = run_processes(world_size, on_processes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes: a product's bits depend on it
    try:
        by_rank += run_threads(world_size, on_threads)
    finally:
        torch.set_num_threads(threads)
    hashes = {name for found in by_rank for name in found}
    assert len(hashes) == 1, by_rank
