"""What a model holds, by the names that parameters have in it, however they are cut."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import Module

from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.dtensors import DTensor
from lockstep.parallel.fsdp1.tensors import full_tensor, gathered
from lockstep.parallel.shard_unit import unit_of


def unwrapped(model: Module) -> Module:
    """The module that the user made, under whose names everything is known."""
    while (inside := _inside(model)) is not None:
        model = inside
    return model


def _inside(model: Module) -> Module | None:
    """The module in a wrapper that has no names of its own, ours or torch's; None for any other."""
    is_torchs = type(model).__module__.startswith("torch.nn.parallel.")
    if isinstance(model, DistributedDataParallel) or is_torchs:
        return model.get_submodule("module")
    return model._modules.get("_orig_mod")  # of torch.compile


def is_cut(model: Module) -> bool:
    """Whether this rank has pieces of parameters, and not whole ones."""
    return any(isinstance(param, DTensor) for param in unwrapped(model).parameters())


def rank_of(model: Module) -> int:
    """This rank among those that train `model`; 0 for a module that `parallelize` did not make."""
    if isinstance(model, DistributedDataParallel):
        return model.reducer.comm.rank
    unit = unit_of(model)
    return 0 if unit is None else unit.mesh.whole.rank


# ------------------------------------------------------------------ parameters and buffers


def whole_tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter and buffer, in the order of names; tied ones once.

    Collective: every rank, to the end. Memory: one tensor, if the caller keeps none.
    """
    module = unwrapped(model)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for fqn in sorted(named):
        yield fqn, full_tensor(named[fqn])


def whole_state_dict(model: Module) -> dict[str, Tensor]:
    """What the `state_dict` of the module would be if it were whole: on the CPU of rank 0, {} on other ranks.

    Collective: every rank. Memory: the whole model on rank 0; elsewhere nothing.
    """
    made: dict[Tensor, Tensor | None] = {}
    named: dict[str, Tensor] = unwrapped(model).state_dict(keep_vars=True)
    for tensor in dict.fromkeys(named.values()):  # tied ones once
        whole = gathered(tensor, tensor, rank0_only=True)
        made[tensor] = None if whole is None or rank_of(model) != 0 else whole.cpu()
    return {fqn: whole for fqn, tensor in named.items() if (whole := made[tensor]) is not None}
