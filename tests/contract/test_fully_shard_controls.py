"""What a caller may do to a sharded module between and inside of steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fsdp2_sides import Cases
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register

import lockstep
from case_table import run_cases
from lockstep.parallel.shard_context import context_of, unit_of
from lockstep.testing.worlds import run_processes
from shard_models import MLP_UNITS, NESTED_UNITS, Nested, mlp
from shard_sides import ADAMW, SGD, Side, layout, scalar, seeded

CASES = Cases(__name__)


def trained(side: Side, model: Any, steps: int = 3) -> Any:
    optimizer = ADAMW(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(model)


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "unshard")]


@CASES.add(1, 2, against="torch")
def layout_at_every_point(side: Side) -> Any:
    """What the registered parameters are: sharded, or plain where a unit stays whole after forward."""
    found = []
    for choice in (None, True, False):
        model = seeded(Nested)
        side.shard_units(model, NESTED_UNITS, reshard_after_forward=choice)
        seen = [layout(model)]
        loss = scalar(model(side.batch(0, 6, 8)))
        seen.append(layout(model))
        loss.backward()
        seen.append(layout(model))
        for unit in units_of(model):
            unit.reshard()
        seen.append(layout(model))
        found.append(seen)
    return found


@CASES.add(2, against="torch")
def unshard_and_reshard_by_hand(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    seen: list[Any] = [model[0].unshard(), layout(model), side.whole({"w": model[0].weight})]
    seen += [model[0].unshard(), model[0].reshard(), model[0].reshard(), layout(model)]
    handle = model[2].unshard(async_op=True)
    seen.append(hasattr(handle, "wait"))
    handle.wait()
    handle.wait()
    seen.append(layout(model))
    model[4].unshard(async_op=True)  # forward waits for it
    seen.append(trained(side, model))
    handle = model[0].unshard(async_op=True)
    model[0].reshard()
    return [*seen, layout(model)]


@CASES.add(2)
def whole_parameters_changed_by_hand(side: Side) -> Any:
    """A change of the sharded parameter is seen by the next forward; the pieces are where the truth is."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    first = trained(side, model)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
            param.add_(1)
    return [first, trained(side, model)]


@CASES.add(2)
def prefetching(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS, reshard_after_forward=True)
    if side.shards:
        model.set_modules_to_forward_prefetch([model[0], model[2]])
        model[0].set_modules_to_forward_prefetch([model[2], model[4]])
        model[4].set_modules_to_backward_prefetch([model[2], model[0]])
        model[2].set_modules_to_backward_prefetch([model[0]])
    return trained(side, model)


@CASES.add(2)
def prefetching_what_does_not_run(side: Side) -> Any:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    beside = seeded(lambda: nn.Linear(8, 8))
    model.beside = nn.ModuleDict({"other": beside})
    model.forward = lambda x: model[1](model[0](x))
    side.shard_units(model, ("0", "1", "beside.other"))
    if side.shards:
        model[0].set_modules_to_forward_prefetch([beside, model[1]])
        model[1].set_modules_to_backward_prefetch([beside, model[0]])
    return trained(side, model)


@CASES.add(2)
def settings_at_run_time(side: Side) -> Any:
    found = []
    for value in (True, False):
        model = seeded(Nested)
        side.shard_units(model, NESTED_UNITS)
        if side.shards:
            model.set_reshard_after_forward(value)
            model.first.set_reshard_after_forward(not value, recurse=False)
        found.append(trained(side, model))
    return found


@CASES.add(2, against="torch")
def settings_for_speed(side: Side) -> Any:
    """What is to change nothing but time and memory changes nothing else."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    for part in units_of(model):
        part.set_force_sum_reduction_for_comms(True)
        part.set_allocate_memory_from_process_group_for_comm(False)
    model.set_reduce_scatter_unused_params(True)
    model.set_is_last_backward(True)
    if side.is_ours:
        assert all(one.comm is not one.group.comm for one in context_of(unit_of(model)).gradients)
        model.set_post_optim_event(object())
    found = [trained(side, model)]
    model.set_separate_reduce_scatter_group(False)
    return [*found, trained(side, model)]


@CASES.add(2, against="torch")
def gradients_in_the_users_way(side: Side) -> Any:
    """Another divisor, and a hook on the sum before it becomes a gradient. Neither is for the modules inside."""
    model = seeded(Nested)
    side.shard_units(model, NESTED_UNITS)
    model.first.set_gradient_divide_factor(4.0)
    model.first.set_force_sum_reduction_for_comms(True)  # Gloo has no other way for torch
    model.second.set_all_reduce_hook(lambda total: total.mul_(0.5))
    scalar(model(side.batch(0, 6, 8))).backward()
    return [side.snapshot(model), trained(side, model)]


@CASES.add(2)
def whole_over_several_backwards(side: Side) -> Any:
    """Units stay whole between the backwards of one step; the last one cuts them again."""
    model = seeded(Nested)
    side.shard_units(model, NESTED_UNITS)
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for part in range(3):
            if side.shards:
                last = part == 2
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last)
            side.set_sync(model, part == 2)
            side.backward(scalar(model(side.batch(20 * part + step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2, against="plain")
def whole_over_a_step(side: Side) -> Any:
    """Torch computes with the parameters of before the step where they stay whole after a step's last backward."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    if side.shards:
        model.set_reshard_after_backward(False)
    return trained(side, model)


