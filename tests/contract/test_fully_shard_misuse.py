"""What torch's fully_shard refuses, ours refuses with the same type of exception, one of ours, and a name in it.

Where ours refuses more, or otherwise, the message is checked here alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp2_sides import Cases
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lockstep
from lockstep.comm.mesh import Mesh
from lockstep.errors import LockstepError
from shard_models import MLP_UNITS, Tied, mlp
from shard_sides import Side, scalar, seeded

CASES = Cases(__name__)


def raised(side: Side, call: Callable[[], Any], *words: str) -> Any:
    """The exception of `call` as the nearest builtin type; on our side one of ours, which holds the words."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the type is what is compared
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        if side.is_ours and not isinstance(error, LockstepError):
            return f"not one of ours: {type(error).__name__}: {error}"
        missing = [word for word in words if side.is_ours and not re.search(word, str(error))]
        return f"{missing} not in: {error}" if missing else kind
    return "nothing was raised"


def refused(side: Side, call: Callable[[], Any], *words: str) -> str:
    """For what only ours refuses: "refused"."""
    found = raised(side, call, *words)
    return "refused" if not side.is_ours or found in ("ValueError", "RuntimeError", "TypeError") else found


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.temperature = nn.Parameter(torch.tensor(1.0))


# ------------------------------------------------------------------ arguments


@CASES.add(2, against="torch")
def what_cannot_be_sharded(side: Side) -> Any:
    return {
        "scalar": raised(side, lambda: side.shard(Scalar()), "temperature", "scalar"),
        "list of modules": raised(side, lambda: side.shard(nn.ModuleList([nn.Linear(2, 2)])), "ModuleList"),
        "dict of modules": raised(side, lambda: side.shard(nn.ModuleDict({"a": nn.Linear(2, 2)})), "ModuleDict"),
    }


@CASES.add(2, against="torch")
def arguments(side: Side) -> Any:
    three = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    return {
        "three axes": raised(side, lambda: side.shard(nn.Linear(8, 3), mesh=three), "1D or 2D", "a|3"),
        "reshard to 3": raised(
            side, lambda: side.shard(nn.Linear(8, 3), reshard_after_forward=3), "reshard_after_forward", "3"
        ),
        "reshard 'yes'": raised(
            side, lambda: side.shard(nn.Linear(8, 3), reshard_after_forward="yes"), "reshard_after_forward"
        ),
    }


@CASES.add(2, against="torch")
def methods(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    register = lockstep.register_fsdp_forward_method if side.is_ours else None
    from torch.distributed.fsdp import register_fsdp_forward_method as theirs

    register = register or theirs
    return {
        "prefetch a plain module": raised(side, lambda: model.set_modules_to_forward_prefetch([model[1]]), "Tanh|ReLU"),
        "in backward": raised(side, lambda: model.set_modules_to_backward_prefetch([model[1]]), "Tanh|ReLU"),
        "no such method": raised(side, lambda: register(model, "encode"), "encode"),
        "reshard to 2": raised(side, lambda: model.set_reshard_after_forward(2), "reshard_after_forward"),
    }


@CASES.add(2, against="plain")
def what_ours_alone_refuses(side: Side) -> Any:
    """Torch takes these, says something else, or hangs."""
    once = side.shard(seeded(mlp))
    transposed = nn.Linear(4, 8)
    transposed.weight = nn.Parameter(torch.zeros(4, 8).t())
    placed = nn.Linear(8, 8)
    mesh = init_device_mesh("cpu", (2,))
    if side.is_ours:
        placed.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 8), mesh, [Shard(1)]))
    linear = nn.Linear(8, 3)
    return {
        "twice": refused(side, lambda: side.shard(once), "Sequential", "before|already"),
        "twice, in a list": refused(side, lambda: side.shard([once, linear]), "Sequential"),
        "no modules": refused(side, lambda: side.shard([]), "at least one"),
        "not a module": refused(side, lambda: side.shard("model"), "str"),
        "a mesh of words": refused(side, lambda: side.shard(linear, mesh="cpu"), "mesh"),
        "placement of words": refused(side, lambda: side.shard(linear, shard_placement_fn=lambda p: "0"), "weight"),
        "no such dimension": refused(side, lambda: side.shard(linear, shard_placement_fn=lambda p: Shard(2)), "weight"),
        "policy of words": refused(side, lambda: side.shard(linear, mp_policy="bf16"), "mp_policy"),
        "policy of dtypes": refused(side, lambda: side.shard(linear, mp_policy=torch.bfloat16), "mp_policy"),
        "sparse": refused(side, lambda: side.shard(nn.Embedding(4, 3, sparse=True)), "weight", "sparse=False"),
        "sparse, a bag": refused(side, lambda: side.shard(nn.EmbeddingBag(4, 3, sparse=True)), "ignored_params"),
        "offload of words": refused(side, lambda: side.shard(linear, offload_policy="cpu"), "offload_policy"),
        "ignored a module": refused(side, lambda: side.shard(linear, ignored_params=[linear]), "ignored_params"),
        "still the same": type(linear).__name__,
    }


