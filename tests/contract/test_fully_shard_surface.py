"""What callers and libraries touch on a module that torch sharded is there on ours, and says the same."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from fsdp2_sides import Cases
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import UnshardHandle as TorchHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register
from torch.distributed.tensor import DTensor

import lockstep
from lockstep.errors import ShardingError
from lockstep.parallel import fsdp_module
from lockstep.parallel.shard_slot import slot_of
from shard_models import GPT2_UNITS, MLP_UNITS, NESTED_UNITS, Nested, Tied, adapted, conv, gpt2, mlp
from shard_sides import ADAMW, Side, layout, placed, scalar, seeded

CASES = Cases(__name__)

PUBLIC = sorted(name for name, value in vars(TorchFSDPModule).items() if name[0] != "_" and callable(value))


def mismatch(theirs: Any, ours: Any) -> str | None:
    """What a call that is right for `theirs` would meet on `ours`."""
    mine = inspect.signature(ours).parameters
    for name, parameter in inspect.signature(theirs).parameters.items():
        if name not in mine:
            return f"no parameter {name!r}"
        if mine[name].kind != parameter.kind:
            return f"{name} is {mine[name].kind.description}, not {parameter.kind.description}"
        if parameter.default is inspect.Parameter.empty and mine[name].default is not inspect.Parameter.empty:
            return f"{name} has a default"
        if isinstance(parameter.default, (bool, int, str)) and mine[name].default != parameter.default:
            return f"{name}={mine[name].default!r}, not {parameter.default!r}"
    extra = [p for n, p in mine.items() if n not in inspect.signature(theirs).parameters]
    required = [p.name for p in extra if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return f"requires {required}" if required else None


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_method_is_there(name: str) -> None:
    assert mismatch(getattr(TorchFSDPModule, name), getattr(fsdp_module.FSDPModule, name)) is None


def test_the_functions_take_what_torchs_take() -> None:
    assert mismatch(torch_fully_shard, lockstep.fully_shard) is None
    assert mismatch(torch_register, lockstep.register_fsdp_forward_method) is None
    assert mismatch(TorchPolicy, lockstep.MixedPrecisionPolicy) is None
    assert {name for name in vars(TorchHandle) if name[0] != "_"} == {"wait"}


# ------------------------------------------------------------------ the module


@CASES.add(2, against="torch")
def what_the_module_is(side: Side) -> Any:
    model = seeded(mlp)
    returned = side.shard(model[0]), side.shard([model[2], model[4]]), side.shard(model)
    kind = type(model[0])
    return [
        [returned[0] is model[0], [part is model[i] for part, i in zip(returned[1], (2, 4), strict=True)]],
        returned[2] is model,
        [kind.__name__, isinstance(model[0], nn.Linear), issubclass(kind, nn.Linear), kind is type(model[2])],
        type(model[1]).__name__,
        repr(model).replace("\n", " "),
        [name for name, _ in model.named_modules()],
        list(model._parameters),
        type(model[0:2]).__name__,
        [type(part).__name__ for part in model],
    ]


@CASES.add(2, against="torch")
def it_is_neither_copied_nor_pickled(side: Side) -> Any:
    model = side.shard(seeded(mlp))
    refused = []
    for make in (copy.deepcopy, pickle.dumps):
        try:
            make(model)
        except (AssertionError, pickle.PicklingError, ShardingError):
            refused.append(make.__name__)
    return refused


@CASES.add(2, 4, against="torch")
def names_and_layout(side: Side) -> Any:
    found = []
    for make, units in (
        (mlp, MLP_UNITS),
        (conv, ("0", "4")),
        (Nested, NESTED_UNITS),
        (Tied, ()),
        (adapted, ("0", "2")),
    ):
        model = seeded(make)
        before = [name for name, _ in model.named_parameters()]
        side.shard_units(model, units)
        found.append([before == [name for name, _ in model.named_parameters()], layout(model)])
        found.append([len(list(model.parameters())), sum(param.numel() for param in model.parameters())])
        found.append([param.is_leaf and isinstance(param, nn.Parameter) for param in model.parameters()])
    return found


@CASES.add(2, against="torch")
def tied_weights_stay_one_parameter(side: Side) -> Any:
    model = seeded(gpt2)
    side.shard_units(model, GPT2_UNITS)
    seen = [model.lm_head.weight is model.transformer.wte.weight]
    tokens = side.tokens(0, 61, 2, 5)
    model(input_ids=tokens, labels=tokens).loss.backward()
    seen += [model.lm_head.weight is model.transformer.wte.weight, len(list(model.parameters()))]
    return [*seen, len(model.state_dict())]


# ------------------------------------------------------------------ state


@CASES.add(2, against="torch")
def state_dict(side: Side) -> Any:
    model = seeded(conv)
    side.shard_units(model, ("0", "1", "6"))
    seen = [{name: placed(tensor) for name, tensor in model.state_dict().items()}]
    loss = scalar(model(side.batch(0, 4, 3, 6, 6)))
    model.reshard()
    seen.append({name: placed(tensor) for name, tensor in model.state_dict().items()})
    loss.backward()
    state = model.state_dict()
    return [*seen, {name: placed(tensor) for name, tensor in state.items()}, side.whole(dict(state))]


@CASES.add(2, against="torch")
def state_dict_with_whole_parameters(side: Side) -> Any:
    """Asked for while a unit is whole: it is sharded first."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS, reshard_after_forward=False)
    model(side.batch(0, 6, 8))
    model[2].unshard()
    return {name: placed(tensor) for name, tensor in model.state_dict().items()}


