"""Dtypes, placements, meshes and parameters that are left alone: equal to torch's, bit for bit where two ranks add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_sides import Cases
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from lockstep.comm.mesh import Mesh
from shard_models import MLP_UNITS, CheckpointedInside, Holder, adapted, conv, mlp
from shard_sides import ADAMW, SGD, Side, gradients, layout, scalar, seeded, train

CASES = Cases(__name__)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# ------------------------------------------------------------------ mixed precision


def policy(side: Side, param: Any = None, reduce: Any = None, output: Any = None, **kwargs: Any) -> Any:
    """On torch's side gradients are reduced in float32: ours adds in it also what travels in less."""
    if side.kind == "torch" and (reduce or param) not in (None, F16):
        reduce = F32
    return MixedPrecisionPolicy(param, reduce, output, **kwargs)


@CASES.add(2, against="torch")
def parameters_in_bfloat16(side: Side) -> Any:
    policies = (
        policy(side, BF16),
        policy(side, BF16, F32),
        policy(side, BF16, BF16, F32),
    )
    return [train(side, mlp, MLP_UNITS, mp_policy=policy) for policy in policies]


@CASES.add(2, against="torch", tolerance={"torch": 1e-2})  # torch rounds the sum too
def reduction_in_bfloat16(side: Side) -> Any:
    return train(side, mlp, MLP_UNITS, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16), optimizer=SGD)


@CASES.add(2, against="torch")
def parameters_in_float16(side: Side) -> Any:
    return train(side, mlp, MLP_UNITS, mp_policy=policy(side, F16, F32))


@CASES.add(2, against="torch", tolerance={"torch": 2e-3})  # a sum in half precision, divided before or after
def reduction_in_float16(side: Side) -> Any:
    return train(side, mlp, MLP_UNITS, mp_policy=MixedPrecisionPolicy(param_dtype=F16), optimizer=SGD)


@CASES.add(2, against="torch")
def frozen_layers_in_bfloat16(side: Side) -> Any:
    low = policy(side, BF16)
    return [
        train(side, adapted, ("0", "2", "4"), mp_policy=low),
        train(side, lambda: CheckpointedInside(False), ("block.up", "leave"), mp_policy=low),
        train(side, lambda: CheckpointedInside(True), ("block.up", "leave"), mp_policy=low),
    ]


@CASES.add(2, against="torch")
def accumulation_in_the_dtype_of_the_reduction(side: Side) -> Any:
    found = []
    for kind in (policy(side, BF16, F32), policy(side, F16, F32), policy(side)):
        model = seeded(mlp)
        side.shard_units(model, MLP_UNITS, mp_policy=kind)
        with side.no_sync(model):
            for step in (1, 2):
                side.backward(scalar(model(side.batch(step, 6, 8))), model)
        side.backward(scalar(model(side.batch(3, 6, 8))), model)
        side.backward(scalar(model(side.batch(4, 6, 8))), model)
        found.append(side.snapshot(model))
    return found


class Recording(nn.Module):
    """Writes down what its forward sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(4))
        self.seen: list[Any] = []

    def forward(self, x: Tensor, *, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
        weight = self.linear.weight
        self.seen.append([str(x.dtype), str(more["y"][0].dtype), str(more["n"].dtype), str(self.shift.dtype)])
        self.seen.append([type(weight).__name__, str(weight.dtype), list(weight.shape), weight.requires_grad])
        return self.linear(x.to(weight.dtype)), more["n"]


@CASES.add(2, against="torch")
def what_forward_sees(side: Side) -> Any:
    found = []
    for kind in (
        policy(side),
        policy(side, BF16),
        policy(side, BF16, cast_forward_inputs=False),
        policy(side, output=BF16),
        policy(side, BF16, output=F32),
    ):
        model = seeded(Recording)
        side.shard(model, mp_policy=kind)
        out, number = model(side.batch(0, 2, 8), more={"y": [torch.ones(2)], "n": torch.ones(2, dtype=torch.int64)})
        out.float().sum().backward()
        found.append([model.seen, str(out.dtype), str(number.dtype), layout(model), side.snapshot(model)])
    return found


@CASES.add(2, against="torch")
def units_of_different_policies(side: Side) -> Any:
    model = seeded(conv)
    low, high = MixedPrecisionPolicy(BF16, F32), MixedPrecisionPolicy(F32, F32)
    for name, policy in (("0", low), ("1", high), ("3", low), ("4", high), ("6", low)):
        side.shard(model.get_submodule(name), mp_policy=policy)
    side.shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=F32))
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 4, 3, 6, 6))), model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2, against="torch")
def nested_outputs_are_cast(side: Side) -> Any:
    found = []
    for kind in ("tuple", "dict"):
        model = seeded(lambda k=kind: Holder(k))
        side.shard_units(model, ("inner",), mp_policy=policy(side, BF16, output=F32))
        out = model(side.batch(0, 6, 8))
        scalar(out).backward()
        leaves = torch.utils._pytree.tree_leaves(out)
        found.append([[str(getattr(leaf, "dtype", leaf)) for leaf in leaves], side.snapshot(model)])
    return found


@CASES.add(2, against="torch")
def a_model_in_another_dtype(side: Side) -> Any:
    """Converted before it is cut, and after."""
    found: list[Any] = [train(side, lambda: mlp().double(), MLP_UNITS, inputs=lambda s: side.batch(s, 6, 8).double())]
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    model.to(torch.float64)
    found.append(layout(model))
    optimizer = ADAMW(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8).double())), model)
        optimizer.step()
    return [*found, layout(model), side.snapshot(model)]


# ------------------------------------------------------------------ meshes


@CASES.add(4, tolerance={"torch": 1e-5})
def replicas_of_shards(side: Side) -> Any:
    found = []
    for shape in ((2, 2), (1, 4), (4, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        found.append(train(side, mlp, MLP_UNITS, mesh=mesh))
    return found


@CASES.add(2, 4, against="torch", tolerance={"torch": 1e-5})
def layout_of_replicas(side: Side) -> Any:
    found = []
    for shape in ((2, side.world_size // 2), (1, side.world_size)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        model = seeded(mlp)
        side.shard_units(model, MLP_UNITS, mesh=mesh)
        scalar(model(side.batch(0, 6, 8))).backward()
        found.append([layout(model), side.snapshot(model)])
    return found


@CASES.add(4, tolerance={"torch": 1e-5, "plain": 1e-6})
def replicas_that_accumulate(side: Side) -> Any:
    """First without any reduction, then reduced along one axis only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS, mesh=mesh)
    with side.no_sync(model):
        side.backward(scalar(model(side.batch(1, 6, 8))), model)
    side.backward(scalar(model(side.batch(2, 6, 8))), model)
    first = side.snapshot(model)
    model.zero_grad()
    if side.shards:
        model.set_requires_all_reduce(False)
    with side.no_sync(model) if not side.shards else torch.enable_grad():
        side.backward(scalar(model(side.batch(3, 6, 8))), model)
    if side.shards:
        model.set_requires_all_reduce(True)
    side.backward(scalar(model(side.batch(4, 6, 8))), model)
    return [first, side.whole(gradients(model))]


