"""What is wrong with the training itself, from the ranks' facts: other models, drifted replicas, lost gradients, data.

Pure, like `diagnosis`. A topic is "kind team/size/number": only ranks of one team tell it, and what they tell under one
key belongs together. What is certain makes results wrong; the rest is only said, once.
"""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.observe import wording
from lockstep.observe.data_facts import different_lengths, equal_data, shared_paths
from lockstep.observe.facts import DETAILS, details_of
from lockstep.observe.model_match import first_difference
from lockstep.observe.replica_diff import (
    MISSING,
    OF_GROUP,
    Entry,
    agree,
    difference_in_words,
    differences,
    likely_cause,
    odd_ranks,
)
from lockstep.observe.scene import Scene
from lockstep.observe.status import Sight
from lockstep.observe.wording import Finding, Kind, names

_AHEAD = 3  # steps: whoever is so far ahead of a rank that goes on computing has not waited for it
_LINE = 104


class Topic(NamedTuple):
    """What ranks have told under one topic."""

    name: str
    size: int  # ranks of the team; 0 where that is not known
    told: dict[str, dict[int, Any]]  # by key and rank

    @property
    def place(self) -> str:
        """Which ranks these are, and which of what they have."""
        return self.name.partition(" ")[2]

    @property
    def team(self) -> str:
        """Which ranks these are, in a word."""
        return self.place.partition("/")[0]


def find_training(scene: Scene) -> Finding | None:
    """The first of the facts that makes the run's results wrong."""
    return next((finding for finding in _findings(scene) if finding.is_certain), None)


def training_notes(scene: Scene) -> list[Finding]:
    """What one should know of, and can live with."""
    return [finding for finding in _findings(scene) if not finding.is_certain]


def _findings(scene: Scene) -> Iterator[Finding]:
    topics: dict[str, list[Topic]] = defaultdict(list)
    for topic in topics_told(scene.sights):
        topics[topic.name.partition(" ")[0]].append(topic)
    for kind, case in _CASES.items():
        for topic in topics[kind]:
            yield from case(scene, topic)


