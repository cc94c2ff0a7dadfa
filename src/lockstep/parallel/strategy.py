"""One word says what is cut over the ranks. The training is the same, and so is the script.

sharding     each rank keeps 1 / W of                        parameters are whole on a rank
none         nothing: DistributedDataParallel                always
optimizer    the optimizer's state: ShardedOptimizer         always
gradients    that, gradients and parameters: fully_shard     from their forward to their backward
full         the same                                        in their forward, and in their backward
hybrid       the same among the ranks of a host              in their forward, and in their backward

model = parallelize(model, "full")
optimizer = optimizer_for(model, torch.optim.AdamW, lr=1e-3)
for inputs, is_last in microbatches:
    with microbatch(model, is_last):
        model(inputs).loss.backward()
lockstep.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakSet

import torch
from torch.nn import Module, ModuleList
from torch.optim import Optimizer

from lockstep.errors import ConfigError, UnsupportedArgument
from lockstep.observe.model_match import describe_model
from lockstep.parallel.ddp import DistributedDataParallel
from lockstep.parallel.fsdp import FullyShardedDataParallel
from lockstep.parallel.fsdp1.arguments import mesh_for
from lockstep.parallel.fsdp_module import FSDPModule
from lockstep.parallel.fully_shard import fully_shard
from lockstep.parallel.replica import broadcast_coalesced, verify_same_model
from lockstep.parallel.shard_mesh import ShardMesh, resolve_mesh
from lockstep.parallel.sharded_optimizer import ShardedOptimizer
from lockstep.parallel.torch_fsdp import ShardingStrategy
from lockstep.parallel.uneven_inputs import JoinedBatches, ReplicaParticipant
from lockstep.parallel.wrap_policies import unit_overrides
from lockstep.parallel.zero.probe import runs_fused

Sharding = Literal["none", "optimizer", "gradients", "full", "hybrid"]
Batch = TypeVar("Batch")

_cut_optimizer: WeakSet[Module] = WeakSet()  # wrappers made for sharding="optimizer"


def parallelize(
    module: Module,
    sharding: Sharding = "full",
    *,
    mesh: Any = None,
    units: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    fill: Callable[[Module], object] | None = None,
) -> Module:
    """Make `module` train on all ranks of `mesh` as one, with rank 0's values; returns what to call from now on.

    That is a DistributedDataParallel around it, or, where parameters are cut, `module` itself. Its parameters move to
    the ranks' device. What is on the meta device gets its values from `fill`, or later where parameters are cut.

    mesh: a lockstep Communicator or Mesh, a torch DeviceMesh, or None for torch's default group. Two axes are (replica,
        shard) for "hybrid", which else takes (hosts, ranks of a host); the other strategies use all ranks as one axis.
    units: what is gathered together: None for the elements of every ModuleList, which are the blocks of a transformer;
        or modules, or a wrap policy. What is in none of them is one unit more.
    mp_policy, offload_policy: those of fully_shard, where parameters are cut.
    fill: gives `module` values that are equal on all ranks, once it is cut where it is cut: `materialize`, or
        `lambda module: load_safetensors(module, path)`.
    Collective: every rank, with equal arguments.
    Memory: the whole module on each rank while it is cut, unless it is on the meta device.
    Raises: ConfigError, UnsupportedArgument; ModelMismatch if ranks built different modules.
    """
    if sharding not in get_args(Sharding):
        raise ConfigError(f"sharding={sharding!r}: it is one of {', '.join(get_args(Sharding))}")
    where = resolve_mesh(mesh)
    if sharding in ("none", "optimizer"):
        _refuse(sharding, mp_policy=mp_policy, offload_policy=offload_policy)
        if fill is not None:
            fill(module)
        if _is_meta(module):
            raise ConfigError(
                f"the module is on the meta device: parallelize(..., {sharding!r}, fill=lockstep.materialize)"
            )
        replica = DistributedDataParallel(module.to(where.device), process_group=where.whole)
        if sharding == "optimizer":
            _cut_optimizer.add(replica)
        return replica
    verify_same_model(where.whole, describe_model(module))
    if not _is_meta(module):
        module.to(where.device)
        broadcast_coalesced(where.whole, [*module.parameters(), *module.buffers()], label="shard.init")
    lines = _lines(where, sharding)
    reshards = False if sharding == "gradients" else None  # None: all but the root, whose backward comes next
    for unit in [*chosen_units(module, units), module]:
        fully_shard(
            unit, mesh=lines, reshard_after_forward=reshards, mp_policy=mp_policy, offload_policy=offload_policy
        )
    if fill is not None:
        fill(module)
    return module


def optimizer_for(
    model: Module, optimizer_cls: Callable[..., Optimizer], params: Iterable[Any] | None = None, **kwargs: Any
) -> Optimizer:
    """`optimizer_cls(params, **kwargs)` for what `parallelize` returned; its state is cut as was asked for there.

    params: parameters, groups of them, or pairs with names; None for all parameters of `model`.
    The class's fused implementation is used where it has one, unless `fused` or `foreach` is given.
    Collective: every rank, with equal arguments.
    """
    params = model.parameters() if params is None else params
    if isinstance(model, FSDPModule):
        return ShardedOptimizer(params, optimizer_cls, **kwargs)
    if isinstance(model, DistributedDataParallel) and model in _cut_optimizer:
        return ShardedOptimizer(params, optimizer_cls, ddp=model, **kwargs)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    return optimizer_cls(params, **({**kwargs, "fused": True} if runs_fused(optimizer_cls, kwargs, device) else kwargs))


def microbatch(model: Module, is_last: bool) -> AbstractContextManager[None]:
    """Around one forward and backward of several that make a step: gradients add up in the least memory.

    Whole gradients stay on the rank until the last backward; where they are cut, every backward sums them over ranks.
    """
    if isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def in_step(model: Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """`batches`, each with True; then the last one with False, whose gradients are zeros, until all ranks are through.

    So ranks may have different numbers of batches. A rank that had none gets another's. Ranks with whole parameters
    need no company where no gradients are recorded: each has its own batches then, and no more.
    Collective: every rank, until the end.
    """
    if isinstance(model, FSDPModule | FullyShardedDataParallel):
        joined = model.join(batches)
    elif isinstance(model, DistributedDataParallel) and torch.is_grad_enabled():
        joined = JoinedBatches(ReplicaParticipant(model), batches, divide_by_initial_world_size=True)
    else:
        yield from ((batch, True) for batch in batches)
        return
    for batch in joined:
        yield batch, joined.has_own


def chosen_units(module: Module, units: Any = None) -> list[Module]:
    """The modules below `module` that become units, from the bottom up; see `parallelize`.

    A module that shares a parameter with others is none, nor is one without parameters.
    Raises: ConfigError for modules that are not below `module`, and for what is no policy.
    """
    if callable(units) or hasattr(units, "_run_policy"):
        return list(unit_overrides(module, units))
    if units is None:
        lists = (part for part in module.modules() if isinstance(part, ModuleList))
        chosen = {part for found in lists for part in found if type(part).forward is not Module.forward}
    else:
        chosen = set(units)
    strange = chosen.difference(module.modules())
    if strange:
        names = ", ".join(sorted(type(part).__name__ for part in strange))
        raise ConfigError(f"units has modules that are not in the {type(module).__name__}: {names}")
    return list(unit_overrides(module, lambda module, recurse, nonwrapped_numel: recurse or module in chosen))


def _is_meta(module: Module) -> bool:
    return any(param.is_meta for param in module.parameters())


def _lines(where: ShardMesh, sharding: Sharding) -> ShardMesh:
    if sharding == "hybrid":
        return mesh_for(ShardingStrategy.HYBRID_SHARD, None, where)
    return where if where.replicate is None else resolve_mesh(where.whole)


def _refuse(sharding: Sharding, **policies: Any) -> None:
    for name, policy in policies.items():
        if policy is not None:
            raise UnsupportedArgument(
                name, f'with sharding="{sharding}" parameters are whole: use torch.autocast, or sharding="gradients"'
            )
