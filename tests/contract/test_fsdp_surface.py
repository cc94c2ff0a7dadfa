"""What callers write for torch's FullyShardedDataParallel is there on ours, with the same defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFsdp
from torch.distributed.fsdp import fully_sharded_data_parallel, wrap

import lockstep
from lockstep.parallel import torch_fsdp as torch_fsdp_names
from lockstep.parallel.fsdp import FullyShardedDataParallel


def shape_of(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_constructor() -> None:
    assert shape_of(FullyShardedDataParallel.__init__) == shape_of(TorchFsdp.__init__)


def test_public_methods() -> None:
    theirs = {name for name in vars(TorchFsdp) if not name.startswith("_")}
    assert {name for name in theirs if not hasattr(FullyShardedDataParallel, name)} == set()
    for name in theirs - {"named_parameters", "named_buffers", "module", "forward"}:
        mine = shape_of(getattr(FullyShardedDataParallel, name))
        assert mine == shape_of(getattr(TorchFsdp, name)), name


@pytest.mark.parametrize("name", [name for name in vars(torch_fsdp_names) if name[0] != "_"])
def test_what_both_are_given_is_the_same(name: str) -> None:
    homes = (torch_fsdp, wrap, fully_sharded_data_parallel)
    theirs = next(getattr(home, name) for home in homes if hasattr(home, name))
    assert getattr(torch_fsdp_names, name) is theirs
    if name in lockstep.__all__:
        assert getattr(lockstep, name) is theirs
