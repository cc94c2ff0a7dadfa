"""Data parallelism without buckets: rank 0's values everywhere, then the mean of what each rank has."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import average_gradients
from lockstep.comm.communicator import Communicator
from lockstep.parallel.naive import broadcast_parameters
from lockstep.testing.worlds import run_threads


def one_step(comm: Communicator) -> tuple[list[float], list[float], list[float], bool]:
    model = nn.ModuleDict({"all": nn.Linear(1, 1, bias=False), "last": nn.Linear(1, 1, bias=False)})
    model["all"].register_buffer("seen", torch.tensor([float(comm.rank)]))
    model["frozen"] = nn.Linear(1, 1, bias=False).requires_grad_(False)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(comm.rank + 1.0)
    broadcast_parameters(model, comm, src=1)
    values = [tensor.item() for tensor in (*model.parameters(), *model.buffers())]
    names = ("all", "last") if comm.rank == comm.world_size - 1 else ("all",)
    for name in names:  # of the other parameter only the last rank has a gradient
        model[name](torch.full((1, 1), comm.rank + 1.0)).sum().backward()
    average_gradients(model, comm)
    gradients = [float(param.grad) for param in model.parameters() if param.grad is not None]
    return values, gradients, [tensor.item() for tensor in model.buffers()], model["frozen"].weight.grad is None


def test_one_rank_s_values_and_the_mean_of_gradients() -> None:
    for values, gradients, buffers, is_frozen in run_threads(3, one_step):
        assert values == [2.0, 2.0, 2.0, 1.0]
        assert gradients == [2.0, 1.0]  # (1 + 2 + 3) / 3, and (0 + 0 + 3) / 3
        assert buffers == [1.0]
        assert is_frozen
