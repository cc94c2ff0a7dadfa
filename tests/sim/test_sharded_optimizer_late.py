"""Parameters that come after `step` has returned: every reader waits for them, and training is the same bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import ConfigError, PeerLost
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.testing.worlds import run_threads
from optimizer_cases import same_tensors, weights

ADAMW = torch.optim.AdamW


@final
class AsLateAsCanBe(TransportLayer):
    """Gathers updated parameters when somebody waits for them, and not before; or loses a rank instead."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.gathers: list[Gather] = []
        self.loses_a_rank = False

    def submit(self, op: CommOp) -> Work:
        if op.label != "optimizer.params":
            return self.inner.submit(op)
        self.gathers.append(Gather(self, op))
        return self.gathers[-1]

    def over(self, inner: Transport) -> TransportLayer:
        return AsLateAsCanBe(inner)

    @property
    def under_way(self) -> int:
        return sum(not gather.is_done() for gather in self.gathers)


@final
class Gather(Work):
    def __init__(self, layer: AsLateAsCanBe, op: CommOp) -> None:
        self._layer, self._op, self._done = layer, op, False

    def wait(self, timeout_s: float | None = None) -> None:
        if self._layer.loses_a_rank:
            raise PeerLost("rank 1 is gone", 1)
        if not self._done:
            self._layer.inner.submit(self._op).wait(timeout_s)
            self._done = True

    def is_done(self) -> bool:
        return self._done


class Keeping(nn.Module):
    """Reads its weight where it has put it aside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 400).view(8, 50))
        self.kept = [self.weight]

    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.kept[0]).tanh() @ self.kept[0].t()


class Net(nn.Module):
    """A module that reads another's weight itself, one that has put its own aside, tied and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.attention = nn.MultiheadAttention(8, 2)  # reads out_proj.weight and never calls out_proj
        self.keeping = Keeping()
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embedding(rows)
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.frozen(self.norm(self.keeping(hidden) * self.scale))
        return self.head(hidden).square().mean()


with torch.random.fork_rng():
    torch.manual_seed(0)
    NET = Net()


def rows(step: int, rank: int) -> Tensor:
    return torch.randint(0, 40, (7, 2), generator=torch.Generator().manual_seed(100 * step + rank))


def make(comm: Communicator, joined: bool, late: bool) -> tuple[Any, Net, Any, AsLateAsCanBe]:
    layer = AsLateAsCanBe(comm.transport)
    over = Communicator(layer)
    model = copy.deepcopy(NET)
    ddp = lockstep.DistributedDataParallel(model, process_group=over, bucket_cap_mb=0.001)
    group: dict[str, Any] = {"ddp": ddp} if joined else {"process_group": over}
    group |= {"overlap_forward": ddp if joined else model} if late else {}
    optimizer = ShardedOptimizer(model.named_parameters(), ADAMW, lr=0.01, **group)
    return ddp, model, optimizer, layer


def train(comm: Communicator, joined: bool, late: bool) -> tuple[list[Tensor], list[Tensor]]:
    ddp, model, optimizer, layer = make(comm, joined, late)
    losses = []
    for step in range(4):
        loss = ddp(rows(step, comm.rank))
        assert layer.under_way == 0
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (layer.under_way > 0) == late
    optimizer.step()  # without a forward in between, and without gradients
    return losses, weights(model)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_is_the_same(joined: bool, world_size: int) -> None:
    expected = run_threads(world_size, train, joined, late=False)
    for found, known in zip(run_threads(world_size, train, joined, late=True), expected, strict=True):
        assert all(same_tensors(*pair) for pair in zip(found, known, strict=True))


def loaded(model: Net) -> Iterable[Tensor]:
    """What is loaded stays: no gather of the step before writes over it."""
    model.load_state_dict(NET.state_dict())
    return model.parameters()


