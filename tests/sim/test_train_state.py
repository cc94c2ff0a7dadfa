"""What a checkpoint has of a model and its optimizer: saved under any strategy, loaded under any other, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import AnyTensor, held, is_dtensor
from lockstep.errors import CheckpointMismatch, ConfigError
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.strategy import optimizer_for, parallelize
from lockstep.parallel.train_state import OptimizerState, State, TrainState
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

Pair = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[[nn.Module, list[dict[str, Any]], Communicator], Pair]


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


def with_zero_in_copies(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
    """Ranks 0, 2 and 4 cut the optimizer into three; the others have copies of what these have, cut into two."""
    group = comm.split(comm.rank % 2, name="parity")
    assert group is not None
    return model, ShardedOptimizer(groups, torch.optim.AdamW, process_group=group, lr=0.1)


def plain(model: nn.Module, groups: list[dict[str, Any]], comm: Communicator) -> Pair:
    return model, torch.optim.AdamW(groups, lr=0.1)


MAKES: dict[str, tuple[Make, int]] = {
    "none": (by_strategy("none"), 2),
    "optimizer": (by_strategy("optimizer"), 3),
    "plain": (plain, 1),
    "full": (by_strategy("full"), 4),
    "gradients": (by_strategy("gradients"), 2),
    "zero": (with_zero, 4),
    "zero in copies": (with_zero_in_copies, 5),
    "hybrid": (by_strategy("hybrid"), 2),
    "torch's optimizer": (with_torchs_optimizer, 3),
    "optimizer of two": (by_strategy("optimizer"), 2),
    "fsdp1": (with_fsdp1, 2),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor | None = None) -> None:
    model(torch.arange(7) if inputs is None else inputs).square().sum().backward()
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


@pytest.mark.parametrize("first", ["none", "optimizer", "zero in copies", "full"])
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


# ------------------------------------------------------------------ every pair of strategies and numbers of ranks


def small() -> nn.Module:
    """Sizes that no number of ranks divides."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


_PAIRED: dict[str, Make] = {
    name: MAKES[name][0] for name in ("none", "optimizer", "gradients", "full", "zero", "fsdp1")
}


def values_of(number: int) -> State:
    """The whole state of a small model and its AdamW, other values for each number."""
    torch.manual_seed(number)
    model = small()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.1 + number)
    step(model, optimizer, torch.randn(3, 5))
    return copy.deepcopy(TrainState(model, optimizer).state_dict())


def save_values(comm: Communicator, models: list[nn.Module], make: Make, values: State, directory: Path) -> None:
    train = TrainState(*make(models[comm.rank], groups_of(models[comm.rank]), comm))
    train.load_state_dict(copy.deepcopy(values))
    Checkpointer(directory, comm).save(1, {"train": train})


def differences(comm: Communicator, models: list[nn.Module], make: Make, saved: dict[Path, State]) -> list[str]:
    """What this rank has of each checkpoint and is not in it, once it was loaded."""
    train = TrainState(*make(models[comm.rank], groups_of(models[comm.rank]), comm))
    found = []
    for directory, values in saved.items():
        assert Checkpointer(directory, comm).load({"train": train}) is not None
        expected, here = flat(values), flat(train.state_dict())
        assert expected.keys() == here.keys()
        for path, leaf in here.items():
            value = expected[path]
            mine = (
                [torch.equal(x, value[p.slices]) for p, x in held(leaf)]
                if isinstance(leaf, AnyTensor)
                else [leaf == value]
            )
            found += [] if all(mine) else [f"{path} of {directory.name}"]
    return found


def test_every_pair_of_strategies_and_numbers_of_ranks(tmp_path: Path) -> None:
    """Each of 24 kinds of runs, and one process alone, loads what each of the others has saved."""
    kinds = [(name, make, world_size) for name, make in _PAIRED.items() for world_size in (1, 2, 3, 4)]
    kinds.append(("plain", plain, 1))
    saved = {tmp_path / f"{name} of {ranks}": values_of(number) for number, (name, _, ranks) in enumerate(kinds)}
    first = small()
    for (_, make, ranks), (directory, values) in zip(kinds, saved.items(), strict=True):
        run_threads(ranks, save_values, [copy.deepcopy(first) for _ in range(ranks)], make, values, directory)
    for name, make, ranks in kinds:
        results = run_threads(ranks, differences, [copy.deepcopy(first) for _ in range(ranks)], make, saved)
        assert not any(results), f"{name} of {ranks}: {results}"


