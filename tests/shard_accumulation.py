"""Training programs with several forwards or backwards in a step, for every side and ranks of any kind."""

from __future__ import annotations

from typing import Any

import torch

from shard_models import MLP_UNITS, Apart, Branches, Holder, Twice, mlp
from shard_sides import ADAMW, SGD, Side, scalar, seeded, train

# ------------------------------------------------------------------ several forwards, several backwards


def two_forwards_one_backward(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        first, second = model(side.batch(step, 6, 8)), model(side.batch(20 + step, 6, 8))
        side.backward(scalar(first) + scalar(second), model)
        optimizer.step()
    return side.snapshot(model)


def a_unit_twice_in_one_forward(side: Side) -> Any:
    return [train(side, Twice, ("shared",)), train(side, Twice, ("enter", "shared", "leave"))]


def two_forwards_two_backwards(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        losses = [scalar(model(side.batch(20 * part + step, 6, 8))) for part in range(2)]
        for loss in losses:
            side.backward(loss, model)
        optimizer.step()
    return side.snapshot(model)


def backward_twice_through_one_graph(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    loss = scalar(model(side.batch(0, 6, 8)))
    if side.kind == "plain":
        side.backward(2 * loss, model)  # the mean of equal gradients, twice
    else:
        loss.backward(retain_graph=True)
        loss.backward()
    return side.snapshot(model)


def backward_through_part_of_the_outputs(side: Side) -> Any:
    def left(output: Any) -> torch.Tensor:
        return scalar(output[0])

    return [
        train(side, lambda: Holder("tuple"), ("inner",), loss_of=left),
        train(side, lambda: Holder("tuple"), ("inner.left", "inner.right", "inner"), loss_of=left),
    ]


def a_unit_that_nobody_uses(side: Side) -> Any:
    model = seeded(Branches)
    side.shard_units(model, ("enter", "left", "right", "leave"))
    optimizer = ADAMW(model.parameters())
    seen = []
    for step, use in enumerate(("left", "right", "none", "left")):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8), use)), model)
        seen.append(side.snapshot(model))
        optimizer.step()
    return [seen, side.snapshot(model)]


# ------------------------------------------------------------------ accumulation


def accumulation_in_shards(side: Side) -> Any:
    """The default: each backward is reduced, and added to the rank's own piece."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            side.backward(scalar(model(side.batch(20 * part + step, 6, 8))) / 3, model)
        optimizer.step()
    return side.snapshot(model)


def accumulation_without_reduction(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = ADAMW(model.parameters())
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        with side.no_sync(model):
            for part in (1, 2):
                side.backward(scalar(model(side.batch(20 * part + step, 6, 8))) / 3, model)
        seen.append([name for name, param in model.named_parameters() if param.grad is not None])
        side.backward(scalar(model(side.batch(step, 6, 8))) / 3, model)
        optimizer.step()
    return [seen, side.snapshot(model)]


def accumulation_of_both_kinds(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    for syncs, step in ((True, 0), (False, 1), (False, 2), (True, 3), (True, 4)):
        side.set_sync(model, syncs)
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
    return side.snapshot(model)


def accumulation_of_different_units(side: Side) -> Any:
    """What was kept without a reduction is reduced by the next backward that reduces, also without a use for it."""
    model = seeded(Branches)
    side.shard_units(model, ("enter", "left", "right", "leave"))
    seen = []
    for step in range(2):
        model.zero_grad()
        with side.no_sync(model):
            side.backward(scalar(model(side.batch(step, 6, 8), "left")), model)
        side.backward(scalar(model(side.batch(20 + step, 6, 8), "right")), model)
        seen.append(side.snapshot(model))
    return seen


def zero_grad_that_keeps_tensors(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = SGD(model.parameters())
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(model)


def a_head_in_chunks(side: Side) -> Any:
    """In one backward, and each chunk in its own."""
    found = []
    for own_backward in (False, True):
        model = seeded(Apart)
        side.shard(model.body)
        side.shard([model.norm, model.head])
        side.shard(model)
        for step in range(2):
            out = model(side.batch(step, 6, 8))
            if own_backward:
                middle = out.detach().requires_grad_()
                for chunk in middle.chunk(2):
                    side.backward(scalar(model.head(chunk)), model)
                assert middle.grad is not None
                side.backward((out * middle.grad).sum(), model)
            else:
                side.backward(torch.stack([scalar(model.head(chunk)) for chunk in out.chunk(2)]).sum(), model)
        found.append(side.snapshot(model))
    return found
