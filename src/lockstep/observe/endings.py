"""Ranks that have ended while others wait for them: facts that nothing undoes."""

from __future__ import annotations

from lockstep.observe import wording
from lockstep.observe.scene import SILENT_S, Scene, Wait
from lockstep.observe.status import FINISHED, RAISED, RUNNING
from lockstep.observe.wording import Finding, names, ordinal, times


def find_raised(scene: Scene) -> Finding | None:
    """A rank that raised, quoted; one that only saw another fail comes last, and only if nobody else turns up."""
    raised = {rank for rank in scene.ended if scene.status(rank).state == RAISED}
    waits = [wait for wait in scene.waits if raised.intersection(_without(scene, wait))]
    missed = sorted({rank for wait in waits for rank in _without(scene, wait)} & raised)
    origins = [rank for rank in missed if not _is_consequence(scene, rank)]
    if not origins and any(wait.age_s >= SILENT_S for wait in waits):
        origins = missed
    if not origins:
        return None
    return _finding(
        scene,
        "raised",
        origins[0],
        f"RAISED in step {scene.status(origins[0]).step}.",
        [line for rank in origins for line in _quote(scene, rank)],
        fix=f"see to the error of {names(origins)}; the others only wait.",
        waits=waits,
    )


def find_gone(scene: Scene) -> Finding | None:
    """A rank whose process ended without a word."""
    for wait in scene.waits:
        for rank in _without(scene, wait):
            gone = scene.sights[rank]
            grace_s = scene.limits.grace_s
            is_settled = gone.age_s - scene.sights[wait.rank].age_s >= grace_s and wait.age_s >= grace_s
            if gone.is_gone and gone.status.state == RUNNING and is_settled:
                return _finding(
                    scene,
                    "gone",
                    rank,
                    f"GONE in step {gone.status.step}: its process ended without a word.",
                    wording.whereabouts(scene, rank, "was last seen"),
                    fix="killed: look for out of memory (dmesg, memory.events of its cgroup), a job limit, os._exit.",
                    waits=[wait for wait in scene.waits if rank in _without(scene, wait)],
                )
    return None


def find_finished(scene: Scene) -> Finding | None:
    """A rank that came to its end while others want one more operation of it."""
    for wait in scene.waits:
        for rank in sorted(scene.ended.intersection(wait.absent)):
            if scene.status(rank).state != FINISHED:
                continue
            if (
                wait.age_s < scene.limits.grace_s
                or wait.is_any
                or (wait.record.is_message and wait.rank not in scene.blocked)
            ):
                continue
            return _finding(
                scene,
                "finished",
                rank,
                f"FINISHED too early, in step {scene.status(rank).step}.",
                [_wanted(scene, wait, rank)],
                fix=f"{names([rank])} has a shorter loop or left it early: equal numbers of batches, or join().",
                waits=[wait for wait in scene.waits if rank in wait.absent],
            )
    return None


def _finding(
    scene: Scene, kind: wording.Kind, rank: int, head: str, body: list[str], fix: str, waits: list[Wait]
) -> Finding:
    stacks = wording.stacks(scene, {wait.rank for wait in waits} | ({rank} if kind == "gone" else set()))
    text = wording.compose(
        f"{head}  {wording.culprit(scene, [rank])}",
        [*body, *wording.waiters(waits)],
        fix=fix,
        evidence=scene.limits.evidence,
        least=stacks,
    )
    return Finding(kind, (rank,), text, is_certain=True, key=f"{kind}:{rank}")


def _without(scene: Scene, wait: Wait) -> list[int]:
    """The ranks that have ended and without whom `wait` cannot."""
    if wait.is_any:
        return []
    ended = [r for r in wait.ranks if r in scene.sights and not scene.is_running(r)]
    return [
        r for r in ended if (r in wait.absent or _is_open(scene, r, wait)) and not _has_done_its_part(scene, r, wait)
    ]


def _is_open(scene: Scene, rank: int, wait: Wait) -> bool:
    mine = wait.record
    theirs = [waiting.record for waiting in scene.status(rank).waiting]
    return any(not r.is_message and (r.group, r.seq) == (mine.group, mine.seq) for r in theirs)


def _has_done_its_part(scene: Scene, rank: int, wait: Wait) -> bool:
    """True where the rank's own record says that it did its part: its last status may be a little older."""
    if not scene.sights[rank].is_gone or wait.record.is_message:
        return False
    mine = wait.record
    theirs = [r for r in scene.records_of(rank) if (r.group, r.seq) == (mine.group, mine.seq) and not r.is_message]
    return any(record.left_ns for record in theirs)


def _is_consequence(scene: Scene, rank: int) -> bool:
    words = scene.status(rank).words
    return words is not None and words.is_consequence


def _quote(scene: Scene, rank: int) -> list[str]:
    words = scene.status(rank).words
    if words is None:
        return [f"{names([rank])} raised, and left no words"]
    return [f"{names([rank])} raised{f' at {words.where}' * bool(words.where)}:", f"  {words.kind}: {words.message}"]


def _wanted(scene: Scene, wait: Wait, rank: int) -> str:
    record = wait.record
    if record.is_message:
        return f"{names([rank])} finished normally, {names([wait.rank])} wanted a message ({wording.operation(record)})"
    ranks = scene.status(wait.rank).groups[record.group].ranks
    count = scene.counts(record.group, ranks).get(rank, 0)
    return (
        f"{names([rank])} finished normally after {times(count)}, "
        f"{names([wait.rank])} wanted a {ordinal(record.seq + 1)} ({record.text.split()[0]}, {record.site})"
    )
