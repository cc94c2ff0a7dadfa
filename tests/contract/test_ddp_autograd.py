"""Whatever a module returns, however its graph is walked: gradients are torch's, or the true mean."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import pickle
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

CASES = Cases(__name__)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Record:
    left: Tensor
    right: Tensor
    note: str = "text"


class Holder:
    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left
        self.inner = types.SimpleNamespace(right=right)


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left
        self.right = right


class Heads(nn.Module):
    """Two heads, returned in one of many shapes."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 5)
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 2)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.pack(self.left(h), self.right(h))


PACKS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda o: (o[0], o[1])),
    "list": (lambda a, b: [a, b], lambda o: (o[0], o[1])),
    "dict": (lambda a, b: {"a": a, 3: b, "none": None}, lambda o: (o["a"], o[3])),
    "ordered": (lambda a, b: collections.OrderedDict(a=a, b=b), lambda o: (o["a"], o["b"])),
    "default": (lambda a, b: collections.defaultdict(list, a=[a], b=[b]), lambda o: (o["a"][0], o["b"][0])),
    "nested": (lambda a, b: {"x": [(a, "s"), {"y": (b, 1)}]}, lambda o: (o["x"][0][0], o["x"][1]["y"][0])),
    "namedtuple": (Pair, lambda o: (o.left, o.right)),
    "dataclass": (Record, lambda o: (o.left, o.right)),
    "object": (Holder, lambda o: (o.left, o.inner.right)),
    "slots": (Slotted, lambda o: (o.left, o.right)),
    "deque": (lambda a, b: collections.deque([a, b]), lambda o: (o[0], o[1])),
    "closure": (lambda a, b: lambda: (a, b), lambda o: o()),
    "generator": (lambda a, b: (t for t in (a, b)), lambda o: tuple(o)),
}


@CASES.add(2, 3)
def outputs(side: Side) -> Any:
    found = {}
    for name, (pack, unpack) in PACKS.items():
        found[name] = train(side, lambda p=pack: Heads(p), steps=3, loss_of=lambda out, u=unpack: scalar(list(u(out))))
    return found


@CASES.add(2)
def types_of_outputs_are_kept(side: Side) -> Any:
    kinds = []
    for pack, _ in PACKS.values():
        ddp = side.wrap(seeded(lambda p=pack: Heads(p)))
        kinds.append(type(ddp(side.batch(0, 6, 8))).__name__)
    return kinds


@CASES.add(2)
def loss_made_inside_and_kept_as_attribute(side: Side) -> Any:
    """Nothing with a gradient is returned; the loss is an attribute of the module."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)
            self.loss = torch.zeros(())

        def forward(self, x: Tensor) -> str:
            self.loss = scalar(self.layer(x))
            return "see .loss"

    model = seeded(Inside)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        ddp(side.batch(step, 6, 8))
        model.loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


class Returns(nn.Module):
    """Its own parameter, a view of it, and its own input are among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), self.weight, self.weight[0], x


@CASES.add(2)
def parameters_and_inputs_among_outputs(side: Side) -> Any:
    return train(side, Returns, loss_of=lambda out: scalar(out[:3]))


@CASES.add(2, against="plain", tolerance=1e-6)
def output_is_the_parameter(side: Side) -> Any:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self) -> Tensor:
            return self.weight

    model = seeded(Bare)
    ddp = side.wrap(model)
    for step in range(3):
        (ddp() * side.batch(step, 4)).sum().backward()
        side.end_backward(model)
    return gradients(model)


@CASES.add(2)
def outputs_changed_in_place(side: Side) -> Any:
    return train(side, lambda: nn.Linear(8, 3), loss_of=lambda out: scalar(out.mul_(2).add_(1)))


