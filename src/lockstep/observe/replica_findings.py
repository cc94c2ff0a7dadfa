"""Replicas that are not equal any more, from the digests that ranks have told of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lockstep.observe.facts import Topic, differ, shown
from lockstep.observe.replica_diff import (
    MISSING,
    OF_GROUP,
    SIGNS,
    Difference,
    Entry,
    agree,
    alike,
    difference_in_words,
    differences,
    likely_cause,
)
from lockstep.observe.scene import Scene
from lockstep.observe.wording import Finding, compose, listed, names

STEP_ALIKE = "call optimizer.step() on every rank, after every backward that is to count."


def find_drift(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Models that were equal, and are not any more."""
    good: str | None = None
    for step in topic.steps:
        told = topic.told[step]
        folds = [value[0] for value in told.values()]
        if len(told) < 2 or not have_all_told(scene, topic, told):
            continue  # there may be a majority yet
        if agree(folds) and agree(folds, moving=True):
            good = step
        elif not agree(folds):
            in_dispute = [r for r, mine in told.items() if any(differ(topic.name, mine, o) for o in told.values())]
            if rows := shown(scene, topic, step, in_dispute):
                is_meant = are_meant_equal(told) or _averages_still(scene, topic, step)
                yield from _drift(scene, topic, step, good, rows) if is_meant else _unaveraged(scene, topic, step, rows)
            return
        elif any(value[3] for value in told.values()):
            yield _moving(scene, topic, told)
    yield from _left_out(scene, topic)


def have_all_told(scene: Scene, topic: Topic, told: Mapping[int, Any]) -> bool:
    """Or no more will be heard: the others may be on machines that are not seen, or gone."""
    return len(told) >= min(topic.size, len(scene.sights)) or bool(scene.ended)


def are_meant_equal(told: Mapping[int, Any]) -> bool:
    """Those of DDP and FSDP are, and what FSDP cuts; others where the same gradients were applied to them."""
    kinds, gradients = {value[1] for value in told.values()}, {value[2] for value in told.values()}
    return kinds in ({"ddp"}, {"pieces"}, {"cut"}) or (len(gradients) == 1 and gradients != {""})


def _averages_still(scene: Scene, topic: Topic, step: str) -> bool:
    """Where gradients are gone, as at the end: whether the calls are those of a step that left equal ones."""
    now, earlier = topic.told[step], [key for key in topic.steps if int(key) < int(step)]
    equal = [key for key in earlier if topic.told[key].keys() == now.keys() and are_meant_equal(topic.told[key])]
    if not equal or any(value[2] for value in now.values()):
        return False
    records, keys = map(scene.records_of, now), (equal[-1], step)
    calls = [[{(r.text, r.site) for r in its if r.step == int(key) - 1} for key in keys] for its in records]
    return all(then and then <= now for then, now in calls)


