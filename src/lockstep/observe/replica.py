"""Do all ranks still hold the same model? Every few steps, and before each checkpoint, in one small message.

What is compared are `Entry`s: one per parameter, buffer and tensor of the optimizer's state, as a digest, and one per
option such as the learning rate. As long as the ranks agree, a few words of each travel; only when they do not, the
entries do, and name what differs, and where. A rank's own piece of a DTensor is compared with its copies alone.

A buffer that changed since the last look is no sign of a fault: running statistics are each rank's own, until the next
forward takes rank 0's. One that changed on some ranks and not on others is.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lockstep.comm.communicator import Communicator
from lockstep.comm.objects import all_gather_rows
from lockstep.comm.tensor_parts import is_dtensor
from lockstep.errors import ConfigError, ReplicaDrift
from lockstep.observe.profile.notes import note
from lockstep.observe.replica_diff import OF_GROUP, Entry, agree, differences, drift_in_words, fold
from lockstep.observe.tensor_digest import digests
from lockstep.observe.torch_optimizers import params_of

BUFFER = "buffer "
_ENTRIES_AT_ONCE = 4000  # of one message
_WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
_WITH_OWN_SHARE = ("ShardedOptimizer", "ZeroRedundancyOptimizer")  # their state is another one on each rank
_NOT_COMPARED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")  # how, and not what
_OWN_LOSS = "prev_loss"  # of LBFGS: what this rank's closure has returned, of its own batch


class ReplicaWarning(UserWarning):
    """The ranks' models differ in something that is allowed to, and that is easily overlooked."""


# ------------------------------------------------------------------ one rank's entries


@torch.no_grad()
def replica_entries(
    model: Module, optimizer: Optimizer | Sequence[Optimizer] | None = None, ignore: Collection[str] = ()
) -> list[Entry]:
    """What of `model` and `optimizer`, or of several that have a part of it each, should be equal on all its replicas.

    Left out: pieces without a copy elsewhere, what DDP was told to ignore, and what is named in `ignore`, each with its
    state in the optimizer. Not collective. Memory: see `digests`.
    """
    module = unwrapped(model)
    own = {*ignore, *getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *_flat_parameters(module)}
    params = {id(param): "" if name in own else plain_name(name) for name, param in module.named_parameters()}
    named = [(f"parameter {params[id(p)]!r}", p) for p in module.parameters() if params[id(p)]]
    named += [(f"{BUFFER}{plain_name(name)!r}", b) for name, b in module.named_buffers() if name not in own]
    numbers: list[Entry] = []
    optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer] if optimizer is not None else []
    for one in optimizers:
        trained = (params.get(id(param), "") for param in params_of(one))
        which = f" of the optimizer of {next(filter(None, trained), '')!r}" if len(optimizers) > 1 else ""
        for what, value in _optimizer_values(one, params, which):
            if isinstance(value, Tensor) and (value.numel() != 1 or is_dtensor(value)):  # whose piece may be empty
                named.append((what, value))
            else:
                numbers.append(Entry(what, repr(value.item() if isinstance(value, Tensor) else value)))
    held = [(what, tensor, copies) for what, tensor in named if (copies := _copies(tensor)) is not None]
    found = digests([tensor for _, tensor, _ in held])
    return [Entry(what, f"{d:016x}", copies) for (what, _, copies), d in zip(held, found, strict=True)] + numbers


def unwrapped(model: Module) -> Module:
    """The module in wrappers that add nothing but a part to its names."""
    while (inside := list(model._modules)) in (["module"], ["_orig_mod"]) and not model._parameters:
        model = model.get_submodule(inside[0])
    return model


def plain_name(fqn: str) -> str:
    """The name of a parameter without what wrappers have put into it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def is_flat(module: Module) -> bool:
    """Whether it is torch's FullyShardedDataParallel, or ours."""
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def _flat_parameters(module: Module) -> Iterator[str]:
    """Names of what torch's FullyShardedDataParallel has cut without saying so."""
    for prefix, child in module.named_modules():
        if is_flat(child) and getattr(getattr(child, "sharding_strategy", None), "name", "") != "NO_SHARD":
            for name, param in child.named_parameters(prefix):
                if not is_dtensor(param):
                    yield name


