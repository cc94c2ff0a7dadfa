"""What some samples of a dataset hold, the same ones on all ranks: who finds the same in them reads the same dataset.

For loaders whose sampler deals by no rule that we know, and for their first pass alone. Which samples it has follows
from what is drawn, what they hold from their batch: 50 us for each of the MARKS, and a microsecond for another batch.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from torch import Tensor, strided, uint8
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, Subset

from lockstep.observe.data_checks import batches_of, sampler_of
from lockstep.observe.data_facts import MARKS
from lockstep.observe.dealt_samples import is_plain

_ELEMENTS = 512  # of a tensor
_KEPT = "_lockstep_marks"  # of a loader


@final
class Marks:
    """Of one loader of one rank, for the rank's thread."""

    def __init__(self, loader: Any) -> None:
        dataset: Any = loader.dataset
        sampler, places = sampler_of(loader), None
        self._size = len(dataset)
        while isinstance(dataset, Subset):
            indices: Any = np.asarray(dataset.indices)
            places, dataset = indices if places is None else indices[places], dataset.dataset
        self._length: int = len(dataset)
        chosen = np.unique(np.linspace(0, self._length - 1, MARKS).astype(np.int64))
        at = chosen if places is None else np.flatnonzero(chosen[np.searchsorted(chosen[:-1], places)] == places)
        samples = (chosen if places is None else places[at]).tolist()
        self._samples: dict[int, int] = dict(zip(at.tolist(), samples, strict=True))  # by what the sampler calls them
        self._scope = f"{self._size} {zlib.crc32(repr(sorted(samples)).encode()):08x}"
        is_each = type(sampler) is SequentialSampler or getattr(sampler, "num_samples", 0) == self._size
        is_stock = type(sampler) in (RandomSampler, SequentialSampler) and is_plain(loader.batch_sampler)
        self._has_all = is_stock and is_each
        self._found: dict[int, int] = {}  # digests
        self.is_done = False

    def begin(self) -> None:
        """A pass begins. What was found in one that was left early holds."""
        self._due: deque[tuple[int, int, dict[int, int]]] = deque()  # a batch, its length, samples and their rows
        self.asks_at = math.inf  # the first of these
        self._batches = self._drawn = self._last = 0
        self._met, self._is_odd = set[int](), False  # samples so far; no ids are drawn, or one of them twice

    def draw(self, ids: Any) -> float:
        """The sampler names a batch, or one sample. The result is `asks_at`."""
        many: Any = ids if isinstance(ids, list | tuple) and ids else [ids]
        if isinstance(many[0], Tensor):
            many = [one.tolist() for one in many]
        self._batches, self._drawn, self._last = self._batches + 1, self._drawn + len(many), len(many)
        if not isinstance(many[0], int | np.integer):
            self._is_odd = True
        elif not self._samples.keys().isdisjoint(many):
            rows = {self._samples[one]: row for row, one in enumerate(many) if one in self._samples}
            self._is_odd |= not self._met.isdisjoint(rows)
            self._met.update(rows)
            if rows := {sample: row for sample, row in rows.items() if sample not in self._found}:
                self._due.append((self._batches, len(many) if isinstance(ids, list | tuple) else 0, rows))
                self.asks_at = self._due[0][0]
        return self.asks_at

    def see(self, number: int, batch: Any) -> bool:
        """Batch `number` of the pass is there. Is there anything to tell?"""
        if self.asks_at != number:
            return False
        _, size, rows = self._due.popleft()
        self.asks_at = self._due[0][0] if self._due else math.inf
        held = {sample: _bytes(batch, row if size else -1, size) for sample, row in rows.items()}
        self._found |= {sample: zlib.crc32(octets) for sample, octets in held.items() if octets}
        return True

    def told(self) -> dict[str, Any]:
        """`drawn` is 0 until a pass is done, and where that says nothing."""
        drawn = 0 if self._is_odd or not self.is_done else self._drawn
        has_all = self._has_all or (drawn > 0 and 0 <= self._size - drawn < max(1, self._last))
        about = {"length": self._length, "scope": self._scope, "drawn": drawn, "has_all": has_all}
        return {**about, "marks": {**self._found}}


def marks_of(loader: Any) -> Marks | None:
    """For the pass over `loader` that begins; None where it is not to be looked into."""
    marks: Marks | None = vars(loader).get(_KEPT)
    if marks is None:
        sampler = sampler_of(loader)
        is_drawn_at_random = getattr(sampler, "replacement", False) or hasattr(sampler, "weights")
        is_mixed = loader.num_workers > 0 and not getattr(loader, "in_order", True)
        sized = not isinstance(loader.dataset, IterableDataset) and batches_of(loader.dataset)
        if is_drawn_at_random or is_mixed or not sized or batches_of(loader) == 1:  # one batch is repeated on purpose
            return None
        try:
            vars(loader)[_KEPT] = marks = Marks(loader)
        except Exception:  # noqa: BLE001 (of a user's dataset, and whatever its parts are named by: nobody has asked but us)
            return None
    if marks.is_done:
        return None
    marks.begin()
    return marks


def _bytes(batch: Any, row: int, size: int) -> bytes:
    """What is in a row of a batch of `size`, or in all of it: -1; but for lone integers, as labels and numbers are."""
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    if isinstance(batch, list | tuple):
        if row < 0 or len(batch) != size or (isinstance(batch[0], Tensor) and batch[0].shape[:1] == (size,)):
            return b"".join(_bytes(each, row, size) for each in batch)
        return _bytes(batch[row], -1, size)
    if isinstance(batch, Tensor) and batch.layout is strided and not batch.is_nested:
        if row >= 0:
            batch = batch[row] if batch.shape[:1] == (size,) else batch.new_empty(0)
        if batch.ndim == 1 and not batch.is_floating_point():  # padded, at either end, as its batch demands
            edges = (batch[1:] != batch[:-1]).nonzero()
            batch = batch[int(edges[0]) + 1 : int(edges[-1]) + 1] if len(edges) else batch[:0]
        flat = batch.detach().reshape(-1)
        flat = flat[:: max(1, len(flat) // _ELEMENTS) if batch.ndim > 1 else 1][:_ELEMENTS].contiguous().cpu()
        return flat.view(uint8).numpy().tobytes() if batch.ndim or batch.is_floating_point() else b""
    return repr(batch).encode() if isinstance(batch, str | bytes | float) else b""
