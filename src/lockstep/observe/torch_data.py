"""What the ranks of a stock torch program train on and save, told to each other as facts.

A pass over a DataLoader counts as training once an optimizer has stepped within it: ranks may well evaluate on the same
samples. Nothing is told of other passes.
"""

from __future__ import annotations

import io
import math
import os
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, final

from lockstep.observe.call_site import call_site
from lockstep.observe.data_facts import PassFacts, same_order
from lockstep.observe.guard import Guard
from lockstep.observe.patches import Patches, around
from lockstep.observe.profile.notes import note, takes_notes
from lockstep.observe.torch_batches import BATCHES, PASS

if TYPE_CHECKING:
    from lockstep.observe.dealt_samples import Share
    from lockstep.observe.sample_marks import Marks

_PILE = 256  # batches whose ids are kept until they are counted
_DRAW = "_next_index"  # torch calls it once for each batch; for those that workers load, ahead of it
_FIRST = "first"  # for the order of a pass: it follows from the first batch


@final
class _Pass:
    """One pass over a loader, of which a loop may keep the iterator alone."""

    def __init__(self, watch: DataWatch, iterator: Any, loader: Any) -> None:
        from lockstep.observe.data_checks import batches_of, order_of, rule_of
        from lockstep.observe.dealt_samples import is_plain

        self._watch = watch
        self.iterator, self.loader = weakref.ref(iterator), weakref.ref(loader)
        try:
            self.data: Callable[[], Any] = weakref.ref(loader.dataset)
        except TypeError:  # a list, a range
            self.data = self.loader
        self.step = watch.recorder.step  # when it began
        self.length, self.batches, self.asks_at, self.last_at = batches_of(loader), 0, 1.0, math.inf
        self.is_fixed = is_plain(loader.batch_sampler) and hasattr(loader.sampler, "__len__")  # that length
        self.skipped = 0  # before the first of them, by a loader that went on from a saved state
        self.first, self.is_twice = "", False  # digest of the first batch; have two workers begun with it
        self.order = order_of(loader, _FIRST)
        self.rule = rule_of(loader, watch.ranks)
        self.site = ""
        self.facts: PassFacts | None = None  # as they were told
        self.line, self.topic = "", ""  # digest of the line of the first loop over it, and the topic of the like
        self.number = 0  # which pass it is of those
        self.is_whole = False
        self.seen, self._is_idle = (0, [0]), False  # at its last batch: step, `handed_out`; were gradients off
        self.is_aside = False  # steps take a batch of another loader after that of this one: this may be to evaluate
        self.marks: Marks | None = None  # where its samples are looked into
        self.share: Share | None = None  # what this rank was handed, where that is to be noted

    def reached(self, iterator: Any, batch: Any) -> None:
        """The first batch is there, the last one, one to look into, or another while it is not known what it is for."""
        from torch import is_grad_enabled

        from lockstep.observe.data_checks import batch_digest

        watch = self._watch
        if self.batches == 2 and iterator._num_workers > 1 and iterator._dataset_kind:  # each reads a stream
            self.is_twice = batch_digest(batch) == self.first != ""
        if self.batches == 1:
            self.site, self.first, self.skipped = call_site(), batch_digest(batch), iterator._num_yielded - 1
        elif self.is_trained_on():
            watch.tell(self, self.batches - 1)
        elif self.batches >= self.last_at:
            watch.complete(self)
        if self.marks is not None and self.marks.see(self.batches, batch):
            watch.tell_marks(self)
        if self.facts is not None:
            self.asks_at = self.last_at if self.marks is None else min(self.last_at, self.marks.asks_at)
            return
        self.step = watch.recorder.step if self._is_idle else self.step
        self._is_idle, self.seen = not is_grad_enabled(), (watch.recorder.step, watch.handed_out())
        watch.latest = watch.latest if self._is_idle else self

    def is_trained_on(self) -> bool:
        """It was not told, and an optimizer has stepped after a batch of it that was drawn with gradients on."""
        return bool(self.facts is None and self.batches and not self._is_idle and self._watch.recorder.step > self.step)

    def drew(self, ids: Any) -> None:
        """The sampler has named a batch, which may be on its way for long."""
        if self.share is not None:
            self.share.drawn.append(ids)
        if self.marks is not None:
            self.asks_at = min(self.asks_at, self.marks.draw(ids))

    def ended(self) -> None:
        """There is no other batch in it."""
        self._watch.ended(self)


