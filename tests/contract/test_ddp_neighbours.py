"""Other code around the wrapper: hooks of users, wrappers that share parameters, checkpoints around it, its own end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CASES = Cases(__name__)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


class WithEncoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).tanh())


def two_wrappers(side: Side) -> tuple[list[nn.Module], list[Any], torch.optim.Optimizer]:
    """An actor and a critic with one encoder, each in a wrapper of its own."""
    torch.manual_seed(0)
    encoder = nn.Linear(8, 5)
    models: list[nn.Module] = [WithEncoder(encoder), WithEncoder(encoder)]
    wrapped = [side.wrap(model) for model in models]
    params = {id(param): param for model in models for param in model.parameters()}
    return models, wrapped, torch.optim.SGD(list(params.values()), lr=0.1)


@CASES.add(2, 3)
def one_loss_over_two_wrappers_that_share(side: Side) -> Any:
    models, (actor, critic), optimizer = two_wrappers(side)
    for step in range(4):
        optimizer.zero_grad()
        (scalar(actor(side.batch(step, 6, 8))) + scalar(critic(side.batch(20 + step, 6, 8)))).backward()
        optimizer.step()
    return [snapshot(model) for model in models]


@CASES.add(2, against="plain", tolerance=1e-6)
def losses_in_turns_over_two_wrappers_that_share(side: Side) -> Any:
    models, wrapped, optimizer = two_wrappers(side)
    for step in range(6):
        optimizer.zero_grad()
        scalar(wrapped[step % 2](side.batch(step, 6, 8))).backward()
        side.end_backward(models[step % 2])
        optimizer.step()
    return [snapshot(model) for model in models]


@CASES.add(2)
def one_module_in_two_wrappers(side: Side) -> Any:
    """The second wrapper is used, the first still lives."""
    model = seeded(mlp)
    first, second = side.wrap(model), side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        scalar((first if step == 3 else second)(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(model)


@CASES.add(2)
def hooks_after_accumulation(side: Side) -> Any:
    """They see this rank's whole gradient, whether they were registered before or after wrapping."""
    model = seeded(mlp)
    seen: list[Tensor] = []

    def look(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.clone())

    model[0].weight.register_post_accumulate_grad_hook(look)
    ddp = side.wrap(model)
    model[2].weight.register_post_accumulate_grad_hook(look)
    for step in range(4):
        model.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
    return [seen, gradients(model)]


@CASES.add(2)
def checkpoint_around_the_wrapper(side: Side) -> Any:
    found = []
    for reentrant in (False, True):
        model = seeded(lambda: nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)))
        ddp = side.wrap(model)
        for step in range(4):
            model.zero_grad()
            x = side.batch(step, 6, 8).requires_grad_()
            scalar(checkpoint(ddp, x, use_reentrant=reentrant)).backward()
        found.append(snapshot(model))
    return found


@CASES.add(2, against="plain", tolerance=1e-6)
def gradients_saved_by_a_graph(side: Side) -> Any:
    """A gradient used in another computation whose own backward comes after the next step."""
    model = seeded(mlp)
    ddp = side.wrap(model)
    weights = torch.ones(9, 8, requires_grad=True)
    late: list[Tensor] = []
    for step in range(3):
        model.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        side.end_backward(model)
        late.append((weights * model[0].weight.grad).sum())
    found = []
    for loss in late:
        found.append(torch.autograd.grad(loss, weights)[0])
    return [found, gradients(model)]


@CASES.add(2)
def backward_in_another_thread(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    for step in range(3):
        model.zero_grad()
        loss = scalar(ddp(side.batch(step, 6, 8)))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    return gradients(model)


@CASES.add(2)
def several_losses_in_one_call(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    for step in range(3):
        model.zero_grad()
        losses = [scalar(ddp(side.batch(10 * step + i, 6, 8))) for i in range(3)]
        torch.autograd.backward(losses, [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0.5)])
    return gradients(model)


@CASES.add(2)
def lbfgs(side: Side) -> Any:
    """Several forwards and backwards per step, as many on every rank."""
    model = seeded(mlp)
    ddp = side.wrap(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0)

    for step in range(2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = scalar(ddp(side.batch(step, 6, 8)))
            loss.backward()
            return loss.detach() * 0 + 1  # a number that is the same on every rank

        optimizer.step(closure)
    return snapshot(model)


@CASES.add(2)
def wrapper_forward_and_module_forward_in_one_loss(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    for step in range(3):
        model.zero_grad()
        (scalar(ddp(side.batch(step, 6, 8))) + scalar(model(side.batch(20 + step, 6, 8)))).backward()
    return gradients(model)


@CASES.add(2, against="plain", tolerance=1e-6)
def every_optimizer(side: Side) -> Any:
    """Those that keep state of gradients too."""
    makers: list[Callable[..., torch.optim.Optimizer]] = [
        torch.optim.Adam,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
    ]
    found = []
    for make in makers:
        model = seeded(mlp)
        ddp = side.wrap(model)
        optimizer = make(model.parameters(), lr=1e-3, eps=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            scalar(ddp(side.batch(step, 6, 8))).backward()
            side.end_backward(model)
            optimizer.step()
        found.append(snapshot(model)["state"])
    return found


@CASES.add(1, against="plain")
def its_end(side: Side) -> Any:
    """A wrapper that is deleted goes at once, and its parameters have no hooks left."""
    model = seeded(mlp)
    found: list[Any] = []
    for _ in range(2):
        ddp = side.wrap(model)
        scalar(ddp(side.batch(0, 6, 8))).backward()
        gone = weakref.ref(ddp)
        reducer = weakref.ref(getattr(ddp, "reducer", ddp))
        del ddp
        gc.collect()
        found.append([gone() is None, reducer() is None])
        model.zero_grad()
    scalar(model(side.batch(1, 6, 8))).backward()
    hooks = [len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()]
    return [found, [count == 0 for count in hooks], gradients(model)]


@CASES.add(2)
def many_steps_leave_nothing(side: Side) -> Any:
    """The number of tensors alive is the same after 3 steps and after 13."""
    model = seeded(mlp)
    ddp = side.wrap(model)
    counts = []
    for step in range(13):
        model.zero_grad()
        x = torch.ones(6, 8, requires_grad=step % 2 == 0)
        with ddp.no_sync():
            scalar(ddp(x)).backward()
        scalar(ddp(x)).backward()
        del x
        if step in (2, 12):
            gc.collect()
            counts.append(sum(1 for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)))
    return counts[0] == counts[1]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_or_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
