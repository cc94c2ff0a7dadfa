"""What an optimizer class can do is found by trying it on a few numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.parallel.initialisers import random_from

IMPLEMENTATION = ("foreach", "fused", "capturable")  # options that say how it is computed, not what
_REFUSALS = (TypeError, ValueError, RuntimeError, NotImplementedError, AssertionError)

OptimizerClass = Callable[..., Optimizer]


def why_not_elementwise(optimizer_cls: OptimizerClass, kwargs: Mapping[str, Any]) -> str | None:
    """Why a parameter cannot be stepped in pieces; None where it can.

    A matrix is stepped as a whole and as two flat pieces whose gradients differ a hundredfold. Where an element's step
    depends on its neighbours, through a norm or a row, the two differ.
    """
    trial = {name: value for name, value in kwargs.items() if name not in IMPLEMENTATION}
    if _takes(optimizer_cls, "lr"):
        trial["lr"] = 0.1  # the user's own may be 0 at the beginning
    generator = torch.Generator().manual_seed(0)
    whole, first, *others = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
    flat = whole.reshape(-1).clone()
    gradients = [gradient * torch.linspace(1.0, 100.0, 6)[:, None] for gradient in (first, *others)]
    with random_from(0, torch.device("cpu")):  # which ranks that are threads take in turns
        try:
            _run(optimizer_cls, trial, [whole], [[gradient] for gradient in gradients])
            pieces = [gradient.reshape(-1).split([19, 29]) for gradient in gradients]
            _run(optimizer_cls, trial, flat.split([19, 29]), pieces)
        except _REFUSALS as error:
            return f"it cannot step a flat piece of a parameter: {error}"
    if torch.allclose(whole.reshape(-1), flat, rtol=1e-6, atol=1e-9):
        return None
    return "the step of an element depends on other elements of its parameter"


def runs_fused(optimizer_cls: OptimizerClass, kwargs: Mapping[str, Any], device: torch.device) -> bool:
    """Whether the class has a fused implementation on this device, and the caller has not asked for another."""
    if not _takes(optimizer_cls, "fused") or any(kwargs.get(name) is not None for name in ("fused", "foreach")):
        return False
    try:
        tensor = torch.zeros(8, device=device)
        _run(optimizer_cls, {**kwargs, "fused": True}, [tensor], [[torch.zeros_like(tensor)]])
    except _REFUSALS:
        return False
    return True


def _run(
    optimizer_cls: OptimizerClass,
    kwargs: Mapping[str, Any],
    tensors: Iterable[Tensor],
    gradients: Iterable[Iterable[Tensor]],
) -> None:
    tensors = list(tensors)
    optimizer = optimizer_cls(tensors, **kwargs)
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = gradient.clone()
        optimizer.step()


def _takes(optimizer_cls: OptimizerClass, name: str) -> bool:
    return name in inspect.signature(optimizer_cls).parameters
