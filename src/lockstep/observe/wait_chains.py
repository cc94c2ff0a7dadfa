"""Who waits for whom, and what the last one of such a chain does. Pure.

A rank that waits is not the culprit; the rank it waits for may itself wait. Following that from rank to rank ends at
ranks that wait for nobody (the roots), or goes round in a circle. What a root does decides: at work, nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from lockstep.observe.endings import is_asked_to_stop
from lockstep.observe.motion import CHILDREN
from lockstep.observe.scene import INIT, LATE_S, NEW_GROUP, STILL_S, Scene, Wait
from lockstep.observe.status import Status

START_TIMES = 30  # as long as the limit: building or fetching what all need, before anything else

Root = Literal["unseen", "ended", "asked", "silent", "active", "moving", "looping", "starting", "stuck", "inside"]


def roots(scene: Scene, wait: Wait) -> list[int]:
    """Those at the end of all chains that begin at `wait`; ranks of a circle, where there is no end."""
    found: set[int] = set()
    seen = {wait.rank}
    open_waits = [wait]
    while open_waits:
        current = open_waits.pop()
        missing = current.absent or _frozen_inside(scene, current)
        if not missing and current is not wait:
            found.add(current.rank)
        for rank in missing:
            following = scene.blocked.get(rank)
            if following is None:
                found.add(rank)
            elif rank not in seen:
                seen.add(rank)
                open_waits.append(following)
    return sorted(found or (seen if wait.absent else ()))


def _frozen_inside(scene: Scene, wait: Wait) -> tuple[int, ...]:
    """Who was in this operation, too, when last heard, and is not run any more: half of its part may be moved."""
    silent = [rank for rank in wait.ranks if scene.is_silent(rank)]
    theirs = {rank: [scene.wait_of(rank, waiting) for waiting in scene.status(rank).waiting] for rank in silent}
    return tuple([rank for rank in silent if wait.record.is_message or any(map(wait.is_part_of, theirs[rank]))])


def state(scene: Scene, rank: int) -> Root:
    """What the rank at the end of a chain does."""
    sight = scene.sights.get(rank)
    if sight is None:
        return "unseen"
    if not scene.is_running(rank):
        return "asked" if is_asked_to_stop(sight) else "ended"
    if activity(scene, rank):
        return "active"
    if scene.is_silent(rank):
        return "moving" if sight.is_working else "silent"
    wait = scene.blocked.get(rank)
    if wait is not None and not wait.absent:
        return "inside"
    if wait is not None and scene.stands_in(wait):
        return "stuck"
    if scene.loops(rank):
        return "looping"
    if sight.status.unmoved_s < max(scene.hang_s - LATE_S, STILL_S):
        return "moving"
    return "starting" if _is_starting(scene, sight.status) else "stuck"


def _is_starting(scene: Scene, status: Status) -> bool:
    """In its first step a rank may build, fetch or compile what the others wait for; but a group is made by all.

    So before its first call; and where a model was wrapped, for else nobody knows of steps, before it repeats a call.
    """
    is_over = scene.step > status.step_before or status.unmoved_s >= START_TIMES * scene.hang_s
    if is_over or any(wait.record.group == NEW_GROUP for wait in scene.waits):
        return False
    if status.last is None or status.last.group == INIT:
        return True
    wrapped = {told["wrapped"][1] for name, told in status.facts.items() if name.startswith("model ")}
    done = [record for record in scene.records_of(status.rank) if record.site not in wrapped]
    return bool(wrapped and done) and len({(one.site, one.text) for one in done}) == len(done)


def activity(scene: Scene, rank: int) -> str:
    """What excuses it; not that processes of its own work, where it stands in an operation."""
    found = scene.status(rank).activity
    return "" if found == CHILDREN and rank in scene.blocked else found


def circle(following: Mapping[int, set[int]]) -> list[int]:
    """Ranks each of which waits for the next, and the last for the first, from the lowest; empty where none do."""
    following = dict(following)
    while ends := [rank for rank, others in following.items() if not others & following.keys()]:
        for rank in ends:
            del following[rank]
    if not following:
        return []
    path = [min(following)]
    while (rank := min(following[path[-1]] & following.keys())) not in path:
        path.append(rank)
    found = path[path.index(rank) :]
    lowest = found.index(min(found))
    return found[lowest:] + found[:lowest]


def waits_for(scene: Scene, ranks: Iterable[int]) -> list[Wait]:
    """The operations in which others wait for `ranks`; also of one that stood at its line when that was seen last."""
    them = set(ranks)
    sure = [wait for wait in scene.blocked.values() if wait.rank not in them and them.intersection(roots(scene, wait))]
    others = [wait for wait in scene.waits if wait.rank not in them and wait.rank not in scene.blocked]
    others = [wait for wait in others if any(wait.is_part_of(one) for one in sure)]
    others = [wait for wait in others if wait.record.site in scene.status(wait.rank).stack]
    return sorted([*sure, *others], key=lambda wait: wait.rank)


def point_of_life(scene: Scene, ranks: Iterable[int]) -> str:
    """These ranks and what each has issued last: the same for whoever sees them stand there."""
    last = {rank: scene.status(rank).last for rank in ranks}
    return ",".join(f"{rank}@{-1 if record is None else record.number}" for rank, record in last.items())
