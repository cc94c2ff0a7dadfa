"""A real language model, and compiled modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot, train
from torch import Tensor, nn

from shard_models import gpt2

CASES = Cases(__name__)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@CASES.add(2)
def gpt2_trained(side: Side) -> Any:
    """Tied embeddings, a ModelOutput with a loss and logits, clipping, accumulation, then evaluation."""
    model = seeded(gpt2)
    ddp = side.wrap(model, bucket_cap_mb=0.03)
    optimizer = ADAMW(model.parameters())
    seen: list[Any] = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=True)
        with ddp.no_sync():
            tokens = side.tokens(step, 61, 2, 12)
            ddp(input_ids=tokens, labels=tokens).loss.backward()
        tokens = side.tokens(50 + step, 61, 2, 12)
        out = ddp(input_ids=tokens, labels=tokens)
        out.loss.backward()
        seen.append([type(out).__name__, nn.utils.clip_grad_norm_(model.parameters(), 1.0)])
        optimizer.step()
    ddp.eval()
    with torch.no_grad():
        seen.append(ddp(side.tokens(99, 61, 1, 5)).logits.clone())
    return [seen, snapshot(model)]


@CASES.add(2)
def gpt2_with_checkpoints(side: Side) -> Any:
    found = []
    for reentrant in (True, False):
        model = seeded(gpt2)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        ddp = side.wrap(model)
        model.train()
        for step in range(3):
            tokens = side.tokens(step, 61, 2, 12)
            ddp(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append(gradients(model))
    return found


@CASES.add(2)
def gpt2_as_a_tuple_with_dropout(side: Side) -> Any:
    model = seeded(lambda: gpt2(0.1))
    ddp = side.wrap(model)
    torch.manual_seed(7 + side.rank)
    for step in range(3):
        model.zero_grad()
        tokens = side.tokens(step, 61, 2, 12)
        loss, *_ = ddp(tokens, labels=tokens, return_dict=False)
        loss.backward()
    return gradients(model)


# ------------------------------------------------------------------ compiled


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, left: bool) -> dict[str, Tensor]:
        return {"y": self.norm(self.left(x) if left else self.right(x))}


@CASES.add(2)
def compiled_module_in_the_wrapper(side: Side) -> Any:
    torch.compiler.reset()

    def make() -> nn.Module:
        model = mlp()
        model.compile(backend="aot_eager")
        return model

    return train(side, make)


@CASES.add(2)
def wrapper_of_a_compiled_module(side: Side) -> Any:
    torch.compiler.reset()
    model = seeded(mlp)
    ddp = side.wrap(torch.compile(model, backend="aot_eager"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            scalar(ddp(side.batch(20 + step, 6, 8))).backward()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return [sorted(ddp.state_dict()), snapshot(model)]


@CASES.add(2, tolerance=1e-6)
def compiled_wrapper(side: Side) -> Any:
    torch.compiler.reset()
    model = seeded(mlp)
    ddp = torch.compile(side.wrap(model), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return [sorted(ddp.state_dict()), snapshot(model)]


@CASES.add(2, against="plain", tolerance=1e-5)
def compiled_with_branches(side: Side) -> Any:
    torch.compiler.reset()
    model = seeded(Half)
    wrapped = side.wrap(model, **({"forward_sync_buffers": False} if side.is_ours else {}))
    ddp = torch.compile(wrapped, backend="aot_eager") if side.is_ours else wrapped
    seen = []
    for step in range(4):
        model.zero_grad()
        scalar(ddp(side.batch(step, 6, 8), (side.rank + step) % 2 == 0)).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_or_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
