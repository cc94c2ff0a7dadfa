"""Models that are cut into pieces, told as facts: whether they were one model before. See `torch_training`.

By torch's fully_shard and FullyShardedDataParallel, and by our own. Each rank keeps a piece of its own model, whatever
those of others are: from another seed on each, they put together a model that nobody has made.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches, around
from lockstep.observe.torch_backward import BACKWARDS
from lockstep.observe.torch_groups import is_the_job

_FEW_ELEMENTS = 256

# Of what was cut: its ranks, names, this rank's pieces. No rank or no name where one has nothing: that never changes.
Looked = tuple[Sequence[int], Sequence[str], Sequence[Any]]
# of what cuts: its attribute after a forward, how one looks at what it has cut, the parameters in its argument
Cutting = tuple[str, Callable[[Any], Looked], Callable[[Any], Sequence[Any]]]


@final
class CutFacts:
    """Of one rank."""

    def __init__(self, guard: Guard, patches: Patches) -> None:
        self._guard, self._patches = guard, patches
        self._told = 0
        # by what has cut: its attribute after a forward, its `_in_`, the line, digests of the parameters and the pieces
        self._cuts: weakref.WeakKeyDictionary[Any, tuple[str, Any, str, Any, Any]] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Whatever cuts, from its import on."""
        one: Cutting = "_unsharded_param", _in_param, lambda param: [param]
        flat: Cutting = "_is_root", _in_flat, list  # called after sync_module_states has broadcast
        ours: Cutting = "unsharded", _in_group, lambda members: [member.param for member in members]
        for module, owner, name, cutting in (
            ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam", "__init__", one),
            ("torch.distributed.fsdp", "_init_utils", "_init_param_handle_from_params", flat),
            ("lockstep.parallel.shard_group", "ShardGroup", "__init__", ours),
        ):
            self._patches.replace_in(module, owner, name, around(partial(self._cut, cutting)))

    def _cut(
        self, cutting: Cutting, old: Callable[..., None], /, owner: Any, params: Any, *args: Any, **kwargs: Any
    ) -> None:
        """With `old` a rank keeps its piece of its own model, whatever those of others are."""
        used, look, given = cutting
        locals_ = [getattr(param, "_local_tensor", param) for param in given(params)]
        is_odd = any(hasattr(local, "__tensor_flatten__") or local.is_meta for local in locals_)
        is_odd |= self._guard.world_size == 1 or not is_the_job(self._guard)
        wholes = [] if is_odd else _digests(locals_)
        old(owner, params, *args, **kwargs)
        BACKWARDS.are_shared = True
        ranks, _, pieces = look(owner) if wholes else ((), (), ())
        if len(ranks) > 1:
            BACKWARDS.once += [self._tell_cuts] * (not self._cuts)
            self._cuts[owner] = used, look, f"cut at {call_site()}", wholes, _digests(pieces)

    def _tell_cuts(self) -> None:
        """What of the model in use is still as it was cut: a program may have loaded or broadcast since."""
        from lockstep.observe.replica import plain_name
        from lockstep.observe.replica_diff import Entry, fold

        told: dict[tuple[int, ...], tuple[str, list[Entry]]] = {}
        for owner in [owner for owner, about in self._cuts.items() if getattr(owner, about[0], None) is not None]:
            _, look, line, wholes, kept = self._cuts.pop(owner)
            ranks, names, pieces = look(owner)
            entries = told.setdefault(tuple(ranks), (line, []))[1]
            if any(kept) and _digests(pieces) == kept:
                named = zip(map(plain_name, names), wholes, strict=False)  # torch may name fewer
                entries += [Entry(f"parameter {name!r}", f"{whole:016x}") for name, whole in named if name]
        BACKWARDS.once += [self._tell_cuts] * bool(self._cuts)
        for ranks, (line, entries) in told.items():
            self._told += 1
            place = f"cut {zlib.crc32(repr(ranks).encode()):08x}/{len(ranks)}/{self._told}"
            self._guard.facts.tell(f"lines {place}", "now", {"cut": line})
            self._guard.facts.tell(f"replica {place}", 1, [fold(entries), "cut", "", []], entries.copy)


def _in_param(cut: Any) -> Looked:
    """What one FSDPParam of torch's fully_shard has cut."""
    about = cut.mesh_info
    others = cut.padded_sharded_param_size.numel() * (getattr(about, "shard_mesh_size", 1) - 1)
    is_odd = getattr(about, "is_spmd_mesh", False) or others >= cut._orig_size.numel()
    return [] if is_odd else about.mesh.mesh.flatten().tolist(), [cut._param_fqn], [cut.sharded_param.to_local()]


def _in_flat(fsdp: Any) -> Looked:
    """What one FullyShardedDataParallel of torch has cut, as one: of most parameters one rank alone has something."""
    import torch.distributed as dist

    handle, flat = fsdp._handle, fsdp._handle.flat_param
    is_odd = not handle.uses_sharded_strategy or flat._sharded_size[0] * (handle.world_size - 1) >= sum(flat._numels)
    local, infos = getattr(flat, "_local_shard", flat), flat._shard_param_infos
    pieces = [local.narrow(0, one.offset_in_shard, one.numel_in_shard) for one in infos if one.in_shard]
    names = [n for param in flat._params or [flat] for n in fsdp._exec_order_data.param_to_fqn.get(param, ())]
    return [] if is_odd else dist.get_process_group_ranks(fsdp.process_group), names, pieces


def _in_group(group: Any) -> Looked:
    """What one ShardGroup of ours has cut."""
    last = group.comm.world_size - 1
    names = [name if all(group.layout.piece_shape(i, last)) else "" for i, name in enumerate(group.fqns)]
    pieces = [piece for name, piece in zip(names, group.pieces.tensors, strict=True) if name]
    return group.mesh.whole.global_ranks, names, pieces


def _digests(tensors: Iterable[Any]) -> list[int]:
    """Of the first elements of each, which stand for all: another seed changes any of them.

    0 of nothing, and of one number throughout, as in a norm: it may be loaded, and be the same.
    """
    from lockstep.observe.tensor_digest import digests

    heads = [tensor.detach().reshape(-1)[:_FEW_ELEMENTS] for tensor in tensors]
    even = digests([head[:1].expand_as(head) for head in heads])
    return [digest * (digest != other) for digest, other in zip(digests(heads), even, strict=True)]
