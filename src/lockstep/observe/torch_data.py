"""What the ranks of a stock torch program train on and save, told to each other as facts.

A pass over a DataLoader counts as training once an optimizer has stepped within it: ranks may well evaluate on the same
samples. Nothing is told of other passes.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.data_facts import PassFacts, same_order
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches
from lockstep.observe.profile.notes import note, takes_notes
from lockstep.observe.torch_batches import BATCHES, PASS

if TYPE_CHECKING:
    from lockstep.observe.dealt_samples import Share

_PILE = 256  # batches whose ids are kept until they are counted
_DRAW = "_next_index"  # torch calls it once for each batch; for those that workers load, ahead of it
_FIRST = "first"  # for the order of a pass: it follows from the first batch


@final
class _Seen:
    """What is known of a dataset."""

    def __init__(self, owner: Callable[[], Any]) -> None:
        self.owner = owner  # None where it is gone
        self.place = ""  # the line of the first loop over it, and which it is of those there: alike on all ranks
        self.passes = 0
        self.whole: list[tuple[Callable[[], Any], PassFacts]] = []  # of each loader's last pass, where it was complete

    def before(self, loader: Callable[[], Any]) -> PassFacts | None:
        """Of the pass before one of `loader`, which may have been over one that is gone; it is not asked for again."""
        gone = [facts for each, facts in self.whole if each is not loader and each() is None]
        own = [facts for each, facts in self.whole if each is loader]
        self.whole = [(each, facts) for each, facts in self.whole if each is not loader and each() is not None]
        return next(reversed(gone + own), None)


@final
class _Pass:
    """One pass over a loader, of which a loop may keep the iterator alone."""

    def __init__(self, watch: DataWatch, iterator: Any, loader: Any, seen: _Seen, step: int) -> None:
        from lockstep.observe.data_checks import order_of, rule_of

        self._watch = watch
        self.iterator, self.loader = weakref.ref(iterator), weakref.ref(loader)
        self.seen = seen
        self.step = step  # of the job, when it began
        self.batches, self.asks_at = 0, 1.0
        self.first = ""  # digest of the first batch
        self.order = order_of(loader, _FIRST)
        self.rule = rule_of(loader, watch.ranks)
        self.site = ""
        self.facts: PassFacts | None = None  # as they were told
        self.is_whole = False
        self.share: Share | None = None  # what this rank was handed, where that is to be noted

    def reached(self, iterator: Any, batch: Any) -> None:
        """See `torch_batches.Pass`."""
        self._watch.reached(self, iterator, batch)

    def ended(self) -> None:
        """See `torch_batches.Pass`."""
        self._watch.ended(self)


@final
class DataWatch:
    """Of one rank. `team` names the ranks that train together; may they have other numbers of batches, or the same?"""

    def __init__(self, guard: Guard, team: Callable[[], tuple[str, bool, bool]]) -> None:
        self._guard = guard
        self.ranks = guard.world_size
        self._team = team
        self._datasets: dict[int, _Seen] = {}  # by id
        self._followed: _Seen | None = None  # the first that is trained on whose samples can be told
        self._current: _Pass | None = None  # over that
        self._passes = 0
        self._loops = Counter[str]()  # that have a name, by line
        self._patches = Patches()

    def watch_loaders(self) -> None:
        """torch.utils.data is there."""
        from torch.utils.data import dataloader

        for name in ("__init__", "_reset"):  # workers that stay are only reset
            self._patches.replace(dataloader._BaseDataLoaderIter, name, self._beginning)
        self._patches.add(BATCHES.attach())
        self._guard.before_look.append(self._add_up)
        self._patches.add(lambda: self._guard.before_look.remove(self._add_up))

    def watch_saves(self) -> None:
        """torch.save is there, or about to be."""
        import torch
        from torch import serialization

        self._patches.replace(serialization, "save", self._saving, torch)

    def watch_safetensors(self) -> None:
        """safetensors.torch is there."""
        from safetensors import torch

        self._patches.replace(torch, "save_file", self._saving)

    def close(self) -> None:
        """Put back what was replaced."""
        self._patches.undo()

    def finish(self) -> None:
        """The program is at its end, maybe within a pass."""
        current, self._current = self._current, None
        if current is not None and current.share is not None:
            share, nth, self._passes = current.share, self._passes, self._passes + 1
            note("coverage", partial(share.fields, current.batches, current.is_whole), epoch=max(share.deal.epoch, nth))

    # ------------------------------------------------------------------ passes

    def _beginning(self, old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            from lockstep.observe.dealt_samples import Share, deal_of

            old(iterator, loader, *args, **kwargs)
            seen = self._seen(loader)
            vars(iterator)[PASS] = current = _Pass(self, iterator, loader, seen, self._guard.recorder.step)
            vars(iterator).pop(_DRAW, None)
            if takes_notes() and self._followed in (None, seen) and (deal := deal_of(loader)):
                current.share = Share(deal)
                vars(iterator)[_DRAW] = _drawing(type(iterator)._next_index, current.iterator, current.share.drawn)

        return begin

    def reached(self, current: _Pass, iterator: Any, batch: Any) -> None:
        """The first batch of a pass is there, or a later one while it is not known whether the pass is for training."""
        if current.batches == 1:
            self._begin(current, batch, iterator._num_yielded - 1)
        elif self._guard.recorder.step > current.step:
            self._tell(current)

    def _begin(self, current: _Pass, batch: Any, skipped: int) -> None:
        from lockstep.observe.data_checks import batch_digest

        current.site, current.first = call_site(), batch_digest(batch)
        if current.share is not None:
            current.share.skipped = skipped  # by a loader that went on from a saved state

    def ended(self, current: _Pass) -> None:
        """There is no other batch in it."""
        current.is_whole = True
        if current.batches and current.facts is None and self._guard.recorder.step > current.step:
            self._tell(current)
        if current is self._current:
            self.finish()
        if current.facts is not None:  # only a complete pass: one that was left early may well be repeated
            current.seen.whole.append((current.loader, current.facts))

    def _tell(self, current: _Pass) -> None:
        from lockstep.observe.data_checks import batches_of

        seen, loader = current.seen, current.loader()
        order = current.first if current.order == _FIRST else current.order
        current.asks_at = math.inf
        batches = None if loader is None else batches_of(loader)
        current.facts = facts = PassFacts(batches, current.first, order, current.rule)
        if not seen.place:
            line = f"{zlib.crc32(current.site.encode()):08x}"
            seen.place, self._loops[line] = f"{line}.{self._loops[line]}", self._loops[line] + 1
        if current.share is not None and self._followed in (None, seen):
            self._followed = seen
            self._follow_samples(current)
        team, joins, may_share = self._team()
        value = {
            "batches": facts.batches,
            "first": "" if may_share else facts.first,
            "rule": "" if may_share else facts.rule,
            "order": same_order(seen.before(current.loader), facts),
            "site": current.site,
            "joins": joins,
        }
        self._guard.facts.tell(f"data {team}/{seen.place}", seen.passes, value)
        seen.passes += 1

    def _follow_samples(self, current: _Pass) -> None:
        """Which samples it has is noted at its end, or when the next one begins."""
        before = self._current
        is_over = before is None or before.iterator() is None or before.loader() is current.loader()
        if not is_over:
            current.share = None  # of two loaders that take turns the first is followed
        elif current.share is not None:
            self.finish()  # with one that was left early
            self._current = current

    def _add_up(self) -> None:
        """What was handed out so far, lest the ids pile up. The guard's thread does it."""
        current = self._current
        if current is not None and current.share is not None and len(current.share.drawn) >= _PILE:
            current.share.count(current.batches)

    def _seen(self, loader: Any) -> _Seen:
        try:
            owner = weakref.ref(loader.dataset)
        except TypeError:  # a list, a range
            owner = weakref.ref(loader)
        found = self._datasets.get(id(owner()))
        if found is None or found.owner() is not owner():
            found = self._datasets[id(owner())] = _Seen(owner)
        return found

    # ------------------------------------------------------------------ files

    def _saving(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """A function that writes to its second argument."""

        @functools.wraps(old)
        def save(*args: Any, **kwargs: Any) -> Any:
            target = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
            if isinstance(target, str | os.PathLike):
                path = os.path.realpath(target)
                if not path.startswith("/dev/"):
                    self._guard.facts.tell("save", path, [self._guard.recorder.step, call_site()])
            with self._guard.activity("checkpoint"):
                return old(*args, **kwargs)

        return save


def _drawing(old: Callable[[Any], Any], iterator: Callable[[], Any], drawn: list[Any]) -> Callable[[], Any]:
    """`_next_index` of one iterator, which it does not keep; the others have nothing to pay."""

    def next_index() -> Any:
        index = old(iterator())
        drawn.append(index)
        return index

    return next_index


def may_share_samples(module: Any, size: int) -> bool:
    """Whether ranks compute `module` together, as in tensor parallelism, and so on the same samples.

    Not so where FSDP cuts it over all of them. With a mesh of several axes, which may be for either, it may be.
    """
    meshes = [param.device_mesh for param in module.parameters() if hasattr(param, "device_mesh")]
    is_sharded = any(hasattr(part, "set_requires_gradient_sync") for part in module.modules())
    return any(not is_sharded or (mesh.ndim, mesh.size()) != (1, size) for mesh in meshes)
