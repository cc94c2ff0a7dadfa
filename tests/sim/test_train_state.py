"""What a checkpoint has of a model and its optimizer: saved under any strategy, loaded under any other, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.comm.communicator import Communicator
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.strategy import optimizer_for, parallelize
from lockstep.parallel.train_state import TrainState
from lockstep.testing.worlds import run_threads

Pair = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[nn.Module, list[dict[str, Any]], Communicator], Pair]


@pytest.fixture(autouse=True)
def _ranks_share_a_process() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Odd(nn.Module):
    """Tied weights, a frozen one, buffers, a parameter without gradient, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.norm = nn.BatchNorm1d(5)
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + self.frozen(block(x)).tanh()
        return self.head(self.norm(x))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, among them a frozen one, and the others."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.5},
    ]


def by_strategy(sharding: Any) -> Make:
    def make(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
        replica = parallelize(model, sharding, mesh=comm, fill=lambda _: None)
        return replica, optimizer_for(replica, torch.optim.AdamW, groups_of(replica), lr=0.1)

    return make


def with_torchs_optimizer(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
    model = parallelize(model, "full", mesh=comm)
    return model, torch.optim.AdamW(groups_of(model), lr=0.1)


def with_fsdp1(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
    wrapped = FullyShardedDataParallel(model, process_group=comm, use_orig_params=True)
    return wrapped, torch.optim.AdamW(groups_of(wrapped), lr=0.1)


def with_zero(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
    """Behind an averaging of gradients that it knows nothing of."""
    replica = DistributedDataParallel(model, process_group=comm)
    return replica, ShardedOptimizer(groups, torch.optim.AdamW, process_group=comm, lr=0.1)


def plain(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
    return model, torch.optim.AdamW(groups, lr=0.1)


MAKES: dict[str, tuple[Make, int]] = {
    "none": (by_strategy("none"), 2),
    "optimizer": (by_strategy("optimizer"), 3),
    "plain": (plain, 1),
    "full": (by_strategy("full"), 4),
    "gradients": (by_strategy("gradients"), 2),
    "zero": (with_zero, 4),
    "hybrid": (by_strategy("hybrid"), 2),
    "torch's optimizer": (with_torchs_optimizer, 3),
    "optimizer of two": (by_strategy("optimizer"), 2),
    "fsdp1": (with_fsdp1, 2),
}


def made(make: Make, comm: Communicator, seed: int) -> Pair:
    torch.manual_seed(seed)  # ranks take turns: each makes its own
    model = Odd()
    return make(model, groups_of(model), comm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {path: leaf for key, value in items for path, leaf in flat(value, f"{prefix}/{key}").items()}
    return {prefix: state}


def assert_same(one: Any, other: Any) -> None:
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        if isinstance(leaf, Tensor):
            assert leaf.dtype == other[path].dtype, path
            assert torch.equal(leaf, other[path]), path
        else:
            assert leaf == other[path], path


def everything(directory: Path) -> Any:
    loaded = Checkpointer(directory).load()
    assert loaded is not None
    return loaded.state


def first_save(comm: Communicator, models: list[nn.Module], make: Make, directory: Path) -> None:
    model, optimizer = make(models[comm.rank], groups_of(models[comm.rank]), comm)
    for _ in range(2):
        step(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.25
    Checkpointer(directory, comm).save(2, {"train": TrainState(model, optimizer)})


def load_and_save(
    comm: Communicator, models: list[nn.Module], make: Make, source: Path, directory: Path, whole: bool
) -> None:
    model, optimizer = make(models[comm.rank], groups_of(models[comm.rank]), comm)
    train = TrainState(model, optimizer)
    if whole:
        train.load_state_dict(everything(source)["train"])
    else:
        assert Checkpointer(source, comm).load({"train": train}) is not None
    with Checkpointer(directory, comm) as checkpointer:
        checkpointer.save(2, {"train": train})
        step(model, optimizer)  # it still trains
        checkpointer.save_async(3, {"train": train})


def odd_models(world_size: int, seed: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    first = Odd()
    return [copy.deepcopy(first) for _ in range(world_size)]


@pytest.mark.parametrize("first", ["none", "optimizer", "full"])
def test_any_strategy_goes_on_where_any_other_was(first: str, tmp_path: Path) -> None:
    make, world_size = MAKES[first]
    run_threads(world_size, first_save, odd_models(world_size, 0), make, tmp_path / "first")
    expected = everything(tmp_path / "first")
    states = expected["train"]["optimizer"]["state"]
    assert set(states["blocks.0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "unused.weight" not in states
    assert "frozen.weight" not in states
    assert [group["lr"] for group in expected["train"]["optimizer"]["param_groups"]] == [0.1, 0.25]
    for number, (name, (other, ranks)) in enumerate(MAKES.items()):
        target = tmp_path / name
        run_threads(ranks, load_and_save, odd_models(ranks, 1), other, tmp_path / "first", target, number % 3 == 0)
        again = Checkpointer(target).load(step=2)
        assert again is not None
        assert_same(again.state, expected)
        after = everything(target)["train"]
        assert float(after["optimizer"]["state"]["norm.weight"]["step"]) == 3.0, name
        assert not torch.equal(after["model"]["norm.weight"], expected["train"]["model"]["norm.weight"]), name
