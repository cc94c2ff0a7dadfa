"""One optimizer step's gradient: the sum over microbatches and ranks, as if they were one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_rows
from lockstep.errors import NonFiniteLoss, TrainingError
from lockstep.observe.profile.phases import BACKWARD, FORWARD, OTHER
from lockstep.observe.profile.step_clock import StepClock
from lockstep.parallel.clip import clip_grad_norm_
from lockstep.parallel.strategy import microbatch
from lockstep.train.evaluate import IGNORED, token_losses

Microbatch = tuple[Tensor, Tensor]  # inputs and targets of one forward, [b, T] int64; IGNORED targets count for nothing


def microbatch_seed(seed: int, step: int, index: int) -> int:
    """Seed of the dropout of microbatch `index` of `step`, counted over all ranks: no rank and no history in it."""
    return (seed * 1_000_003 + step) * 1_000_003 + index & (1 << 63) - 1


def agree(comm: Communicator, microbatches: Sequence[Microbatch], wants_to_stop: bool) -> tuple[int, bool]:
    """(tokens of this step over all ranks, whether any rank wants to stop instead).

    Collective: every rank of `comm`; blocks. It is what makes all ranks stop between the same two steps.
    """
    tokens = sum(int((targets != IGNORED).sum()) for _, targets in microbatches)
    totals = torch.tensor([tokens, int(wants_to_stop)], dtype=torch.int64, device=comm.device)
    comm.all_reduce(totals, label="agree")
    tokens, stopping = totals.tolist()
    return tokens, stopping > 0


def accumulate_gradient(
    replica: nn.Module,
    microbatches: Sequence[Microbatch],
    tokens: int,
    seed: int,
    step: int,
    comm: Communicator,
    clock: StepClock,
) -> float:
    """Leave in `.grad` the gradient of the mean loss over the `tokens` of all ranks' microbatches; return that loss.

    `replica`, which `parallelize` returned, averages over ranks. Weighting by tokens of the whole step, not of the
    microbatch, is what makes the result that of one big batch when some have more padding than others.

    Units: nats per token.
    Collective: every rank of `comm`, with as many microbatches each; blocks.
    Raises: NonFiniteLoss on every rank, before the optimizer could use the gradient.
    """
    total = torch.zeros(1, dtype=torch.float64, device=comm.device)
    for number, (inputs, targets) in enumerate(microbatches, 1):
        torch.manual_seed(microbatch_seed(seed, step, comm.rank * len(microbatches) + number))
        with microbatch(replica, is_last=number == len(microbatches)):
            clock.switch(FORWARD)
            loss = token_losses(replica, inputs.to(comm.device), targets.to(comm.device))
            clock.switch(BACKWARD)
            (loss * (comm.world_size / max(1, tokens))).backward()  # the replica divides by world_size again
        total += loss.detach()
    clock.switch(OTHER)
    losses = all_gather_rows(comm, total, "loss").view(-1).tolist()
    for rank, rank_loss in enumerate(losses):
        if not math.isfinite(rank_loss):
            raise NonFiniteLoss(
                f"the loss became {rank_loss} at step {step + 1}, first on rank {rank}: this step did not change the "
                "weights; try a lower --optim.lr or more --optim.warmup_steps"
            )
    return sum(losses) / max(1, tokens)


def clip_gradient(replica: nn.Module, limit: float, step: int) -> float:
    """Scale the whole gradient down to norm `limit` (0: leave it); return the norm before.

    Collective: every rank.
    Raises: TrainingError where it is not finite although the loss was; equal on every rank, as the gradients are.
    """
    norm = float(clip_grad_norm_(replica.parameters(), limit if limit > 0 else math.inf))
    if not math.isfinite(norm):
        raise TrainingError(f"the gradient's norm is {norm} at step {step + 1} on every rank: try a lower --optim.lr")
    return norm
