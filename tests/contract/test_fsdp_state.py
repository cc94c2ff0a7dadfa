"""State dicts under FullyShardedDataParallel: equal to torch's, loadable by torch's, and from torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_sides import Cases, Side, difference, scalar, seeded
from fsdp_sides import BLOCKS, Block, fsdp_class, wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType
from torch.distributed.tensor import DTensor

from lockstep.comm.communicator import Communicator
from lockstep.parallel.torch_fsdp import OptimStateKeyType
from lockstep.testing.worlds import run_processes

CASES = Cases(__name__)
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), Block(), nn.BatchNorm1d(7), nn.Linear(7, 3))


def trained(side: Side, seed: int = 0, steps: int = 2, **kwargs: Any) -> Any:
    """A wrapped model and its optimizer. torch's optimizer states are right only without original parameters."""
    model = wrap(side, seeded(net, seed), auto_wrap_policy=BLOCKS, use_orig_params=False, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(side, model, optimizer, steps)
    return model, optimizer


def train(side: Side, model: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        scalar(model(side.batch(step, 6, 5))).backward()
        optimizer.step()


def described(value: Any) -> Any:
    """Tensors as they are, DTensors as their pieces and placements; sorted, flat parameters have an order of theirs."""
    if isinstance(value, DTensor):
        return str(value.placements), tuple(value.shape), value.to_local().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: sorted(value[key]) if key == "params" else described(value[key]) for key in sorted(value)}
    return [described(item) for item in value] if isinstance(value, list) else value


@CASES.add(2, 3)
def full_states(side: Side) -> Any:
    cls = fsdp_class(side)
    model, optimizer = trained(side)
    found = [list(model.state_dict()), described(dict(model.state_dict()))]
    found += [described(cls.optim_state_dict(model, optimizer))]
    found += [list(nn.ModuleDict({"a": model}).state_dict())]
    return found


@CASES.add(2, 3)
def states_on_rank_0(side: Side) -> Any:
    cls = fsdp_class(side)
    model, optimizer = trained(side)
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with cls.state_dict_type(model, FULL, *configs):
        return described([dict(model.state_dict()), cls.optim_state_dict(model, optimizer)])


@CASES.add(2, 3)
def sharded_states(side: Side) -> Any:
    cls = fsdp_class(side)
    model, optimizer = trained(side, device_mesh=init_device_mesh("cpu", (side.world_size,)))
    configs = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig()
    with cls.state_dict_type(model, SHARDED, *configs):
        states = described([dict(model.state_dict()), cls.optim_state_dict(model, optimizer)])
        again, stepper = trained(side, seed=1, device_mesh=init_device_mesh("cpu", (side.world_size,)))
        cls.set_state_dict_type(again, SHARDED)
        again.load_state_dict(model.state_dict())
        loaded = cls.optim_state_dict_to_load(again, stepper, cls.optim_state_dict(model, optimizer))
        stepper.load_state_dict(loaded)
    train(side, again, stepper)
    cls.set_state_dict_type(again, FULL)
    return states, described(dict(again.state_dict()))


@CASES.add()
def older_names(side: Side) -> Any:
    cls = fsdp_class(side)
    model, optimizer = trained(side)
    full = cls.full_optim_state_dict(model, optimizer)
    everywhere = cls.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = seeded(net)
    single = torch.optim.AdamW(plain.parameters())
    keys = OptimStateKeyType if side.is_ours else TorchKeyType
    numbered = cls.rekey_optim_state_dict(everywhere, keys.PARAM_ID, plain, optim=single)
    ends = []
    for load, saved in ((cls.scatter_full_optim_state_dict, full), (cls.shard_full_optim_state_dict, everywhere)):
        again, stepper = trained(side, seed=1)
        stepper.load_state_dict(load(saved, again, optim=stepper))
        train(side, again, stepper)
        ends.append(described(dict(again.state_dict())))
    return described([full, everywhere, numbered]), ends


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)


# ------------------------------------------------------------------ from one into the other


def handed_over(comm: Communicator, saver: str, kind: StateDictType) -> str | None:
    """Train on one side, go on on the other and on the same; what differs."""
    sides = {"saver": Side(saver, comm), "torch": Side("torch", comm), "ours": Side("ours", comm)}
    mesh = init_device_mesh("cpu", (comm.world_size,))
    kwargs = {} if kind is FULL else {"device_mesh": mesh}
    model, optimizer = trained(sides["saver"], **kwargs)
    cls = fsdp_class(sides["saver"])
    cls.set_state_dict_type(model, kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer_state = cls.optim_state_dict(model, optimizer)
    ends = []
    for name in ("torch", "ours"):
        cls = fsdp_class(sides[name])
        again, stepper = trained(sides[name], seed=1, **kwargs)
        cls.set_state_dict_type(again, kind)
        again.load_state_dict(state)
        stepper.load_state_dict(cls.optim_state_dict_to_load(again, stepper, optimizer_state))
        train(sides[name], again, stepper, 2)
        cls.set_state_dict_type(again, FULL)
        ends.append(described(dict(again.state_dict())))
    return difference(*ends, 1e-6)


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("saver", ["torch", "ours"])
def test_states_load_on_the_other_side(saver: str, kind: StateDictType) -> None:
    assert run_processes(2, handed_over, saver, kind) == [None, None]


# ------------------------------------------------------------------ torch's own functions for states


def by_torch_functions(comm: Communicator) -> list[Any]:
    """torch.distributed.checkpoint.state_dict on our wrapper: names without prefixes, and a way back."""
    side = Side("ours", comm)
    model, optimizer = trained(side)
    options = StateDictOptions(full_state_dict=True)
    states = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    expected = model.state_dict(), fsdp_class(side).optim_state_dict(model, optimizer)
    differences = [
        difference(described(dict(a)), described(dict(b)), None) for a, b in zip(states, expected, strict=True)
    ]
    again, stepper = trained(side, seed=1)
    set_model_state_dict(again, states[0], options=options)
    set_optimizer_state_dict(again, stepper, copy.deepcopy(states[1]), options=options)  # torch shares the step
    train(side, model, optimizer)
    train(side, again, stepper)
    return [*differences, difference(described(dict(model.state_dict())), described(dict(again.state_dict())), None)]


def test_torch_functions_find_the_names() -> None:
    assert run_processes(2, by_torch_functions) == [[None, None, None]] * 2
