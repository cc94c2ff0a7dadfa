"""Ranks that step a part each and tell the others have the weights of one process, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.communicator import Communicator
from lockstep.comm.op import DONE
from lockstep.errors import ConfigError, ModelMismatch, UnsupportedArgument
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.zero.chunk import flat_in_order
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads
from optimizer_cases import WORLDS, Uneven, give_gradients, on_one, on_rank, same_tensors, train, weights

ADAMW = torch.optim.AdamW
CLASSES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True, "lr": 0.01}),
    (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    (torch.optim.SGD, {"fused": True, "lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"fused": False, "lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.RMSprop, {"momentum": 0.5}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
]


@pytest.mark.parametrize(("cls", "kwargs"), CLASSES)
def test_equal_to_one_process(cls: type[torch.optim.Optimizer], kwargs: dict[str, Any]) -> None:
    expected, _ = on_one(cls, **kwargs)
    for world_size in WORLDS:
        for found, _ in run_threads(world_size, on_rank, cls, **kwargs):
            assert same_tensors(found, expected), world_size


def test_fused_by_default() -> None:
    assert same_tensors(run_threads(2, on_rank, ADAMW)[0][0], on_one(ADAMW, fused=True)[0])


def long_rows(comm: Communicator, optimizer_cls: Any, **kwargs: Any) -> list[int]:
    """Unfused on a CPU, long parameters are cut for the cache, and state is that of the whole all the same."""
    model = nn.Linear(300, 700, bias=False)
    optimizer = ShardedOptimizer(model.parameters(), optimizer_cls, process_group=comm, **kwargs)
    give_gradients(model, 0)
    optimizer.step()
    kept = next(value for value in optimizer.state[model.weight].values() if value.dim())
    return [*(len(part.chunk.pieces) for part in optimizer._parts), kept.numel()]


def test_long_parameters_are_cut_for_the_cache() -> None:
    assert run_threads(1, long_rows, torch.optim.RMSprop) == [[4, 210_000]]
    assert run_threads(1, long_rows, ADAMW) == [[1, 210_000]]
    assert run_threads(1, long_rows, ADAMW, fused=True) == [[1, 210_000]]
    assert run_threads(1, long_rows, ADAMW, fused=False) == [[4, 210_000]]


# ------------------------------------------------------------------ parameters and groups


def named_and_added(comm: Communicator | None) -> list[Tensor]:
    model = Uneven()
    named = list(model.named_parameters())
    cls: Any = ADAMW if comm is None else ShardedOptimizer
    kwargs: dict[str, Any] = {"fused": True} if comm is None else {"optimizer_cls": ADAMW, "process_group": comm}
    optimizer = cls(named[:4], lr=0.05, **kwargs)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in named[:4]]
    train(model, optimizer, steps=3)
    optimizer.add_param_group({"params": named[4:], "weight_decay": 0.3})
    return train(model, optimizer, steps=4, start=3)


def test_named_parameters_and_a_group_added_later() -> None:
    expected = named_and_added(None)
    for world_size in (1, 3):
        assert all(same_tensors(found, expected) for found in run_threads(world_size, named_and_added))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.arange(25.0).view(5, 5) / 25)
        self.second.weight = self.first.weight


def tied(comm: Communicator | None) -> Tensor:
    model = Tied()
    optimizer: torch.optim.Optimizer
    if comm is None:
        optimizer = ADAMW(model.parameters(), fused=True)
    else:
        optimizer = ShardedOptimizer(model.parameters(), ADAMW, process_group=comm)
    for _ in range(3):
        optimizer.zero_grad()
        model.second(model.first(torch.ones(2, 5))).square().sum().backward()
        optimizer.step()
    assert model.first.weight is model.second.weight
    return model.first.weight.detach().clone()


def test_tied_parameters() -> None:
    expected = tied(None)
    assert all(torch.equal(found, expected) for found in run_threads(2, tied))


def thawed(comm: Communicator | None) -> list[Tensor]:
    model = Uneven()
    optimizer: torch.optim.Optimizer
    if comm is None:
        optimizer = ADAMW(model.parameters(), fused=True)
    else:
        optimizer = ShardedOptimizer(model.parameters(), ADAMW, process_group=comm)
    train(model, optimizer, steps=2)
    model.frozen.requires_grad_()
    model.frozen.grad = torch.ones(5)
    optimizer.step()
    return weights(model)


def sent(comm: Communicator) -> list[int]:
    """How many buffers a step sends, before and after thawing."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)).requires_grad_(False)
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    optimizer = ShardedOptimizer(model[0].requires_grad_().parameters(), ADAMW, process_group=comm)
    optimizer.add_param_group({"params": model[1].parameters()})
    found = []
    for _ in range(2):
        works = [part.chunk.publish() for part in optimizer._parts]
        for work in works:
            work.wait()
        found.append(sum(work is not DONE for work in works))
        model.requires_grad_()
    return found


def test_frozen_parameters_are_not_sent() -> None:
    assert run_threads(2, sent) == [[1, 2]] * 2


def test_a_parameter_thawed_later() -> None:
    expected = thawed(None)
    assert all(same_tensors(found, expected) for found in run_threads(3, thawed))


def state_numel(comm: Communicator) -> int:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    optimizer = ShardedOptimizer(model.parameters(), ADAMW, process_group=comm)
    give_gradients(model, 0)
    optimizer.step()
    return sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())