@CASES.add(2, against="plain")
def methods_that_ours_refuses(side: Side) -> Any:
    """Each says what to do instead; the model trains on."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    hook = functools.partial(model.set_all_reduce_hook, print) if side.is_ours else print
    return {
        "all-gather": refused(side, lambda: model.set_custom_all_gather(print), "TransportLayer", "'all_gather'"),
        "reduce": refused(side, lambda: model.set_custom_reduce_scatter(print), "TransportLayer", "'reduce_scatter'"),
        "memory": refused(side, lambda: model.set_symm_mem_for_comm(), "Leave the call out"),
        "stream": refused(side, lambda: hook(stream=object()), "wait_stream"),
        "mesh axes": refused(side, lambda: side.shard(nn.Linear(8, 3), dp_mesh_dims=("dp",)), "mesh="),
        "state": [step(side, model), side.snapshot(model)],
    }


@CASES.add(2, against="plain")
def sparse_gradients_that_are_not_reduced(side: Side) -> Any:
    """Frozen or left out, an embedding that was made for them is taken."""
    if side.is_ours:
        frozen = nn.Embedding(11, 8, sparse=True).requires_grad_(False)
        side.shard(frozen)
        own = nn.Embedding(11, 8, sparse=True)
        model = nn.Sequential(own, nn.Linear(8, 3))
        side.shard(model, ignored_params={own.weight})
        model(torch.arange(4)).sum().backward()
        assert own.weight.grad.is_sparse
    return good_step(side)


@CASES.add(2, against="plain")
def meshes_that_do_not_fit(side: Side) -> Any:
    """No rank waits for another; what is left over is still a plain module."""
    linear = seeded(lambda: nn.Linear(8, 3))
    found: dict[str, Any] = {}
    alone = DeviceMesh("cpu", [0])
    answer = refused(side, lambda: side.shard(linear, mesh=alone), "rank 1|this rank") if side.rank == 1 else "refused"
    found["not in the mesh"] = answer
    with Mesh(side.comm, {"a": 1, "b": 1, "c": 2}) as three:
        found["three axes"] = refused(side, lambda: side.shard(linear, mesh=three), "3 axes|1-D|a")
    closed = side.comm.split(0)
    closed.barrier()  # else one rank may close it while another is still connecting
    closed.close()
    found["closed"] = refused(side, lambda: side.shard(linear, mesh=closed), "closed|destroyed")
    found["still the same"] = type(linear).__name__
    return found


# ------------------------------------------------------------------ a model that was changed


def step(side: Side, model: nn.Module) -> None:
    side.backward(scalar(model(side.batch(0, 6, 8))), model)


def good_step(side: Side) -> Any:
    """A model beside the broken one trains as ever."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    step(side, model)
    return side.snapshot(model)


def sharded(side: Side) -> Any:
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    step(side, model)
    return model


@CASES.add(2, against="plain")
def parameters_changed_after_sharding(side: Side) -> Any:
    """Each is found at the next forward, by the parameter's name, on every rank."""
    found: dict[str, Any] = {}
    if side.is_ours:
        model = sharded(side)
        model[0].weight = nn.Parameter(torch.zeros(5, 8))
        found["replaced"] = refused(side, lambda: step(side, model), r"0\.weight")
        model = sharded(side)
        model[2].register_parameter("extra", nn.Parameter(torch.zeros(3)))
        found["added"] = refused(side, lambda: step(side, model), r"2\.extra")
        model = sharded(side)
        del model[2].bias
        model[2].bias = None
        found["removed"] = refused(side, lambda: step(side, model), r"2\.bias")
        model = sharded(side)
        model[0].weight._local_tensor = torch.zeros(1, 8)
        found["another piece"] = refused(side, lambda: step(side, model), r"0\.weight")
    else:
        found = dict.fromkeys(("replaced", "added", "removed", "another piece"), "refused")
    return [found, good_step(side)]


