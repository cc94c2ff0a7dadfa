"""When gradients are synchronised, what they are then, and whose memory they live in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot
from torch import Tensor, nn

CASES = Cases(__name__)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


def start(
    side: Side, make: Callable[[], nn.Module] = mlp, **kwargs: Any
) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = seeded(make)
    return model, side.wrap(model, **kwargs), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(side: Side, ddp: Any, step: int, micro: int = 0) -> Tensor:
    return scalar(ddp(side.batch(100 * micro + step, 6, 8)))


# ------------------------------------------------------------------ no_sync


def accumulate(side: Side, **kwargs: Any) -> Any:
    model, ddp, optimizer = start(side, **kwargs)
    local = []
    for step in range(5):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss(side, ddp, step, 1).backward()
            loss(side, ddp, step, 2).backward()
        local.append(gradients(model))
        loss(side, ddp, step, 3).backward()
        side.end_backward(model)
        optimizer.step()
    return [local, snapshot(model)]


@CASES.add(1, 2, 3, 4)
def accumulated_under_no_sync(side: Side) -> Any:
    return accumulate(side)


@CASES.add(2, tolerance=1e-6)  # torch adds local gradients that are divided already, ours divides the sum
def accumulated_in_views(side: Side) -> Any:
    return accumulate(side, gradient_as_bucket_view=True)


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def accumulated_by_hand(side: Side) -> Any:
    return accumulate(side)


@CASES.add(2, 3, tolerance=1e-6)
def accumulated_with_synchronisation_each_time(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    seen = []
    for step in range(4):
        if step != 2:
            optimizer.zero_grad()
        for micro in range(3):
            loss(side, ddp, step, micro).backward()
            seen.append(gradients(model))
        optimizer.step()
    return [seen, snapshot(model)]


@CASES.add(2, against="plain", tolerance=1e-6)
def only_no_sync_for_several_steps(side: Side) -> Any:
    model, ddp, _ = start(side)
    with ddp.no_sync():
        for step in range(3):
            loss(side, ddp, step).backward()
    local = gradients(model)
    loss(side, ddp, 3).backward()
    side.end_backward(model)
    return [local, gradients(model)]


@CASES.add(2, against="plain", tolerance=1e-6)
def switched_on_after_the_forward(side: Side) -> Any:
    """build-nanogpt issue 30: the flag is set between forward and backward. Torch leaves gradients local there."""
    model, ddp, optimizer = start(side)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            ddp.require_backward_grad_sync = False
            value = loss(side, ddp, step, micro)
            ddp.require_backward_grad_sync = micro == 2
            value.backward()
        side.end_backward(model)
        optimizer.step()
    return snapshot(model)


@CASES.add(2, against="plain", tolerance=1e-6)
def switched_off_after_the_forward(side: Side) -> Any:
    model, ddp, _ = start(side)
    value = loss(side, ddp, 0)
    with ddp.no_sync():
        value.backward()
    side.end_backward(model)
    return gradients(model)


@CASES.add(2)
def flag_is_restored(side: Side) -> Any:
    _, ddp, _ = start(side)
    seen = [ddp.require_backward_grad_sync]
    with ddp.no_sync():
        seen.append(ddp.require_backward_grad_sync)
        with ddp.no_sync():
            seen.append(ddp.require_backward_grad_sync)
        seen.append(ddp.require_backward_grad_sync)
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    return [*seen, ddp.require_backward_grad_sync, ddp.require_forward_param_sync]


@CASES.add(2)
def no_sync_with_buffers(side: Side) -> Any:
    """After a forward without synchronisation torch does not broadcast buffers before the next one."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5)))
    ddp = side.wrap(model)
    seen = []
    for step in range(4):
        with ddp.no_sync():
            loss(side, ddp, step, 1).backward()
        seen.append(snapshot(model)["state"])
        loss(side, ddp, step).backward()
        seen.append((snapshot(model), ddp.require_forward_param_sync))
    return seen


# ------------------------------------------------------------------ several forwards or backwards


