"""What the ranks of a stock torch program train on and save, told to each other as facts.

A pass over a DataLoader counts as training once an optimizer has stepped within it: ranks may well evaluate on the same
samples. Nothing is told of other passes.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.dealt_samples import DEALT, Dealt, dealing
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches
from lockstep.observe.profile.notes import note

_PASS = "_lockstep_pass"


@final
class _Pass:
    """One pass over a loader."""

    def __init__(self, loader: Any, step: int) -> None:
        self.loader = weakref.ref(loader)
        self.sampler: Any = getattr(loader, "sampler", None)
        self.size: int = getattr(loader, "batch_size", None) or 0
        self.step = step  # of the job, when it began
        self.batches = 0
        self.first = ""  # digest of the first batch
        self.order = ""
        self.site = ""
        self.is_told = False
        self.dealt: Dealt | None = None  # to this rank, where that is to be noted
        self.number = 0  # among the passes over this sampler


@final
class _Seen:
    """What is known of a loader."""

    def __init__(self) -> None:
        self.number: int | None = None  # among the loaders that are trained on
        self.passes = 0
        self.before: Any = None  # facts of the last pass, where that was complete


@final
class DataWatch:
    """Of one rank. `team` names the ranks that train together, and says whether they may have other batches (join)."""

    def __init__(self, guard: Guard, team: Callable[[], tuple[str, bool]]) -> None:
        self._guard = guard
        self._team = team
        self._loaders: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
        self._count = 0
        self._sampler: weakref.ref[Any] | None = None  # the first that is trained on
        self._current: _Pass | None = None  # over it
        self._passes = 0
        self._patches = Patches()

    def watch_loaders(self) -> None:
        """torch.utils.data is there."""
        from torch.utils.data import dataloader

        self._patches.replace(dataloader.DataLoader, "__iter__", self._beginning)
        self._patches.replace(dataloader._BaseDataLoaderIter, "__next__", self._going_on)

    def watch_samplers(self) -> None:
        """torch's DistributedSampler is there."""
        from torch.utils.data.distributed import DistributedSampler

        self._patches.replace(DistributedSampler, "__iter__", dealing)

    def watch_saves(self) -> None:
        """torch.save is there, or about to be."""
        import torch
        from torch import serialization

        self._patches.replace(serialization, "save", self._saving(1))
        if hasattr(torch, "save"):  # else torch takes it from there
            self._patches.replace(torch, "save", lambda _: serialization.save)

    def watch_safetensors(self) -> None:
        """safetensors.torch is there."""
        from safetensors import torch

        self._patches.replace(torch, "save_file", self._saving(1))

    def close(self) -> None:
        """Put back what was replaced."""
        self._patches.undo()

    def finish(self) -> None:
        """The program is at its end, maybe within a pass."""
        current, self._current = self._current, None
        if current is not None:
            self._note_samples(current)

    # ------------------------------------------------------------------ passes

    def _beginning(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def begin(loader: Any) -> Any:
            iterator = old(loader)
            vars(iterator)[_PASS] = _Pass(loader, self._guard.recorder.step)
            return iterator

        return begin

    def _going_on(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def next_batch(iterator: Any) -> Any:
            current = vars(iterator).get(_PASS)
            if current is None:
                return old(iterator)
            try:
                batch = old(iterator)
            except StopIteration:
                self._end(current)
                raise
            current.batches += 1
            if current.batches == 1:
                self._begin(current, batch)
            elif not current.is_told and self._guard.recorder.step > current.step:
                self._tell(current)
            return batch

        return next_batch

    def _begin(self, current: _Pass, batch: Any) -> None:
        from lockstep.observe.data_checks import batch_digest, order_of

        current.site = call_site()
        current.first = batch_digest(batch)
        loader = current.loader()
        current.order = "" if loader is None else order_of(loader, current.first)

    def _end(self, current: _Pass) -> None:
        if current.batches and not current.is_told and self._guard.recorder.step > current.step:
            self._tell(current)
        if current is self._current:
            self.finish()
        loader = current.loader()
        seen = None if loader is None else self._loaders.get(loader)
        if seen is not None and current.is_told:
            seen.before = self._facts(current)  # only a complete pass: one that was left early may well be repeated

    def _tell(self, current: _Pass) -> None:
        from lockstep.observe.data_facts import same_order

        current.is_told = True
        self._follow_samples(current)
        loader = current.loader()
        if loader is None:
            return
        seen = self._loaders.setdefault(loader, _Seen())
        if seen.number is None:
            seen.number = self._count
            self._count += 1
        facts = self._facts(current)
        team, joins = self._team()
        value = {
            "batches": facts.batches,
            "first": facts.first,
            "order": same_order(seen.before, facts),
            "site": current.site,
            "joins": joins,
            "repeated": _repeated(loader),
        }
        seen.before = None
        self._guard.facts.tell(f"data {team}/{seen.number}", seen.passes, value)
        seen.passes += 1

    def _follow_samples(self, current: _Pass) -> None:
        """Which samples it has is noted at its end, or when the next one begins."""
        if not hasattr(current.sampler, DEALT):
            return
        if self._sampler is None:
            self._sampler = weakref.ref(current.sampler)
        if self._sampler() is current.sampler:
            self.finish()  # with one that was left early
            current.dealt = vars(current.sampler)[DEALT]
            current.number, self._current = self._passes, current
            self._passes += 1

    @staticmethod
    def _note_samples(current: _Pass) -> None:
        """Write down which samples this rank was given."""
        if current.dealt is not None:
            epoch = max(current.dealt.epoch, current.number)
            note("coverage", partial(current.dealt.fields, current.batches * current.size), epoch=epoch)

    @staticmethod
    def _facts(current: _Pass) -> Any:
        from lockstep.observe.data_checks import batches_of
        from lockstep.observe.data_facts import PassFacts

        return PassFacts(batches_of(current.loader()), current.first, current.order)

    # ------------------------------------------------------------------ files

    def _saving(self, place: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A function that writes to its argument number `place`."""

        def wrap(old: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(old)
            def save(*args: Any, **kwargs: Any) -> Any:
                target = args[place] if len(args) > place else kwargs.get("f", kwargs.get("filename"))
                if isinstance(target, str | os.PathLike):
                    path = os.path.realpath(target)
                    if not path.startswith("/dev/"):
                        self._guard.facts.tell("save", path, [self._guard.recorder.step, call_site()])
                return old(*args, **kwargs)

            return save

        return wrap


def _repeated(loader: Any) -> int:
    """How many samples a DistributedSampler deals out twice, so that all ranks have equally many."""
    sampler = getattr(loader, "sampler", None)
    total, dataset = getattr(sampler, "total_size", None), getattr(sampler, "dataset", None)
    size = getattr(dataset, "__len__", None)
    return 0 if total is None or size is None else max(0, total - size())