@CASES.add(2, 4)
def load_state_dict(side: Side) -> Any:
    """Into the same memory, or in its place; before any step, and between steps."""
    found = []
    for assign in (False, True):
        source, target = seeded(mlp, 1), seeded(mlp, 2)
        for model in (source, target):
            side.shard_units(model, MLP_UNITS)
        seen = [str(target.load_state_dict(source.state_dict(), assign=assign))]
        optimizer = ADAMW(target.parameters())
        for step in range(2):
            optimizer.zero_grad()
            side.backward(scalar(target(side.batch(step, 6, 8))), target)
            optimizer.step()
        found.append([seen, side.snapshot(target)])
        if not assign:
            saved = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
            target.load_state_dict(saved)
            side.backward(scalar(target(side.batch(2, 6, 8))), target)
            found.append(side.snapshot(target))
    return found


@CASES.add(2, against="torch")
def optimizer_state(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = ADAMW(model.parameters())
    scalar(model(side.batch(0, 6, 8))).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    flat = {f"{i} {name}": tensor for i, entry in state.items() for name, tensor in entry.items()}
    return [{name: placed(tensor) for name, tensor in flat.items()}, side.whole(flat)]


@CASES.add(2)
def optimizer_state_loaded(side: Side) -> Any:
    runs = []
    for _ in range(2):
        model = seeded(mlp)
        side.shard_units(model, MLP_UNITS)
        runs.append((model, ADAMW(model.parameters())))
    for step in range(4):
        if step == 2:
            (first, old), (second, new) = runs
            second.load_state_dict(first.state_dict())
            new.load_state_dict(old.state_dict())
        model, optimizer = runs[step // 2]
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(runs[1][0])


@CASES.add(2, against="torch")
def torchs_own_gathering(side: Side) -> Any:
    """`full_tensor` of a parameter, of a gradient and of an optimizer's state."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = ADAMW(model.parameters())
    scalar(model(side.batch(0, 6, 8))).backward()
    optimizer.step()
    found: list[Tensor] = []
    for param in model.parameters():
        assert isinstance(param, DTensor)
        found += [
            param.full_tensor().detach(),
            param.grad.full_tensor(),
            optimizer.state[param]["exp_avg"].full_tensor(),
        ]
    return found


@CASES.add(2, against="torch")
def initialised_after_it_was_cut(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)

    def start(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
            nn.init.zeros_(module.bias)

    model.apply(start)
    return [side.snapshot(model), model(torch.ones(2, 8)).detach()]


@CASES.add(2, against="plain")
def memory_of_adapters(side: Side) -> Any:
    """Frozen parameters are in groups of their own, which never have room for a gradient."""
    model = seeded(adapted)
    side.shard_units(model, ("0", "2"))
    side.backward(scalar(model(side.batch(0, 6, 8))), model)
    if not side.is_ours:
        return ["trained alone have one", side.snapshot(model)]
    groups = {id(slot.group): slot.group for param in model.parameters() if (slot := slot_of(param)) is not None}
    for group in groups.values():
        trained = {param.requires_grad for param in group.params}
        assert trained == {param.grad is not None for param in group.params}, group
    return ["trained alone have one", side.snapshot(model)]


@CASES.add(2, against="torch")
def on_the_meta_device(side: Side) -> Any:
    with torch.device("meta"):
        model = mlp()
    side.shard_units(model, MLP_UNITS)
    before = layout(model)
    model.to_empty(device="cpu")
    for index, param in enumerate(model.parameters()):
        nn.init.constant_(param, 0.01 * (index + 1))
    optimizer = ADAMW(model.parameters())
    scalar(model(side.batch(0, 6, 8))).backward()
    optimizer.step()
    return [before, layout(model), side.snapshot(model)]


@CASES.add(2, against="torch")
def a_model_without_parameters(side: Side) -> Any:
    model = nn.Sequential(nn.Tanh(), nn.Linear(8, 3))
    model = seeded(lambda: model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None))
    side.shard(model[0])
    side.shard(model[1])
    side.shard(model)
    scalar(model(side.batch(0, 6, 8))).backward()
    model[0].unshard()
    model[0].reshard()
    return [layout(model), side.snapshot(model)]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