@final
class DataWatch:
    """Of one rank. `team` names the ranks that train together; may they have other numbers of batches, or the same?"""

    def __init__(self, guard: Guard, team: Callable[[], tuple[str, bool, bool]], patches: Patches) -> None:
        self._guard, self._patches = guard, patches
        self.recorder, self.ranks = guard.recorder, guard.world_size
        self._team = team
        self._followed: Callable[[], Any] | None = None  # the first dataset trained on whose samples can be told
        self._current: _Pass | None = None  # over that
        self._passes = 0
        self._newest: dict[str, _Pass] = {}  # that were told, by topic
        self.latest: Any = None  # pass that handed a batch out, before it was told
        self._whole: list[_Pass] = []  # each loader's last one that was told, where it was complete

    def watch_loaders(self) -> None:
        """Their passes, from torch's import on."""
        for name in ("__init__", "_reset"):  # workers that stay are only reset
            self._patches.replace_in("torch.utils.data.dataloader", "_BaseDataLoaderIter", name, around(self._begin))
        self._patches.add(BATCHES.attach())
        self._patches.insert(self._guard.before_look, self._add_up)

    def watch_saves(self) -> None:
        """torch.save is there, or about to be; what else weights are kept with is there too."""
        import numpy
        import torch
        from torch import serialization

        saving = around(partial(self._save, 1))
        self._patches.replace(serialization, "save", saving, torch)
        self._patches.replace(serialization.pickle, "dump", saving)
        for name in ("save", "savez", "savez_compressed"):
            self._patches.replace(numpy, name, around(partial(self._save, 0)))

    def watch_safetensors(self) -> None:
        """safetensors.torch is there."""
        from safetensors import torch

        self._patches.replace(torch, "save_file", around(partial(self._save, 1)))

    def finish(self) -> None:
        """The program is at its end, maybe within a pass."""
        current, self._current = self._current, None
        if current is not None and current.share is not None:
            share, nth, self._passes = current.share, self._passes, self._passes + 1
            fields = partial(share.fields, current.batches, current.skipped, current.is_whole)
            note("coverage", fields, epoch=max(share.deal.epoch, nth))

    # ------------------------------------------------------------------ passes

    def _begin(self, old: Callable[..., Any], /, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        from lockstep.observe.dealt_samples import Share, deal_of
        from lockstep.observe.sample_marks import marks_of

        old(iterator, loader, *args, **kwargs)
        vars(iterator)[PASS] = current = _Pass(self, iterator, loader)
        vars(iterator).pop(_DRAW, None)
        may_follow = self._followed is None or self._followed is current.data
        if takes_notes() and may_follow and (deal := deal_of(loader)):
            current.share = Share(deal)
        if self.ranks > 1 and not current.rule:
            current.marks = marks_of(loader)
        if current.share is not None or current.marks is not None:
            drew = current.share.drawn.append if current.share and not current.marks else current.drew
            vars(iterator)[_DRAW] = _drawing(type(iterator)._next_index, current.iterator, drew)

    def ended(self, current: _Pass) -> None:
        """There is no other batch in it."""
        if current.is_trained_on():
            self.tell(current, current.batches)
        self.complete(current)
        if current is self._current:
            self.finish()

    def complete(self, current: _Pass) -> None:
        """All its batches have been handed out, and nobody may ever ask for another one."""
        if current.facts is not None and not current.is_whole:  # one that was left early may well be repeated
            current.is_whole, current.last_at = True, math.inf
            self._whole.append(current)
            if current.marks is not None:
                current.marks.is_done = True
                self.tell_marks(current)

    def tell(self, current: _Pass, begun: int) -> None:
        """It is for training: a first step has ended with so many of its batches."""
        order = "" if _FIRST in current.order and not current.first else current.order.replace(_FIRST, current.first)
        current.facts = facts = PassFacts(current.length, current.first, order, current.rule)
        if current.share is not None and (self._followed is None or self._followed is current.data):
            self._followed = current.data
            self._follow_samples(current)
        team, joins, may_share = self._team()
        step, others = current.seen
        is_first = self.latest not in (None, current) and self.latest.seen[0] == step  # of two
        current.is_aside = not current.rule and (is_first or self.handed_out() != others)
        lines = [one.line for one in [*self._newest.values()] if one.loader is current.loader]
        current.line = lines[-1] if lines else f"{zlib.crc32(current.site.encode()):08x}"
        current.topic, last = self._place(current, f"{team}/{current.line}")
        current.last_at = current.length - current.skipped if current.is_fixed and current.length else math.inf
        value: dict[str, Any] = {
            **facts._asdict(),
            "before": last.batches + last.skipped if current.is_fixed and last is not None and last.is_whole else None,
            "order": same_order(self._before(current), facts),
            "begun": begun,
            "is_twice": current.is_twice,
            "site": current.site,
            "joins": joins,
        }
        if may_share or current.is_aside:
            value, current.marks = {**value, "first": "", "rule": ""}, None
        self._guard.facts.tell(f"data {current.topic}", current.number, value, can_wait=True)
        self.tell_marks(current)

    def tell_marks(self, current: _Pass) -> None:
        """What some of its samples hold, as far as that is known."""
        if current.marks is not None and current.facts is not None:
            value = {**current.marks.told(), "first": current.facts.first, "site": current.site}
            self._guard.facts.tell(f"samples {current.topic}", 0, value, can_wait=True)

    def handed_out(self) -> list[int]:
        """Batches so far, of passes that are trained on for sure."""
        return [one.batches for one in self._newest.values() if not one.is_aside]

    def _before(self, current: _Pass) -> PassFacts | None:
        """Of the pass before one of its loader, or of one over its dataset that is gone; it is not asked for again."""
        old = [one for one in self._whole if one.loader is current.loader]
        old = old or [one for one in self._whole if one.data is current.data and one.loader() is None]
        self._whole = [one for one in self._whole if one not in old and one.data() is not None]
        return old[-1].facts if old else None

    def _place(self, current: _Pass, line: str) -> tuple[str, _Pass | None]:
        """The topic of the passes of that line, but for others that are open meanwhile; and the last one in it."""
        nth, free = 0, (None, current.iterator())
        while (last := self._newest.get(topic := f"{line}.{nth}")) and not (last.is_whole or last.iterator() in free):
            nth += 1
        self._newest[topic], current.number = current, last.number + 1 if last else 0
        return topic, last

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

    # ------------------------------------------------------------------ files

    def _save(self, at: int, old: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A function that writes to its argument `at`."""
        named = (kwargs[name] for name in ("f", "filename", "file") if name in kwargs)
        target = args[at] if len(args) > at else next(named, None)
        if isinstance(target, io.FileIO | io.BufferedWriter | io.BufferedRandom):  # no other has a path for certain
            target = getattr(target, "name", None)  # a number where a descriptor was opened
        if isinstance(target, str | os.PathLike):
            path = os.path.realpath(target)
            if not path.startswith("/dev/"):
                self._guard.facts.tell("save", path, [self.recorder.step, call_site()])
        with self._guard.activity("checkpoint"):
            return old(*args, **kwargs)


def _drawing(old: Callable[[Any], Any], iterator: Callable[[], Any], drew: Callable[[Any], Any]) -> Callable[[], Any]:
    """`_next_index` of one iterator, which it does not keep; the others have nothing to pay."""

    def next_index() -> Any:
        index = old(iterator())
        drew(index)
        return index

    return next_index


def may_share_samples(module: Any, size: int) -> bool:
    """Whether ranks compute `module` together, as in tensor parallelism, and so on the same samples.

    Not so where FSDP cuts it over all of them. With a mesh of several axes, which may be for either, it may be.
    """
    meshes = [param.device_mesh for param in module.parameters() if hasattr(param, "device_mesh")]
    is_sharded = any(hasattr(part, "set_requires_gradient_sync") for part in module.modules())
    return any(not is_sharded or (mesh.ndim, mesh.size()) != (1, size) for mesh in meshes)