class Counting(torch.optim.SGD):
    """Keeps something of another shape than the parameter, too."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            state["step"] = state.get("step", torch.zeros(())) + 1
            state.setdefault("counts", param.new_zeros(3)).add_(2)


def go_on_beside(comm: Communicator, models: list[nn.Module], cls: Any, source: Path | None, target: Path) -> None:
    """Model and optimizer are saved one beside the other, without a TrainState; those loaded are saved again."""
    model = parallelize(models[comm.rank], "full", mesh=comm)
    state = {"model": model, "optimizer": cls(groups_of(model), lr=0.1)}
    if source is not None:
        assert Checkpointer(source, comm).load(state) is not None
        values = [value for entry in state["optimizer"].state.values() for value in entry.values()]
        assert all(is_dtensor(value) == (value.ndim > 0) for value in values)
        Checkpointer(target, comm).save(1, state)
    step(model, state["optimizer"])
    Checkpointer(target, comm).save(2, state)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam, Counting])
def test_torchs_optimizer_of_dtensors_is_saved_and_loaded_by_itself(cls: Any, tmp_path: Path) -> None:
    run_threads(3, go_on_beside, odd_models(3, 0), cls, None, tmp_path / "first")
    run_threads(2, go_on_beside, odd_models(2, 1), cls, tmp_path / "first", tmp_path / "second")
    again, after = state_of(tmp_path / "second", 1), everything(tmp_path / "second")
    assert_same(again, everything(tmp_path / "first"))
    assert {float(entry["step"]) for entry in after["optimizer"]["state"].values()} == {2.0}


# ------------------------------------------------------------------ where only the optimizer is cut


def cut_beside(comm: Communicator, models: list[nn.Module], is_cut: bool, source: Path | None, target: Path) -> int:
    """An optimizer that knows no names, saved and loaded without a TrainState. Returns: elements of state here."""
    model = models[comm.rank]
    make: Any = partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW, process_group=comm)
    state = {"model": model, "optimizer": (make if is_cut else torch.optim.AdamW)(model.parameters(), lr=0.1)}
    if source is None:
        step(model, state["optimizer"], torch.ones(3, 5))
    else:
        assert Checkpointer(source, comm).load(state) is not None
    Checkpointer(target, comm).save(1, state)
    return sum(value.numel() for entry in state["optimizer"].state.values() for value in entry.values() if value.ndim)


def test_cut_optimizer_is_saved_and_loaded_by_itself(tmp_path: Path) -> None:
    first = small()
    expected = None
    kinds = [(3, True), (2, True), (1, False), (4, True)]
    for number, (ranks, is_cut) in enumerate(kinds):
        models: list[nn.Module] = [copy.deepcopy(first) for _ in range(ranks)]
        source, target = (tmp_path / str(number - 1) if number else None), tmp_path / str(number)
        kept = run_threads(ranks, cut_beside, models, is_cut, source, target)
        assert sum(kept) == 2 * sum(param.numel() for param in first.parameters()), "each element is on one rank"
        expected = everything(target) if expected is None else expected
        assert_same(everything(target), expected)


class Loose(nn.Module):
    """Parameters that lie in memory otherwise than row by row, a scalar, an empty one, and one that is never used."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {"turned": (7, 9), "scalar": (), "none": (0, 3), "cube": (3, 5, 7)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))
        self.turned = nn.Parameter(torch.randn(9, 7, dtype=dtype).t())
        self.image = nn.Parameter(torch.randn(3, 4, 2, 5, dtype=dtype).to(memory_format=torch.channels_last))
        self.unused = nn.Parameter(torch.randn(6, dtype=dtype))

    def forward(self) -> Tensor:
        used = (self.turned, self.scalar, self.none, self.cube, self.image)
        return sum((p.float().sin() * (1 + i)).sum() for i, p in enumerate(used))  # type: ignore[return-value]


