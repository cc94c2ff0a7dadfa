"""What the model is worth: loss on held-out text, a sample, and the proof that all ranks hold the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.errors import ReplicaError
from lockstep.parallel.named_state import whole_tensors
from lockstep.parallel.strategy import in_step

IGNORED = -100  # targets that count for nothing: padding


def token_losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets that are not `IGNORED`.

    Shapes: inputs, targets [B, T] int64; returns [].
    Units: nats.
    """
    logits = model(input_ids=inputs).logits  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], comm: Communicator) -> float:
    """Mean loss per token over all ranks' `batches` of inputs and targets; a rank may have fewer than others, or none.

    Shapes: inputs, targets [B, T] int64.
    Units: nats per token.
    Collective: every rank of `comm`; blocks.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=comm.device)  # sum of losses, tokens
    model.eval()
    for (inputs, targets), is_own in in_step(model, batches):
        loss = token_losses(model, inputs.to(comm.device), targets.to(comm.device))
        if is_own:
            totals[0] += loss
            totals[1] += int((targets != IGNORED).sum())
    model.train()
    comm.all_reduce(totals, label="evaluate")
    return float(totals[0] / totals[1])


@torch.no_grad()
def sample(
    model: nn.Module, prompt: list[int], length: int, context: int, device: torch.device, seed: int
) -> list[int]:
    """`length` tokens that the model writes after `prompt`, drawn at temperature 0.8.

    Collective: where the model's parameters are cut over ranks, each of them, with equal arguments.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    for _ in range(length):
        logits = model(input_ids=torch.tensor([tokens[-context:]], device=device)).logits[0, -1]  # [V]
        probabilities = F.softmax(logits.float().cpu() / 0.8, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train()
    return tokens[len(prompt) :]


@torch.no_grad()
def parameter_digest(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all parameters and buffers, in the order of their names.

    Collective: where parameters are cut over ranks, each of them. Memory: one whole tensor.
    """
    digest = hashlib.sha256()
    for fqn, whole in whole_tensors(model):
        tensor = whole.cpu().contiguous()
        digest.update(f"{fqn} {tensor.dtype} {list(tensor.shape)}\n".encode())
        data: Any = tensor.flatten().view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()


def prove_equal(model: nn.Module, comm: Communicator) -> str:
    """The digest of the model, after comparing it between all ranks.

    Collective: every rank of `comm`; blocks.
    Raises: ReplicaError on every rank, naming the ranks that differ from rank 0.
    """
    digests = comm.all_gather_object(parameter_digest(model), label="proof")
    differing = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        listed = ", ".join(f"rank {rank} has {digests[rank][:16]}" for rank in differing)
        raise ReplicaError(f"the ranks no longer hold the same weights: rank 0 has {digests[0][:16]}, {listed}")
    return digests[0]
