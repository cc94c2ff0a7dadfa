"""Ranks that have ended while others wait for them: facts that nothing undoes; and what is said of an end."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.observe import wording
from lockstep.observe.scene import SILENT_S, Scene, Wait
from lockstep.observe.status import FINISHED, RAISED, RUNNING, Sight, Status
from lockstep.observe.wording import Finding, names, ordinal, times

BECAUSE_OF_ANOTHER = "was ended by its launcher because of another"
_FIXES = (  # by what a launcher says
    ("SIGSTOP", "find what stopped it: a debugger, Ctrl-Z, a suspended job; `kill -CONT` in time lets it go on."),
    ("out of memory", "use less memory on that machine: a smaller batch, fewer loader workers, sharded state."),
    ("exit code", "look for os._exit, or for native code that ends the process, on that rank."),
    ("SIGKILL", "find who sent it: out of memory (dmesg, memory.events of its cgroup), a job limit, `kill -9`."),
    ("SIG", "a crash in native code, or a signal: where Python printed a stack for it, that is in this output."),
    ("", "killed: look for out of memory (dmesg, memory.events of its cgroup), a job limit, os._exit."),
)


def left_first(me: int, sights: Mapping[int, Sight], *, is_final: bool) -> tuple[int, str] | None:
    """Which rank but `me` is the first cause that others fail, and what is said of it; None while that is not known.

    One that raised for a reason of its own; one whose process is gone; one that another rank says it has lost; and,
    where no news of these is to come any more (`is_final`), one that came to the end of its program.
    """
    others = [sight for rank, sight in sights.items() if rank != me]
    own = [sight for sight in others if not saw_another(sight.status)]
    first = [sight for sight in own if sight.status.state == RAISED] + [sight for sight in own if _has_vanished(sight)]
    lost = [words for sight in others if (words := sight.status.words) is not None and words.of not in (None, me)]
    if not first and lost and lost[0].of is not None:
        return lost[0].of, lost[0].message
    first += [sight for sight in own if is_final and sight.status.state == FINISHED]
    return (first[0].status.rank, f"in step {first[0].status.step} {how_it_ended(first[0])}") if first else None


def how_it_ended(sight: Sight, group: str = "") -> str:
    """A sentence that others quote. group: of which its collectives are counted; "": that which has most of them."""
    status, words = sight.status, sight.status.words
    who, at = f"rank {status.rank}", f" at {words.where}" if words is not None and words.where else ""
    if status.state == RAISED:
        said = "it left no words" if words is None else f"{words.kind}: {words.message}"
        return f"{who} raised{at}: {said.removesuffix(': KeyboardInterrupt')}"
    if status.state == FINISHED:
        counts = [one.count for name, one in status.groups.items() if group in ("", name)]
        return f"{who} finished normally{at} after {times(max(counts, default=0))}"
    return f"{who} (pid {status.pid}) {sight.how or 'was killed without a word'}"


def saw_another(status: Status) -> bool:
    """True where a rank ended, in whatever way, after it had seen another one fail."""
    return status.words is not None and status.words.is_consequence


def find_raised(scene: Scene) -> Finding | None:
    """A rank that raised, quoted; one that only saw another fail comes last, and only if nobody else turns up."""
    ended = {rank for rank in scene.ended if scene.status(rank).state == RAISED or saw_another(scene.status(rank))}
    waits = [wait for wait in scene.waits if ended.intersection(_without(scene, wait))]
    missed = sorted({rank for wait in waits for rank in _without(scene, wait)} & ended)
    origins = [rank for rank in missed if not saw_another(scene.status(rank))]
    if not origins and any(wait.age_s >= SILENT_S for wait in waits):
        origins = missed
    if not origins:
        return None
    words = scene.status(origins[0]).words
    culprit = origins[0] if words is None or words.of is None else words.of
    return _finding(
        scene,
        "raised",
        culprit,
        f"RAISED in step {scene.status(origins[0]).step}.",
        [line for rank in origins for line in _quote(scene.sights[rank])],
        fix=f"see to the error of {names(origins)}; the others only wait." if culprit in origins else _FIXES[-1][1],
        waits=waits,
    )


def find_gone(scene: Scene) -> Finding | None:
    """A rank whose process ended without a word."""
    for wait in scene.waits:
        for rank in _without(scene, wait):
            gone = scene.sights[rank]
            grace_s = scene.limits.grace_s
            is_settled = gone.age_s - scene.sights[wait.rank].age_s >= grace_s and wait.age_s >= grace_s
            if _has_vanished(gone) and is_settled:
                return _finding(
                    scene,
                    "gone",
                    rank,
                    f"GONE in step {gone.status.step}.",
                    [*_quote(gone), *wording.whereabouts(scene, rank, "was last seen")],
                    fix=next(fix for sign, fix in _FIXES if sign in gone.how),
                    waits=[wait for wait in scene.waits if rank in _without(scene, wait)],
                )
    return None


def find_finished(scene: Scene) -> Finding | None:
    """A rank that came to its end while others want one more operation of it."""
    for wait in scene.waits:
        is_early = wait.age_s < scene.limits.grace_s
        if is_early or wait.is_any or (wait.record.is_message and wait.rank not in scene.blocked):
            continue
        for rank in sorted(scene.ended.intersection(wait.absent)):
            status = scene.status(rank)
            if status.state == FINISHED and not saw_another(status):
                return _finding(
                    scene,
                    "finished",
                    rank,
                    f"FINISHED too early, in step {status.step}.",
                    [f"{how_it_ended(scene.sights[rank], wait.record.group)},", _wanted(wait)],
                    fix=f"{names([rank])} has a shorter loop or left it early: equal numbers of batches, or join().",
                    waits=[wait for wait in scene.waits if rank in wait.absent],
                )
    return None


def _finding(
    scene: Scene, kind: wording.Kind, rank: int, head: str, body: list[str], fix: str, waits: list[Wait]
) -> Finding:
    inside = {wait.rank for wait in waits if wait.record.site in scene.status(wait.rank).stack}  # else it is of before
    stacks = wording.stacks(scene, inside | ({rank} if kind == "gone" else set()))
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


def _has_vanished(sight: Sight) -> bool:
    """True of a process that has ended without having said that it would, and not because of another."""
    return sight.is_gone and sight.status.state == RUNNING and sight.how != BECAUSE_OF_ANOTHER


def _quote(sight: Sight) -> list[str]:
    """The sentence, what is quoted in it in a line of its own."""
    who, colon, words = how_it_ended(sight).partition(": ")
    return [who + colon.strip(), *([f"  {words}"] if words else [])]


def _wanted(wait: Wait) -> str:
    record = wait.record
    what = f"a {ordinal(record.seq + 1)} ({record.text.split()[0]}, {record.site})"
    return f"{names([wait.rank])} wanted {f'a message ({wording.operation(record)})' if record.is_message else what}"