@CASES.add(2, against="plain", tolerance=1e-6)
def outputs_that_are_not_looked_into(side: Side) -> Any:
    """A plain object: its backward is noticed by the first gradient of a parameter, also the second and a late one."""
    model = seeded(lambda: Heads(Holder))
    ddp = side.wrap(model)
    seen = []
    for step in range(4):
        model.zero_grad()
        first, second = ddp(side.batch(step, 6, 8)), ddp(side.batch(10 + step, 6, 8))
        losses = [scalar([out.left, out.inner.right]) for out in (first, second)]
        for loss in losses if step % 2 else reversed(losses):
            loss.backward(retain_graph=True)
            side.end_backward(model)
        losses[0].backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def objects_and_unused_parameters(side: Side) -> Any:
    model = seeded(lambda: Heads(Holder))
    ddp = side.wrap(model)
    seen = []
    for step in range(4):
        model.zero_grad()
        out = ddp(side.batch(step, 6, 8))
        with ddp.no_sync():
            scalar(ddp(side.batch(20 + step, 6, 8)).left).backward()
        scalar(out.left if (side.rank + step) % 2 else out.inner.right).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


# ------------------------------------------------------------------ checkpoints


class Checkpointed(nn.Module):
    """`shared` layers stand in several segments and outside of any."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.reentrant = reentrant
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh() if self.shared else x.requires_grad_()
        x = checkpoint(lambda v: self.first(v).tanh(), x, use_reentrant=self.reentrant)
        x = checkpoint(lambda v: self.second(v).tanh(), x, use_reentrant=self.reentrant)
        if self.shared:
            x = checkpoint(lambda v: self.second(self.first(v)).tanh(), x, use_reentrant=self.reentrant)
            x = self.second(x).tanh()
        return self.third(x)


@CASES.add(2)
def checkpoints(side: Side) -> Any:
    return [train(side, lambda r=r: Checkpointed(r, shared=False)) for r in (True, False)]


@CASES.add(2)
def checkpoints_without_reentry_share_parameters(side: Side) -> Any:
    return train(side, lambda: Checkpointed(False, shared=True))


@CASES.add(2, 3, against="plain", tolerance=1e-6)
def checkpoints_with_reentry_share_parameters(side: Side) -> Any:
    return train(side, lambda: Checkpointed(True, shared=True), bucket_cap_mb=0.0002)


@CASES.add(2)
def checkpoints_with_reentry_as_torch_does_with_static_graph(side: Side) -> Any:
    return train(side, lambda: Checkpointed(True, shared=True), torch_only={"static_graph": True})


@CASES.add(2, against="plain", tolerance=1e-6)
def checkpoints_with_reentry_and_accumulation(side: Side) -> Any:
    model = seeded(lambda: Checkpointed(True, shared=True))
    ddp = side.wrap(model, bucket_cap_mb=0.0002)
    seen = []
    for step in range(4):
        model.zero_grad()
        with ddp.no_sync():
            scalar(ddp(side.batch(step, 6, 8))).backward()
        scalar(ddp(side.batch(10 + step, 6, 8))).backward()
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def sequential_checkpoints(side: Side) -> Any:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(8, 8)
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, 3, x.requires_grad_(), use_reentrant=True)

    return train(side, Stack)


# ------------------------------------------------------------------ autograd by hand


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


@CASES.add(2, against="plain", tolerance=1e-6)
def autograd_grad_stays_local(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    seen: list[Any] = []
    for step in range(4):
        model.zero_grad()
        x = side.batch(step, 6, 8).requires_grad_()
        loss = scalar(ddp(x))
        seen.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
        seen.append(torch.autograd.grad(loss, x, retain_graph=True))
        loss.backward(retain_graph=True)
        side.end_backward(model)
        seen.append(torch.autograd.grad(loss, x))
        seen.append(gradients(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def gradient_penalty(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x = side.batch(step, 6, 8).requires_grad_()
        out = ddp(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (scalar(out) + (slope.norm(2, dim=1) - 1).pow(2).mean()).backward()
        side.end_backward(model)
        optimizer.step()
    return snapshot(model)


@CASES.add(2, against="plain", tolerance=1e-6)
def backward_of_chosen_inputs(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    seen = []
    for step in range(4):
        model.zero_grad()
        chosen = [model[0].weight] if step % 2 else [model[2].bias, model[0].bias]
        scalar(ddp(side.batch(step, 6, 8))).backward(inputs=chosen)
        side.end_backward(model)
        seen.append(gradients(model))
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def backward_that_makes_a_graph(side: Side) -> Any:
    """create_graph=True: gradients have a graph of their own, and a second backward goes through them."""
    model = seeded(mlp)
    ddp = side.wrap(model)
    seen = []
    for step in range(3):
        model.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward(create_graph=True)
        side.end_backward(model)
        seen.append([p.grad.detach().clone() for p in model.parameters()])
        for param in model.parameters():
            param.grad = None
    return seen


@CASES.add(2, against="plain", tolerance=1e-6)
def two_losses_of_two_heads(side: Side) -> Any:
    """One forward, one backward per head: the second one also synchronises."""
    model = seeded(lambda: Heads(lambda a, b: (a, b)))
    ddp = side.wrap(model)
    for step in range(3):
        model.zero_grad()
        left, right = ddp(side.batch(step, 6, 8))
        scalar(left).backward(retain_graph=True)
        side.end_backward(model)
        scalar(right).backward()
        side.end_backward(model)
    return gradients(model)


# ------------------------------------------------------------------ hooks of the caller


@CASES.add(2)
def hooks_of_the_caller(side: Side) -> Any:
    model = seeded(mlp)
    calls: list[str] = []
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[0].bias.register_post_accumulate_grad_hook(lambda param: calls.append("before wrap"))
    ddp = side.wrap(model)
    model[2].weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    model[2].register_forward_hook(lambda module, args, out: out * 0.5)
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    ddp.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    ddp.register_forward_hook(lambda module, args, out: out + 1)
    ddp.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("wrapper"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        out = ddp(side.batch(step, 6, 8))
        out.register_hook(lambda grad: grad * 2)
        scalar(out).backward()
        optimizer.step()
    return [calls, snapshot(model)]


# ------------------------------------------------------------------ wrappers of wrappers


@CASES.add(2, tolerance=1e-6)
def wrapped_inside_a_wrapper(side: Side) -> Any:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.out = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(x))

    inner = side.wrap(seeded(mlp))
    model = seeded(lambda: Outer(inner))
    for param in inner.parameters():
        param.requires_grad_(True)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(ddp)


@CASES.add(2, 3)
def wrapper_of_a_wrapper(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(side.wrap(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
    return snapshot(ddp)


@CASES.add(2)
def wrapped_twice_in_turns(side: Side) -> Any:
    """The same module wrapped again after the first wrapper is gone."""
    model = seeded(mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        ddp = side.wrap(model)
        optimizer.zero_grad()
        scalar(ddp(side.batch(step, 6, 8))).backward()
        optimizer.step()
        del ddp
    return snapshot(model)


@CASES.add(2)
def copied_and_pickled(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    scalar(ddp(side.batch(0, 6, 8))).backward()
    found = []
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), _saved(ddp)):  # noqa: S301 - made in this line
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            scalar(twin(side.batch(step, 6, 8))).backward()
            optimizer.step()
        found.append([list(twin.state_dict()), type(twin.module).__name__, twin.dim, snapshot(twin)])
    return [*found, snapshot(ddp)]


def _saved(ddp: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@CASES.add(2)
def names_of_the_state(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    keys = list(ddp.state_dict())
    doubled = {name: value * 2 for name, value in ddp.state_dict().items()}
    ddp.load_state_dict(doubled)
    scalar(ddp(side.batch(0, 6, 8))).backward()
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.load_state_dict(model.state_dict())
    names = [name for name, _ in ddp.named_parameters()], [name for name, _ in ddp.named_modules()]
    return [keys, names, str(ddp.module), snapshot(ddp)]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_or_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