@CASES.add(2)
def two_forwards_one_backward(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    for step in range(4):
        optimizer.zero_grad()
        (loss(side, ddp, step, 1) + 2 * loss(side, ddp, step, 2)).backward()
        optimizer.step()
    return snapshot(model)


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def two_forwards_then_two_backwards(side: Side) -> Any:
    """Torch reduces the second backward's gradients wrongly here."""
    model, ddp, optimizer = start(side)
    for step in range(4):
        optimizer.zero_grad()
        first, second = loss(side, ddp, step, 1), loss(side, ddp, step, 2)
        first.backward()
        side.end_backward(model)
        second.backward()
        side.end_backward(model)
        optimizer.step()
    return snapshot(model)


@CASES.add(2, against="plain", tolerance=1e-6)
def backwards_in_the_other_order(side: Side) -> Any:
    model, ddp, _ = start(side)
    for step in range(3):
        losses = [loss(side, ddp, step, micro) for micro in range(3)]
        for value in reversed(losses):
            value.backward()
            side.end_backward(model)
    return gradients(model)


@CASES.add(2, against="plain", tolerance=1e-6)
def graph_is_retained(side: Side) -> Any:
    model, ddp, _ = start(side)
    seen = []
    for step in range(3):
        value = loss(side, ddp, step)
        value.backward(retain_graph=True)
        side.end_backward(model)
        seen.append(gradients(model))
        value.backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def forward_without_backward(side: Side) -> Any:
    """A forward with gradient whose loss is thrown away, on one rank only."""
    model, ddp, optimizer = start(side)
    for step in range(4):
        optimizer.zero_grad()
        if side.rank == step % 2:
            loss(side, ddp, step, 5)
        loss(side, ddp, step).backward()
        side.end_backward(model)
        optimizer.step()
    return snapshot(model)


# ------------------------------------------------------------------ the caller's gradients


def memory(grads: dict[str, Tensor | None]) -> list[Tensor]:
    return [grad.clone() for grad in grads.values() if grad is not None]


@CASES.add(2)
def kept_gradients_never_change(side: Side) -> Any:
    """Objects, views, detached tensors and arrays of old gradients: a later step must leave them alone."""
    model, ddp, optimizer = start(side)
    holds: list[Callable[[Tensor], Any]] = [
        lambda grad: grad,
        lambda grad: grad.view(-1),
        lambda grad: grad.detach(),
        lambda grad: grad[:1],
        lambda grad: grad.detach().numpy(),
        lambda grad: torch.utils.dlpack.from_dlpack(grad.detach()),
        lambda grad: np.asarray(memoryview(grad.detach().numpy())),
    ]
    kept: list[Any] = []
    values: list[Tensor] = []
    for step in range(2 * len(holds)):
        optimizer.zero_grad()
        loss(side, ddp, step).backward()
        hold = holds[step % len(holds)]
        # one parameter's gradient only, in turns: the others of the bucket are not kept
        param = list(model.parameters())[step % 4]
        kept.append(hold(param.grad))
        values.append(torch.as_tensor(kept[-1]).clone())
        optimizer.step()
    changed = [i for i, (k, v) in enumerate(zip(kept, values, strict=True)) if not torch.equal(torch.as_tensor(k), v)]
    return [changed, values, snapshot(model)]


@CASES.add(2)
def kept_beside_gradients_that_stay(side: Side) -> Any:
    """Some gradients go on accumulating; others of the same bucket are held by the caller and set to None."""
    seen = []
    for kept in ([0], [2], [1, 2], [0, 3]):
        model, ddp, _ = start(side)
        held: list[tuple[Tensor, Tensor]] = []
        for step in range(5):
            loss(side, ddp, step).backward()
            seen.append(gradients(model))
            for index in kept:
                param = list(model.parameters())[index]
                held.append((param.grad, param.grad.clone()))
                param.grad = None
        seen.append([torch.equal(grad, values) for grad, values in held])
    return seen


@CASES.add(2)
def kept_gradients_of_accumulation(side: Side) -> Any:
    """A copy of the list of gradients, taken between micro-steps and used after."""
    model, ddp, optimizer = start(side)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss(side, ddp, step, 1).backward()
        first = [p.grad for p in model.parameters()]
        values = [grad.clone() for grad in first]
        optimizer.zero_grad()
        loss(side, ddp, step, 2).backward()
        seen.append([torch.equal(a, b) for a, b in zip(first, values, strict=True)])
        seen.append([param.grad is grad for param, grad in zip(model.parameters(), first, strict=True)])
    return [seen, snapshot(model)]


@CASES.add(2)
def gradients_set_by_the_caller(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    for step in range(5):
        for i, param in enumerate(model.parameters()):
            param.grad = None if (i + step) % 3 == 0 else torch.full_like(param, 0.5)
        loss(side, ddp, step).backward()
        optimizer.step()
    return snapshot(model)


@CASES.add(2)
def gradients_edited_in_place(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    norms = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 1)
        (loss(side, ddp, step) * 1024).backward()
        for param in model.parameters():
            param.grad.div_(1024)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.step()
    return [norms, snapshot(model)]


@CASES.add(2)
def gradients_detached_and_replaced(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    for step in range(6):
        loss(side, ddp, step).backward()
        optimizer.step()
        for i, param in enumerate(model.parameters()):
            if i % 3 == 0:
                param.grad.detach_().zero_()
            elif i % 3 == 1:
                param.grad = torch.zeros_like(param.grad)
            else:
                param.grad.data = torch.zeros_like(param.grad)
    return snapshot(model)


@CASES.add(2)
def gradients_moved_then_dropped(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    for step in range(6):
        loss(side, ddp, step).backward()
        optimizer.step()
        for i, param in enumerate(model.parameters()):
            param.grad.data = torch.zeros_like(param.grad)
            if (i + step) % 3:
                param.grad = None if (i + step) % 3 == 1 else torch.ones_like(param)
    return snapshot(model)


@CASES.add(2)
def loss_scaler(side: Side) -> Any:
    model, ddp, optimizer = start(side)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(side, ddp, step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), snapshot(model)]


@CASES.add(2)
def two_optimizers_for_two_halves(side: Side) -> Any:
    """Only one half is zeroed in each step, so the other half goes on accumulating."""
    model, ddp, _ = start(side)
    halves = [torch.optim.Adam(layer.parameters(), lr=1e-2) for layer in (model[0], model[2])]
    for step in range(6):
        halves[step % 2].zero_grad(set_to_none=step % 4 < 2)
        loss(side, ddp, step).backward()
        halves[step % 2].step()
    return snapshot(model)


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_or_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
