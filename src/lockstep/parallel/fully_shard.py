"""torch's fully_shard over our ShardGroup: parameters, gradients and optimizer state cut over the ranks, in place."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, ModuleDict, ModuleList, Parameter

from lockstep.errors import ConfigError, ShardingError, UnsupportedArgument
from lockstep.parallel.dtensors import Shard
from lockstep.parallel.eager import compile_only_the_module
from lockstep.parallel.fsdp_module import FSDPModule
from lockstep.parallel.shard_extension import is_extended
from lockstep.parallel.shard_face import face_of
from lockstep.parallel.shard_gradients import sparse_gradient
from lockstep.parallel.shard_group import TAKEN, Member, Owner, ShardGroup
from lockstep.parallel.shard_mesh import ShardMesh, resolve_mesh
from lockstep.parallel.shard_slot import slot_of
from lockstep.parallel.shard_unit import ShardUnit, register_unit, unit_of
from lockstep.parallel.torch_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

PlacementFn = Callable[[Parameter], Shard | None]

_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()  # a module's class -> the same, sharded


ModuleOrList = TypeVar("ModuleOrList", Module, list[Module])


def fully_shard(
    module: ModuleOrList,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: set[Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> ModuleOrList:
    """Cut the parameters of `module` over the ranks of `mesh`; returns `module`, now also an FSDPModule.

    Signature and meaning are torch's. Called bottom-up: parameters of modules that were sharded before stay in their
    own unit, the others form one that is gathered together. Names stay; between uses a parameter is a DTensor. One
    that is a DTensor already, cut by tensor parallelism, lies on both meshes then: they have to be slices of one.
    Different from torch:

    - `mesh` may also be a lockstep Communicator or Mesh; of two axes the first replicates, the second shards;
    - ranks of one host share one copy of the whole parameters instead of gathering one each;
    - units and parameters that only some ranks use need no flag; an exception on one rank reaches all as PeerFailed;
    - gradients are added in the dtype of the shard, also where `reduce_dtype` is narrower;
    - parameters that are whole for a forward without gradients are sharded again after it;
    - `reshard_after_forward` as a number of ranks n: where nothing is gathered, there is nothing to keep on n of them;
    - `dp_mesh_dims` raises UnsupportedArgument.

    Collective: every rank of `mesh`, the same modules in the same order; so are forward and backward.
    Memory: 1 / W of parameters, gradients and optimizer state; while modules compute see `unsharded`.
    Raises: ConfigError for arguments; ShardingError for a parameter that cannot be sharded or is in another unit.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_arguments(modules, ignored_params, dp_mesh_dims)
    policy = _understand_policy(mp_policy)
    where = resolve_mesh(mesh)
    managed = _managed_modules(modules)
    members = _members(managed, set(map(id, ignored_params or ())), shard_placement_fn, where)
    _move_buffers(managed, where.device)
    reshards = _reshards(reshard_after_forward, where.shard.world_size, members)
    groups = _group(members, where, policy, _understand_offload(offload_policy))
    unit = ShardUnit(modules, managed, groups, where, policy, reshards)
    register_unit(unit)
    compile_only_the_module(FSDPModule, ("__call__", "run_whole"), ())
    for part in modules:
        part.__class__ = _sharded_class(type(part))
    return module


def _check_arguments(modules: Sequence[Module], ignored_params: Any, dp_mesh_dims: Any) -> None:
    if not modules:
        raise ConfigError("fully_shard needs at least one module")
    for module in modules:
        if not isinstance(module, Module):
            raise ConfigError(f"fully_shard takes a module or a list of modules, not a {type(module).__name__}")
        if isinstance(module, (ModuleList, ModuleDict)) and type(module).forward is Module.forward:
            raise ConfigError(
                f"fully_shard does not support containers that do not implement forward: {type(module).__name__}. "
                "Shard the modules in it"
            )
        if unit_of(module) is not None:
            raise ShardingError(f"fully_shard was called on this {type(module).__name__} before")
    for param in ignored_params or ():
        if not isinstance(param, Tensor):
            raise ConfigError(f"ignored_params holds a {type(param).__name__}: it is a set of parameters")
    if dp_mesh_dims is not None:
        raise UnsupportedArgument("dp_mesh_dims", "pass the data axes of the mesh: mesh=mesh['replicate', 'shard']")


def _understand_policy(given: Any) -> MixedPrecisionPolicy:
    """`given`, or a policy that leaves all dtypes as they are.  Raises: ConfigError."""
    policy = MixedPrecisionPolicy() if given is None else given
    if not isinstance(policy, MixedPrecisionPolicy):
        raise ConfigError(f"mp_policy={given!r}: pass a MixedPrecisionPolicy")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"mp_policy: {name}={dtype!r} is not a floating-point torch.dtype")
    return policy


