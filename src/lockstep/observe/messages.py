"""Messages between two ranks: those that one sends pair, by their order, with those that the other asks for.

And who has called out of turn, where they do not. Pure.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from lockstep.observe import wording
from lockstep.observe.flight import Record
from lockstep.observe.scene import FROM_CPP, Scene, Wait, read_message
from lockstep.observe.wording import call, names, step_after

PAIR_UP = "let one side send first, or post both with batch_isend_irecv; tags must match."  # a fix for `unpaired`

_TENSOR = re.compile(r"\w+ ([a-z]+(\d*)\w*) \[([\d, ]*)\] ")  # the dtype, bits of an element, and the shape
_TAGGED = re.compile(r" tagged (\S+) ")
_BYTES = {"uint8", "int8"}  # which anything may be sent and received as
_AS_REAL = ({"complex64", "float32"}, {"complex128", "float64"}, {"complex32", "float16"})  # as torch views them
_LOOKED_AT = 8  # calls that a rank has made since
_LONGEST_RUN = 128  # calls that are compared with earlier ones

Both = tuple[dict[int, Record], dict[int, Record]]  # what was sent, and what was asked for, by number


def channels_of(scene: Scene, rank: int) -> dict[tuple[str, tuple[int, int], int], Both]:
    """By group, who sends and who receives, and tag: to and from `rank`, but for whom may have received from any."""
    found: dict[tuple[str, tuple[int, int], int], Both] = defaultdict(lambda: ({}, {}))
    unread, vague = [rank], set[int]()
    for who in unread:
        for record in scene.records_of(who) if who in scene.sights else ():
            said = read_message(record.text) if record.is_message else None
            if said is not None and said.peer is not None and rank in (who, said.peer):
                unread += [said.peer] * (said.peer not in unread)
                ends = (who, said.peer) if said.is_send else (said.peer, who)
                found[record.group, ends, said.tag][not said.is_send][record.seq] = record
            elif record.is_message and (said is None or said.peer is None):
                vague.add(who)
    return {key: both for key, both in found.items() if not vague.intersection(key[1])}


def knows_all_messages(scene: Scene, rank: int) -> bool:
    """Whether its status tells of all of them; it tells of none where it has had none, and where it does not know."""
    records = scene.records_of(rank)
    has_none = bool(records) and records[0].number == 0 and not any(record.is_message for record in records)
    return bool(scene.status(rank).messages) or has_none


def tally(scene: Scene, rank: int, record: Record) -> list[str]:
    """How many like `record`, the last of them of `rank`, both ends have begun; nothing where that is not known.

    A third line, where they begin other numbers in one step: so those of one step pair with those of another.
    """
    for (_, ends, _), both in channels_of(scene, rank).items():
        if all(both) and record in both[rank == ends[1]].values():
            told = [f"{r.seq + 1}, the last at {r.site} ({step_after(r.step)})" for r in (x[max(x)] for x in both)]
            step = min(half[max(half)].step for half in both) - 1  # the newest that both have ended
            has_all = all(min(half) == 0 or half[min(half)].step < step for half in both)
            sent, asked = (sum(one.step == step for one in half.values()) for half in both)
            each = f"in {step_after(step)}: rank {ends[0]} sent {sent}, rank {ends[1]} asked for {asked}"
            lines = [f"rank {ends[0]} sent {told[0]}", f"rank {ends[1]} asked for {told[1]}"]
            return lines + [each] * (has_all and sent > 0 < asked != sent)
    return []


def let_go(scene: Scene, wait: Wait) -> dict[int, str]:
    """By rank, in words: of a message that both ends have begun, those up to it whose Work went without a wait."""
    told: dict[int, str] = {}
    for (_, ends, _), both in channels_of(scene, wait.rank).items() if not wait.absent else ():
        for rank, half in zip(ends, both, strict=True) if wait.record in both[wait.rank == ends[1]].values() else ():
            gone = [half[seq] for seq in sorted(half) if half[seq].digest and seq <= wait.record.seq]
            if gone:
                last = f"the last: {call(gone[-1])} ({step_after(gone[-1].step)})"
                told[rank] = f"  rank {rank} had dropped the Work of {len(gone)} by then, {last}"
    return told


def bits(record: Record) -> float:
    """Of its tensor; NaN, which is neither more nor less than any, where the record does not say."""
    found = _TENSOR.match(record.text)
    return math.nan if found is None else int(found[2] or 8) * math.prod(map(int, filter(None, found[3].split(", "))))


def is_garbled(sent: Record, asked: Record) -> bool:
    """Whether the bytes of one dtype are read as another, which no view of torch's does for both ends alike."""
    dtypes = {found[1] for found in map(_TENSOR.match, (sent.text, asked.text)) if found is not None}
    return len(dtypes) == 2 and not dtypes & _BYTES and dtypes not in _AS_REAL and bits(sent) > 0 < bits(asked)


def tag_of(record: Record) -> str:
    """Where messages pair by their order alone, as those of NCCL do: the tag that the program gave this one."""
    found = _TAGGED.search(record.text)
    return "0" if found is None else found[1]


def unpaired(scene: Scene, ranks: Sequence[int]) -> tuple[dict[int, str], list[Wait]]:
    """Messages of `ranks`, which stand still, that lack their other half; and who of both ends left its habit there."""
    found = [one for one in scene.waits if one.record.is_message and {one.rank, *one.absent} & set(ranks)]
    found = [one for one in found if one.absent and one.absent[0] in scene.sights and not one.is_any]
    odd = strays(scene, found)
    is_waited_for = any(scene.blocked.get(one.rank) is one for one in found)
    if not odd and not (is_waited_for and scene.blocked.keys() >= set(ranks)):
        return {}, []
    return odd, sorted(found, key=lambda one: (not {one.rank, *one.absent} & odd.keys(), one.record.step, one.rank))