def topics_told(sights: Mapping[int, Sight]) -> Iterator[Topic]:
    """All that ranks have told."""
    told: dict[str, dict[str, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
    for rank, sight in sorted(sights.items()):
        for name, values in sight.status.facts.items():
            if name != DETAILS:
                for key, value in values.items():
                    told[name][key][rank] = value
    for name, keys in sorted(told.items()):
        size = name.split("/")[1] if "/" in name else ""
        yield Topic(name, int(size or 0), keys)


def _steps(topic: Topic) -> list[str]:
    return sorted(topic.told, key=int)


def _say(
    scene: Scene,
    kind: Kind,
    key: str,
    head: str,
    culprits: Sequence[int],
    text: Sequence[str],
    *,
    why: str = "",
    fix: str = "",
    is_certain: bool = True,
) -> Finding:
    who = f"  {wording.culprit(scene, culprits)}" if culprits else ""
    body = [line for part in text for line in textwrap.wrap(part, _LINE, subsequent_indent="  ")]
    composed = wording.compose(
        f"{head}{who}", body, why=why, fix=fix, evidence=scene.limits.evidence if is_certain else ""
    )
    return Finding(kind, tuple(culprits), composed, is_certain, f"{kind}:{key}")


def _odd(values: Mapping[int, Any]) -> tuple[int, ...]:
    return odd_ranks({rank: json.dumps(value) for rank, value in values.items()})


def _shown(scene: Scene, topic: Topic, key: str) -> dict[int, list[Any]] | None:
    """The details of all that told `key`; None while a rank that runs may still show its own."""
    found = {rank: details_of(scene.status(rank), topic.name, key) for rank in topic.told[key]}
    if any(rows is None and scene.is_running(rank) for rank, rows in found.items()):
        return None
    return {rank: rows for rank, rows in found.items() if rows is not None}


# ------------------------------------------------------------------ models


def _model(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Other parameters, or the same ones in another order, when the ranks wrapped their models."""
    for key, told in topic.told.items():
        digests = {rank: value[0] for rank, value in told.items()}
        if len(set(digests.values())) < 2 or (rows := _shown(scene, topic, key)) is None:
            continue
        odd = _odd(digests) if len(told) > 2 else ()
        if not odd and any(rank not in told and scene.is_running(rank) for rank in scene.sights):
            continue  # there may be a majority yet
        usual = min(set(told) - set(odd))
        others = [rank for rank in odd or told if digests[rank] != digests[usual]]
        lines = []
        for rank in others:
            text = first_difference(rows[rank], rows[usual], usual) if rank in rows and usual in rows else None
            lines.append(f"rank {rank} {text or 'has another model, which cannot be read from here any more'}")
        lines += [f"wrapped at {told[usual][1]} (rank {usual}), {told[others[0]][1]} (rank {others[0]})"]
        yield _say(
            scene,
            "model",
            topic.name,
            "MODELS differ when DistributedDataParallel wraps them.",
            odd or tuple(told),
            lines,
            why="gradients pair by the order of the parameters: others would be averaged, or the job hangs.",
            fix="build one model on every rank, in one order, and freeze the same parameters before it is wrapped.",
        )


def _frozen(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Parameters that some ranks train and others do not, since the model was wrapped."""
    for step in _steps(topic):
        told = topic.told[step]
        frozen = {rank: value[0] for rank, value in told.items()}
        if len({json.dumps(value) for value in frozen.values()}) < 2:
            continue
        odd = _odd(frozen) or tuple(rank for rank, value in frozen.items() if value)
        lines = [f"rank {r} froze {_listed(value) or 'nothing'} after wrapping" for r, value in frozen.items()]
        yield _say(
            scene,
            "model",
            f"{topic.name} frozen",
            f"FROZEN on some ranks only, in step {step}.",
            odd,
            [*lines, f"seen at {told[odd[0]][2]}"],
            why="the other ranks wait for gradients that these do not have.",
            fix="set requires_grad alike on all ranks, before DistributedDataParallel(model).",
            is_certain=bool(told[odd[0]][1]),
        )
        return


def _unused(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Parameters that had no part in the loss: on all ranks, or on some."""
    for step in _steps(topic):
        told = topic.told[step]
        is_everywhere = len(told) >= topic.size
        if not is_everywhere and not any(value[1] for value in told.values()):
            continue  # the others may yet say the same
        unused = {rank: value[0] for rank, value in told.items()}
        sites = sorted({value[2] for value in told.values()})
        if is_everywhere and len({json.dumps(value) for value in unused.values()}) == 1:
            lines = [f"no rank used {_listed(next(iter(unused.values())))} in its loss"]
            head, culprits = f"UNUSED parameters in step {step}, on every rank.", ()
        else:
            others = sorted(set(scene.sights) - set(unused)) if not is_everywhere else []
            lines = [f"rank {rank} did not use {_listed(value)}" for rank, value in unused.items()]
            lines += [f"{names(others)} did"] if others else []
            head, culprits = f"UNUSED parameters in step {step}, not on every rank.", _odd(unused) or tuple(unused)
        yield _say(
            scene,
            "model",
            f"{topic.name} unused",
            head,
            culprits,
            [*lines, f"the forward is called at {', '.join(sites)}"],
            why="DistributedDataParallel waits for the gradient of every parameter before the step is whole.",
            fix="use them in the loss, remove or freeze them before wrapping, or find_unused_parameters=True.",
        )
        return


def _synced(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Ranks that averaged gradients in a step in which others did not. What a rank told holds until it changes."""
    latest: dict[int, Any] = {}
    for step in _steps(topic):
        now = topic.told[step]
        told = {r: value for r, value in latest.items() if scene.status(r).step > int(step)} | now
        latest.update(now)
        counts = {rank: value[0] for rank, value in told.items()}
        stays = [r for r in told if scene.status(r).step == int(step) < scene.step - _AHEAD and counts[r] > _AHEAD]
        if stays:
            yield _without_steps(scene, topic, step, stays)
            return
        fewest = [rank for rank, value in told.items() if value[0] == min(counts.values()) and value[1]]
        if len(set(counts.values())) < 2 or not fewest:
            continue
        rank = fewest[0]
        yield _say(
            scene,
            "model",
            f"{topic.name} sync",
            f"NO_SYNC on some ranks only, in step {step}.",
            fewest,
            [
                f"{names(fewest)} ran {told[rank][1]} backward in no_sync() and {told[rank][0]} synchronised ones, at "
                f"{told[rank][2]}; {names(set(told) - set(fewest))} synchronised {max(counts.values())}",
            ],
            why="gradients of different steps are averaged from here on, and the last ones wait for nobody.",
            fix="decide by the number of the micro-batch alone, alike on all ranks, whether to use no_sync().",
        )
        return


def _without_steps(scene: Scene, topic: Topic, step: str, stays: Sequence[int]) -> Finding:
    count, _, site = topic.told[step][stays[0]]
    others = sorted(set(scene.sights) - set(stays))
    return _say(
        scene,
        "replica",
        f"{topic.name} steps",
        f"NO STEP of the optimizer on some ranks since step {step}.",
        stays,
        [
            f"{names(stays)} ran {count} synchronised backwards there, at {site}",
            f"{names(others)} went on to {scene.step}",
        ],
        why="the ranks average the same gradients, and only some apply them: their models drift apart.",
        fix="call optimizer.step() on every rank, after every backward that is to count.",
    )


# ------------------------------------------------------------------ replicas


def _replica(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Models that were equal, and are not any more."""
    good: str | None = None
    for step in _steps(topic):
        told = topic.told[step]
        if len(told) < 2:
            continue
        folds = [value[0] for value in told.values()]
        if agree(folds) and agree(folds, moving=True):
            good = step
        elif not agree(folds):
            if are_meant_equal(told) and (rows := _shown(scene, topic, step)):
                yield from _drift(scene, topic, step, good, rows)
            return
        elif any(value[3] for value in told.values()):
            yield _moving(scene, topic, told)


def are_meant_equal(told: Mapping[int, Any]) -> bool:
    """Replicas of DDP are; others where the same gradients were applied to them."""
    kinds, gradients = {value[1] for value in told.values()}, {value[2] for value in told.values()}
    return kinds == {"ddp"} or (len(gradients) == 1 and gradients != {""})


_SINCE = ("perhaps since the start", "equal when they were wrapped")
_SEED = "Start all ranks alike: one seed, or rank 0's parameters broadcast. Average gradients on all ranks."


def _drift(scene: Scene, topic: Topic, step: str, good: str | None, rows: Mapping[int, list[Any]]) -> Iterator[Finding]:
    entries = {
        rank: [Entry(what, value, tuple(held), moving) for what, value, held, moving in r] for rank, r in rows.items()
    }
    found = [
        one for one in differences(entries) if MISSING not in one.values.values()
    ]  # state that is split is missing
    if not found:
        return
    ranks = sorted(topic.told[step])
    odd = sorted({rank for one in found for rank in one.odd}) or ranks
    options = [one for one in found if OF_GROUP in one.what]
    causes = [*options, *(one for one in found if one not in options)]
    lines = [difference_in_words(one) for one in causes[:3]]
    lines += [f"and {len(found) - 3} more"] if len(found) > 3 else []
    is_wrapped = any(value[1] != "hand" for value in topic.told[step].values())
    since = f"equal after step {good}" if good is not None else _SINCE[is_wrapped]
    is_seed = good is None and not is_wrapped and not options
    lines += _lines_of(scene, topic, ranks, ("made",) if options or is_seed else ("loaded", "past", "step"))
    cause = _SEED if is_seed else likely_cause(found)
    if good is not None and int(step) - int(good) > 1:
        cause += " LOCKSTEP_REPLICA_EVERY=1 finds the step."
    yield _say(
        scene,
        "replica",
        topic.name,
        f"REPLICAS differ after step {step}, {since}.",
        odd,
        [*lines, cause],
        why="each rank trains another model, and averaging gradients does not bring them together again.",
        fix=""
        if good is None
        else f"see to that, then go on from the newest checkpoint of step {good} or before, on every rank.",
        is_certain=len(options) < len(found),
    )


def _lines_of(scene: Scene, topic: Topic, ranks: Sequence[int], keys: Sequence[str]) -> list[str]:
    """Which lines had to do with it, by the rank's own account: where it loaded, stepped, or made what differs."""
    told = {rank: scene.status(rank).facts.get(f"lines {topic.place}", {}).get("now", {}) for rank in ranks}
    lines: list[str] = []
    for key in keys:
        by_text: dict[str, list[int]] = defaultdict(list)
        for rank, texts in told.items():
            by_text[texts.get(key, "")].append(rank)
        is_news = key != "loaded" or len(by_text) > 1  # what all did alike explains nothing
        lines += [f"{names(same)}: {text}" for text, same in by_text.items() if text and is_news and len(lines) < 2]
    return lines


def _moving(scene: Scene, topic: Topic, told: Mapping[int, Any]) -> Finding:
    buffers = list(dict.fromkeys(name for value in told.values() for name in value[3]))
    return _say(
        scene,
        "replica",
        f"{topic.name} buffers",
        f"BUFFERS differ on {names(told)}: running statistics, as those of BatchNorm.",
        (),
        [
            f"each rank keeps its own {_listed(buffers)}, and a checkpoint holds one rank's",
            *_lines_of(scene, topic, sorted(told), ("wrapped",)),
        ],
        fix="SyncBatchNorm.convert_sync_batchnorm(model), or leave broadcast_buffers on.",
        is_certain=False,
    )


# ------------------------------------------------------------------ gradients and data


def _gradient(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Gradients that are NaN or infinite when the optimizer is about to apply them."""
    for step in _steps(topic):
        told = topic.told[step]
        silent = [rank for rank in scene.sights if rank not in told and scene.is_running(rank)]
        is_heard = len(scene.sights) == scene.status(scene.me).world_size
        if any(scene.status(rank).step <= int(step) for rank in silent) or (scene.step <= int(step) and not is_heard):
            return  # they may yet tell
        origins = {rank: value[0] for rank, value in told.items() if value[0]}
        lines = [f"rank {rank}: {value[0]} at {value[2]}" for rank, value in told.items() if value[0]]
        lines += [] if origins else ["on which rank it began cannot be told: every loss was finite"]
        lines += [f"gradients after averaging: {', '.join(next(iter(told.values()))[1])}"]
        yield _say(
            scene,
            "gradient",
            topic.name,
            f"NOT FINITE gradients in step {step}.",
            sorted(origins) if len(origins) < len(told) else (),
            lines,
            why="their mean is about to be applied on every rank, and from the next step on nothing is finite.",
            fix="look at that rank's batch and loss; skip the step where the gradients' norm is not finite.",
            is_certain=False,
        )
        return


def _data(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Ranks of one team that train on the same samples, in the same order again, or on other numbers of batches."""
    if topic.team == "hand" and not _has_equal_replicas(scene):
        return
    for number in _steps(topic):
        told = topic.told[number]
        site = next(iter(told.values()))["site"]
        texts = {
            "lengths": different_lengths({rank: value["batches"] for rank, value in told.items()}),
            "equal": equal_data({rank: value["first"] for rank, value in told.items()}),
            "order": next((value["order"] for value in told.values() if value["order"]), None),
        }
        for kind, text in texts.items():
            if text is not None and not any(value["joins"] for value in told.values()):
                text = text[0].upper() + text[1:]
                where = f"in pass {int(number) + 1} of the loop at {site}"
                head = f"DATA: {_HEADS[kind]}."
                yield _say(scene, "data", f"{topic.name} {kind}", head, (), [where, text + "."], is_certain=False)


_HEADS = {
    "lengths": "the ranks have different numbers of batches",
    "equal": "ranks train on the same samples",
    "order": "the samples come in the order of the last pass",
}


def _has_equal_replicas(scene: Scene) -> bool:
    topics = [topic for topic in topics_told(scene.sights) if topic.name.startswith("replica hand")]
    steps = [told for topic in topics for told in topic.told.values() if len(told) > 1]
    return any(agree([value[0] for value in told.values()]) for told in steps)


def _saved(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """One file that several ranks of a machine wrote in the same step."""
    for path, told in topic.told.items():
        for rank, (step, site) in told.items():
            host = scene.status(rank).host
            same = [r for r, (s, _) in told.items() if s == step and scene.status(r).host == host]
            text = shared_paths({r: [path] for r in same}) if rank == same[0] else None
            if text is not None:
                sites = sorted({told[r][1] for r in same})
                head = f"SAVE: {names(same)} wrote one file in step {step}, at {', '.join(sites) or site}."
                yield _say(scene, "data", f"{topic.name} {path}", head, (), [text + "."], is_certain=False)


def _listed(what: Sequence[str]) -> str:
    return ", ".join(what[:6]) + (f" and {len(what) - 6} more" if len(what) > 6 else "")


_CASES = {
    "model": _model,
    "trained": _frozen,
    "unused": _unused,
    "sync": _synced,
    "replica": _replica,
    "gradient": _gradient,
    "data": _data,
    "save": _saved,
}
