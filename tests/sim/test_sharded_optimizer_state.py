"""State that was saved on any number of ranks continues on any other, and in the class itself, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.errors import CheckpointError, ConfigError
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.testing.worlds import run_threads
from optimizer_cases import (
    WORLDS,
    Uneven,
    give_gradients,
    groups,
    on_one,
    on_rank,
    same_tensors,
    state_difference,
    train,
    weights,
)

Made = Callable[..., Any]
CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.SGD, {"fused": False, "lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"fused": False, "lr": 0.1}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adagrad, {"fused": True}),
]


@pytest.mark.parametrize(("cls", "kwargs"), CASES)
def test_the_state_is_that_of_the_class_itself(cls: Made, kwargs: dict[str, Any]) -> None:
    _, expected = on_one(cls, **kwargs)
    for world_size in WORLDS:
        for _, found in run_threads(world_size, on_rank, cls, **kwargs):
            assert state_difference(found, expected) is None


def half_way(comm: Communicator, cls: Made, kwargs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    model = Uneven()
    optimizer = ShardedOptimizer(groups(model), cls, process_group=comm, **kwargs)
    train(model, optimizer, steps=5)
    return model, optimizer.state_dict(), optimizer.state_dict_in_pieces()


def go_on(
    comm: Communicator | None, cls: Made, kwargs: dict[str, Any], model: nn.Module, states: list[dict[str, Any]]
) -> list[Tensor]:
    """Five more steps from a saved state; `states`: one for all ranks, or one for each."""
    model = copy.deepcopy(model)
    optimizer: torch.optim.Optimizer
    if comm is None:
        optimizer = cls(groups(model), **kwargs)
    else:
        optimizer = ShardedOptimizer(groups(model), cls, process_group=comm, **kwargs)
    optimizer.load_state_dict(copy.deepcopy(states[comm.rank if comm is not None and len(states) > 1 else 0]))
    return train(model, optimizer, steps=5, start=5)


@pytest.mark.parametrize(("cls", "kwargs"), CASES)
def test_saved_on_two_ranks_loaded_anywhere(cls: Made, kwargs: dict[str, Any]) -> None:
    saved = run_threads(2, half_way, cls, kwargs)
    model, whole, _ = saved[0]
    pieces = [own for _, _, own in saved]
    expected = go_on(None, cls, kwargs, model, [whole])
    for world_size in WORLDS:
        assert same_tensors(run_threads(world_size, go_on, cls, kwargs, model, [whole])[0], expected)
    assert same_tensors(run_threads(2, go_on, cls, kwargs, model, pieces)[1], expected)


def test_saved_by_the_class_itself() -> None:
    cls, kwargs = CASES[0]
    model = Uneven()
    optimizer = cls(groups(model), **kwargs)
    train(model, optimizer, steps=5)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = go_on(None, cls, kwargs, model, [saved])
    assert same_tensors(run_threads(3, go_on, cls, kwargs, model, [saved])[2], expected)


def test_loading_keeps_no_copy_of_the_whole() -> None:
    """The state that a rank keeps has memory of its own size."""
    model, whole, _ = run_threads(2, half_way, torch.optim.AdamW, {})[0]

    def kept(comm: Communicator) -> bool:
        mine = copy.deepcopy(model)
        optimizer = ShardedOptimizer(groups(mine), torch.optim.AdamW, process_group=comm)
        optimizer.load_state_dict(whole)
        tensors = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        return all(value.untyped_storage().nbytes() == value.nbytes for value in tensors)

    assert all(run_threads(3, kept))


def test_what_is_not_chosen_is_not_saved() -> None:
    """The fused implementation is ours to choose: a state_dict does not carry it, and does not undo it."""

    def groups_of(comm: Communicator) -> tuple[Any, Any, Any]:
        model = nn.Linear(3, 2, bias=False)
        nn.init.ones_(model.weight)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=comm)
        saved = optimizer.state_dict()
        chosen = ShardedOptimizer(model.parameters(), torch.optim.AdamW, process_group=comm, fused=False)
        chosen.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.5}]})
        group = chosen.param_groups[0]
        return saved["param_groups"][0]["fused"], group["fused"], group["lr"]

    assert run_threads(1, groups_of) == [(None, False, 0.5)]


# ------------------------------------------------------------------ gathered on one rank


def consolidated(comm: Communicator) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    model = Uneven()
    optimizer = ShardedOptimizer(groups(model), torch.optim.AdamW, process_group=comm)
    train(model, optimizer, steps=3)
    whole = optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    gathered = None
    if comm.rank == 1:
        gathered = optimizer.state_dict()
    else:
        with pytest.raises(ConfigError, match="consolidated on rank 1"):
            optimizer.state_dict()
    give_gradients(model, 3)
    optimizer.step()
    assert state_difference(optimizer.state_dict(), whole) is not None  # of every rank again, and not the old one
    return gathered, whole


def test_consolidated_on_one_rank() -> None:
    found = run_threads(3, consolidated)
    assert [gathered is not None for gathered, _ in found] == [False, True, False]
    gathered, whole = found[1]
    assert gathered is not None
    assert state_difference(gathered, whole) is None


# ------------------------------------------------------------------ hooks, and what torch's tools do


def hooks(comm: Communicator) -> list[str]:
    model = nn.Linear(4, 2)
    for param in model.parameters():
        nn.init.ones_(param)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, process_group=comm, momentum=0.9)
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: called.append(f"extra={state.pop('extra')}"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    return called


def test_state_dict_hooks() -> None:
    assert run_threads(2, hooks) == [["before saving", "extra=1", "after loading"]] * 2


# ------------------------------------------------------------------ what does not fit


def misfits(comm: Communicator) -> None:
    model = Uneven()
    optimizer = ShardedOptimizer(list(model.parameters())[:2], torch.optim.AdamW, process_group=comm)
    give_gradients(model, 0)
    optimizer.step()
    before = weights(model)
    saved = optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"groups of \[1\] parameters, this optimizer of \[2\]"):
        optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "params": [0]}]})
    turned = {**saved["state"], 0: {**saved["state"][0], "exp_avg": torch.zeros(5, 7)}}
    with pytest.raises(CheckpointError, match=r"'exp_avg' has shape \[5, 7\], parameter 0 of group 0 has \[7, 5\]"):
        optimizer.load_state_dict({**saved, "state": turned})
    with pytest.raises(CheckpointError, match="state of parameter 9"):
        optimizer.load_state_dict({**saved, "state": {9: saved["state"][0]}})
    with pytest.raises(ConfigError, match="load_state_dict"):
        optimizer.state = saved["state"]
    assert same_tensors(weights(model), before)
    assert state_difference(optimizer.state_dict(), saved) is None  # nothing was half loaded


def test_state_of_another_model() -> None:
    run_threads(2, misfits)


def test_pieces_of_another_rank() -> None:
    saved = run_threads(2, half_way, torch.optim.AdamW, {})

    def swapped(comm: Communicator) -> None:
        optimizer = ShardedOptimizer(groups(saved[comm.rank][0]), torch.optim.AdamW, process_group=comm)
        with pytest.raises(CheckpointError, match="state are not those that this rank steps"):
            optimizer.load_state_dict(saved[1 - comm.rank][2])

    run_threads(2, swapped)


class Remembering(torch.optim.SGD):
    """Keeps what no rank could tell another."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["history"] = [1, 2]
        return super().step(closure)


def remembering(comm: Communicator) -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    optimizer = ShardedOptimizer(model.parameters(), Remembering, process_group=comm)
    give_gradients(model, 0)
    optimizer.step()
    with pytest.raises(ConfigError, match="'history' as a list"):  # also on the rank that has no piece
        optimizer.state_dict()


def test_state_that_cannot_travel() -> None:
    run_threads(2, remembering)
