"""`reshard_after_forward` as a number: between forward and backward n neighbours keep a unit's whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from fsdp2_sides import Cases
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from case_table import run_cases
from lockstep.testing.worlds import run_processes
from shard_models import MLP_UNITS, NESTED_UNITS, Nested, Twice, mlp
from shard_sides import SGD, Side, difference, layout, placed, scalar, seeded, train

CASES = Cases(__name__)


@CASES.add(4)
def training(side: Side) -> Any:
    """Bit for bit what it is with the parameters cut over all ranks in between."""
    found = []
    for make, units in ((mlp, MLP_UNITS), (Twice, ("enter", "shared"))):
        found.append(train(side, make, units, optimizer=SGD, reshard_after_forward=2))
        if side.is_ours:
            assert not difference(found[-1], train(side, make, units, optimizer=SGD, reshard_after_forward=True))
    return found


@CASES.add(4, against="torch")
def what_the_modules_have(side: Side) -> Any:
    """DTensors over the neighbours from forward to backward, unless the user asks for the parameters before."""
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = seeded(Nested)
        side.shard_units(model, NESTED_UNITS, reshard_after_forward=2, mp_policy=policy)
        loss = scalar(model(side.batch(0, 6, 8)))
        found.append(without_names(layout(model)))
        loss.backward()
        found.append(layout(model))
        loss = scalar(model(side.batch(1, 6, 8)))
        state = {name: placed(tensor) for name, tensor in model.state_dict().items()}
        model.first.reshard()
        found += [state, layout(model.first)]
        loss.backward()
        if policy.param_dtype is None:  # else torch adds in bf16
            found.append(side.snapshot(model))
        with torch.no_grad():
            model(side.batch(2, 6, 8))
        model.reshard()
        model.set_reshard_after_forward(True)
        scalar(model(side.batch(3, 6, 8)))
        found.append(layout(model.second))
    return found


def without_names(found: Any) -> Any:
    """The axes of the neighbours' mesh have names in ours, not in torch's."""
    if isinstance(found, dict):
        return {key: without_names(value) for key, value in found.items()}
    if isinstance(found, list):
        return None if found == ["replica", "shard"] else [without_names(value) for value in found]
    return found


@CASES.add(4, against="torch")
def numbers(side: Side) -> Any:
    """One is no giving back, all ranks are all; others divide the number of ranks."""
    found: list[Any] = []
    for number in (1, 4, 0, 3, -2, 8):
        model = seeded(lambda: nn.Linear(8, 5))
        try:
            side.shard(model, reshard_after_forward=number)
        except ValueError:
            found.append("refused")
            continue
        model(side.batch(0, 6, 8))
        found.append(layout(model))
    return found


def test_over_gloo() -> None:
    names = list(CASES.by_name)
    for answers in run_processes(4, run_cases, __name__, names, env={"LOCKSTEP_SHM": "off"}):
        assert answers == dict.fromkeys(names)