class Wide(torch.optim.Optimizer):
    """Of somebody else's: its state is wider than the parameters, and a number counts the steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    sums = state.setdefault("sums", torch.zeros_like(param, dtype=torch.float64))
                    state["count"] = state.get("count", 0) + 1
                    sums.add_(param.grad.double() / 3)
                    param.sub_((group["lr"] * sums).to(param.dtype))


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD without state": (torch.optim.SGD, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "Wide": (Wide, {"lr": 0.1}),
}


def train_loose(
    comm: Communicator, models: list[nn.Module], name: str, is_cut: bool, source: Path | None, target: Path
) -> None:
    """Go on from `source`, save that again, and after one more step."""
    model, (cls, kwargs) = models[comm.rank], OPTIMIZERS[name]
    params = model.parameters()
    optimizer = ShardedOptimizer(params, cls, process_group=comm, **kwargs) if is_cut else cls(params, **kwargs)
    state = {"train": TrainState(model, optimizer)}
    found = None if source is None else Checkpointer(source, comm).load(state)
    step = found.step if found else 0
    with Checkpointer(target, comm, keep=None) as checkpointer:
        checkpointer.save(step, state)
        model().backward()
        optimizer.step()
        checkpointer.save_async(step + 1, state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cut_optimizer_is_saved_where_it_is_and_loaded_by_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if name == "Wide" else torch.float32
    first, other = Loose(dtype), Loose(dtype)
    worlds = ((3, True), (2, True), (1, False), (5, True), (1, True))
    alone = train_alone(copy.deepcopy(first), name, len(worlds))
    source: Path | None = None
    for number, (world_size, is_cut) in enumerate(worlds):
        target = tmp_path / str(number)
        models = [copy.deepcopy(other if number else first) for _ in range(world_size)]
        run_threads(world_size, train_loose, models, name, is_cut, source, target)
        if source is not None:
            assert_same(state_of(target, number), state_of(source, number))
        found = state_of(target, number + 1)["train"]["model"]
        for fqn, expected in alone[number].items():
            torch.testing.assert_close(found[fqn], expected, msg=f"{fqn} after {number + 1} steps")
        source = target
    states = state_of(tmp_path / "4", 5)["train"]["optimizer"]["state"]
    assert "unused" not in states
    if name == "AdamW":
        assert states["image"]["exp_avg"].shape == (3, 4, 2, 5)
        assert states["scalar"]["max_exp_avg_sq"].shape == ()
        assert float(states["none"]["step"]) == 5.0
    if name == "Wide":
        assert states["cube"]["sums"].dtype == torch.float64
        assert states["cube"]["count"] == 5


def train_alone(model: nn.Module, name: str, steps: int) -> list[dict[str, Tensor]]:
    cls, kwargs = OPTIMIZERS[name]
    optimizer = cls(model.parameters(), **kwargs)
    found = []
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({fqn: param.detach().clone() for fqn, param in model.named_parameters()})
    return found


def state_of(directory: Path, step: int) -> Any:
    loaded = Checkpointer(directory).load(step=step)
    assert loaded is not None
    return loaded.state


def files_of_a_cut_optimizer(comm: Communicator, models: list[nn.Module], directory: Path) -> tuple[int, int]:
    model = models[comm.rank]
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=comm)
    model(torch.ones(1, 501)).sum().backward()
    optimizer.step()
    state = OptimizerState(model, optimizer)
    held_here = sum(tensor.numel() for entry in state.state_dict()["state"].values() for _, tensor in _held(entry))
    path = Checkpointer(directory, comm).save(1, {"optimizer": state})
    return held_here, (path / f"rank-{comm.rank:05}.safetensors").stat().st_size


def _held(entry: dict[str, Any]) -> list[tuple[Any, Tensor]]:
    return [piece for key in ("exp_avg", "exp_avg_sq") for piece in held(entry[key])]


def test_nothing_is_gathered_and_every_rank_writes_what_it_has(tmp_path: Path) -> None:
    model = nn.Linear(501, 99, bias=False)
    results = run_threads(4, files_of_a_cut_optimizer, [copy.deepcopy(model) for _ in range(4)], tmp_path)
    assert sum(numel for numel, _ in results) == 2 * 501 * 99
    assert all(numel < 2 * 501 * 25 and size < 4 * 2 * 501 * 26 for numel, size in results)


# ------------------------------------------------------------------ what does not fit


def test_what_does_not_fit_is_refused_before_anything_is_changed() -> None:
    torch.manual_seed(0)
    saved = Odd()
    optimizer = torch.optim.AdamW(groups_of(saved), lr=0.1)
    step(saved, optimizer)
    good = copy.deepcopy(TrainState(saved, optimizer).state_dict())

    def changed(change: Callable[[Any], Any]) -> Any:
        state = copy.deepcopy(good)
        change(state)
        return state

    cases: list[tuple[Callable[[Any], Any], str]] = [
        (lambda s: s.pop("optimizer"), "the state has no optimizer: it has model"),
        (lambda s: s["model"].pop("norm.bias"), "it lacks 'norm.bias'"),
        (lambda s: s["model"].update(new=torch.ones(1)), "it has 'new'"),
        (lambda s: s["model"].update({"norm.bias": torch.ones(4)}), r"'norm.bias' is \[4\], not \[5\]"),
        (lambda s: s["optimizer"]["state"].update(new={}), "optimizer state for 'new'"),
        (lambda s: s["optimizer"]["param_groups"].pop(), "'blocks.0.bias' is in none"),
        (lambda s: _split_first_group(s["optimizer"]["param_groups"], lr=0.7), "other options there"),
    ]
    model = Odd()
    train = TrainState(model, torch.optim.AdamW(groups_of(model), lr=0.3))
    before = copy.deepcopy(train.state_dict())
    for change, words in cases:
        with pytest.raises(CheckpointMismatch, match=words):
            train.load_state_dict(changed(change))
        assert_same(train.state_dict(), before)
    for state in (good, changed(lambda s: _split_first_group(s["optimizer"]["param_groups"]))):
        train.load_state_dict(state)
        assert_same(train.state_dict(), good)
    with pytest.raises(ConfigError, match=r"1 parameter\(s\) that are not in the model, of shapes \[\(2,\)\]"):
        TrainState(model, torch.optim.SGD([nn.Parameter(torch.ones(2))])).state_dict()


def _split_first_group(groups: list[dict[str, Any]], **options: Any) -> None:
    first, *rest = groups[0]["params"]
    groups.append({**groups[0], "params": [first], **options})
    groups[0]["params"] = rest


def test_wrappers_have_no_part_in_names() -> None:
    model = Odd()
    expected = list(model.state_dict())
    compiled: Any = torch.compile(model, backend="eager")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(compiled, optimizer).state_dict()
    assert list(state["model"]) == expected
    assert "blocks.0.weight" in state["optimizer"]["param_groups"][0]["params"]
    state = copy.deepcopy(state)
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    TrainState(compiled, optimizer).load_state_dict(state)
    assert model.norm.weight.tolist() == [1.0] * 5
