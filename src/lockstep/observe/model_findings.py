"""What ranks of one team make different of the models that they train together; gradients that are not finite."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.observe.endings import END
from lockstep.observe.facts import FINITE, NEVER_FINITE, UNTIL, Topic, shown
from lockstep.observe.model_match import first_difference
from lockstep.observe.replica_diff import alike, odd_ranks
from lockstep.observe.replica_findings import STEP_ALIKE, have_all_told
from lockstep.observe.scene import FROM_CPP, GRACE_S, Scene
from lockstep.observe.wording import Finding, compose, listed, names, step_after, waiters

SYNC_ALIKE = "decide by the number of the micro-batch alone, alike on all ranks, whether to use no_sync()."
_AHEAD = 3  # steps: whoever is so far ahead of a rank that goes on computing has not waited for it


def find_other_models(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Other parameters, or the same ones in another order, when the ranks wrapped their models."""
    for key, told in topic.told.items():
        digests = {rank: value[0] for rank, value in told.items()}
        if len(set(digests.values())) < 2 or (rows := shown(scene, topic, key, told)) is None:
            continue
        odd = odd_ranks(digests) if len(told) > 2 else ()
        if not odd and not have_all_told(scene, topic, told):
            continue  # there may be a majority yet
        usual = min(set(told) - set(odd))
        others = [rank for rank in odd or told if digests[rank] != digests[usual]]
        lines = []
        for rank in others:
            text = first_difference(rows[rank], rows[usual], usual) if rank in rows and usual in rows else None
            lines.append(f"rank {rank} {text or 'has another model, which cannot be read from here any more'}")
        lines += [f"wrapped at {told[usual][1]} (rank {usual}), {told[others[0]][1]} (rank {others[0]})"]
        head = "MODELS differ when DistributedDataParallel wraps them."
        why = "gradients pair by the order of the parameters: others would be averaged, or the job hangs."
        fix = "build one model on every rank, in one order; freeze the same parameters before, and wrap it alike."
        yield compose(scene, "model", topic.name, head, odd or tuple(told), lines, why=why, fix=fix)