def _copies(tensor: Any) -> tuple[int, ...] | None:
    """Ranks that hold the same piece of `tensor`; () for a whole one, None where this rank alone does."""
    if not is_dtensor(tensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    placed = zip(coordinate, tensor.placements, strict=True)
    line = tuple([slice(None) if placement.is_replicate() else place for place, placement in placed])
    ranks = tuple(tensor.device_mesh.mesh[line].flatten().tolist())
    return ranks if len(ranks) > 1 else None


def has_own_share(optimizer: Optimizer) -> bool:
    """Whether each rank keeps another part of the state of `optimizer`."""
    return any(kind.__name__ in _WITH_OWN_SHARE for kind in type(optimizer).__mro__)


def _optimizer_values(optimizer: Optimizer, names: Mapping[int, str], which: str) -> Iterator[tuple[str, Any]]:
    """State and options; those of a parameter that `names` lacks, or whose name is "", are left out."""
    is_shared = has_own_share(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            name = names.get(id(param))
            if name and not is_shared and param in optimizer.state:
                state = {key: value for key, value in optimizer.state[param].items() if key != _OWN_LOSS}
                yield from _leaves(f" of {name!r}", state)
        options = {key: value for key, value in group.items() if key not in _NOT_COMPARED}
        yield from _leaves(f"{OF_GROUP}{number}{which}", options)


def _leaves(of: str, values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors and plain numbers in nested dicts and lists, which are named by their path."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(values, Mapping):
        items = values.items()
    elif isinstance(values, list | tuple):
        items = enumerate(values)
    elif isinstance(values, Tensor | int | float | str | None):
        yield path + of, values
    for key, value in items:
        yield from _leaves(of, value, f"{path}.{key}" if path else str(key))


# ------------------------------------------------------------------ over a communicator


@final
class ReplicaCheck:
    """Compares the replicas of `model`, which the ranks of `comm` train, every `every` steps.

        check = ReplicaCheck(comm, model, optimizer)
        for step in range(1, steps + 1):
            ...
            optimizer.step()
            check.after_step(step)

    every: 0 for never; `check(step)` compares at any time, before a checkpoint is saved say.
    ignore: names of parameters and buffers that are each rank's own.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Module,
        optimizer: Optimizer | None = None,
        *,
        every: int = 100,
        ignore: Collection[str] = (),
    ) -> None:
        if every < 0:
            raise ConfigError(f"every={every}: give a number of steps, or 0 for never")
        self.every = every
        self.last_good: int | None = None  # the last step after which all were equal
        self._comm = comm
        self._model = model
        self._optimizer = optimizer
        self._ignore = frozenset(ignore)
        self._what = "parameters, buffers" if optimizer is None else "parameters, buffers, optimizer state"
        self._compares_moving = not getattr(model, "broadcast_buffers", False)
        self._buffers = self._buffers_in(replica_entries(model, None, self._ignore)) if comm.world_size > 1 else {}

    def after_step(self, step: int) -> None:
        """Compare if `step`, counted in optimizer steps, is due. See `check`."""
        if self.every and step % self.every == 0:
            self.check(step)

    def check(self, step: int) -> None:
        """Compare now; the second time at one step does nothing.

        Collective: every rank, at the same step; blocks. Sends 96 bytes per rank where all agree.
        Memory: see `digests`.
        Raises: ReplicaDrift, on every rank.
        """
        if self._comm.world_size == 1 or step == self.last_good:
            return
        entries = self._marked(replica_entries(self._model, self._optimizer, self._ignore))
        compared = [entry for entry in entries if self._compares_moving or not entry.is_moving]
        mine = torch.tensor(fold(compared), dtype=torch.int64, device=self._comm.device)
        rows = all_gather_rows(self._comm, mine, "replica").tolist()
        is_equal = agree(rows)
        digest = f"{zlib.crc32(repr(rows[self._comm.rank]).encode()):08x}"
        note("replicas", step=step, equal=is_equal, digest=digest, what=self._what)
        if not is_equal:
            self._raise_drift(entries, step)
        if not agree(rows, moving=True):
            self._warn_of_moving()
        self.last_good = step

    def _raise_drift(self, entries: Sequence[Entry], step: int) -> None:
        by_rank: dict[int, list[Entry]] = {rank: [] for rank in range(self._comm.world_size)}
        counts = self._comm.all_gather_object(len(entries), label="replica.entries")
        for first in range(0, max(counts), _ENTRIES_AT_ONCE):
            part = entries[first : first + _ENTRIES_AT_ONCE]
            for rank, rows in enumerate(self._comm.all_gather_object(part, label="replica.entries")):
                by_rank[rank] += [Entry(what, value, tuple(held), moving) for what, value, held, moving in rows]
        found = differences(by_rank)
        if not found:  # a buffer came to be equal: it has changed on some ranks only
            return
        odd = sorted({rank for difference in found for rank in difference.odd})
        words = f"rank {self._comm.rank}: {drift_in_words(found, step, self.last_good)}"
        raise ReplicaDrift(words, odd, [difference.what for difference in found])

    def _marked(self, entries: Sequence[Entry]) -> list[Entry]:
        """`entries`, with the buffers marked that have changed since the last look."""
        before, self._buffers = self._buffers, self._buffers_in(entries)
        return [e._replace(is_moving=before.get(e.what, e.value) != e.value) for e in entries]

    @staticmethod
    def _buffers_in(entries: Iterable[Entry]) -> dict[str, str]:
        return {entry.what: entry.value for entry in entries if entry.what.startswith(BUFFER)}

    def _warn_of_moving(self) -> None:
        self._compares_moving = False
        warnings.warn(
            "buffers that change in every forward, such as the running statistics of BatchNorm, are different on each "
            "rank, and a checkpoint keeps one rank's: leave broadcast_buffers on or, on GPUs, use "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model). This is said once",
            ReplicaWarning,
            stacklevel=4,
        )
