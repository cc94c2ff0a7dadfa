"""What callers write for torch's FullyShardedDataParallel is there on ours, with the same defaults."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import pytest
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFsdp
from torch.distributed.fsdp import api, fully_sharded_data_parallel

from lockstep.errors import ConfigError
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.fsdp1 import arguments as fsdp_arguments

# Defaults that differ, and why
DTENSORS = "SHARDED_STATE_DICT always holds DTensors"
DIFFERENT = {
    ("ShardedStateDictConfig", "_use_dtensor"): DTENSORS,
    ("ShardedOptimStateDictConfig", "_use_dtensor"): DTENSORS,
}
TYPES = [*api.__all__, "OptimStateKeyType"]
ABSTRACT = {"StateDictConfig", "OptimStateDictConfig", "StateDictSettings"}  # of those the user makes no object


def torch_type(name: str) -> Any:
    return getattr(api, name, None) or getattr(fully_sharded_data_parallel, name)


def plain(value: Any) -> Any:
    """An enum's member by its name, so that torch's and ours compare."""
    return value.name if isinstance(value, enum.Enum) else value


def shape_of(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, plain(p.default)) for p in inspect.signature(function).parameters.values()]


def test_constructor() -> None:
    assert shape_of(FullyShardedDataParallel.__init__) == shape_of(TorchFsdp.__init__)


def test_public_methods() -> None:
    theirs = {name for name in vars(TorchFsdp) if not name.startswith("_")}
    assert {name for name in theirs if not hasattr(FullyShardedDataParallel, name)} == set()
    for name in theirs - {"named_parameters", "named_buffers", "module", "forward"}:
        mine = shape_of(getattr(FullyShardedDataParallel, name))
        assert mine == shape_of(getattr(TorchFsdp, name)), name


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ABSTRACT])
def test_arguments(name: str) -> None:
    mine, theirs = getattr(fsdp_arguments, name), torch_type(name)
    assert hasattr(torch_fsdp, name) or name == "OptimStateKeyType"
    if issubclass(theirs, enum.Enum):
        assert list(mine.__members__) == list(theirs.__members__)
        assert [fsdp_arguments.understood(mine, member, "x") for member in theirs] == list(mine)
        return
    fields = {field.name: field.default for field in dataclasses.fields(theirs)}
    changed = {field: default for field, default in fields.items() if (name, field) not in DIFFERENT}
    assert {f.name: f.default for f in dataclasses.fields(mine) if f.name in changed} == changed
    assert fsdp_arguments.understood(mine, theirs(), "x") == mine(**fields)
    with pytest.raises(ConfigError, match=f"x=3: pass a {name}, lockstep's or torch's"):
        fsdp_arguments.understood(mine, 3, "x")