@CASES.add(2, against="torch")
def another_tensor_as_data(side: Side) -> Any:
    """A plain tensor cannot become a DTensor's data: torch itself says so."""
    model = seeded(mlp)
    side.shard_units(model, MLP_UNITS)
    try:
        model[0].weight.data = torch.zeros(3, 8)
    except RuntimeError as error:
        return "incompatible tensor type" in str(error)
    return "was taken"


@CASES.add(2, against="plain")
def parameters_in_two_units(side: Side) -> Any:
    """Tied weights whose two modules are units of their own."""

    def build() -> None:
        model = seeded(Tied)
        side.shard(model.embed)
        side.shard(model.head)
        side.shard(model)
        model(side.tokens(0, 11, 6, 4))

    return [refused(side, build, "weight", "tied|shared") if side.is_ours else "refused", good_step(side)]


@CASES.add(2, against="plain")
def gradients_of_another_kind(side: Side) -> Any:
    """A gradient set by hand that is not a DTensor of the parameter's layout."""
    model = sharded(side)
    found = "refused"
    if side.is_ours:

        def replace() -> None:
            model[0].weight.grad = torch.zeros(33, 8)  # torch refuses it, or the next backward does
            step(side, model)

        try:
            replace()
            found = "nothing was raised"
        except (RuntimeError, LockstepError):
            found = "refused"
    return [found, good_step(side)]


@CASES.add(2, against="plain")
def states_of_another_kind(side: Side) -> Any:
    """What `load_state_dict` is given: names, shapes, dtypes and layouts that do not fit."""
    model = sharded(side)
    state = model.state_dict() if side.is_ours else {}
    found = dict.fromkeys(("missing", "shape", "dtype", "plain tensors", "dtype in place"), "refused")
    if side.is_ours:
        missing = {name: tensor for name, tensor in state.items() if name != "2.bias"}
        other = mlp()
        other[2] = nn.Linear(33, 18)
        side.shard_units(other, MLP_UNITS)
        lower = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
        found["missing"] = words_of(lambda: model.load_state_dict(missing), r"2\.bias")
        found["shape"] = words_of(lambda: model.load_state_dict(other.state_dict()), r"2\.weight")
        found["dtype"] = words_of(
            lambda: (model.load_state_dict(lower, assign=True), step(side, model)), r"0\.weight", "bfloat16"
        )
        model = sharded(side)
        found["plain tensors"] = words_of(lambda: model.load_state_dict(mlp().state_dict()), r"0\.weight")
        model.load_state_dict(lower)  # values are cast into the shard, as torch does
        same = model[0].weight.dtype == torch.float32
        found["dtype in place"] = "refused" if same else str(model[0].weight.dtype)
    return [found, good_step(side)]


def words_of(call: Callable[[], Any], *words: str) -> str:
    """ "refused" where the message holds the words, whoever raised it."""
    try:
        call()
    except (LockstepError, RuntimeError, ValueError, TypeError) as error:
        missing = [word for word in words if not re.search(word, str(error))]
        return f"{missing} not in {type(error).__name__}: {error}" if missing else "refused"
    return "nothing was raised"


@CASES.add(2, against="plain")
def not_all_ranks_the_same_model(side: Side) -> Any:
    """Sizes, names or dtypes that differ between ranks: every rank says so, none waits."""
    found: dict[str, Any] = {}
    makers: dict[str, Callable[[], nn.Module]] = {
        "sizes": lambda: nn.Linear(8, 3 + side.rank),
        "dtypes": lambda: nn.Linear(8, 4, dtype=torch.float64 if side.rank else torch.float32),
        "fewer": lambda: nn.Linear(8, 4, bias=side.rank == 0),
    }
    for name, make in makers.items():
        if side.is_ours:

            def run(make: Callable[[], nn.Module] = make) -> None:
                model = make()
                side.shard(model)
                model(torch.zeros(2, 8, dtype=model.weight.dtype)).sum().backward()

            found[name] = refused(side, run)
        else:
            found[name] = "refused"
    return found


@pytest.mark.parametrize(("name", "world_size"), CASES.parameters())
def test_is_refused_by_name(name: str, world_size: int) -> None:
    CASES.check(name, world_size)
