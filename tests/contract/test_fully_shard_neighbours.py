"""Torch's own tools around a sharded module: clipping, checkpoints, compilation, autocast, tensor subclasses."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from fsdp2_sides import Cases
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shard_models import MLP_UNITS, NESTED_UNITS, Nested, conv, mlp
from shard_sides import ADAMW, SGD, Side, scalar, seeded

CASES = Cases(__name__)


@CASES.add(2, 4, against="torch")
def clipping(side: Side) -> Any:
    """By torch's functions, which know DTensors."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    scalar(model(side.batch(0, 6, 8))).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    total = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    nn.utils.clip_grad_value_(model.parameters(), 0.004)
    return [norm.full_tensor(), total.full_tensor(), side.snapshot(model)]


@CASES.add(2, 4, against="torch")
def torchs_state_dict_functions(side: Side) -> Any:
    model = seeded(Nested)
    side.shard_units(model, NESTED_UNITS)
    optimizer = ADAMW(model.parameters())
    scalar(model(side.batch(0, 6, 8))).backward()
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True)
    state, optimizer_state = get_model_state_dict(model, options=whole), get_optimizer_state_dict(model, optimizer)
    other = seeded(Nested, 1)
    side.shard_units(other, NESTED_UNITS)
    other_optimizer = ADAMW(other.parameters())
    set_model_state_dict(other, dict(state), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    set_optimizer_state_dict(other, other_optimizer, optimizer_state)
    for step in range(2):
        other_optimizer.zero_grad()
        scalar(other(side.batch(step, 6, 8))).backward()
        other_optimizer.step()
    return [state, sorted(optimizer_state["state"]), side.snapshot(other)]


@CASES.add(2)
def wrapped_checkpoints(side: Side) -> Any:
    model = seeded(Nested)
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.first or module is model.second)
    side.shard_units(model, ("first", "second"))
    return trained(side, model)


def trained(side: Side, model: Any, steps: int = 3) -> Any:
    optimizer = SGD(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2, tolerance={"torch": 1e-6, "plain": 1e-6})
def compiled_units(side: Side) -> Any:
    torch.compiler.reset()
    model = seeded(Nested)
    for block in (model.first, model.second):
        block.compile(backend="aot_eager")
    side.shard_units(model, ("first", "second"))
    return trained(side, model, 2)


@CASES.add(2)
def autocast(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = scalar(model(side.batch(step, 6, 8)))
        side.backward(loss, model)
        optimizer.step()
    return side.snapshot(model)


@CASES.add(2)
def schedulers_and_groups(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for step in range(4):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 6, 8))), model)
        optimizer.step()
        scheduler.step()
    return side.snapshot(model)


@CASES.add(2)
def gradients_of_inputs_alone(side: Side) -> Any:
    """torch.autograd.grad for the inputs, before the backward that trains."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    x = side.batch(0, 6, 8).requires_grad_()
    (found,) = torch.autograd.grad(scalar(model(x)), [x])
    side.backward(scalar(model(side.batch(1, 6, 8))), model)
    return [found, side.snapshot(model)]


@CASES.add(2)
def a_running_average_of_weights(side: Side) -> Any:
    """Of the shards, by hand."""
    model = seeded(conv)
    side.shard_units(model, ("0", "3"))
    average = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = SGD(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        side.backward(scalar(model(side.batch(step, 4, 3, 6, 6))), model)
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                average[name].lerp_(param, 0.1)
    return [side.whole(dict(average)), side.snapshot(model)]


# ------------------------------------------------------------------ tensors that travel in another form


class Halved(torch.Tensor):
    """A weight that is gathered as bfloat16, with the name of its module, and used as float32."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls: type[Halved], inner: Tensor) -> Halved:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Halved({list(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Halved:
        return Halved(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(Halved, lambda t: t.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func in KEEPS:
            return torch.utils._pytree.tree_map_only(Tensor, Halved, out)
        return args[0] if func in WRITES and isinstance(args[0], Halved) else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        Halved.calls.append(f"pre {list(outer_size)} {type(module).__bases__[-1].__name__} {mesh.size()}")
        return (self.inner.bfloat16(),), ("bfloat16",)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        (gathered,) = outputs
        Halved.calls.append(f"post {metadata} {gathered.dtype} {list(gathered.shape)} {param_dtype} {out is not None}")
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(gathered.to(param_dtype).view_as(out))
            return None
        whole = gathered.to(param_dtype)
        return whole, (whole,)


_ATEN = torch.ops.aten
KEEPS = {
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN.empty_like.default,
    _ATEN.new_zeros.default,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.view.default,
    _ATEN.as_strided.default,
    _ATEN._to_copy.default,
    _ATEN.alias.default,
}
WRITES = {_ATEN.copy_.default}


@CASES.add(2, against="torch")
def tensors_that_travel_in_another_form(side: Side) -> Any:
    Halved.calls = []

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 6, bias=False))
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(Halved(layer.weight.detach()))
        return model

    model = seeded(make)
    side.shard_units(model, ("0",), reshard_after_forward=True)
    out = []
    for step in range(2):
        loss = scalar(model(side.batch(step, 6, 8)))
        loss.backward()
        out.append(loss.detach())
    return [out, sorted(set(Halved.calls)), [param.grad.to_local().clone() for param in model.parameters()]]


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_equals_torch_and_the_truth(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