def find_other_meshes(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Meshes of the same ranks, of which each made as many before, that are laid out or named in other ways."""
    for key, told in topic.told.items():
        texts = {rank: value[0] for rank, value in told.items()}
        if len(set(texts.values())) < 2 or not have_all_told(scene, topic, told):
            continue
        odd = odd_ranks(texts) if len(told) == topic.size else ()
        by_text = alike({rank: " at ".join(value) for rank, value in told.items()})
        lines = [f"{names(ranks)}: {text}" for text, ranks in by_text.items()]
        why = "ranks take other groups for those of a dimension: they mix values that do not belong together."
        fix = "give DeviceMesh or init_device_mesh one shape, and its dimensions one order, on every rank."
        head = "MESHES differ in their dimensions, or in the order of their ranks."
        yield compose(scene, "mismatch", f"{topic.name} {key}", head, odd or tuple(told), lines, why=why, fix=fix)


def find_frozen(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Parameters that some ranks train and others do not, since the model was wrapped."""
    for step in topic.steps:
        told = topic.told[step]
        frozen = {rank: value[0] for rank, value in told.items()}
        values = [*frozen.values()]
        if values.count(values[0]) == len(values):
            continue
        odd = odd_ranks(frozen) or tuple([rank for rank, value in frozen.items() if value])
        lines = [f"rank {r} froze {listed(value) or 'nothing'} after wrapping" for r, value in frozen.items()]
        _, sure, site = told[odd[0]]
        lines.append(f"seen at {site}")
        key, head = f"{topic.name} frozen", f"FROZEN on some ranks only, in {step_after(step)}."
        why = "the other ranks wait for gradients that these do not have."
        fix, done = "set requires_grad alike on all ranks, before DistributedDataParallel(model).", int(step)
        yield compose(scene, "model", key, head, odd, lines, why=why, fix=fix, is_certain=bool(sure), done=done)
        return


def find_unused(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Parameters that had no part in the loss: on all ranks, or on some."""
    for step in topic.steps:
        told = topic.told[step]
        is_everywhere = len(told) >= topic.size
        if not is_everywhere and not any(value[1] for value in told.values()):
            continue  # the others may yet say the same
        unused = {rank: value[0] for rank, value in told.items()}
        sites = sorted({value[2] for value in told.values()})
        if is_everywhere and len({json.dumps(value) for value in unused.values()}) == 1:
            lines = [f"no rank used {listed(next(iter(unused.values())))} in its loss"]
            where, culprits = "on every rank", ()
        else:
            others = sorted(set(scene.sights) - set(unused)) if not is_everywhere else []
            looks = {r for r in others if _looks_for_unused(scene, r, topic)}
            lines = [f"rank {rank} did not use {listed(value)}" for rank, value in unused.items()]
            lines += [f"{names(looks)} may not either: wrapped with find_unused_parameters=True"] if looks else []
            lines += [f"{names(used)} did"] if (used := [r for r in others if r not in looks]) else []
            where, culprits = "not on every rank", odd_ranks(unused) or tuple(unused)
            if looks:
                culprits = odd_ranks({rank: rank in looks for rank in scene.sights}) or tuple(scene.sights)
        head = f"UNUSED parameters seen in {step_after(step)}, {where}."
        lines += [f"the forward is called at {', '.join(sites)}"]
        why = "DistributedDataParallel waits for the gradient of every parameter before the step is whole."
        fix = "use them in the loss, remove or freeze them before wrapping, or find_unused_parameters=True."
        yield compose(scene, "model", f"{topic.name} unused", head, culprits, lines, why=why, fix=fix, done=int(step))
        return


def _looks_for_unused(scene: Scene, rank: int, topic: Topic) -> bool:
    told = scene.status(rank).facts.get(f"trained {topic.place}", {})
    return any(not uses_all for _, uses_all, _ in told.values())


def find_unsynced(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Ranks that averaged gradients in a step in which others did not. What a rank told holds until it changes."""
    yield from _past(scene, topic)
    latest: dict[int, Any] = {}
    for step in topic.steps:
        now = topic.told[step]
        latest.update(now)
        heard = {r for r in latest if scene.sights[r].age_s <= GRACE_S or not scene.is_running(r)}  # else old facts
        told = {r: v for r, v in latest.items() if r in heard and scene.status(r).step > int(step)}  # that ended it
        counts = {rank: value[0] for rank, value in told.items()}
        most = max([_AHEAD, *counts.values()])
        stays = [r for r in now if scene.status(r).step == int(step) < scene.step - _AHEAD and now[r][0] > most]
        if stays:
            yield _without_steps(scene, topic, step, stays)
            return
        fewest = [rank for rank, value in told.items() if value[0] == min(counts.values()) and value[1]]
        if len(set(counts.values())) < 2 or not fewest:
            continue
        rank = fewest[0]
        head = f"NO_SYNC on some ranks only, in {step_after(step)}."
        text = (
            f"{names(fewest)} ran {told[rank][1]} backward in no_sync() and {told[rank][0]} synchronised ones, at "
            f"{told[rank][2]}; {names(set(told) - set(fewest))} synchronised {max(counts.values())}"
        )
        why = "gradients of different steps are averaged from here on, and the last ones wait for nobody."
        key, done = f"{topic.name} sync", int(step)
        yield compose(scene, "model", key, head, fewest, [text], why=why, fix=SYNC_ALIKE, done=done)
        return


def suspects(scene: Scene, ranks: Iterable[int], step: int) -> tuple[dict[int, str], dict[int, str]]:
    """Who ran fewer synchronised backwards in that step, and others in no_sync(); who ran more forwards in one."""
    told: dict[str, dict[int, list[tuple[int, Any]]]] = defaultdict(dict)
    for rank in sorted(ranks):
        facts = scene.status(rank).facts
        for topic in [topic for topic in facts if topic.startswith("sync ")]:
            past = [(int(key), value) for key, value in facts[topic].items() if int(key) <= step]
            if past:
                told[topic][rank] = past
    unsynced, twice = dict[int, str](), dict[int, str]()
    for by_rank in told.values():
        last = {rank: past[-1][1] for rank, past in by_rank.items()}  # which holds
        most = {rank: max((value[0], -key) for key, value in past) for rank, past in by_rank.items()}
        for rank, (synced, apart, site) in last.items():
            if apart and synced < max(value[0] for value in last.values()) and scene.status(rank).step > step:
                unsynced[rank] = f"{names([rank])} ran {apart} backward in no_sync(), at {site}"
            count, key = most[rank]
            if count > min(most.values())[0]:
                done = f"called its model {count} times in {step_after(-key)}"
                twice[rank] = f"{names([rank])} {done}: was a backward left out?"
    return unsynced, {} if unsynced else twice


def _past(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Ranks that went past the model that averages, and on, while others wait for their part of the mean."""
    told = {rank: scene.status(rank).facts.get(f"lines {topic.place}", {}).get("now", {}) for rank in scene.sights}
    past = {rank: f"{names([rank])}: {lines['past']}" for rank, lines in told.items() if "past" in lines}
    for wait in scene.waits:
        gone = sorted(r for r in past.keys() & wait.absent if scene.status(r).step > wait.record.step)
        if gone and wait.rank not in past and wait.age_s > GRACE_S and wait.record.text == FROM_CPP:
            head, step = f"PAST DDP on some ranks only, since {step_after(wait.record.step)}.", wait.record.step
            why = "these do not average their gradients any more, and the others wait for them."
            fix = f"call the wrapped model, and not its .module, on {names(gone)} too."
            lines = [*(past[rank] for rank in gone), *waiters([wait])]
            yield compose(scene, "model", f"{topic.name} past", head, gone, lines, why=why, fix=fix, done=step)
            return


def _without_steps(scene: Scene, topic: Topic, step: str, stays: Sequence[int]) -> Finding:
    count, _, site = topic.told[step][stays[0]]
    others = sorted(set(scene.sights) - set(stays))
    head = f"NO STEP of the optimizer on some ranks since {step_after(step)}."
    lines = [f"{names(stays)} ran {count} synchronised backwards there, at {site}"]
    lines += [f"{names(others)} went on to {step_after(scene.step)}"]
    why = "the ranks average the same gradients, and only some apply them: their models drift apart."
    key, done = f"{topic.name} steps", int(step)
    return compose(scene, "replica", key, head, stays, lines, why=why, fix=STEP_ALIKE, done=done)


def find_not_finite(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Gradients that are NaN or infinite when the optimizer is about to apply them."""
    for step in topic.steps:
        told = topic.told[step]
        silent = [scene.sights[rank] for rank in scene.sights if rank not in told and scene.is_running(rank)]
        is_heard = len(scene.sights) == scene.status(scene.me).world_size
        before = [one for one in silent if one.status.step <= int(step) + 1 or one.age_s > GRACE_S]
        before += [one for one in silent if one.status.facts.get(FINITE, {}).get(UNTIL, int(step)) < int(step)]
        if any(END not in one.status.facts for one in before) or (scene.step <= int(step) and not is_heard):
            return  # they may yet tell
        origins = {rank: value[0] for rank, value in told.items() if value[0]}
        lines = [f"rank {rank}: {value[0]} at {value[2]}" for rank, value in told.items() if value[0]]
        lines += [] if origins else ["on which rank it began cannot be told: every loss was finite"]
        culprits = sorted(origins) if len(origins) < len(scene.sights) else ()
        faulty = ", ".join(next(iter(told.values()))[1])
        if NEVER_FINITE in origins.values():
            head = f"NOT FINITE parameters before {step_after(step)}."
            lines += [f"parameters: {faulty}"]
            why = "nothing that is computed with them is finite, whatever the batch."
            fix = "see what filled them: a checkpoint, or to_empty() and then no reset of these modules."
        else:
            head = f"NOT FINITE gradients in {step_after(step)}."
            lines += [f"gradients after averaging: {faulty}"]
            why = "their mean is applied on every rank, and from the next step on nothing is finite."
            fix = "look at that rank's batch and loss; skip the step where the gradients' norm is not finite."
        yield compose(scene, "gradient", topic.name, head, culprits, lines, why=why, fix=fix, done=int(step))
        return
