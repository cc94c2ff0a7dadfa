"""Are the ranks fed as they should be: different samples, in another order each epoch, equally many batches?

Pure functions compare what the ranks say of themselves; `DataCheck` watches a loader and carries it between them.
Whether every sample of an epoch was used exactly once is `data.coverage`'s to prove.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar, final

from torch import Tensor
from torch.utils.data import DistributedSampler, RandomSampler, Subset

from lockstep.comm.communicator import Communicator
from lockstep.errors import DataError
from lockstep.observe.data_facts import PassFacts, different_lengths, different_rules, equal_data, same_order
from lockstep.observe.tensor_digest import digests

Batch = TypeVar("Batch")
_HEAD = 1 << 18  # elements of a batch's tensor that are looked at: no two batches begin alike by chance
_ASKED = "_IterableDataset_len_called"
_IDS = 256  # of a Subset, that are compared
_FEW = 8  # samples: so few come in the same order twice by chance


class DataWarning(UserWarning):
    """The ranks' data are not what training on several ranks needs."""


# ------------------------------------------------------------------ what one rank has to say


def batch_digest(batch: Any) -> str:
    """Digest of the tensors in a batch, in nested dicts and lists; "" where there are none, or all samples are equal.

    Equal samples are made-up ones: ranks that have the same of them are not at fault.
    """
    tensors = list(_tensors_in(batch))
    if not tensors or all(_is_constant(tensor) for tensor in tensors):
        return ""
    return "".join(f"{digest:016x}" for digest in digests(tensors))


def _tensors_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        whole = batch.numel()
        yield batch[: max(1, len(batch) * _HEAD // whole)] if batch.ndim and whole > _HEAD else batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors_in(value)


def _is_constant(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    sample = tensor[:1] if tensor.ndim and len(tensor) > 1 else tensor.reshape(-1)[:1]
    return bool((tensor == sample).all())


def order_of(loader: Any, first: str = "") -> str:
    """What the order of the next pass over `loader` follows from, where it is shuffled; "" where that is not known.

    A sampler with `set_epoch`, as torch's DistributedSampler, tells; lockstep's counts epochs by itself. Of a loader
    with `shuffle=True` it is in the digest of the `first` batch, if not too small; of who may shuffle or not, in both.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler = sampler_of(loader)
    if isinstance(sampler, RandomSampler):
        parts = batches.num_processes if getattr(batches, "split_batches", False) else 1  # as Accelerate splits them
        size = getattr(batches, "batch_size", None) or 0
        return first if min(size, len(sampler)) // parts >= _FEW else ""
    named: Any = next((one for one in (batches, sampler) if hasattr(one, "set_epoch") and hasattr(one, "epoch")), None)
    if hasattr(named, "next_epoch") or not getattr(named, "shuffle", True) or (batches_of(named) or 0) < _FEW:
        return ""
    epoch = f"epoch {named.epoch}, seed {getattr(named, 'seed', None)}"
    return epoch if hasattr(named, "shuffle") else first and f"{epoch}, {first}"  # who knows whether it shuffles


def rule_of(loader: Any, ranks: int) -> str:
    """By which rule the sampler of `loader` deals which samples to so many ranks: torch's or ours; "" of others."""
    sampler = sampler_of(loader)
    is_ours = hasattr(sampler, "upcoming_deal")
    is_known = is_ours or getattr(type(sampler), "__iter__", None) is DistributedSampler.__iter__
    if not is_known or sampler.num_replicas != ranks:
        return ""
    chosen = [*islice(sampler.dataset.indices, _IDS)] if isinstance(sampler.dataset, Subset) else []
    samples = f"{len(sampler.dataset)} samples" + f" (digest {zlib.crc32(repr(chosen).encode()):08x})" * bool(chosen)
    order = f"seed {sampler.seed}" + f" in epoch {sampler.epoch}" * (not is_ours) if sampler.shuffle else "no shuffle"
    return f"{order} of {samples}"


def sampler_of(loader: Any) -> Any:
    """The innermost one."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None) or getattr(loader, "sampler", None)


def batches_of(loader: Any) -> int | None:
    """`len(loader)`; None where it has none. Nothing follows from having asked."""
    asked = getattr(loader, _ASKED, None)
    try:
        return len(loader)
    except Exception:  # noqa: BLE001 (whatever a loader raises: nobody has asked but us)
        return None
    finally:
        if hasattr(loader, _ASKED):
            setattr(loader, _ASKED, asked)  # else torch warns of a stream that is longer than it said


# ------------------------------------------------------------------ over a communicator


@final
class DataCheck:
    """Checks what the ranks of `comm` train on.

        for batch in DataCheck(comm).watch(loader):
            ...

    strict: raises DataError on every rank where it warns otherwise, once of each kind.
    may_differ: ranks may have different numbers of batches, for `join`.
    """

    def __init__(self, comm: Communicator, *, strict: bool = False, may_differ: bool = False) -> None:
        self._comm = comm
        self._strict = strict
        self._may_differ = may_differ
        self._said: set[str] = set()

    def watch(self, loader: Iterable[Batch]) -> Watched[Batch]:
        """`loader`, to be iterated over instead. Collective: every pass over it, at its first batch."""
        return Watched(self, loader, self._comm.world_size)

    def begin(self, mine: PassFacts, before: PassFacts | None) -> None:
        """Compare at the beginning of a pass.

        before: of this rank's last pass, where that was complete.
        Collective: every rank; blocks.
        Raises: DataError where strict.
        """
        said = self._comm.all_gather_object([*mine, same_order(before, mine)], label="data")
        batches = {rank: facts[0] for rank, facts in enumerate(said)}
        self._tell("lengths", None if self._may_differ else different_lengths(batches, {}))
        self._tell("equal", equal_data({rank: facts[1] for rank, facts in enumerate(said)}))
        self._tell("rules", different_rules({rank: facts[3] for rank, facts in enumerate(said)}))
        self._tell("order", next((facts[4] for facts in said if facts[4]), None))

    def _tell(self, kind: str, text: str | None) -> None:
        if text is None or kind in self._said:
            return
        self._said.add(kind)
        if self._strict:
            raise DataError(f"rank {self._comm.rank}: {text}.")
        warnings.warn(f"rank {self._comm.rank}: {text}. This is said once.", DataWarning, stacklevel=4)


@final
class Watched(Generic[Batch]):
    """A loader under watch; everything but iteration is the loader's own."""

    def __init__(self, check: DataCheck, loader: Iterable[Batch], ranks: int) -> None:
        self._check, self._ranks = check, ranks
        self._loader = loader
        self._before: PassFacts | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # pyright: ignore[reportArgumentType]  a loader without a length says so itself

    def __iter__(self) -> Iterator[Batch]:
        epoch, before, self._before = order_of(self._loader), self._before, None
        rule = rule_of(self._loader, self._ranks)
        batches = iter(self._loader)
        nothing: Any = object()
        batch = next(batches, nothing)
        first = "" if batch is nothing else batch_digest(batch)
        facts = PassFacts(batches_of(self._loader), first, epoch or order_of(self._loader, first), rule)
        self._check.begin(facts, before)
        while batch is not nothing:
            yield batch
            batch = next(batches, nothing)
        self._before = facts  # only a complete pass: one that was left early may well be repeated
