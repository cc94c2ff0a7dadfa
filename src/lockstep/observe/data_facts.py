"""Whether ranks that train together are fed as they should be, from what each says of its loader: in words.

Pure, and without torch: guards compare what other processes say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from lockstep.observe.facts import told_by_kind, topics_of
from lockstep.observe.replica_diff import alike, ranks_in_words
from lockstep.observe.status import Sight

MARKS = 64  # samples of a dataset, spread over it, that are looked at
_ENOUGH = 8  # that hold the same on two ranks, each another thing: not by chance, nor by what two datasets may share
_LEAST = 3 / 8  # of the samples that two ranks have: others may be flipped, or cut in another place
_DEAL = "Give the loader sampler=DistributedSampler(dataset), and call set_epoch(epoch) on that before each epoch"


class PassFacts(NamedTuple):
    """What one rank says at the beginning of a pass over its loader."""

    batches: int | None  # None where that is not known
    first: str  # digest of the first batch; "" where it says nothing: no tensors, or all samples equal
    order: str  # what the order of the samples follows from; "" where that is not known or not to change
    rule: str = ""  # by which the samples are dealt to all ranks; "" where that is not known


# ------------------------------------------------------------------ what ranks say, compared


def equal_data(first: Mapping[int, str]) -> str | None:
    """Ranks whose first batches have the same digest, in words."""
    groups = [ranks for digest, ranks in alike(first).items() if digest and len(ranks) > 1]
    if not groups:
        return None
    return (
        f"{' and '.join(ranks_in_words(ranks) for ranks in groups)} got the very same first batch: every sample counts "
        f"{max(map(len, groups))} times and others are missed. Give the loader sampler=DistributedSampler(dataset), "
        "with each rank's own rank, and no shuffle; or a sampler, generator or stream of yours a part or seed by rank"
    )


def unshared(told: Mapping[int, Mapping[str, Any]], ranks: int) -> tuple[str, str] | None:
    """Of so many ranks those that read one dataset without sharing it out, by what `Marks` tell: a head, and why."""
    holders: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, value in told.items():
        for mark in value["marks"].items():
            holders[mark].append(rank)
    met = Counter(sample for value in told.values() for sample in value["marks"])
    twice = sum(times > 1 for times in met.values())
    same = {digest: held for (_, digest), held in holders.items() if len(held) > 1}
    readers = {rank for held in same.values() for rank in held}
    firsts = [first for rank in readers if (first := told[rank]["first"])]
    if len(same) < max(_ENOUGH, _LEAST * twice) or len({*firsts}) < len(firsts):  # of these `equal_data` tells
        return None
    for scope, ranks_of_it in alike({rank: value["scope"] for rank, value in told.items() if value["has_all"]}).items():
        whole = [rank for rank in ranks_of_it if rank in readers]
        if len(whole) > 1 and all(len(told[rank]["marks"]) >= _ENOUGH for rank in ranks_of_it):
            text = f"each goes over all {scope.split()[0]} samples in an order of its own: every sample counts"
            return "ranks each read the whole dataset", f"{ranks_in_words(whole)}: {text} {len(whole)} times. {_DEAL}"
    drawn, length = [value["drawn"] for value in told.values()], min(value["length"] for value in told.values())
    looked_at = min(length, MARKS)
    is_dealt = len(drawn) == ranks and all(drawn) and abs(sum(drawn) - length) * _ENOUGH <= length
    if not is_dealt or min(twice, looked_at - len(met)) < max(_ENOUGH // 2, ranks):
        return None
    text = f"of {looked_at} samples that were looked at {twice} came on several ranks, {looked_at - len(met)} on none"
    return "ranks share out the samples by different orders", f"{text}: shuffle with one seed on all ranks. {_DEAL}"


def different_lengths(batches: Mapping[int, int | None], before: Mapping[int, int | None]) -> str | None:
    """Ranks that have other numbers of batches, in words."""
    counts = lengths_in_words(batches, before)
    return counts and (
        f"the ranks have different numbers of batches in this epoch: {counts}. A rank that stops at the end of "
        "its own leaves the others waiting for ever: use a DistributedSampler (its drop_last=True, or its padding, "
        "makes them equal), or `with model.join():`"
    )


def left_out(begun: Mapping[int, int]) -> str | None:
    """Ranks that had taken other numbers of batches of a pass by the end of a first step, in words."""
    each = [f"{count} on {ranks_in_words(ranks)}" for count, ranks in alike(begun).items()]
    return f"its first step ended with batch {'; '.join(each)}" if len(each) > 1 else None


def lengths_in_words(batches: Mapping[int, int | None], before: Mapping[int, int | None]) -> str | None:
    """5 on ranks 0, 2; 4 (5 before) on rank 1: None where they do not differ. before: where it should be the same."""
    known = {rank: count for rank, count in batches.items() if count is not None}
    usual = {rank: before.get(rank) or count for rank, count in known.items()}
    words = alike({r: f"{known[r]}" + f" ({usual[r]} before)" * (known[r] != usual[r]) for r in known})
    each = "; ".join(f"{count} on {ranks_in_words(ranks)}" for count, ranks in words.items())
    return each if len({*known.values()}) > 1 else None


def uneven(sights: Mapping[int, Sight], ranks: set[int]) -> tuple[list[str], set[int], bool]:
    """Of the first pass of a loop that has not as many batches for each of `ranks`: that in words, for whom it had
    another number before, and whether there was none before."""
    for topic in topics_of(told_by_kind(sights).get("data", ())):
        for number, told in ((number, topic.told[number]) for number in topic.steps):
            batches, before = ({rank: value[name] for rank, value in told.items()} for name in ("batches", "before"))
            words = lengths_in_words(batches, before) or left_out({r: told[r]["begun"] for r in told})
            if words and ranks <= told.keys() and not any(value["joins"] for value in told.values()):
                where = f"pass {int(number) + 1} of the loop at {told[min(told)]['site']}"
                changed = {rank for rank in told if before[rank] not in (None, batches[rank])}
                return [f"batches in {where}: {words}"], changed, number == "0"
    return [], set(), False


def different_rules(rules: Mapping[int, str]) -> str | None:
    """Ranks that deal the samples by other rules, in words."""
    known = alike({rank: rule for rank, rule in rules.items() if rule})
    if len(known) < 2:
        return None
    each = ", ".join(f"{ranks_in_words(ranks)} by {rule}" for rule, ranks in known.items())
    return (
        f"each rank takes its part of an order of its own: {each}. Some samples come twice and others never: give "
        "DistributedSampler one dataset (split with one seed) and one seed on all ranks, and call set_epoch there"
    )


def same_order(before: PassFacts | None, now: PassFacts) -> str | None:
    """Whether a shuffled pass has the order of the complete one before it, in words."""
    if before is None or not now.order or before.order != now.order:
        return None
    return (
        "this epoch has the samples in the order of the last one: call sampler.set_epoch(epoch) before each epoch, or "
        "use lockstep.DistributedSampler, which counts epochs by itself"
    )
