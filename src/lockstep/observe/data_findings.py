"""Samples that ranks of one team do not share out as they should, and files that several of them write."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.observe.data_facts import different_lengths, different_rules, equal_data, left_out, unshared
from lockstep.observe.facts import Topic, told_by_kind, topics_of
from lockstep.observe.replica_diff import agree, ranks_in_words
from lockstep.observe.replica_findings import have_all_told
from lockstep.observe.scene import Scene
from lockstep.observe.wording import Finding, compose, names

_TWICE = "two workers began with one batch: let __iter__ of the dataset give each a part, as get_worker_info() has it"
_ONE_FILE = (
    "the last one wins, or their bytes mix. Save on rank 0 only, put the rank into the name, or use "
    "lockstep.Checkpointer, which does both."
)
_PASSES = 8  # the newest, of which ranks tell all: those before were looked at when they were new


def find_data(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Ranks of one team that train on the same samples, in the same order again, or on other numbers of batches."""
    if topic.team == "hand" and not _has_equal_replicas(scene):
        return
    for number in topic.steps[-_PASSES:]:
        told = topic.told[number]
        said = {name: {rank: value[name] for rank, value in told.items()} for name in next(iter(told.values()))}
        if (number == topic.steps[-1] and not have_all_told(scene, topic, told)) or any(said["joins"].values()):
            continue
        again, begun = [rank for rank, order in said["order"].items() if order], said["begun"]
        skipped = left_out(begun) if max(begun.values()) - min(begun.values()) >= len(told) else None
        firsts = {rank: first and f"{first} {begun[rank]}" for rank, first in said["first"].items()}
        texts = {
            "the samples come in the order of the last pass": said["order"][again[0]] if again else None,
            "the ranks have different numbers of batches": different_lengths(said["batches"], said["before"]),
            "ranks have left out other numbers of batches": skipped and f"{skipped}: go on from one batch on all",
            "ranks train on the same samples": equal_data(firsts),
            "workers of a loader read the same samples": _TWICE if any(said["is_twice"].values()) else None,
            "ranks share out the samples by different rules": different_rules(said["rule"]),
        }
        for head, text in texts.items():
            if text is not None:
                where = f"in pass {int(number) + 1} of the loop at {next(iter(told.values()))['site']}"
                culprits = again if text in said["order"].values() and len(again) < len(told) else ()
                text = f"{text[0].upper()}{text[1:]}."
                yield compose(scene, "data", f"{topic.name} {head}", f"DATA: {head}.", culprits, [where, text])


def find_unshared(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """Ranks of one team that read one dataset without sharing it out."""
    told = topic.told["0"]
    found = unshared(told, topic.size) if have_all_told(scene, topic, told) else None
    if found is not None and (topic.team != "hand" or _has_equal_replicas(scene)):
        where = f"in the loop at {told[min(told)]['site']}"
        yield compose(scene, "data", topic.name, f"DATA: {found[0]}.", (), [where, f"{found[1]}."])


def _has_equal_replicas(scene: Scene) -> bool:
    told = told_by_kind(scene.sights).get("replica", ())
    topics = [topic for topic in topics_of(told) if topic.place.startswith("hand")]
    steps = [told for topic in topics for told in topic.told.values() if len(told) > 1]
    return any(agree([value[0] for value in told.values()]) for told in steps)


def find_shared_files(scene: Scene, topic: Topic) -> Iterator[Finding]:
    """One file that several ranks of a machine wrote in the same step."""
    for path, told in topic.told.items():
        for rank, (step, site) in told.items():
            host = scene.status(rank).host
            same = [r for r, (s, _) in told.items() if s == step and scene.status(r).host == host]
            if len(same) > 1 and rank == same[0]:
                sites = sorted({told[r][1] for r in same})
                when = f"after step {step}" if step else "before the first step"
                head = f"SAVE: {names(same)} wrote one file {when}, at {', '.join(sites) or site}."
                text = f"{ranks_in_words(same)} write the same file {path}: {_ONE_FILE}"
                yield compose(scene, "data", f"{topic.name} {path}", head, (), [text])
