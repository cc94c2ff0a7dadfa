"""What torch's constructor and methods refuse, ours refuse with the same type of exception and the same key words."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ddp_sides import Cases, Side, scalar, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

CASES = Cases(__name__)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))


class Raised(NamedTuple):
    kind: str  # the builtin type that a caller would catch
    words: bool  # the message holds what torch's says


def raised(call: Callable[[], Any], words: str) -> Raised | str:
    """The exception of `call` as the nearest builtin type."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the type is what is compared
        builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        return (
            Raised(builtin, bool(re.search(words, str(error))))
            if re.search(words, str(error))
            else f"{builtin}: {error}"
        )
    return "nothing was raised"


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.LazyLinear(3)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def two_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))


def sync_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))


BAD_ARGUMENTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "device_ids on cpu": (mlp, {"device_ids": [0]}, "device_ids and output_device arguments"),
    "two device_ids": (mlp, {"device_ids": [0, 1]}, "device_ids can only be None or contain a single element"),
    "output_device on cpu": (mlp, {"output_device": 1}, "device_ids and output_device arguments"),
    "no parameters": (nn.Tanh, {}, "not needed when a module doesn't have any parameter"),
    "all frozen": (frozen, {}, "not needed when a module doesn't have any parameter"),
    "lazy": (Lazy, {}, "uninitialized parameters"),
    "two kinds of device": (two_kinds, {}, "on the same type of devices"),
    "sync batch norm on cpu": (sync_batch_norm, {}, "SyncBatchNorm layers only work with GPU modules"),
    "delayed without release": (mlp, {"delay_all_reduce_named_params": []}, "need to be set at the same time"),
    "release without delayed": (
        mlp,
        {"param_to_hook_all_reduce": nn.Parameter(torch.zeros(1))},
        "need to be set at the same time",
    ),
    "unknown argument": (mlp, {"colour": "red"}, "unexpected keyword argument 'colour'"),
}
FINE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "empty device_ids": {"device_ids": []},
    "dim": {"dim": 1},
    "small cap": {"bucket_cap_mb": 1e-6},
    "empty cap list": {"bucket_cap_mb_list": []},
}


@CASES.add(2)
def constructor_arguments(side: Side) -> Any:
    return {
        name: raised(lambda m=make, kw=kwargs: side.wrap(m(), **kw), words)
        for name, (make, kwargs, words) in BAD_ARGUMENTS.items()
    }


@CASES.add(2)
def accepted_arguments(side: Side) -> Any:
    found = {}
    for name, kwargs in FINE_ARGUMENTS.items():
        ddp = side.wrap(seeded(mlp), **kwargs)
        scalar(ddp(side.batch(0, 6, 8))).backward()
        found[name] = [
            ddp.device_ids,
            ddp.output_device,
            ddp.dim,
            ddp.device_type,
            str(ddp.device),
            ddp.is_multi_device_module,
        ]
    return found


@CASES.add(2)
def groups(side: Side) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    flat = init_device_mesh("cpu", (2, 1))
    return [
        raised(lambda: side.wrap(mlp(), process_group=dist.group.WORLD, device_mesh=mesh), "Cannot specify both"),
        raised(lambda: side.wrap(mlp(), device_mesh=flat), "Only 1D device mesh is supported"),
    ]


@CASES.add(2)
def warnings_of_the_constructor(side: Side) -> Any:
    found = []
    for kwargs in (
        {"check_reduction": True},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {},
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp = side.wrap(mlp(), **kwargs)
        found.append([(w.category.__name__, str(w.message)[:60]) for w in caught if w.category is FutureWarning])
        found.append([ddp.broadcast_buffers, ddp.forward_sync_buffers])
    return found


@CASES.add(2)
def static_graph_twice(side: Side) -> Any:
    ddp = side.wrap(mlp(), static_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp._set_static_graph()
    return [ddp.static_graph, [str(w.message)[:50] for w in caught]]


@CASES.add(2)
def pickling_with_a_group_of_ones_own(side: Side) -> Any:
    group = dist.new_group([0, 1])
    ddp = side.wrap(seeded(mlp), process_group=group)
    scalar(ddp(side.batch(0, 6, 8))).backward()
    words = "Pickling/Unpickling are only supported"
    return [raised(lambda: pickle.dumps(ddp), words), raised(lambda: copy.deepcopy(ddp), words)]


@CASES.add(2)
def sample_rate_of_logging(side: Side) -> Any:
    ddp = side.wrap(mlp())
    ddp._set_ddp_runtime_logging_sample_rate(3)
    return raised(lambda: ddp._set_ddp_runtime_logging_sample_rate(0), "sample rate should be equal or greater than 1")


@CASES.add(2)
def methods_of_data_parallel(side: Side) -> Any:
    """Inherited from older times: train returns the wrapper; the module's attributes are not the wrapper's."""
    ddp = side.wrap(mlp())
    return [ddp.train() is ddp, ddp.eval() is ddp, ddp.training, raised(lambda: ddp.weight, "no attribute 'weight'")]


@CASES.add(2)
def unfinished_backward(side: Side) -> Any:
    """A second forward after a backward that every rank has broken off."""
    model = seeded(mlp)
    ddp = side.wrap(model)

    def explode(grad: torch.Tensor) -> None:
        raise ZeroDivisionError("in the middle")

    handle = model[0].weight.register_hook(explode)
    first = raised(lambda: scalar(ddp(side.batch(0, 6, 8))).backward(), "in the middle")
    handle.remove()
    return first


class Table(nn.Module):
    def __init__(self, sparse: bool, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=sparse)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


@CASES.add(2)
def dense_gradient_where_a_sparse_one_was_expected(side: Side) -> Any:
    """A sparse embedding tied to a dense layer."""
    ddp = side.wrap(seeded(lambda: Table(sparse=True, tied=True)))
    return raised(lambda: scalar(ddp(side.tokens(0, 7, 3))).backward(), "sparse gradient")


@CASES.add(2)
def sparse_gradient_where_a_dense_one_was_expected(side: Side) -> Any:
    model = seeded(lambda: Table(sparse=False, tied=False))
    ddp = side.wrap(model)
    model.table.sparse = True
    with pytest.raises(RuntimeError, match=r"(?i)sparse"):  # NotImplementedError in torch, which is one
        scalar(ddp(side.tokens(0, 7, 3))).backward()
    return True


@CASES.add(1)
def no_group_of_torch(side: Side) -> Any:
    """Without a default group; the case makes it again for the cases after it."""
    dist.destroy_process_group()
    try:
        return raised(lambda: side.wrap(mlp()), "Default process group has not been initialized")
    finally:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_refuses_as_torch(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