def _understand_offload(given: Any) -> CPUOffloadPolicy | None:
    """`given`; None where nothing is kept elsewhere than where it is computed with.  Raises: ConfigError."""
    if given is not None and not isinstance(given, OffloadPolicy):
        raise ConfigError(f"offload_policy={given!r}: pass an OffloadPolicy or CPUOffloadPolicy")
    return given if isinstance(given, CPUOffloadPolicy) else None


def _reshards(asked: Any, world_size: int, members: Sequence[Member]) -> bool | int | None:
    """Whether parameters are given back after forward, or on how many neighbours they stay; one is no giving back."""
    if asked is None or isinstance(asked, bool):
        return asked
    if not isinstance(asked, int) or asked < 1 or world_size % asked:
        raise ConfigError(
            f"reshard_after_forward={asked!r} is True, False or a number of ranks that divides {world_size}, along "
            "which parameters are cut"
        )
    if asked not in (1, world_size) and any(member.face.spread is not None for member in members):
        raise UnsupportedArgument(f"reshard_after_forward={asked}", "True or False around tensor parallelism")
    return False if asked == 1 else asked == world_size or asked


def _managed_modules(modules: Sequence[Module]) -> list[Module]:
    """`modules` and all in them, without what belongs to a unit already."""
    found: dict[int, Module] = {}

    def visit(module: Module) -> None:
        if id(module) in found or unit_of(module) is not None:
            return
        found[id(module)] = module
        for child in module.children():
            visit(child)

    for module in modules:
        visit(module)
    return list(found.values())


def _members(
    managed: Sequence[Module], ignored: set[int], placement: PlacementFn | None, mesh: ShardMesh
) -> list[Member]:
    owners: dict[int, list[Owner]] = {}
    params: dict[int, Parameter] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in ignored and slot_of(param) is None:
                params[id(param)] = param
                owners.setdefault(id(param), []).append(Owner(module, name))
    return [_member(param, owners[key], placement, mesh) for key, param in params.items()]


def _member(param: Parameter, owners: list[Owner], placement: PlacementFn | None, mesh: ShardMesh) -> Member:
    module, name = owners[0]
    fqn = f"{type(module).__name__}.{name}"
    taken = getattr(param, TAKEN, None)
    if taken is not None:
        raise ShardingError(
            f"parameter {fqn!r} is the one that another unit has sharded as {taken!r}: tied parameters belong into one "
            "unit, fully_shard([module_a, module_b]), or leave both to the unit around them"
        )
    if param.requires_grad and any(isinstance(m, (Embedding, EmbeddingBag)) and m.sparse for m, _ in owners):
        raise ShardingError(sparse_gradient(fqn))
    if param.dim() == 0:
        raise ConfigError(f"parameter {fqn!r} is a scalar: make it a 1-D tensor with one element")
    dim = 0
    chosen = placement(param) if placement is not None else None
    if chosen is not None:
        if not isinstance(chosen, Shard):
            raise ConfigError(f"shard_placement_fn returned {chosen!r} for {fqn!r}: it returns Shard(dim) or None")
        dim = chosen.dim + param.dim() if chosen.dim < 0 else chosen.dim
        if not 0 <= dim < param.dim():
            raise ConfigError(f"shard_placement_fn returned {chosen!r} for {fqn!r}, which has {param.dim()} dims")
    return Member(param, tuple(owners), dim, fqn, face_of(param, dim, mesh, fqn))


def _group(
    members: Sequence[Member], mesh: ShardMesh, policy: MixedPrecisionPolicy, offload: CPUOffloadPolicy | None
) -> list[ShardGroup]:
    """One group per dtype, and per whether a gradient is needed, so that frozen parameters have no room for one.

    Matrices come first: optimizers often treat them and the rest differently, and each kind is then one flat stretch.
    """
    kinds: dict[tuple[object, ...], list[Member]] = {}
    for number, member in enumerate(members):
        param = member.param
        alone = number if is_extended(param, member.fqn) else -1
        kinds.setdefault((param.dtype, param.requires_grad, param.is_meta, alone), []).append(member)
    ordered = [sorted(kind, key=lambda member: member.param.dim() < 2) for kind in kinds.values()]
    return [ShardGroup(kind, mesh, policy, offload) for kind in ordered]


def _move_buffers(modules: Sequence[Module], device: torch.device) -> None:
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type not in ("meta", device.type):
                module._buffers[name] = buffer.to(device)


def _sharded_class(cls: type) -> type:
    """`cls` with FSDPModule in front, the same class for all modules of `cls`."""
    found = _classes.get(cls)
    if found is None:
        found = _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    return found


def register_fsdp_forward_method(module: Module, method_name: str) -> None:
    """Let `module.method_name` be used like its forward: with whole parameters. Does nothing without fully_shard.

    Raises: ConfigError where there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ConfigError(f"{type(module).__name__} does not have a method {method_name!r}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run_whole(method, args, kwargs)

    setattr(module, method_name, types.MethodType(run, module))
