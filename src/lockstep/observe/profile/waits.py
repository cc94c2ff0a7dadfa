"""Who waited for whom, from times that were taken by clocks that may not agree.

Ranks of one machine share a clock: there a thread waits for the last one until that has started the collective, and
stands for its data from then on. Of several machines no clocks are compared. A collective ends for all at about the
same moment: so the rank in which it was open for the shortest time started it last; that time is what the communication
takes, and whatever another rank's thread stood there beyond that is waiting for the last one. Of one that had ended
before anybody asked for it, nobody may know when: then it counts how long threads stood. So it does for messages, which
leave their sender before they are there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from lockstep.observe.profile.run_record import Key, Op, Run, Steps

_ALWAYS_EXACT_US = 20  # less than this apart, nobody was late
_MOMENT = 0.02  # of the time that a collective was open before its thread asked for it


class Wait(NamedTuple):
    """One collective, compared over ranks; microseconds."""

    op: Op  # as the last rank saw it
    last: int  # the rank that came last
    waited_us: Mapping[int, int]  # of each rank, for the last one
    came_us: Mapping[int, int]  # when that came, since the step of each rank began
    moved_us: Mapping[int, int]  # from then on, until each rank had the data

    @property
    def real_us(self) -> int:
        """Of communication."""
        return self.moved_us[self.last]


Kind = tuple[str, str]  # of operations: text and site


class Pair(NamedTuple):
    """How long one rank waited for another one, and where most of it."""

    rank: int
    last: int
    waited_s: float
    site: str
    text: str
    label: str


class Waits(NamedTuple):
    """All ranks of a run. Where the record lists every n-th step only, each stands for n."""

    pairs: tuple[Pair, ...]  # the longest first
    waited_s: Mapping[int, float]  # of each rank, for others
    caused_s: Mapping[int, float]  # by each rank, to all others together


def compare(ops: Mapping[int, Op], began_us: Mapping[int, float] | None = None) -> Wait | None:
    """One collective as its ranks saw it; None where the thread of one of them did not stand in it at all.

    began_us: when the step began on each, if they share a clock.
    """
    if len(ops) < 2 or min([op.began_us for op in ops.values()]) < 0:
        return None
    is_message = next(iter(ops.values())).is_message
    parts = None if began_us is None or is_message else _on_one_clock(ops, began_us)
    last, came, moved = parts or _by_durations(ops)
    late = {rank: min(op.waited_us, came[rank] - op.began_us) for rank, op in ops.items()}
    waited = {rank: us if us >= _ALWAYS_EXACT_US and rank != last else 0 for rank, us in late.items()}
    return Wait(ops[last], last, waited, came, moved)


_Parts = tuple[int, dict[int, int], dict[int, int]]  # `last`, `came_us` and `moved_us` of a Wait


def _on_one_clock(ops: Mapping[int, Op], began_us: Mapping[int, float]) -> _Parts | None:
    """None where a rank went on before the last one came: a broadcast, or no one clock after all."""
    entered = {rank: began_us[rank] + op.entered_us for rank, op in ops.items()}
    latest_us = max(entered.values())
    came: dict[int, int] = {}
    moved = dict.fromkeys(ops, -1)
    for rank, op in ops.items():
        came[rank] = at_us = round(latest_us - began_us[rank])
        until_us = op.stood_until_us
        if until_us < at_us - _ALWAYS_EXACT_US:
            return None
        if not _ended_unseen(op):
            moved[rank] = max(0, min(op.left_us, until_us) - at_us)
    soonest = min([us for us in moved.values() if us >= 0], default=0)
    for rank in (rank for rank, us in moved.items() if us < 0):
        moved[rank] = max(0, min(soonest, ops[rank].began_us - came[rank]))
    return min([rank for rank, us in entered.items() if us == latest_us]), came, moved


def _by_durations(ops: Mapping[int, Op]) -> _Parts:
    inside = {rank: op.waited_us if op.is_message else op.left_us - op.entered_us for rank, op in ops.items()}
    last = min(ops, key=lambda rank: (inside[rank], -ops[rank].waited_us, rank))
    if _ended_unseen(ops[last]):
        inside = {rank: op.waited_us for rank, op in ops.items()}
        last = min(ops, key=lambda rank: (inside[rank], rank))
    ends = {r: op.stood_until_us if op.is_message else min(op.left_us, op.stood_until_us) for r, op in ops.items()}
    came = {rank: end - inside[last] for rank, end in ends.items()}
    return last, came, dict.fromkeys(ops, inside[last])


def _ended_unseen(op: Op) -> bool:
    """Before the thread asked for it, nobody knows when: for what was long over, it stands a moment too."""
    return op.left_us >= op.began_us and op.waited_us < max(_ALWAYS_EXACT_US, _MOMENT * (op.began_us - op.entered_us))


def matched(run: Run) -> Iterator[tuple[dict[int, Op], dict[int, float], int]]:
    """Each collective as `compare` takes it, and steps that it stands for; by the lowest rank, without the first steps.

    One that a rank has not listed, because it was killed or its record is cut, is left out. One that is waited for in a
    later step is listed in both: the later one counts.
    """
    seen: dict[Key, tuple[dict[int, Op], dict[int, float], int]] = {}
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, record in run.ranks.items():
        zero_us = {start.attempt: start.clock_ns / 1e3 for start in record.starts}
        for line, weight in weighted(record.steady):
            for op in line.ops or ():
                one = seen.get(key := op.key)
                if one is None:
                    one = seen[key] = {}, {}, weight * max(1, line.every)
                one[0][rank], one[1][rank] = op, zero_us[op.attempt] + line.at_us
    for key, (ops, *_) in seen.items():
        members[key[:2]].update(ops)
    yield from (one for key, one in seen.items() if one[0].keys() == members[key[:2]])


def weighted(lines: tuple[Steps, ...]) -> Iterator[tuple[Steps, int]]:
    """(a line that lists operations, the number of steps up to the next such line)."""
    held: Steps | None = None
    weight = 0
    for line in lines:
        if line.ops is not None:
            if held is not None:
                yield held, weight
            held, weight = line, 0
        weight += line.count
    if held is not None:
        yield held, weight


_place_of: Callable[[Op], tuple[str, str, str]] = attrgetter("site", "text", "label")
kind_of: Callable[[Op], Kind] = attrgetter("text", "site")  # equal for all of one line and one shape


def unseen(run: Run) -> dict[Kind, Op]:
    """One collective of each kind that nobody was seen to stand in: C++ waits for it, a later step, or a GPU.

    How much of these is exposed, how much hidden, and who came last, is not known. Those of few steps are left out: a
    checkpoint in the background has such.
    """
    found: dict[Kind, Op] = {}
    stood, usual = set[Kind](), set[Kind]()
    for record in run.ranks.values():
        lines = [line for line in record.steady if line.ops is not None]
        is_queued = any(line.cuda_mib for line in lines)  # a thread does not stand where its GPU does
        steps = Counter[Kind]()
        for line in lines:
            pairs = [(kind_of(op), op) for op in line.ops or ()]
            found |= pairs
            steps.update({kind for kind, _ in pairs})
            if line.on_gpu or not is_queued:
                stood |= {kind for kind, op in pairs if op.began_us >= 0}
        usual |= {kind for kind, count in steps.items() if 2 * count > len(lines)}
    return {kind: op for kind, op in found.items() if kind in usual - stood and not op.is_message}


def waits_of(run: Run) -> Waits:
    """Who waited for whom in a whole run."""
    totals: dict[tuple[int, int], dict[tuple[str, str, str], float]] = defaultdict(lambda: defaultdict(float))
    is_one_clock = run.is_of_one_host
    for ops, began_us, weight in matched(run):
        found = compare(ops, began_us if is_one_clock else None)
        for rank, us in found.waited_us.items() if found else ():
            if found and us:
                totals[rank, found.last][_place_of(ops[rank])] += us * weight
    waited: dict[int, float] = dict.fromkeys(run.ranks, 0.0)
    caused = dict(waited)
    pairs: list[Pair] = []
    for (rank, last), places in totals.items():
        seconds = sum(places.values()) / 1e6
        waited[rank] += seconds
        caused[last] += seconds
        pairs.append(Pair(rank, last, seconds, *max(places, key=lambda place: places[place])))
    return Waits(tuple(sorted(pairs, key=lambda pair: -pair.waited_s)), waited, caused)