def strays(scene: Scene, waits: Sequence[Wait]) -> dict[int, str]:
    """Of ranks that are in each other's way: who has called out of turn since their calls do not meet, in words.

    Nobody where all have, or where it is not known of one.
    """
    since: dict[int, list[int]] = defaultdict(list)
    for one in waits:
        since[one.rank].append(one.record.number)
        for rank in one.absent:
            halves = [record.number for record in scene.records_of(rank) if _is_other_half(record, one)]
            since[rank] += [number + 1 for number in halves[-1:]]
    odd: dict[int, str] = {}
    for rank, numbers in sorted(since.items()):
        records = scene.records_of(rank)
        turn = _out_of_turn(records, min(numbers, default=records[-1].number)) if records else None
        if turn is not None and turn[1] is not None:
            odd[rank] = f"{names([rank])} made {_of_group(turn[0])}, where it made {_of_group(turn[1])} before"
        elif turn is not None or not records:
            return {}
    return odd if len(odd) < len(since) else {}


def _out_of_turn(history: Sequence[Record], since: int) -> tuple[Record, Record | None] | None:
    """The first call from number `since` on that never came after those before it, and what did; None where all have.

    What comes next is what came after the longest run of calls that ends alike and is there twice; None: nobody knows.
    """
    calls = [record for record in history if record.text != FROM_CPP]
    deeds = [_deed(record) for record in calls]
    for at in [at for at, one in enumerate(calls) if one.number >= since][:_LOOKED_AT]:
        alike = sorted(((_alike(deeds, at, before), before) for before in range(1, at)), reverse=True)
        length = alike[1][0] if len(alike) > 1 else 0
        usual = [before for its, before in alike if length and its >= length]
        if all(deeds[before] != deeds[at] for before in usual):
            is_new = all(before.site != calls[at].site for before in calls[:at])
            is_known = any(_tells_the_next(calls, at, length, before) for before in usual) and not is_new
            return calls[at], calls[usual[0]] if is_known else None
    return None


def _tells_the_next(calls: Sequence[Record], at: int, length: int, usual: int) -> bool:
    """Whether so many calls before the one `at` are all of its step; or a whole round of lines that make one call each.

    A line that makes many, as a pipeline's step(), may do something else after any number of rounds of its own.
    """
    its_step = calls[at].step
    if its_step and length >= sum(before.step == its_step for before in calls[:at]):
        return True
    deeds = [_deed(record) for record in calls[: at + 1]]
    run, sites = deeds[at - length :], Counter(site for *_, site in set(deeds))
    return deeds[usual] in run and all(sites[site] == 1 for *_, site in run)


def _alike(deeds: Sequence[object], one: int, other: int) -> int:
    """How many of them before `one` are those before `other`, which is earlier."""
    most = min(other, _LONGEST_RUN)
    return next((back for back in range(most) if deeds[one - 1 - back] != deeds[other - 1 - back]), most)


def _deed(record: Record) -> tuple[str, str, str]:
    """Its text without the tensor, whose shape may vary, and the site."""
    return record.text.partition(" ")[0], record.text.rpartition("] ")[2], record.site


def _of_group(record: Record) -> str:
    return call(record) if record.is_message else f"{record.text} of group {record.group} at {record.site}"


def _is_other_half(record: Record, wait: Wait, *, any_tag: bool = False) -> bool:
    """Whether it is of the other end of the messages that `wait` is one of; or of the same group, of a collective."""
    mine, its = read_message(wait.record.text), read_message(record.text)
    is_same = (record.group, record.is_message) == (wait.record.group, wait.record.is_message)
    if mine is None or its is None:
        return is_same and not record.is_message
    is_pair = its.is_send != mine.is_send and its.peer in (wait.rank, None)
    return is_same and is_pair and (any_tag or its.tag == mine.tag)


def waiters(scene: Scene, waits: Sequence[Wait], alone: Sequence[Wait]) -> list[str]:
    """Who waits in what; of messages that are `unpaired`: what the other end did last in place of its half."""
    lines: dict[str, str] = {}
    for one in alone:
        lines.setdefault(wording.waiters([one])[0], _missing_half(scene, one))  # one line may post many
    others = [one for one in waits if one not in alone]
    return [*(line for both in lines.items() for line in both), *wording.waiters(others)]


def _missing_half(scene: Scene, wait: Wait) -> str:
    mine, other = wait.record, wait.absent[0]
    did = "asked for" if mine.text.startswith("send") else "sent"
    lacks = f"  not {did} by {names([other])}"
    last = next((r for r in reversed(scene.records_of(other)) if _is_other_half(r, wait, any_tag=True)), None)
    if last is None:
        return lacks
    place, its = _place(scene, wait.rank, mine), _place(scene, other, last)
    is_alike = mine.text.partition("]")[0].split()[1:] == last.text.partition("]")[0].split()[1:]
    if place and its and is_alike and last.step == mine.step and _is_other_half(last, wait):
        lacks += f": it is the {wording.ordinal(place)} in {step_after(mine.step)}, {names([other])} {did} {its}"
        return f"{lacks}, the last at {last.site}"
    return f"{lacks}; its last: {call(last)} ({step_after(last.step)})"


def _place(scene: Scene, rank: int, record: Record) -> int:
    """Of its like in its step: the how many-th it is; 0 where the record of `rank` does not have all of the step."""
    records, like = scene.records_of(rank), (record.text, record.group, record.step)
    if records[0].number and records[0].step >= record.step:
        return 0
    return sum((r.text, r.group, r.step) == like for r in records if r.number <= record.number)
