"""Gradient clipping that knows every layout: whole, sharded, replicated shards, several meshes, in one call.

The norm is that of one process with all gradients. Elements are summed in fp64, so what the number of ranks changes in
the sum is lost when it is rounded to fp32: the same gradients give the same bits on any number of ranks, unless the sum
is within about 1e-15 of the border between two fp32 numbers. Torch sums in the dtype of the gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.objects import all_gather_rows
from lockstep.errors import ConfigError, TrainingError, UnsupportedArgument
from lockstep.parallel.grad_pieces import HeldGradients, Lines, by_kind, held_gradients, held_tensors, in_runs

_BLOCK_NUMEL = 1 << 17  # at a time in fp64: 1 MiB, which stays in the cache


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); the norm they had, [], the same on every rank.

    Takes what torch.nn.utils.clip_grad_norm_ takes, and any mixture of plain parameters (each rank has the whole
    gradient), torch's DTensors, those of fully_shard and those of a ShardedOptimizer. fp32, or fp64 if a parameter is.
    Collective: every rank that has pieces, with the same parameters, also where it has no gradient; it blocks.
    One operation of a few bytes for each group of ranks; none for plain parameters only.
    Raises: TrainingError, a RuntimeError, on every rank for error_if_nonfinite; ConfigError for a norm_type that is not
    positive or a max_norm below 0.
    """
    limit = _checked(max_norm)
    params = _listed(parameters)
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()  # each element once: the norm is of their sum
    held = held_gradients(params)
    total = _total_norm(held, params, norm_type, error_if_nonfinite, foreach)
    _scale(held, limit, total, foreach)
    return total


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of `tensors`, plain ones and DTensors, as one vector: [], the same on every rank.

    Collective: as `clip_grad_norm_`; every rank passes the same tensors, so none may be left out for being empty here.
    """
    listed = _listed(tensors)
    return _total_norm(held_tensors(listed), listed, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale all gradients by min(1, max_norm / (total_norm + 1e-6)).

    Not collective, unless total_norm is a DTensor, as torch's get_total_norm returns it.
    """
    limit = _checked(max_norm)
    total: Any = total_norm
    _scale(held_gradients(_listed(parameters)), limit, getattr(total, "full_tensor", lambda: total)(), foreach)


def _checked(max_norm: float) -> float:
    if not max_norm >= 0:
        raise ConfigError(f"max_norm={max_norm}: it must be 0 or more; math.inf only measures")
    return float(max_norm)


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not listed and isinstance(tensors, GeneratorType):
        text = "the generator of parameters is empty, so nothing is clipped: was it used before? Pass a list."
        warnings.warn(text, RuntimeWarning, stacklevel=4)  # past torch.no_grad
    return listed


# ------------------------------------------------------------------ the norm


def _total_norm(
    held: HeldGradients, like: Sequence[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """The norm of all pieces on all ranks, on the device of the first tensor of `like`."""
    power = float(norm_type)
    if not power > 0:
        raise UnsupportedArgument("norm_type", f"{norm_type} is not a positive number; math.inf is the largest element")
    device = like[0].device if like else torch.device("cpu")
    norms = {lines: _norm(pieces, power, foreach, device) for lines, pieces in held.items()}
    total = _over_all_ranks(norms, power, device)
    is_double = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in like)
    total = total if is_double else total.float()
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise TrainingError(
            f"the total norm of order {norm_type} of the gradients is {total.item()} on every rank, so they cannot be "
            "clipped: skip this step, or look for the first loss that is not finite. error_if_nonfinite=False clips "
            "all the same, which makes every gradient NaN or zero."
        )
    return total


def _norm(pieces: Sequence[Tensor], power: float, foreach: bool | None, device: torch.device) -> Tensor:
    """The norm of this rank's pieces together, in fp64."""
    norms: list[Tensor] = []
    for alike in by_kind(piece.abs() if piece.is_complex() else piece for piece in in_runs(pieces)):
        if alike[0].device.type == "cpu":
            norms += _norms_on_cpu(alike, power)
        elif foreach is False:
            norms += [torch.linalg.vector_norm(piece, power, dtype=torch.float64) for piece in alike]
        else:
            norms += torch._foreach_norm(alike, power, dtype=torch.float64)
    return _norm_of_norms(norms, power, device)


def _norms_on_cpu(pieces: Sequence[Tensor], power: float) -> Iterator[Tensor]:
    """Norms in fp64 of parts of `pieces`. Memory: a block; torch's kernel would make an fp64 copy of the whole."""
    for piece in pieces:
        flat = piece.reshape(-1)
        if math.isinf(power):
            low, high = torch.aminmax(flat)  # fifteen times faster than vector_norm, and exact in any dtype
            yield torch.maximum(low.neg(), high).double()
        else:
            for block in flat.split(_BLOCK_NUMEL):
                yield torch.linalg.vector_norm(block, power, dtype=torch.float64)


def _norm_of_norms(norms: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), power)


def _over_all_ranks(norms: dict[Lines, Tensor], power: float, device: torch.device) -> Tensor:
    """The norm over all ranks. One operation for each communicator: what lies along several passes through each.

    Gathered, not reduced: every rank adds the same numbers in the same order, whatever the transport, and NaN stays.
    """
    left = {lines: [norm] for lines, norm in norms.items()}
    while open_lines := [lines for lines in left if lines]:
        comm = open_lines[0][0]
        through = [lines for lines in open_lines if comm in lines]
        mine = torch.stack([_norm_of_norms(left.pop(lines), power, device) for lines in through])
        ranks = all_gather_rows(comm, mine.to(comm.device), "clip.norm")
        for lines, norm in zip(through, ranks.unbind(1), strict=True):
            left.setdefault(tuple(other for other in lines if other is not comm), []).append(
                torch.linalg.vector_norm(norm.to(device), power)
            )
    return _norm_of_norms(left.get((), []), power, device)


# ------------------------------------------------------------------ the scaling


def _scale(held: HeldGradients, max_norm: float, total: Tensor, foreach: bool | None) -> None:
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if coefficient.device.type == "cpu" and coefficient >= 1:
        return  # nothing would change; on a GPU, asking would cost more than multiplying
    for alike in by_kind(run for pieces in held.values() for run in in_runs(pieces)):
        factor = coefficient.to(alike[0].device)
        if foreach is False:
            for piece in alike:
                piece.mul_(factor)
        else:
            torch._foreach_mul_(alike, factor)
