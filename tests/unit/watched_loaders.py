"""A rank whose loaders are watched, without a guard: what it notes and tells."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from lockstep.observe.patches import Patches
from lockstep.observe.profile.notes import Later, take_notes
from lockstep.observe.torch_data import DataWatch


class Watched:
    """A rank whose loaders are watched: what it notes of samples, and tells of passes."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self.recorder = SimpleNamespace(step=0)
        self.world_size = 2
        self.before_look: list[Callable[[], None]] = []
        self.facts = self
        self._told: dict[tuple[str, Any], Any] = {}
        self.notes: list[dict[str, Any]] = []
        self.may_share = False
        patches = Patches()
        self.watch = DataWatch(cast(Any, self), lambda: ("team/2", False, self.may_share), patches)
        self.watch.watch_loaders()
        request.addfinalizer(patches.undo)
        request.addfinalizer(take_notes(self))

    def tell(self, topic: str, key: int | str, value: Any, *, can_wait: bool = False) -> None:
        self._told[topic, key] = value

    def activity(self, _: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def note(self, kind: str, later: Later | None = None, /, **fields: Any) -> None:
        assert later is not None
        self.notes.append({**fields, **(later() or {})})

    def log(self, step: int | None, values: Mapping[str, Any]) -> None:
        raise AssertionError

    def train(self, batches: Iterable[Any], limit: int | None = None) -> None:
        for batch in itertools.islice(batches, limit):
            self.step(batch)

    def step(self, _: Any) -> None:
        self.recorder.step += 1
        for look in self.before_look:
            look()

    @property
    def told(self) -> list[tuple[str, int, Any]]:
        """What is known of each pass by now."""
        return [(topic, key, value) for (topic, key), value in self._told.items() if topic.startswith("data ")]

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What is known of the samples of each loop."""
        return [value for (topic, _), value in self._told.items() if topic.startswith("samples ")]

    @property
    def saved(self) -> list[str]:
        """Files that were written, the first one first."""
        return [path for topic, path in self._told if topic == "save"]

    @property
    def epochs(self) -> list[tuple[int, int, bool]]:
        """Epoch, samples, left early."""
        return [(note["epoch"], note["samples"], note["left_early"]) for note in self.notes]


class Rows(Dataset[Any]):
    """One that a worker can be given."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), float(index)).cumsum(0), "name": str(index)}


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(9.0))


def stock(rank: int = 0, **options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(cast(Any, range(20)), 2, rank, **options)
