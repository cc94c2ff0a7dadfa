"""Data parallelism in ten lines: what DistributedDataParallel does, without its speed. Read this first.

    broadcast_parameters(model, comm)          # once: all ranks start equal
    for batch in my_share_of_the_data:
        loss_of(model, batch).backward()       # every rank has the gradients of its own batch
        average_gradients(model, comm)         # now every rank has the mean
        optimizer.step()                       # so every rank takes the same step

Each gradient is its own message, sent after backward has ended. DistributedDataParallel sends several gradients as one
bucket, while backward still computes the others: fewer messages, and waiting hidden behind work.
"""

from __future__ import annotations

import torch
from torch.nn import Module

from lockstep.comm.communicator import Communicator


def broadcast_parameters(module: Module, comm: Communicator, src: int = 0) -> None:
    """Every rank's parameters and buffers become rank `src`'s.

    Collective: every rank of `comm`, with equal modules; blocks.
    """
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor, src)


def average_gradients(module: Module, comm: Communicator) -> None:
    """Every parameter's `.grad` becomes the mean over the ranks; a missing one counts as zero.

    Collective: every rank of `comm`, after backward; blocks once per parameter.
    Memory: none, but zeros for missing gradients.
    """
    for param in module.parameters():
        if param.requires_grad:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            comm.all_reduce(param.grad, "mean")
