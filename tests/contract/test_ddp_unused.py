"""Parameters without a gradient, on some ranks or on all, in some steps or in all: right with no flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot
from torch import Tensor, nn

CASES = Cases(__name__)
FIND = {"find_unused_parameters": True}


class Branches(nn.Module):
    """Layers of which each forward uses those it is told to."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor, use: Sequence[int]) -> Tensor:
        for index in use:
            x = x + self.layers[index](x).tanh()
        return x


Pattern = Callable[[int, int], Sequence[int]]  # (step, rank) -> layers
PATTERNS: dict[str, Pattern] = {
    "nowhere": lambda step, rank: [0, 1, 3],
    "on one rank": lambda step, rank: [0, 1, 2, 3, 4] if rank == 0 else [0, 1],
    "on the last rank": lambda step, rank: [0, 1] if rank == 0 else [0, 1, 2, 3],
    "in turns": lambda step, rank: [i for i in range(5) if (i + step + rank) % 2],
    "one each": lambda step, rank: [(step + rank) % 5],
    "later and later": lambda step, rank: list(range(min(step + 1, 5))),
    "first and last steps": lambda step, rank: [0, 1, 2, 3, 4] if step in (0, 5) else [2],
    "in another order": lambda step, rank: [4, 2, 0] if rank else [0, 2, 4],
    "a different order each step": lambda step, rank: [(i * (step + 1)) % 5 for i in range(4)],
}


def train(side: Side, pattern: Pattern, *, momentum: float = 0.9, set_to_none: bool = True, **kwargs: Any) -> Any:
    model = seeded(Branches)
    ddp = side.wrap(model, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    seen = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        out = ddp(side.batch(step, 4, 8).requires_grad_(), pattern(step, side.rank))
        scalar(out).backward()
        side.end_backward(model)
        seen.append(gradients(model))
        optimizer.step()
    return [seen, snapshot(model)]


@CASES.add(1, 2, 3)
def as_torch_with_its_flag(side: Side) -> Any:
    return {name: train(side, pattern, torch_only=FIND) for name, pattern in PATTERNS.items()}


@CASES.add(2, 4, tolerance={4: 1e-6})
def in_small_buckets(side: Side) -> Any:
    return {name: train(side, p, torch_only=FIND, bucket_cap_mb=0.0003) for name, p in PATTERNS.items()}


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def by_hand(side: Side) -> Any:
    return {name: train(side, pattern) for name, pattern in PATTERNS.items()}


@CASES.add(2)
def with_the_flag_given(side: Side) -> Any:
    return {name: train(side, pattern, find_unused_parameters=True) for name, pattern in PATTERNS.items()}


@CASES.add(2)
def with_gradients_that_stay(side: Side) -> Any:
    """zero_grad(set_to_none=False): an unused parameter's gradient is zeros, and momentum goes on."""
    return {name: train(side, p, torch_only=FIND, set_to_none=False) for name, p in PATTERNS.items()}


@CASES.add(2)
def skipped_buckets(side: Side) -> Any:
    pattern: Pattern = lambda step, rank: [0, 1] if step < 3 else [0, 1, 2]  # noqa: E731 - one of a family
    return train(side, pattern, torch_only=FIND, skip_all_reduce_unused_params=True, bucket_cap_mb=0.0003)


@CASES.add(2, 3)
def old_gradient_is_not_touched(side: Side) -> Any:
    """A parameter that no rank used keeps the object and the values of its gradient, whatever these are."""
    model = seeded(Branches)
    ddp = side.wrap(model, torch_only=FIND)
    seen: list[Any] = []
    for step, use in enumerate(([0, 1, 2, 3, 4], [0, 1], [0, 3], [1], [0, 1, 2, 3, 4])):
        before = {
            name: (param.grad, None if param.grad is None else param.grad.clone())
            for name, param in model.named_parameters()
        }
        scalar(ddp(side.batch(step, 4, 8), use)).backward()
        for name, param in model.named_parameters():
            grad, values = before[name]
            if int(name.split(".")[1]) in use or grad is None:
                continue
            seen.append((step, name, param.grad is grad, torch.equal(param.grad, values)))
        if step == 2:
            model.layers[4].weight.grad = torch.full((8, 8), float(side.rank))  # differs between ranks, and stays so
    return [seen, gradients(model)]


@CASES.add(2, against="plain", tolerance=1e-6)
def gradients_kept_of_unused_parameters(side: Side) -> Any:
    """The caller holds all gradients; later steps use some parameters, on some ranks, or none of a bucket."""
    seen: list[Any] = []
    for cap in (None, 1e-6, 0.0005):
        model = seeded(Branches)
        ddp = side.wrap(model, bucket_cap_mb=cap)
        held: list[tuple[Tensor, Tensor]] = []
        for step, (zero, one) in enumerate(
            (([0, 1, 2, 3, 4],) * 2, ([0, 2], [0, 2]), ([1], [3]), ([4], [4]), ([0], [1, 2]))
        ):
            model.zero_grad()
            scalar(ddp(side.batch(step, 4, 8), zero if side.rank == 0 else one)).backward()
            side.end_backward(model)
            seen.append(gradients(model))
            held += [(param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None]
        seen.append([torch.equal(grad, values) for grad, values in held])
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def some_stay_some_are_kept_some_are_unused(side: Side) -> Any:
    """All at once, in every step another third of the parameters."""
    model = seeded(Branches)
    ddp = side.wrap(model, bucket_cap_mb=0.0008)
    seen: list[Any] = []
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(8):
        for i, param in enumerate(model.parameters()):
            if param.grad is None or (i + step) % 3 == 0:
                continue
            if (i + step) % 3 == 1:
                held.append((param.grad, param.grad.clone()))
            param.grad = None
        use = [i for i in range(5) if (i * (step + 2) + side.rank) % 4]
        scalar(ddp(side.batch(step, 4, 8).requires_grad_(), use)).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return [seen, [torch.equal(grad, values) for grad, values in held]]


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def used_only_in_an_earlier_micro_step(side: Side) -> Any:
    """pytorch issue 69031: a gradient of an unsynchronised micro-step, of one rank only, is reduced."""
    model = seeded(Branches)
    ddp = side.wrap(model)
    seen = []
    for step in range(5):
        model.zero_grad()
        with ddp.no_sync():
            scalar(ddp(side.batch(step, 4, 8).requires_grad_(), [0, 1, 2] if side.rank == step % 2 else [0])).backward()
            scalar(ddp(side.batch(10 + step, 4, 8), [0, 3])).backward()
        scalar(ddp(side.batch(20 + step, 4, 8), [0])).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def a_rank_that_uses_nothing(side: Side) -> Any:
    """Its loss depends on the output, but on no parameter of the module."""
    model = seeded(Branches)
    ddp = side.wrap(model)
    seen = []
    for step in range(4):
        model.zero_grad()
        x = side.batch(step, 4, 8).requires_grad_() * 1
        scalar(ddp(x, [] if side.rank == step % 2 else [0, 1, 2])).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def a_rank_that_returns_its_input(side: Side) -> Any:
    """A leaf: no operation of autograd stands between it and the loss."""
    model = seeded(Branches)
    ddp = side.wrap(model)
    seen = []
    for step in range(4):
        model.zero_grad()
        x = side.batch(step, 4, 8).requires_grad_()
        scalar(ddp(x, [] if side.rank == step % 2 else [0, 1, 2])).backward()
        side.end_backward(model)
        seen.append([x.grad, gradients(model)])
    return seen


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 2)
        self.never = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"left": self.left(h), "right": self.right(h)}


