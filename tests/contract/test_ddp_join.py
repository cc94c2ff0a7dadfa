"""Ranks that run out of inputs at different times: join() gives torch's weights on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_sides import Cases, Side, gradients, scalar, seeded, snapshot
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

CASES = Cases(__name__)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


def with_buffers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def uneven(side: Side, make: Any = mlp, batches: Any = lambda rank: 2 + 3 * rank, **options: Any) -> Any:
    """Rank r has `batches(r)` batches; all weights after it, and the gradients of the last step of each rank."""
    join = {key: options.pop(key) for key in list(options) if key in ("divide_by_initial_world_size", "enable")}
    model = seeded(make)
    ddp = side.wrap(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    last = None
    with ddp.join(**join):
        for step in range(batches(side.rank)):
            optimizer.zero_grad()
            scalar(ddp(side.batch(step, 6, 8))).backward()
            optimizer.step()
            last = gradients(model)
    return [last, snapshot(model)["state"]]


@CASES.add(2, 3, tolerance={3: 1e-5})
def uneven_inputs(side: Side) -> Any:
    return [
        uneven(side),
        uneven(side, batches=lambda rank: 6 - 2 * rank),
        uneven(side, batches=lambda rank: 4),
        uneven(side, batches=lambda rank: 0 if rank == 0 else 3),
        uneven(side, batches=lambda rank: 3 * rank, bucket_cap_mb=0.0002),
    ]


@CASES.add(2, 3, tolerance={3: 1e-5})
def divided_by_those_that_are_left(side: Side) -> Any:
    return [
        uneven(side, divide_by_initial_world_size=False),
        uneven(side, batches=lambda rank: 6 - 2 * rank, divide_by_initial_world_size=False),
        uneven(side, batches=lambda rank: 1 + rank, divide_by_initial_world_size=False, bucket_cap_mb=0.0002),
    ]


@CASES.add(2)
def not_enabled(side: Side) -> Any:
    return uneven(side, batches=lambda rank: 3, enable=False)


@CASES.add(2, 3, tolerance={3: 1e-5})
def with_batch_norm(side: Side) -> Any:
    return [
        uneven(side, with_buffers),
        uneven(side, with_buffers, batches=lambda rank: 6 - 2 * rank),
        uneven(side, with_buffers, forward_sync_buffers=False),
    ]


@CASES.add(2)
def with_accumulation(side: Side) -> Any:
    model = seeded(with_buffers)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + 2 * side.rank):
            with ddp.no_sync():
                scalar(ddp(side.batch(step, 6, 8))).backward()
            scalar(ddp(side.batch(10 + step, 6, 8))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model)["state"]


@CASES.add(2)
def with_unused_parameters(side: Side) -> Any:
    """Without momentum: a joined rank of torch goes on telling what it used last, so others get 0 for None."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
            return self.layers[use](self.layers[0](x))

    model = seeded(Half)
    ddp = side.wrap(model, torch_only={"find_unused_parameters": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + 2 * side.rank):
            optimizer.zero_grad()
            scalar(ddp(side.batch(step, 6, 8), 1 + (step + side.rank) % 2)).backward()
            optimizer.step()
    return snapshot(model)["state"]


@CASES.add(2, 3, tolerance={3: 1e-5})
def with_a_hook(side: Side) -> Any:
    """A joined rank runs the hook too, on zeros."""
    found = []
    for hook in (default_hooks.fp16_compress_hook, default_hooks.allreduce_hook):
        model = seeded(mlp)
        ddp = side.wrap(model, bucket_cap_mb=0.0002)
        ddp.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 + 2 * side.rank):
                optimizer.zero_grad()
                scalar(ddp(side.batch(step, 6, 8))).backward()
                optimizer.step()
        found.append(snapshot(model)["state"])
    return found


@CASES.add(2, 3, tolerance=1e-6)
def with_sparse_gradients(side: Side) -> Any:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4, sparse=True)
            self.out = nn.Linear(4, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.table(tokens).sum(1)).tanh()

    model = seeded(Table)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 + side.rank):
            optimizer.zero_grad()
            scalar(ddp(side.tokens(step, 7, 3, 2))).backward()
            optimizer.step()
    return snapshot(model)["state"]


@CASES.add(2)
def gradients_of_a_joined_rank_stay(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    held: list[Any] = []
    with ddp.join():
        for step in range(1 + 2 * side.rank):
            model.zero_grad()
            scalar(ddp(side.batch(step, 6, 8))).backward()
            held = [(param.grad, param.grad.clone()) for param in model.parameters()]
    return [all(torch.equal(grad, values) for grad, values in held), gradients(model) if side.rank == 1 else None]


@CASES.add(2)
def ends_early_on_request(side: Side) -> Any:
    model = seeded(mlp)
    ddp = side.wrap(model)
    steps = 0
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in range(2 + 2 * side.rank):
                scalar(ddp(side.batch(step, 6, 8))).backward()
                steps += 1
    except RuntimeError as error:
        return [steps, str(error)]
    return "nothing was raised"


@CASES.add(2)
def trains_on_after_join(side: Side) -> Any:
    model = seeded(with_buffers)
    ddp = side.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for epoch in range(3):
        with ddp.join(divide_by_initial_world_size=epoch == 1):
            for step in range(1 + (side.rank + epoch) % 2):
                optimizer.zero_grad()
                scalar(ddp(side.batch(10 * epoch + step, 6, 8))).backward()
                optimizer.step()
        optimizer.zero_grad()
        scalar(ddp(side.batch(50 + epoch, 6, 8))).backward()
        optimizer.step()
        seen.append(snapshot(model))
    return seen


class Counter(Joinable):
    """Counts how many ranks called it, each time."""

    class Hook(JoinHook):
        def __init__(self, counter: Counter) -> None:
            self.counter = counter

        def main_hook(self) -> None:
            dist.all_reduce(torch.zeros(1))

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[float] = []

    def __call__(self) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        mine = torch.ones(1)
        dist.all_reduce(mine)
        self.counts.append(mine.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Counter.Hook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@CASES.add(2, 3, tolerance={3: 1e-5})
def together_with_others(side: Side) -> Any:
    """torch's Join over two wrapped models and a class of the user's."""
    first, second = seeded(mlp), seeded(with_buffers, 1)
    one, two, counter = side.wrap(first), side.wrap(second), Counter()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with Join([counter, one, two], divide_by_initial_world_size=False):
        for step in range(1 + 2 * side.rank):
            optimizer.zero_grad()
            counter()
            # one after the other, in the order of the joinables: so a joined rank mirrors them
            scalar(one(side.batch(step, 6, 8))).backward()
            scalar(two(side.batch(20 + step, 6, 8))).backward()
            optimizer.step()
    return [counter.counts, snapshot(first)["state"], snapshot(second)["state"]]


@CASES.add(2)
def what_join_asks(side: Side) -> Any:
    ddp = side.wrap(seeded(mlp))
    hook = ddp.join_hook(divide_by_initial_world_size=True)
    return [
        isinstance(ddp, Joinable),
        isinstance(hook, JoinHook),
        str(ddp.join_device),
        ddp.join_process_group is dist.group.WORLD,
    ]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
