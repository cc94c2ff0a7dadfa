"""Which rank sees which sample: torch's DistributedSampler, with epochs that advance and a position that can be saved.

It is a subclass of torch's class only to be recognised: other libraries ask `isinstance` before they leave a loader's
sampler alone. Nothing is inherited.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_names import default_rank_and_world
from lockstep.data.cursor import STATE_VERSION, EpochCursor, Pass, check_state
from lockstep.data.order import Order, Tail, deal, sample_chunks
from lockstep.errors import ConfigError, DataError, UnsizedDataset
from lockstep.observe.dealt_samples import Deal

Pad = Literal["repeat", "none"]


class DistributedSampler(TorchDistributedSampler[int]):
    """Deals the samples of a dataset to ranks: `torch.utils.data.DistributedSampler`, same arguments, same indices.

    torch_order: True shuffles with torch's own permutation, False as order="keyed" does.
    order: "torch" or "keyed", which is computed, not stored: O(1) memory and seek, to 2**62 samples.
    pad: "repeat" gives every rank equally many samples by repeating some, as torch does. "none" gives every sample
        exactly once, so ranks may differ by one and some may get nothing: for evaluation, with sums over ranks.
    comm: gives rank and num_replicas; without it they come from torch's default group.

    Epochs: the first pass (a `for` loop over the sampler or its DataLoader) is epoch 0, every later one the next epoch.
    A pass counts from its first sample on, also when it is left early, so every rank must begin the same passes.
    `set_epoch(e)` makes the next pass epoch e; from then on a pass that was left early is repeated, as in torch, and a
    complete one is followed by e + 1. With pad="none" no rank knows whether others have a sample more than it, so a
    pass counts as complete once some rank may have used all of its samples.

    Resume: `state_dict()` is a few numbers that hold for any number of ranks; save rank 0's and load it on every rank.
    `len()` stays that of a whole epoch.

    Fewer samples than ranks: some are repeated, as in torch; with pad="none" some ranks get nothing; with drop_last,
    which would drop all, it is an error.

    Raises: ConfigError for arguments, DataError for a dataset that cannot be dealt; both are ValueErrors.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        comm: Communicator | None = None,
        torch_order: bool = True,
        order: Order | None = None,
        pad: Pad = "repeat",
    ) -> None:
        self.rank, self.num_replicas = _place(num_replicas, rank, comm)
        order = _choose_order(torch_order, order)
        _check_choices(pad, drop_last)
        self.length = _length(dataset)  # samples in the dataset
        self._cursor = EpochCursor()
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.order: Order = order
        self.pad: Pad = pad
        if drop_last and self.length < self.num_replicas:
            raise DataError(
                f"{self.length} samples for {self.num_replicas} ranks with drop_last=True: all would be dropped. "
                "Use at most as many ranks as samples, or drop_last=False"
            )
        self.num_samples = len(self._deal(start=0))
        self.total_size = self.length if pad == "none" else self.num_samples * self.num_replicas

    @property
    def torch_order(self) -> bool:
        """True where the indices are those of torch's sampler."""
        return self.order == "torch"

    @property
    def epoch(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  in torch a plain attribute; scripts assign it
        """The epoch of the pass begun last, or of the next one where none has begun since `set_epoch`."""
        return self._cursor.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass epoch `epoch`, from its beginning; only a position loaded for this very epoch is kept."""
        self._cursor.seek(epoch)

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        length = _length(self.dataset)
        if length != self.length:
            raise DataError(f"the dataset had {self.length} samples and has {length} now: make a new sampler for it")
        epoch, start = self._cursor.next(length)
        new = Pass(epoch, start, self._deal(start), self.num_replicas, length, self._cursor.seeks)
        # No Python runs per sample: chain draws from a chunk's list, and the pass asks its iterator what is left.
        return itertools.chain.from_iterable(self._chunks(new))

    def upcoming_deal(self) -> Deal:
        """What a pass that would be made now hands out, over all ranks."""
        epoch, start = self._cursor.next(self.length)
        total = self.length if self.pad == "none" else start + len(self._deal(start)) * self.num_replicas
        return Deal(epoch, self.length, total, partial(self._ordered, epoch), self.num_replicas, start)

    def _ordered(self, epoch: int) -> list[int]:
        chunks = sample_chunks(range(self.length), self.length, self.used_order, self.seed, epoch)
        return list(itertools.chain.from_iterable(chunks))

    def _chunks(self, new: Pass) -> Iterator[Iterator[int]]:
        left = self._cursor.begin(new)
        if left is not None and self.shuffle:
            warnings.warn(
                f"rank {self.rank} left epoch {left.epoch} after {left.done()} of {len(left.positions)} samples and "
                f"begins epoch {new.epoch}. If not every rank does so, ranks disagree from now on: call set_epoch",
                stacklevel=2,
            )
        for chunk in sample_chunks(new.positions, new.length, self.used_order, self.seed, new.epoch):
            new.handed_out += len(chunk)
            new.chunk = iter(chunk)
            yield new.chunk
        new.ended = True

    @property
    def current_pass(self) -> Pass | None:
        """The pass that began last, if any has since the last seek or load."""
        return self._cursor.current

    @property
    def next_epoch(self) -> int:
        """The epoch of a pass that would be made now."""
        return self._cursor.next(self.length)[0]

    @property
    def tail(self) -> Tail:
        """What happens at the end of an epoch, in the words of `order.deal`."""
        return "drop" if self.drop_last else self.pad

    @property
    def used_order(self) -> Order | None:
        """The order that samples come in; None is as they are."""
        return self.order if self.shuffle else None

    def _deal(self, start: int) -> range:
        return deal(self.length, start, self.rank, self.num_replicas, self.tail)

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """The position in the global order, in JSON values; the same on all ranks that are equally far.

        consumed: how many samples this rank has trained on in its current pass. A DataLoader with workers draws samples
            ahead of the training loop, so there the sampler's own count, which is the default, is too high: pass
            `batches_done * batch_size` (more than the pass has, from a short last batch, counts as all).
        """
        current = self._cursor.current
        taken = 0 if current is None else current.taken()
        if consumed is None:
            consumed = taken
        elif current is not None:
            consumed = min(consumed, len(current.positions))
        if not 0 <= consumed <= taken:
            raise DataError(f"consumed={consumed} on rank {self.rank}: the sampler has handed out {taken} in this pass")
        return self.state_at(self._cursor.start if current is None else current.position(consumed))

    def state_at(self, position: int) -> dict[str, Any]:
        """The state in which the first `position` samples of the global order of this epoch are used up."""
        return {"version": STATE_VERSION, "epoch": self.epoch, "consumed": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass the rest of the epoch that `state` was taken in, dealt to the ranks there are now.

        Raises: DataError naming both values where the dataset's length, seed, order or shuffle is another one.
        """
        check_state("sampler", state, self._identity(), counts=("epoch", "consumed"))
        if state["consumed"] > self.length:
            raise DataError(f"the sampler state is damaged: {state['consumed']} of {self.length} samples are consumed")
        self._cursor.restore(state["epoch"], state["consumed"])

    def _identity(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle, "order": self.order}


def _place(num_replicas: int | None, rank: int | None, comm: Communicator | None) -> tuple[int, int]:
    """Rank and number of ranks, from whoever knows them."""
    if comm is not None:
        if num_replicas is not None or rank is not None:
            raise ConfigError("comm already says rank and num_replicas: give comm, or the two numbers, not both")
        return comm.rank, comm.world_size
    if num_replicas is None or rank is None:
        default = default_rank_and_world()
        if default is None:
            raise ConfigError(
                "rank and num_replicas are not given, and the default process group has not been initialized: pass "
                "comm=, pass both numbers, or call torch.distributed.init_process_group first"
            )
        rank = default[0] if rank is None else rank
        num_replicas = default[1] if num_replicas is None else num_replicas
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"Invalid rank {rank}, rank should be in the interval [0, {num_replicas - 1}]")
    return rank, num_replicas


def _length(dataset: Dataset[Any]) -> int:
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__len__"):
        raise UnsizedDataset(
            f"{name} has no samples to count and pick, so they cannot be dealt to ranks: give it __len__ and "
            "__getitem__, or let its __iter__ choose by rank and use it without a sampler"
        )
    length = len(dataset)  # pyright: ignore[reportArgumentType]  Dataset leaves __len__ to its subclasses
    if length == 0:
        raise DataError(f"{name} is empty: there is nothing to deal to ranks. Check its path or filter")
    return length


def _choose_order(torch_order: bool, order: Order | None) -> Order:
    if order is None:
        return "torch" if torch_order else "keyed"
    if order not in get_args(Order):
        raise ConfigError(f"order={order!r}: choose one of {', '.join(get_args(Order))}")
    if order == "torch" and not torch_order:
        raise ConfigError("order='torch' and torch_order=False contradict each other: give one of them")
    return order


def _check_choices(pad: str, drop_last: bool) -> None:
    if pad not in get_args(Pad):
        raise ConfigError(f"pad={pad!r}: choose one of {', '.join(get_args(Pad))}")
    if pad == "none" and drop_last:
        raise ConfigError("pad='none' hands out every sample and drop_last=True leaves some out: choose one of them")