@CASES.add(2)
def part_of_the_model_synchronised(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    if side.shards:
        model.set_requires_gradient_sync(False, recurse=False)  # the root holds no parameter itself
    return trained(side, model)


@CASES.add(2)
def not_unsharded_in_backward(side: Side) -> Any:
    """An embedding's weight is not needed for its gradient."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

    model = seeded(make)
    side.shard_units(model, ("0", "1"))
    if side.shards:
        model[0].set_unshard_in_backward(False)
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.backward(scalar(model(side.tokens(step, 11, 6, 4))), model)
        optimizer.step()
    return side.snapshot(model)


class TwoWays(nn.Module):
    """A module that is called by other names than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(x=self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()

    def decode(self, *, x: Tensor) -> Tensor:
        return self.outer(x)


def register(side: Side, module: nn.Module, name: str) -> None:
    if side.kind == "torch":
        torch_register(module, name)
    elif side.is_ours:
        lockstep.register_fsdp_forward_method(module, name)


@CASES.add(2)
def other_forward_methods(side: Side) -> Any:
    model = seeded(lambda: nn.Sequential(TwoWays(), nn.Tanh()))
    side.shard_units(model, ("0",))
    register(side, model[0], "encode")
    register(side, model[0], "decode")
    register(side, model[1], "not there, nor a unit")
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        x = side.batch(step, 6, 8)
        side.backward(scalar(model[0].decode(x=model[0].encode(x))), model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2)
def other_forward_methods_of_the_root(side: Side) -> Any:
    model = seeded(TwoWays)
    side.shard_units(model, ("inner",))
    register(side, model, "encode")
    register(side, model, "decode")
    side.backward(scalar(model.decode(x=model.encode(side.batch(0, 6, 8)))), model)
    return side.snapshot(model)


@CASES.add(2)
def a_part_is_evaluated_alone(side: Side) -> Any:
    """After the root has run once, a unit may run without it."""
    model = seeded(Nested)
    side.shard_units(model, NESTED_UNITS)
    side.backward(scalar(model(side.batch(0, 6, 8))), model)
    with torch.no_grad():
        alone = model.first(torch.ones(2, 8)).clone()
    side.backward(scalar(model.second(side.batch(1, 6, 8))), model)
    side.backward(scalar(model(side.batch(2, 6, 8))), model)
    return [alone, side.snapshot(model)]


@CASES.add(2, against="plain")
def a_part_runs_before_the_root(side: Side) -> Any:
    """Torch takes the first module that runs for the root, and then refuses the true one."""
    model = seeded(Nested)
    side.shard_units(model, NESTED_UNITS)
    with torch.no_grad():
        alone = model.first(torch.ones(2, 8)).clone()
    side.backward(scalar(model(side.batch(0, 6, 8))), model)
    return [alone, side.snapshot(model)]


@CASES.add(2)
def units_without_a_root(side: Side) -> Any:
    model = seeded(mlp)
    for name in MLP_UNITS:
        side.shard(model.get_submodule(name))
    return trained(side, model)


@CASES.add(2)
def hooks_of_the_caller(side: Side) -> Any:
    """Forward hooks on a unit, registered before and after it was cut, and a hook of its output's gradient."""
    model = seeded(mlp)
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append([type(module.weight).__name__, list(module.weight.shape)])
        return output * 2

    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[0].register_forward_hook(note)
    side.shard_units(model, MLP_UNITS)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model[2].register_forward_hook(lambda module, args, output: output + 1)
    return [trained(side, model), seen]


@CASES.add(2, against="torch")
def gradient_hooks_of_the_caller(side: Side) -> Any:
    """A hook after accumulation on the sharded parameter sees its reduced gradient."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    seen: list[str] = []

    def look(name: str, param: Any) -> None:
        seen.append(name + str(list(param.grad.to_local().shape)))

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(look, name))
    for step in range(2):
        scalar(model(side.batch(step, 6, 8))).backward()
    return sorted(seen)


@CASES.add(2)
def train_and_eval_and_requires_grad(side: Side) -> Any:
    """A unit is frozen for a step, and trained again."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = SGD(model.parameters())
    seen = []
    for step in range(4):
        model[2].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        seen.append([param.grad is None for param in model.parameters()])
        optimizer.step()
    return [seen, side.snapshot(model)]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_and_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)


OVER_GLOO = (
    "layout_at_every_point",
    "settings_for_speed",
    "unshard_and_reshard_by_hand",
    "prefetching",
    "whole_over_a_step",
)


def test_the_same_without_shared_memory() -> None:
    answers = run_processes(2, run_cases, __name__, list(OVER_GLOO), env={"LOCKSTEP_SHM": "off"})
    assert answers == [dict.fromkeys(OVER_GLOO)] * 2