def by_name(model: Net) -> list[Tensor]:
    modules = {name.rpartition(".")[0]: name for name, _ in model.named_parameters()}
    assert modules
    return [getattr(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n, _ in NET.named_parameters()]


READERS: dict[str, Callable[[Net], Iterable[Tensor]]] = {
    "parameters": lambda model: model.parameters(),
    "attributes": by_name,
    "state_dict": lambda model: [model.state_dict()[name] for name, _ in NET.named_parameters()],
    "copy": lambda model: copy.deepcopy(model).parameters(),
    "load_state_dict": loaded,
    "out_proj": lambda model: [model.attention.out_proj.weight],
    "forward of a part": lambda model: [model.frozen(model.norm(torch.ones(8) * model.scale))],
}


def read(comm: Communicator, late: bool) -> dict[str, list[Tensor]]:
    found = {}
    for name, reader in READERS.items():
        ddp, model, optimizer, layer = make(comm, True, late)
        ddp(rows(0, comm.rank)).backward()
        held: list[Tensor] = list(model.parameters())
        optimizer.step()
        before = [param.detach().clone() for param in held]
        found[name] = [tensor.detach().clone() for tensor in reader(model)]
        optimizer.wait()
        assert layer.under_way == 0
        assert type(model._parameters) is dict
        if late and name != "load_state_dict":
            assert not same_tensors(before, held), "nothing was late"
        found[name + ", afterwards"] = [param.detach().clone() for param in held]
    return found


def test_every_way_to_read_a_parameter() -> None:
    expected, found = run_threads(2, read, late=False), run_threads(2, read, late=True)
    for rank in range(2):
        assert found[rank].keys() == expected[rank].keys()
        assert [name for name in found[rank] if not same_tensors(found[rank][name], expected[rank][name])] == []


def replaced(comm: Communicator) -> None:
    """A parameter that is put in or taken out meanwhile stays so."""
    ddp, model, optimizer, _ = make(comm, True, late=True)
    ddp(rows(0, comm.rank)).backward()
    optimizer.step()
    model.extra = nn.Parameter(torch.ones(3))
    del model.scale
    optimizer.wait()
    assert "extra" in dict(model.named_parameters())
    assert not hasattr(model, "scale")


def test_a_module_that_is_changed_meanwhile() -> None:
    run_threads(2, replaced)


def lost(comm: Communicator) -> None:
    """Whoever needs a parameter that did not come is told, each time."""
    ddp, model, optimizer, layer = make(comm, True, late=True)
    ddp(rows(0, comm.rank)).backward()
    optimizer.step()
    layer.loses_a_rank = True
    for reader in (lambda: ddp(rows(1, comm.rank)), model.state_dict, optimizer.step, lambda: list(model.parameters())):
        with pytest.raises(PeerLost):
            reader()


def test_a_rank_that_is_lost_meanwhile() -> None:
    run_threads(2, lost)


def two_optimizers(comm: Communicator) -> list[Tensor]:
    """They share modules: each has some of their parameters."""
    layer = AsLateAsCanBe(comm.transport)
    model = copy.deepcopy(NET)
    named = list(model.named_parameters())
    optimizers = [
        ShardedOptimizer(part, ADAMW, lr=0.01, process_group=Communicator(layer), overlap_forward=model)
        for part in (named[::2], named[1::2])
    ]
    order = sorted(["weight", "bias"], key=lambda name: f"norm.{name}" in dict(named[::2]))  # the second's first
    for step in range(3):
        model(rows(step, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        read = [getattr(model.norm, name).detach().clone() for name in order]
        optimizers[1].wait()
        assert same_tensors(read, [getattr(model.norm, name).detach() for name in order])
    return weights(model)


def on_one() -> list[Tensor]:
    model = copy.deepcopy(NET)
    optimizer = ADAMW(model.parameters(), lr=0.01, fused=True)
    for step in range(3):
        model(rows(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_two_optimizers_of_one_module() -> None:
    expected = on_one()
    assert all(same_tensors(found, expected) for found in run_threads(2, two_optimizers))


def of_another_module(comm: Communicator) -> None:
    model = copy.deepcopy(NET)
    with pytest.raises(ConfigError, match=r"overlap_forward: .* is no parameter of this module"):
        ShardedOptimizer(model.parameters(), ADAMW, process_group=comm, overlap_forward=model.attention)


def test_a_parameter_that_nothing_would_wait_for() -> None:
    run_threads(2, of_another_module)