@CASES.add(2, 4, tolerance={4: 1e-6})
def an_output_without_a_loss(side: Side) -> Any:
    """The other head is in the graph, but no loss is computed of it: torch needs its flag."""
    model = seeded(Heads)
    ddp = side.wrap(model, torch_only=FIND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 4, 8))["left" if (step + side.rank) % 2 else "right"]).backward()
        optimizer.step()
    return snapshot(model)


@CASES.add(2, against="plain", tolerance=1e-6)
def sparse_and_unused(side: Side) -> Any:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(7, 4, sparse=True) for _ in range(3))
            self.out = nn.Linear(4, 2)

        def forward(self, tokens: Tensor, use: Sequence[int]) -> Tensor:
            return self.out(sum((self.tables[i](tokens) for i in use), torch.zeros(1, 4)))

    model = seeded(Tables)
    ddp = side.wrap(model)
    seen = []
    for step in range(5):
        model.zero_grad()
        scalar(ddp(side.tokens(step, 7, 3, 2), [0] if side.rank == step % 2 else [0, 1])).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


# ------------------------------------------------------------------ one big batch


@CASES.add(1, 2, 3, 4, against="plain", tolerance=1e-6)
def one_big_batch(side: Side) -> Any:
    """A batch of 12 samples, cut over the ranks on our side, whole on the other: equal weights."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))

    model = seeded(make)
    ddp = side.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    share = 12 // side.world_size
    for step in range(5):
        x, y = side.batch(step, 12, 8, rank=0), side.batch(50 + step, 12, 3, rank=0)
        if side.is_ours:
            mine = slice(side.rank * share, (side.rank + 1) * share)
            x, y = x[mine], y[mine]
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_or_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
