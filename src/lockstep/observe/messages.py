"""Messages between two ranks: those that one sends pair, by their order, with those that the other asks for. Pure."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from lockstep.observe import histories, wording
from lockstep.observe.flight import Record
from lockstep.observe.scene import Scene, Wait, read_message
from lockstep.observe.wording import call, names, step_after

PAIR_UP = "let one side send first, or post both with batch_isend_irecv; tags must match."  # a fix for `unpaired`

_TENSOR = re.compile(r"\w+ ([a-z]+(\d*)\w*) \[([\d, ]*)\] ")  # the dtype, bits of an element, and the shape
_BYTES = {"uint8", "int8"}  # which anything may be sent and received as
_AS_REAL = ({"complex64", "float32"}, {"complex128", "float64"}, {"complex32", "float16"})  # as torch views them

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
    """How many like `record`, the last of them of `rank`, both ends have begun; nothing where that is not known."""
    for (_, ends, _), both in channels_of(scene, rank).items():
        if all(both) and record in both[rank == ends[1]].values():
            told = [f"{r.seq + 1}, the last at {r.site} ({step_after(r.step)})" for r in (x[max(x)] for x in both)]
            return [f"rank {ends[0]} sent {told[0]}", f"rank {ends[1]} asked for {told[1]}"]
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


def unpaired(scene: Scene, ranks: Sequence[int]) -> tuple[list[int], list[Wait]]:
    """Messages of `ranks`, which stand still, that lack their other half; and who of both ends left its habit there."""
    found = [one for one in scene.waits if one.record.is_message and {one.rank, *one.absent} & set(ranks)]
    found = [one for one in found if one.absent and one.absent[0] in scene.sights and not one.is_any]
    since = min((one.record.step for one in found), default=0)
    ends = {rank for one in found for rank in (one.rank, *one.absent)}
    records = {rank: scene.records_of(rank) for rank in ends}
    odd = {rank for rank, its in records.items() if not histories.keeps_habit(its, since)}
    are_known = all(records[rank] and records[rank][-1].step >= since for rank in odd)
    if odd == ends or not are_known:  # nobody can tell the two ends apart
        odd = set()
    is_waited_for = any(scene.blocked.get(one.rank) is one for one in found)
    if not odd and not (is_waited_for and scene.blocked.keys() >= set(ranks)):
        return [], []
    return sorted(odd), sorted(found, key=lambda one: (not {one.rank, *one.absent} & odd, one.record.step, one.rank))


def waiters(scene: Scene, waits: Sequence[Wait], alone: Sequence[Wait]) -> list[str]:
    """Who waits in what; of messages that are `unpaired`: what the other end did last in place of its half."""
    lines: dict[tuple[str, str], None] = {}  # one line may post many
    for one in alone:
        lines[wording.waiters([one])[0], _missing_half(scene, one)] = None
    others = [one for one in waits if one not in alone]
    return [*(line for both in lines for line in both), *wording.waiters(others)]


def _missing_half(scene: Scene, wait: Wait) -> str:
    is_send = not wait.record.text.startswith("send")
    last = ""
    for record in scene.records_of(wait.absent[0]):
        said = read_message(record.text)
        if said is not None and said.is_send == is_send and said.peer in (wait.rank, None):
            last = f"; its last: {call(record)} ({step_after(record.step)})"
    return f"  not {'sent' if is_send else 'asked for'} by {names(wait.absent)}{last}"