def test_each_rank_keeps_its_part_of_the_state() -> None:
    whole = 2 * (64 * 96 * 2 + 96 + 64)
    assert run_threads(1, state_numel) == [whole]
    for world_size in (2, 4):
        found = run_threads(world_size, state_numel)
        assert sum(found) == whole
        assert max(found) <= whole / world_size + 2 * 16 * 5


# ------------------------------------------------------------------ what users do between steps


def closure_and_hooks(comm: Communicator) -> tuple[float, list[str]]:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, process_group=comm)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum()
        loss.backward()
        called.append("closure")
        return loss.item()

    return optimizer.step(closure), called


def test_closure_and_step_hooks() -> None:
    assert run_threads(2, closure_and_hooks) == [(3.0, ["before", "closure", "after"])] * 2


def moved(comm: Communicator | None) -> list[Tensor]:
    """Weights put elsewhere by `.data`, loaded in place, and with gradients in an order of their own."""
    model = Uneven()
    optimizer: torch.optim.Optimizer
    if comm is None:
        optimizer = torch.optim.RMSprop(model.parameters())
    else:
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.RMSprop, process_group=comm)
    saved = copy.deepcopy(model.state_dict())
    train(model, optimizer, steps=2)
    model.large.data = model.large.detach() * 2
    model.turned.data = model.turned.detach().contiguous() + 1
    give_gradients(model, 7)
    assert model.turned.grad is not None
    model.turned.grad = model.turned.grad.t().contiguous().t()
    optimizer.step()
    model.load_state_dict({**model.state_dict(), "matrix": saved["matrix"]})
    return train(model, optimizer, steps=2, start=8)


def test_parameters_moved_between_steps() -> None:
    expected = moved(None)
    assert all(same_tensors(found, expected) for found in run_threads(2, moved))


def test_flat_order_is_that_of_memory() -> None:
    rows = torch.arange(6.0).view(2, 3)
    assert flat_in_order(rows, (1, 2)).tolist() == [0, 3, 1, 4, 2, 5]
    assert flat_in_order(rows.t(), (1, 3)).data_ptr() == rows.data_ptr()
    assert flat_in_order(rows[:, None], (3, 77, 1)).data_ptr() == rows.data_ptr()
    assert flat_in_order(torch.ones(()).expand(2, 2), (2, 1)).tolist() == [1, 1, 1, 1]


# ------------------------------------------------------------------ what is refused


def refused(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The error of making an optimizer, on the one rank there is."""
    with pytest.raises(RankFailed) as failed:
        run_threads(1, lambda comm: ShardedOptimizer(model.parameters(), *args, process_group=comm, **kwargs))
    return str(failed.value)


def test_optimizers_that_are_not_elementwise() -> None:
    assert "optimizer_cls=Muon is not supported" in refused(nn.Linear(2, 2, bias=False), torch.optim.Muon)
    with pytest.raises(UnsupportedArgument, match="differentiable"):
        ShardedOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, differentiable=True)


class Noisy(torch.optim.SGD):
    """Elementwise but random, so that no trial can tell."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad += torch.randn(param.shape, dtype=param.dtype)
        return super().step(closure)


def noisy(comm: Communicator) -> None:
    model = Uneven()
    train(model, ShardedOptimizer(model.parameters(), Noisy, process_group=comm, assume_elementwise=True), steps=1)


def test_the_user_may_know_better() -> None:
    assert "depends on other elements" in refused(nn.Linear(2, 2), Noisy)
    run_threads(2, noisy)


def test_the_class_itself_refuses_its_options() -> None:
    assert "Invalid learning rate" in refused(nn.Linear(2, 2), ADAMW, lr=-1.0)
    assert "unexpected keyword argument" in refused(nn.Linear(2, 2), ADAMW, learning_rate=1.0)


def test_parameters_that_cannot_move() -> None:
    shared = nn.Linear(4, 4, bias=False)
    shared.other = nn.Parameter(shared.weight.detach()[1:])
    assert "share memory" in refused(shared, ADAMW)
    assert "give it values first" in refused(nn.Linear(2, 2, device="meta"), ADAMW)


def differing(comm: Communicator, what: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3 + (what == "shape") * comm.rank))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
        model[1].weight[0, 0] += comm.rank * (what == "value")
        model[1].weight[0, comm.rank] += what == "order"  # the same numbers, in other places
    with pytest.raises(ModelMismatch, match=r"1\.weight"):
        ShardedOptimizer(model.named_parameters(), ADAMW, process_group=comm)


@pytest.mark.parametrize("what", ["shape", "value", "order"])
def test_ranks_with_different_models(what: str) -> None:
    run_threads(3, differing, what)


def changed(comm: Communicator) -> None:
    model = nn.Embedding(4, 3, sparse=True)
    nn.init.ones_(model.weight)
    optimizer = ShardedOptimizer(model.named_parameters(), ADAMW, process_group=comm)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="weight has a gradient of layout"):
        optimizer.step()
    model.double()
    with pytest.raises(ConfigError, match=r"weight is now torch\.float64"):
        optimizer.step()
    with pytest.raises(ConfigError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_changes_that_a_step_finds() -> None:
    run_threads(2, changed)
