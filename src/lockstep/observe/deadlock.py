"""Ranks that wait for each other in a circle, and who of them has led the others there."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.observe import histories, wording
from lockstep.observe.messages import PAIR_UP, unpaired, waiters
from lockstep.observe.scene import GRACE_S, STILL_S, Scene, Wait
from lockstep.observe.wait_chains import circle, point_of_life, waits_for
from lockstep.observe.wording import Finding, names, step_after


def find_cycle(scene: Scene) -> Finding | None:
    """Ranks that provably wait for each other in a circle: none of them can get on."""
    proven = {rank: wait for rank, wait in scene.blocked.items() if _is_proven(scene, wait)}
    ranks = circle({rank: set(wait.absent) & set(proven) for rank, wait in proven.items()})
    return _report(scene, [proven[rank] for rank in ranks]) if ranks else None


def _is_proven(scene: Scene, wait: Wait) -> bool:
    is_fresh = scene.sights[wait.rank].age_s <= GRACE_S
    return is_fresh and wait.age_s >= STILL_S and scene.stands_in(wait) and not wait.is_any


def _went_on(scene: Scene, waits: Sequence[Wait]) -> list[int]:
    """Of a circle: those who have ended a step without an operation of it that others wait in; not if all have.

    Who waits there has made no call of that group more often than in the step before: else it may be its own fault.
    """
    lacking = set[int]()
    for one in waits:
        step, group = one.record.step, one.record.group
        history = [record for record in scene.records_of(one.rank) if record.group == group]
        if not one.record.is_message and not histories.adds_calls(history, step):
            lacking |= {rank for rank in one.absent if scene.status(rank).step > step}
    ahead = sorted(lacking & {wait.rank for wait in waits})
    return ahead if len(ahead) < len(waits) else []


def _outvoted(waits: Sequence[Wait]) -> list[int]:
    """Of a circle: those whom most ranks that are in all of its groups wait for in one of them; all, if it is even."""
    ranks = sorted(wait.rank for wait in waits)
    if any(wait.record.is_message for wait in waits):
        return ranks
    shared = set.intersection(*({wait.rank, *wait.ranks} for wait in waits))
    for wait in waits:
        if 2 * len(shared.intersection(wait.absent)) < len(shared):
            return [rank for rank in ranks if rank in wait.absent]
    return ranks


def _report(scene: Scene, waits: Sequence[Wait]) -> Finding:
    ranks = [wait.rank for wait in waits]
    groups = sorted({wait.record.group for wait in waits if not wait.record.is_message})
    ahead = _went_on(scene, waits)
    odd, alone = unpaired(scene, ranks)
    culprits = ahead or odd or _outvoted(waits)
    lines = waiters(scene, [*waits, *waits_for(scene, ranks)], alone)
    lines += [f"{names([rank])} is in {step_after(scene.status(rank).step)} already" for rank in ahead]
    done = scene.done_by(ranks)
    head = f"DEADLOCK in {step_after(done)}: {_way(ranks, groups, culprits)}"
    why, fix = "each of them waits for the next one, so none can ever get on.", _fix(groups, ahead, odd)
    key, least = point_of_life(scene, sorted(ranks)), wording.stacks(scene, ranks)
    return wording.compose(scene, "cycle", key, head, culprits, lines, why=why, fix=fix, least=least, done=done)


def _way(ranks: Sequence[int], groups: Sequence[str], culprits: Sequence[int]) -> str:
    way = " -> ".join(f"rank {rank}" for rank in (*ranks, ranks[0]))
    if len(groups) > 1:
        way = f"groups in different order: {way}"
    if len(culprits) == len(ranks):
        return way
    return f"{way}.  Culprit{'s' * (len(culprits) > 1)}: {names(culprits)}"


def _fix(groups: Sequence[str], ahead: Sequence[int], odd: Sequence[int]) -> str:
    if ahead:
        return f"look for a condition that is false on {names(ahead)}, or an exception that is caught there."
    if len(groups) > 1:
        return f"use groups {', '.join(groups)} in the same order on every rank."
    if groups and not odd:
        return "send what another rank receives before the collective, or let that rank receive it later."
    return PAIR_UP
