"""Ranks that wait for each other in a circle, and who of them has led the others there."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.observe import wording
from lockstep.observe.messages import PAIR_UP, strays, unpaired, waiters
from lockstep.observe.scene import GRACE_S, STILL_S, Scene, Wait
from lockstep.observe.wait_chains import circle, point_of_life, waits_for
from lockstep.observe.wording import Finding, names, step_after

_BY_ALL = ("all_", "barrier", "reduce_scatter")  # collectives that nobody is through with before all have come


def find_cycle(scene: Scene) -> Finding | None:
    """Ranks that provably wait for each other in a circle: none of them can get on."""
    proven = {wait.rank: wait for wait in scene.waits if _is_called(scene, wait)}
    proven |= {rank: wait for rank, wait in scene.blocked.items() if _has_stood(scene, wait)}
    ranks = circle({rank: set(wait.absent) & set(proven) for rank, wait in proven.items()})
    moment_s = max([scene.sights[rank].age_s for rank in ranks], default=0.0)  # ago: did all of them stand there then?
    is_sure = all(scene.sights[rank].age_s + scene.status(rank).unmoved_s >= moment_s for rank in ranks)
    return _report(scene, [proven[rank] for rank in ranks]) if ranks and is_sure else None


def _has_stood(scene: Scene, wait: Wait) -> bool:
    is_fresh = scene.sights[wait.rank].age_s <= GRACE_S
    return is_fresh and wait.age_s >= STILL_S and scene.stands_in(wait) and not wait.is_any


def _is_called(scene: Scene, wait: Wait) -> bool:
    """Whether the rank's thread is in that call itself, since a look ago at least: what it waits for is no guess."""
    status, record = scene.status(wait.rank), wait.record
    is_alone = status.last is not None and status.last.number == record.number and len(status.waiting) == 1
    is_there = status.is_in_call and status.unmoved_s > 0 and record.site in status.stack
    return is_alone and is_there and record.text.startswith(_BY_ALL)


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
    voted = _outvoted(waits)
    odd, alone = unpaired(scene, ranks)
    odd = odd or strays(scene, waits)
    culprits = voted if len(voted) < len(ranks) else [*odd] or voted
    told = [text for rank, text in odd.items() if rank in culprits]
    lines = [*told, *waiters(scene, [*waits, *waits_for(scene, ranks)], alone)]
    done, steps = scene.done_by(ranks), {rank: scene.status(rank).step for rank in culprits}
    lines += [f"{names([rank])} is in {step_after(step)} already" for rank, step in steps.items() if step > done]
    way = " -> ".join(f"rank {rank}" for rank in (*ranks, ranks[0]))
    if len(culprits) < len(ranks):
        way = f"{way}.  Culprit{'s' * (len(culprits) > 1)}: {names(culprits)}"
        what = "condition that is false on" if groups else "condition, peer or tag that differs on"
        fix = f"look for a {what} {names(culprits)}, or an exception that is caught there."
    elif len(groups) > 1:
        way = f"groups in different order, or a call left out: {way}"
        fix = f"use groups {', '.join(groups)} in the same order on every rank, each on all of its ranks."
    elif groups:
        fix = "send what another rank receives before the collective, or let that rank receive it later."
    else:
        fix = PAIR_UP
    head = f"DEADLOCK in {step_after(done)}: {way}"
    why = "each of them waits for the next one, so none can ever get on."
    key, least = point_of_life(scene, sorted(ranks)), wording.stacks(scene, ranks)
    return wording.compose(scene, "cycle", key, head, culprits, lines, why=why, fix=fix, least=least, done=done)