def _left_out(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Models that differ at the end, where ranks averaged the same gradients and took fewer steps with them.

    Until then their steps do not belong together, so nothing can be compared. Who went on alone ran no synchronised
    backward in those steps.
    """
    facts = {rank: scene.status(rank).facts for rank in scene.sights}
    ends: dict[int, int] = {rank: told["end"]["end"] for rank, told in sorted(facts.items()) if "end" in told}
    last = {rank: topic.told[str(end)][rank] for rank, end in ends.items() if rank in topic.told.get(str(end), ())}
    steps = {rank: ends[rank] for rank in last}
    late = [rank for rank, count in steps.items() if count < max(steps.values())]
    if not late or len(last) < topic.size or agree([value[0] for value in last.values()]) or not are_meant_equal(last):
        return
    backwards = {_synchronised(facts[rank].get(f"sync {topic.place}", {}), count) for rank, count in steps.items()}
    if len(backwards) > 1 or None in backwards:
        return
    counts = ", ".join(f"{count} times on {names(ranks)}" for count, ranks in alike(steps).items())
    head = "REPLICAS differ at the end: an optimizer.step() was left out."
    text = f"each rank ran {backwards.pop()} synchronised backwards, and optimizer.step() {counts}"
    body, done = [text, *_lines_of(scene, topic, sorted(last), ("step",))], min(steps.values())
    why = "all averaged the same gradients, and not all applied them: the models will stay apart."
    yield compose(scene, "replica", f"{topic.name} end", head, late, body, why=why, fix=STEP_ALIKE, done=done)


def _synchronised(told: Mapping[str, Any], steps: int) -> int | None:
    """How many synchronised backwards a rank ran in so many steps; None where it did not tell, or not in every step."""
    counts = {int(step): value[0] for step, value in told.items() if int(step) < steps}  # each holds until the next
    if 0 not in counts or 0 in counts.values():
        return None
    return sum(counts[since] * (until - since) for since, until in pairwise([*sorted(counts), steps]))


_LONG = 1024  # steps, in which a program that averages models by itself has done so, as one with a period of 500
_SINCE = ("perhaps since the start", "equal when they were wrapped")
_LOAD = "Load on every rank what is loaded on one, from one checkpoint."
_SEED = "Start all ranks alike: one seed, one checkpoint, or rank 0's parameters broadcast; and average gradients."


def _drift(scene: Scene, topic: Topic, step: str, good: str | None, rows: Mapping[int, list[Any]]) -> Iterator[Finding]:
    found = _differences(rows)
    if not found:
        return
    kinds = {value[1] for value in topic.told[step].values()}
    is_cut, is_wrapped = kinds == {"cut"}, not kinds.isdisjoint(("ddp", "hook"))
    ranks = sorted({rank for one in found for rank in one.values})
    odd = sorted({rank for one in found for rank in one.odd}) or ranks
    options = [one for one in found if OF_GROUP in one.what]
    lines = [difference_in_words(one) for one in sorted(found, key=lambda one: one not in options)[:3]]
    if len(found) > 3:
        lines.append(f"and {len(found) - 3} more")
    later = _apart_after(topic, step) if len(options) == len(found) else ""
    if later:
        lines.append(f"after step {later} parameters or optimizer state differ too")
    is_seed = good is None and not is_wrapped and not options
    keys = ("cut", "made") if options or is_seed else ("loaded", "past", "step")
    lines += _lines_of(scene, topic, ranks, keys) or _lines_of(scene, topic, ranks, ("made",))
    if is_seed:
        cause = _SEED
    elif len(found) > 1 and any("load_state_dict()" in line for line in lines):
        cause = _LOAD
    else:
        cause = likely_cause(found)
    if good is not None and int(step) - int(good) > 16:  # of short steps, facts keep no more than each 16th
        cause += " LOCKSTEP_REPLICA_EVERY=1 narrows that down to 16 steps or fewer."
    if is_cut:
        head = "REPLICAS differ: built from different seeds."
        why = "each rank keeps its piece of its own model: the whole is put together of different ones."
    else:
        since = _SINCE[is_wrapped] if good is None else f"equal after step {good}"
        head = f"REPLICAS differ after step {step}, {since}."
        why = "each rank trains another model, and averaging gradients does not bring them together again."
    then = f"see to that, then go on from the newest checkpoint of step {good} or before, on every rank."
    key, done = f"{topic.name} later" if later else topic.name, int(step) - 1
    sure = (len(options) < len(found) or bool(later)) and not is_cut
    body, fix = [*lines, cause], "" if good is None else then
    yield compose(scene, "replica", key, head, odd, body, why=why, fix=fix, is_certain=sure, done=done)


def _apart_after(topic: Topic, step: str) -> str:
    """The first step at which more than options of optimizers differ, as these alone did after `step`."""
    folds = {key: [value[0] for value in topic.told[key].values()] for key in topic.steps if int(key) >= int(step)}
    apart = [key for key, rows in folds.items() if not agree(rows, options=False)]
    return apart[0] if apart and apart[0] != step and are_meant_equal(topic.told[apart[0]]) else ""


def _differences(rows: Mapping[int, list[Any]]) -> list[Difference]:
    entries = {
        rank: [Entry(what, value, tuple(held), moving) for what, value, held, moving in mine if what != SIGNS]
        for rank, mine in rows.items()
    }
    return [one for one in differences(entries) if MISSING not in one.values.values()]  # as state that is split


def _unaveraged(scene: Scene, topic: Topic, step: str, rows: Mapping[int, list[Any]]) -> Iterator[Finding]:
    """Parameters whose gradients nobody averages, though all ranks began with the same: all do alike, and drift apart.

    Those of others are averaged: by DDP, by FSDP2 or by the program. What ranks work out together, as experts or parts
    of a layer, is each one's own: it is not averaged on purpose.
    """
    signs = [mine[-1][1] for mine in rows.values() if mine and mine[-1][0] == SIGNS]
    texts = {record.text for rank in rows for record in scene.records_of(rank)}
    trained: set[str] = set.intersection(*map(set, signs)) if len(signs) == len(topic.told[step]) else set()
    same, began = ({what for what in trained if len({mine[what][at] for mine in signs}) == 1} for at in range(2))
    apart = [one.what for one in _differences(rows) if one.what in trained]
    if not apart or same.intersection(apart) or any("all_to_all" in text for text in texts):
        return
    kinds = {value[1] for value in topic.told[step].values()}
    if kinds == {"hook"}:
        later = {int(key): [value[0] for value in topic.told[key].values()] for key in topic.steps}
        is_long = max(later) >= _LONG or all("end" in scene.status(rank).facts for rank in scene.sights)
        models = _are_reduced([signs[0][what][2] for what in apart], texts) or any(map(agree, later.values()))
        if same or int(step) > 1 or len(later) < 2 or not is_long or models:
            return  # they were averaged at first, or the models are or will be, by the program
        text = "the comm hook gave each rank its own back, of all parameters"
        fix = "let the hook return the future of an all-reduce of bucket.buffer() over the number of ranks."
    elif began.issuperset(apart) and (kinds == {"loose"} or _are_reduced([signs[0][what][2] for what in same], texts)):
        text = f"{listed(apart)} began alike on all ranks; gradients of others are averaged"
        fix = "wrap them too, or all-reduce their .grad; what is each rank's own may begin from its own seed."
    else:
        return
    head = f"UNAVERAGED gradients of {len(apart)} parameter{'s' * (len(apart) > 1)}, seen after step {step}."
    body = [text, *_lines_of(scene, topic, sorted(rows), ("wrapped", "step"))]
    why, key = "each rank trains its own from here on, and a checkpoint holds one rank's.", f"{topic.name} apart"
    yield compose(scene, "replica", key, head, (), body, why=why, fix=fix, is_certain=False, done=int(step) - 1)


def _are_reduced(shapes: Sequence[Sequence[int]], texts: set[str]) -> bool:
    """Whether a tensor of one of these shapes, or of all of them as one, was all-reduced, or gathered for it."""
    numels = [math.prod(shape) for shape in shapes]
    wanted = [f"{shape}" for shape, numel in zip(shapes, numels, strict=True) if numel > 1] + [f"[{sum(numels)}]"]
    return any(text.startswith(("all_reduce", "all_gather")) and shape in text for text in texts for shape in wanted)


def _lines_of(scene: Scene, topic: Topic, ranks: Sequence[int], keys: Sequence[str]) -> list[str]:
    """Which lines had to do with it, by the rank's own account: where it loaded, stepped, or made what differs."""
    told = {rank: scene.status(rank).facts.get(f"lines {topic.place}", {}).get("now", {}) for rank in ranks}
    lines: list[str] = []
    for key in keys:
        by_text = alike({rank: texts.get(key, "") for rank, texts in told.items()})
        is_news = key != "loaded" or len(by_text) > 1  # what all did alike explains nothing
        lines += [f"{names(same)}: {text}" for text, same in by_text.items() if text and is_news and len(lines) < 2]
    return lines


def _moving(scene: Scene, topic: Topic, told: Mapping[int, Any]) -> Finding:
    buffers = list(dict.fromkeys(name for value in told.values() for name in value[3]))
    head = f"BUFFERS differ on {names(told)}: running statistics, as those of BatchNorm."
    text = f"each rank keeps its own {listed(buffers)}, and a checkpoint holds one rank's"
    body = [text, *_lines_of(scene, topic, sorted(told), ("wrapped",))]
    fix = "leave broadcast_buffers on; or, on GPUs, SyncBatchNorm.convert_sync_batchnorm(model)."
    return compose(scene, "replica", f"{topic.name} buffers", head, (), body, fix=fix, is_certain=False)