@CASES.add(2)
def part_of_a_larger_mesh(side: Side) -> Any:
    """One dimension of two: each rank alone; and the same mesh written out."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    found = [
        train(side, mlp, MLP_UNITS, mesh=mesh["data"]),
        train(side, mlp, MLP_UNITS, mesh=DeviceMesh("cpu", [0, 1])),
    ]
    return [*found, train(side, mlp, MLP_UNITS, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))]


@CASES.add(4, tolerance={"torch": 1e-5})
def units_on_different_meshes(side: Side) -> Any:
    whole = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = seeded(mlp)
    for name, mesh in (("0", whole), ("2", grid), ("4", whole)):
        side.shard(model.get_submodule(name), mesh=mesh)
    side.shard(model, mesh=whole)
    for step in range(2):
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
    return side.snapshot(model)


@CASES.add(2, 4, against="plain")
def meshes_of_ours(side: Side) -> Any:
    """A communicator, and a mesh of named axes; what torch has no name for."""
    found = []
    sizes = {"replica": side.world_size // 2, "shard": 2}
    with Mesh(side.comm, {"shard": -1}) as line, Mesh(side.comm, sizes) as grid:
        for mesh in (side.comm, line, grid, grid["replica", "shard"]):
            found.append(train(side, mlp, MLP_UNITS, mesh=mesh))
    return found


# ------------------------------------------------------------------ placements, parameters left alone


@CASES.add(2, 4, tolerance={"torch": 1e-5})
def other_dimensions(side: Side) -> Any:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 8, 1))

    def largest(param: nn.Parameter) -> Shard | None:
        return Shard(max(range(param.ndim), key=param.size)) if param.ndim > 1 else None

    return [
        train(side, make, ("0", "2", "4"), shard_placement_fn=largest),
        train(side, make, ("0",), shard_placement_fn=lambda p: Shard(-1 if p.ndim == 2 else 0)),
    ]


@CASES.add(2, 4, against="torch")
def layout_along_other_dimensions(side: Side) -> Any:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 12), nn.Conv1d(12, 8, 3)))
    side.shard_units(model, ("0",), shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else Shard(0))
    return layout(model)


@CASES.add(2, against=("torch", "plain"))
def ignored_parameters(side: Side) -> Any:
    """They stay whole, on every rank, with each rank's own gradient."""
    model = seeded(mlp)
    ignored = {model[2].weight, model[4].bias}
    side.shard(model[2], ignored_params=ignored)
    side.shard(model, ignored_params=ignored)
    scalar(model(side.batch(0, 6, 8))).backward()
    local = {name: param.grad for name, param in model.named_parameters() if name in ("2.weight", "4.bias")}
    return [[type(param).__name__ for param in ignored], side.whole(local)]


@CASES.add(2)
def a_step_with_ignored_parameters(side: Side) -> Any:
    def make() -> nn.Module:
        model = mlp()
        model[2].requires_grad_(False)
        return model

    model = seeded(make)
    side.shard(model, ignored_params=set(model[2].parameters()))
    optimizer = ADAMW(param for param in model.parameters() if param.requires_grad)
    for step in range(2):
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2, against="plain")
def the_batch_is_a_sum(side: Side) -> Any:
    """Another divisor than the number of ranks, which torch's Gloo does not take."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    if side.shards:
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
    loss = scalar(model(side.batch(0, 6, 8)))
    side.backward(loss if side.shards else loss * side.world_size, model)
    return side.whole(gradients(model))


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_and_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
