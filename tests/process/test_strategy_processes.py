"""What is cut over real processes, on shared memory and over Gloo, ends with the digest of whole copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lockstep
import shard_models
from lockstep.comm.communicator import Communicator
from lockstep.testing.worlds import run_processes
from lockstep.train.evaluate import prove_equal

SHARDINGS: tuple[Any, ...] = ("none", "optimizer", "gradients", "full", "hybrid")


def digest(comm: Communicator, original: nn.Module, sharding: Any) -> str:
    """After some steps, with torch's default group and meshes."""
    wide = comm.world_size == 4 and sharding == "hybrid"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if wide else None
    model = lockstep.parallelize(original, sharding, mesh=mesh)
    optimizer = lockstep.optimizer_for(model, torch.optim.AdamW, lr=1e-2)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(4):
        tokens = torch.randint(61, (2, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        lockstep.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return prove_equal(model, comm)


def digests(comm: Communicator) -> dict[str, str]:
    found = {}
    for sharding in SHARDINGS:
        torch.manual_seed(0)
        found[sharding] = digest(comm, shard_models.gpt2(), sharding)
    return found


@pytest.mark.parametrize(("world_size", "shm"), [(2, "on"), (2, "off"), (4, "on")])
def test_every_sharding_has_the_same_digest(world_size: int, shm: str) -> None:
    for found in run_processes(world_size, digests, env={"LOCKSTEP_SHM": shm}):
        print(world_size, shm, {k: v[:6] for k, v in found.items()})
        assert set(found) == set(SHARDINGS)
        assert len(set(found.values())) == 1
