"""Replicas that are not equal any more, from the digests that ranks have told of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lockstep.observe.facts import Topic, differ, shown
from lockstep.observe.replica_diff import (
    MISSING,
    OF_GROUP,
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
            if are_meant_equal(told) and (rows := shown(scene, topic, step, in_dispute)):
                yield from _drift(scene, topic, step, good, rows)
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
    yield compose(
        scene,
        "replica",
        f"{topic.name} end",
        "REPLICAS differ at the end: an optimizer.step() was left out.",
        late,
        [
            f"each rank ran {backwards.pop()} synchronised backwards, and optimizer.step() {counts}",
            *_lines_of(scene, topic, sorted(last), ("step",)),
        ],
        why="all averaged the same gradients, and not all applied them: the models will stay apart.",
        fix=STEP_ALIKE,
        done=min(steps.values()),
    )


def _synchronised(told: Mapping[str, Any], steps: int) -> int | None:
    """How many synchronised backwards a rank ran in so many steps; None where it did not tell, or not in every step."""
    counts = {int(step): value[0] for step, value in told.items() if int(step) < steps}  # each holds until the next
    if 0 not in counts or 0 in counts.values():
        return None
    return sum(counts[since] * (until - since) for since, until in pairwise([*sorted(counts), steps]))


_SINCE = ("perhaps since the start", "equal when they were wrapped")
_SEED = "Start all ranks alike: one seed, one checkpoint, or rank 0's parameters broadcast; and average gradients."


def _drift(scene: Scene, topic: Topic, step: str, good: str | None, rows: Mapping[int, list[Any]]) -> Iterator[Finding]:
    entries = {
        rank: [Entry(what, value, tuple(held), moving) for what, value, held, moving in r] for rank, r in rows.items()
    }
    found = [one for one in differences(entries) if MISSING not in one.values.values()]  # as state that is split
    if not found:
        return
    ranks = sorted({rank for one in found for rank in one.values})
    odd = sorted({rank for one in found for rank in one.odd}) or ranks
    options = [one for one in found if OF_GROUP in one.what]
    causes = [*options, *(one for one in found if one not in options)]
    lines = [*map(difference_in_words, causes[:3]), *([f"and {len(found) - 3} more"] if len(found) > 3 else [])]
    is_cut = all(value[1] == "cut" for value in topic.told[step].values())
    is_wrapped = any(value[1] in ("ddp", "hook") for value in topic.told[step].values())
    since = f"equal after step {good}" if good is not None else _SINCE[is_wrapped]
    is_seed = good is None and not is_wrapped and not options
    keys = ("cut", "made") if options or is_seed else ("loaded", "past", "step")
    lines += _lines_of(scene, topic, ranks, keys) or _lines_of(scene, topic, ranks, ("made",))
    cause = _SEED if is_seed else likely_cause(found)
    if good is not None and int(step) - int(good) > 16:  # of short steps, facts keep no more than each 16th
        cause += " LOCKSTEP_REPLICA_EVERY=1 narrows that down to 16 steps or fewer."
    yield compose(
        scene,
        "replica",
        topic.name,
        f"REPLICAS differ{': built from different seeds' if is_cut else f' after step {step}, {since}'}.",
        odd,
        [*lines, cause],
        why="each rank keeps its piece of its own model: the whole is put together of different ones."
        if is_cut
        else "each rank trains another model, and averaging gradients does not bring them together again.",
        fix=""
        if good is None
        else f"see to that, then go on from the newest checkpoint of step {good} or before, on every rank.",
        is_certain=len(options) < len(found) and not is_cut,
        done=int(step) - 1,
    )


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
    return compose(
        scene,
        "replica",
        f"{topic.name} buffers",
        f"BUFFERS differ on {names(told)}: running statistics, as those of BatchNorm.",
        (),
        [
            f"each rank keeps its own {listed(buffers)}, and a checkpoint holds one rank's",
            *_lines_of(scene, topic, sorted(told), ("wrapped",)),
        ],
        fix="leave broadcast_buffers on; or, on GPUs, SyncBatchNorm.convert_sync_batchnorm(model).",
        is_certain=False,
    )
