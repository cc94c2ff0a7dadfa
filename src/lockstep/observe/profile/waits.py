"""Who waited for whom, from times that were taken by clocks that do not agree.

A collective ends at the same moment for all. So the rank in which it was open for the shortest time started it last;
that time is what the communication takes, and whatever another rank's thread stood there beyond that is waiting for the
last one. Of one that had ended before anybody asked for it, nobody may know when: then it counts how long threads
stood. So it does for messages, which leave their sender before they are there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lockstep.observe.profile.run_record import Op, Run, Steps

_ALWAYS_EXACT_US = 20  # less than this apart, nobody was late


class Wait(NamedTuple):
    """One collective, compared over ranks; microseconds."""

    op: Op  # as the last rank saw it
    last: int  # the rank that came last
    real_us: int  # of communication, from then on
    waited_us: Mapping[int, int]  # of each rank, for the last one


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


def compare(ops: Mapping[int, Op]) -> Wait | None:
    """One collective as its ranks saw it; None where the thread of one of them did not stand in it at all."""
    if len(ops) < 2 or any(op.began_us < 0 for op in ops.values()):
        return None
    inside = {rank: op.waited_us if op.is_message else op.left_us - op.entered_us for rank, op in ops.items()}
    last = min(ops, key=lambda rank: (inside[rank], -ops[rank].waited_us, rank))
    if ops[last].waited_us < _ALWAYS_EXACT_US and ops[last].left_us > ops[last].began_us:  # it ended unseen, before
        inside = {rank: op.waited_us for rank, op in ops.items()}
        last = min(ops, key=lambda rank: (inside[rank], rank))
    late = {rank: op.waited_us - inside[last] if rank != last else 0 for rank, op in ops.items()}
    return Wait(ops[last], last, inside[last], {r: us if us >= _ALWAYS_EXACT_US else 0 for r, us in late.items()})


def matched(run: Run) -> Iterator[tuple[dict[int, Op], int]]:
    """(one collective as each of its ranks saw it, how many steps it stands for), in the order of the lowest rank,
    without the first steps.

    One that a rank has not listed, because it was killed or its record is cut, is left out.
    """
    seen: dict[tuple[str, str, int], dict[int, Op]] = {}
    weights: dict[tuple[str, str, int], int] = {}
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, record in run.ranks.items():
        for line, weight in weighted(record.steady):
            for op in line.ops or ():
                seen.setdefault(op.key, {})[rank] = op
                weights.setdefault(op.key, weight * max(1, line.every))
                members[op.key[:2]].add(rank)
    for key, ops in seen.items():
        if ops.keys() == members[key[:2]]:
            yield ops, weights[key]


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


def kind_of(op: Op) -> Kind:
    """Equal for all that are started at one line with one shape."""
    return op.text, op.site


def unseen(run: Run) -> dict[Kind, Op]:
    """One collective of each kind that no thread was seen to stand in: C++ waits for it, a later step, or a GPU.

    How much of these is exposed, how much hidden, and who came last, is not known. Those of few steps are left out: a
    checkpoint in the background has such.
    """
    found: dict[Kind, Op] = {}
    stood, usual = set[Kind](), set[Kind]()
    for record in run.ranks.values():
        lines = [line for line in record.steady if line.ops is not None]
        is_queued = any(line.cuda_mib for line in lines)  # a thread does not stand where its GPU does
        seen = [{kind_of(op): op for op in line.ops or () if not op.is_message} for line in lines]
        for ops in seen:
            found |= ops
            stood |= set() if is_queued else {kind for kind, op in ops.items() if op.began_us >= 0}
        steps = Counter(kind for ops in seen for kind in ops)
        usual |= {kind for kind, count in steps.items() if 2 * count > len(lines)}
    return {kind: op for kind, op in found.items() if kind in usual - stood}


def waits_of(run: Run) -> Waits:
    """Who waited for whom in a whole run."""
    totals: dict[tuple[int, int], dict[tuple[str, str, str], float]] = defaultdict(lambda: defaultdict(float))
    for ops, weight in matched(run):
        found = compare(ops)
        for rank, us in found.waited_us.items() if found else ():
            if found and us:
                totals[rank, found.last][ops[rank].site, ops[rank].text, ops[rank].label] += us * weight
    waited: dict[int, float] = dict.fromkeys(run.ranks, 0.0)
    caused = dict(waited)
    pairs: list[Pair] = []
    for (rank, last), places in totals.items():
        seconds = sum(places.values()) / 1e6
        waited[rank] += seconds
        caused[last] += seconds
        pairs.append(Pair(rank, last, seconds, *max(places, key=lambda place: places[place])))
    return Waits(tuple(sorted(pairs, key=lambda pair: -pair.waited_s)), waited, caused)
