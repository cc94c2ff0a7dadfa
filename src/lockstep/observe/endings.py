"""Ranks that have ended while others wait for them: facts that nothing undoes; and what is said of an end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from lockstep.observe import wording
from lockstep.observe.data_facts import uneven
from lockstep.observe.flight import Record
from lockstep.observe.messages import tally
from lockstep.observe.replica_diff import alike
from lockstep.observe.scene import SILENT_S, Scene, Wait
from lockstep.observe.status import FINISHED, RAISED, RUNNING, LastWords, Sight, Stalled, Status, in_words
from lockstep.observe.wording import Finding, Kind, names, ordinal, seconds, step_after, times

END = "end"  # topic of what a rank tells once its program is done
CLOSED = "closed"  # topic of the groups that a rank has destroyed: where, by the group's name
CAUGHT = "caught"  # topic and key of what a rank tells of an error of the ranks that its program was given
BECAUSE_OF_ANOTHER = "was ended by its launcher because of another"
_FIXES = (  # by what a launcher says
    ("SIGSTOP", "find what stopped it: a debugger, Ctrl-Z, a suspended job; `kill -CONT` in time lets it go on."),
    ("out of memory", "use less memory on that machine: a smaller batch, fewer loader workers, sharded state."),
    ("exit code", "look for os._exit, or for native code that ends the process, on that rank."),
    ("SIGKILL", "find who sent it: out of memory (dmesg, memory.events of its cgroup), a job limit, `kill -9`."),
    ("SIGABRT", "did the ranks make other calls? Gloo aborts who gets too much, at fault or not. Or a crash."),
    ("SIG", "a crash in native code, or a signal: the stacks that Python leaves of a crash are in this output."),
    ("", "killed: look for out of memory (dmesg, memory.events of its cgroup), a job limit, os._exit."),
)


def left_first(
    me: int, sights: Mapping[int, Sight], *, is_final: bool, lost: int | None = None
) -> tuple[int, str] | None:
    """Which rank but `me` is the first cause that others fail, and what is said of it; None while that is not known.

    One that raised for a reason of its own; one whose process is gone; one that another rank says it has lost; and,
    where no news of these is to come any more (`is_final`), one that came to the end of its program without its part
    in what `me` began last. lost: the rank that `me` cannot reach, where it knows which.
    """
    others = [sight for rank, sight in sights.items() if rank != me and not is_asked_to_stop(sight)]
    own = [sight for sight in others if not saw_another(sight.status)]
    first = [sight for sight in own if sight.status.state == RAISED]
    first += sorted((sight for sight in own if _has_vanished(sight, sights)), key=lambda sight: -sight.age_s)
    claim = _claim(me, sights)
    if not first and claim is not None and claim.of is not None:
        return claim.of, claim.message
    if is_final and not first:
        done = [sight for sight in own if sight.status.state == FINISHED and lost in (None, sight.status.rank)]
        first = [sight for sight in done if me not in sights or _lacks_part(sights[me].status, sight.status)]
    if not first:
        return None
    status = first[0].status
    return status.rank, f"in {step_after(status.step)} {how_it_ended(first[0])}"


def _claim(me: int | None, sights: Mapping[int, Sight]) -> LastWords | None:
    """The words of a rank that it has lost another, not `me`; best of one that does not say the same of a third."""
    said = {rank: sight.status.words for rank, sight in sights.items() if rank != me}
    claims = {rank: words for rank, words in said.items() if words is not None and words.of not in (None, me)}
    return next((words for words in claims.values() if words.of not in claims), next(iter(claims.values()), None))


def _lacks_part(mine: Status, its: Status) -> bool:
    """Whether a rank has not begun the newest operation of mine, which is of both; True where that is not known."""
    last = mine.last
    if last is None or last.is_message or last.group not in mine.groups:
        return True
    theirs = its.groups.get(last.group)
    return its.rank in mine.groups[last.group].ranks and (theirs is None or theirs.count <= last.seq)


def how_it_ended(sight: Sight, group: str = "") -> str:
    """A sentence that others quote. group: of which its collectives are counted; "": that which has most of them."""
    status, words = sight.status, sight.status.words
    who, at = f"rank {status.rank}", f" at {words.where}" if words is not None and words.where else ""
    if status.state == RAISED:
        said = "it left no words" if words is None else in_words(words.kind, words.message)
        return f"{who} raised{at}: {said}"
    closed = status.facts.get(CLOSED, {}).get(group)
    if status.state == FINISHED or closed:
        did = f"destroyed group {group} {closed}" if closed else f"finished normally{at}"
        return f"{who} {did} after {times(_count(status, group))}"
    return f"{who} (pid {status.pid}) {sight.how or 'was killed without a word'}"


def _count(status: Status, group: str) -> int:
    return max((one.count for name, one in status.groups.items() if group in ("", name)), default=0)


def stalled_by(found: Finding, sights: Mapping[int, Sight], place: str) -> Stalled:
    """What `found`, said at `place`, says of ranks, and may pass."""
    return Stalled(found.kind, found.culprits, tuple([_begun(sights.get(rank)) for rank in found.culprits]), place)


def sequel(found: Finding, mine: Stalled | None, sights: Mapping[int, Sight], here: str) -> str:
    """The end of a rank of which output `here` has a report, to be said in place of another one; else "".

    mine: what this rank has reported, wherever that went.
    """
    if found.kind not in ("raised", "gone", "finished") or not sights.keys() >= set(found.culprits):
        return ""
    others = [sight.status.stalled for sight in sights.values()]
    for told in (mine, *(other for other in others if other is not None and here and other.place == here)):
        if told is not None and set(found.culprits) <= set(told.ranks):
            return told.is_over(how_it_ended(sights[found.culprits[0]]))
    return ""


def goes_on(told: Stalled, sights: Mapping[int, Sight]) -> str:
    """That ranks which were said to stand still have begun something since; "" where none has."""
    pairs = zip(told.ranks, told.begun, strict=True)
    on = [rank for rank, begun in pairs if _begun(sights.get(rank)) > begun and not sights[rank].is_gone]
    return told.is_over(f"{names(on)} {'goes' if len(on) == 1 else 'go'} on") if on else ""


def _begun(sight: Sight | None) -> int:
    """The number of the newest operation; -1 where there is none."""
    return -1 if sight is None or sight.status.last is None else sight.status.last.number


def saw_another(status: Status) -> bool:
    """True where a rank ended, in whatever way, after it had seen another one fail."""
    return status.words is not None and status.words.is_consequence


def is_asked_to_stop(sight: Sight) -> bool:
    """True after a Ctrl-C, and until its launcher says that nobody has asked: the program may have raised that too."""
    words = sight.status.words
    is_stop = words is not None and words.kind == KeyboardInterrupt.__name__
    return is_stop and (not sight.is_gone or sight.how == BECAUSE_OF_ANOTHER)


def find_raised(scene: Scene) -> Finding | None:
    """A rank that raised, quoted; one that only saw another fail comes last, and only if nobody else turns up."""
    left = [rank for rank in scene.ended if not is_asked_to_stop(scene.sights[rank])]
    ended = {rank for rank in left if scene.status(rank).state == RAISED or saw_another(scene.status(rank))}
    waits = [wait for wait in scene.waits if ended.intersection(_without(scene, wait))]
    missed = sorted({rank for wait in waits for rank in _without(scene, wait)} & ended)
    has_gone = any(_has_vanished(scene.sights[r], scene.sights) for wait in waits for r in _without(scene, wait))
    is_due = not has_gone and any(wait.age_s >= SILENT_S for wait in waits)
    origins = [rank for rank in missed if not saw_another(scene.status(rank))] or (missed if is_due else [])
    if not origins:
        return None
    claim = _claim(None, {rank: scene.sights[rank] for rank in origins})
    culprits = origins if claim is None or claim.of is None else [claim.of]
    fix = f"see to the error of {names(origins)}; the others only wait." if culprits == origins else _FIXES[-1][1]
    sights, step = [scene.sights[rank] for rank in origins], scene.done_by(origins)
    lines = [line for sight in sights for line in (*_quote(sight), *wording.told_before(sight.status))]
    return _finding(scene, "raised", culprits, "RAISED in", step, lines, fix, waits)


def find_gone(scene: Scene) -> Finding | None:
    """A rank whose process ended without a word; all of them, where they were killed in a way that no rank causes."""
    grace_s, sights = scene.limits.grace_s, scene.sights
    vanished: list[int] = []
    for wait in scene.waits:
        for rank in _without(scene, wait) if wait.age_s >= grace_s else ():
            was_seen_later = sights[rank].age_s - sights[wait.rank].age_s < grace_s
            if _has_vanished(sights[rank], sights) and not was_seen_later:
                vanished.append(rank)
    if not vanished:
        return None
    first = max(vanished, key=lambda one: sights[one].age_s)  # others may have been ended for it
    sign, fix = next(advice for advice in _FIXES if advice[0] in sights[first].how)
    ranks = [first]
    if sign in ("SIGSTOP", "out of memory", "SIGKILL"):
        ranks = [rank for rank, sight in sights.items() if sign in sight.how and _has_vanished(sight, sights)]
        ranks.sort(key=lambda rank: (sights[rank].how, rank))  # which say how long after the first
    lines = [line for rank in ranks for line in _quote(sights[rank])]
    lines += wording.whereabouts(scene, {r: f"was last seen {seconds(sights[r].age_s)} ago" for r in ranks})
    waits = [wait for wait in scene.waits if set(ranks).intersection(_without(scene, wait))]
    return _finding(scene, "gone", sorted(ranks), "GONE in", scene.done_by(ranks), lines, fix, waits)


def find_finished(scene: Scene) -> Finding | None:
    """Ranks that came to their end while others want one more operation of them."""
    for wait in scene.waits:
        if wait.age_s >= scene.limits.grace_s and not wait.is_any:
            early = [rank for rank in sorted(_awaited_in(scene, wait)) if _has_left(scene, rank, wait.record.group)]
            if early:
                return _report_finished(scene, wait, early)
    return None


def _awaited_in(scene: Scene, wait: Wait) -> Sequence[int]:
    if not wait.record.is_message or wait.rank in scene.blocked:
        return wait.absent
    has_failed = not scene.limits.grace_s and wait.rank == scene.me and scene.status(wait.rank).last == wait.record
    return wait.ranks if has_failed else ()  # what was begun there may not have been sent


def _report_finished(scene: Scene, wait: Wait, early: list[int]) -> Finding:
    group, is_message, everybody = wait.record.group, wait.record.is_message, {wait.rank, *wait.ranks}
    ends = alike({rank: how_it_ended(scene.sights[rank], group).removeprefix(f"rank {rank} ") for rank in early})
    lines = [f"{names(ranks)} {text}," for text, ranks in ends.items()]
    lines += dict.fromkeys(text for rank in early for text in wording.told_before(scene.status(rank)))
    lines.append(_wanted(wait))
    blamed, head = early, "FINISHED too early, in"
    fix = "give all ranks as many batches, or use join(); make a call under `if rank == 0` on all, or none."
    if any(scene.is_running(rank) for rank in early):
        fix = "destroy a group after the last call in it that any rank makes, and then on all of its ranks."
    is_one_end = len({_count(scene.status(rank), group) for rank in early}) == 1 and not is_message
    counts = tally(scene, wait.rank, wait.record) if is_message else []
    batches, changed, _ = uneven(scene.sights, everybody)
    if counts or (is_message and not batches):
        lines, fix = lines + counts, "as many sends as receives, and wait() for each isend before the end."
        if len(counts) > 2:
            blamed, head = [*early, wait.rank], "FINISHED with other numbers of messages, in"
    elif batches:
        lines += batches
        fix = "as many batches on all ranks: check what each skips as it goes on, its sampler and its data."
        if len(early) * 2 >= len(everybody) and changed != {*early}:  # no majority has the right number
            blamed, head = [*early, *everybody.difference(early)], "FINISHED with other numbers of batches, in"
    elif 2 * len(early) > len(everybody) and is_one_end:
        blamed, head = [one.rank for one in scene.waits if one.is_part_of(wait)], "FINISHED on most ranks, in"
    waits = [wait for wait in scene.waits if set(early).intersection(wait.absent)]
    return _finding(scene, "finished", blamed, head, scene.done_by(early), lines, fix, waits)


def _has_left(scene: Scene, rank: int, group: str) -> bool:
    """Whether a rank makes no more calls in a group, and did not mean to leave the others alone for one that failed."""
    if scene.is_running(rank):
        return group in scene.status(rank).facts.get(CLOSED, {})
    return rank in scene.ended and scene.status(rank).state == FINISHED and not saw_another(scene.status(rank))


def find_caught(scene: Scene) -> Finding | None:
    """An error of the ranks that programs have handled, and at which lines."""
    handled = {rank: one.status.facts for rank, one in scene.sights.items() if one.status.state != RAISED}
    told = {rank: facts[CAUGHT][CAUGHT] for rank, facts in sorted(handled.items()) if CAUGHT in facts}
    if not told:
        return None
    texts = {rank: f"at {site}: {words}" for rank, (_, site, words) in told.items()}
    done = [one for rank, one in sorted(scene.sights.items()) if rank not in told and one.status.state == FINISHED]
    lines = [*map(how_it_ended, done), *(f"{names(ranks)} {text}" for text, ranks in alike(texts).items())]
    head = f"CAUGHT by the program in {step_after(min(step for step, *_ in told.values()))}, an error of the ranks."
    why = "the ranks may be out of step since then, and the exit code does not tell."
    fix = "let such an error end the run, or go on from a checkpoint, on every rank, where it is caught."
    return wording.compose(scene, "caught", "", head, tuple(told), lines, why=why, fix=fix)


def _finding(
    scene: Scene, kind: Kind, ranks: list[int], head: str, done: int, body: list[str], fix: str, waits: list[Wait]
) -> Finding:
    shown = {wait.rank for wait in waits if wait.record.site in scene.status(wait.rank).stack}  # else it is of before
    if kind == "gone":
        shown.update(ranks)
    key, body = ",".join(map(str, ranks)), [*body, *wording.waiters(waits)]
    stacks, head = wording.stacks(scene, shown), f"{head} {step_after(done)}."
    return wording.compose(scene, kind, key, head, ranks, body, fix=fix, least=stacks, done=done)


def _without(scene: Scene, wait: Wait) -> list[int]:
    """The ranks that have ended and without whom `wait` cannot."""
    if wait.is_any:
        return []
    ended = [r for r in wait.ranks if r in scene.sights and not scene.is_running(r)]
    begun = {r: _those_of(wait, [waiting.record for waiting in scene.status(r).waiting]) for r in ended}
    return [r for r in ended if (r in wait.absent or begun[r]) and not _has_done_its_part(scene, r, wait)]


def _has_done_its_part(scene: Scene, rank: int, wait: Wait) -> bool:
    """True where the rank's own record says that it did its part: its last status may be a little older."""
    is_gone = scene.sights[rank].is_gone
    return is_gone and any(record.left_ns for record in _those_of(wait, scene.records_of(rank)))


def _those_of(wait: Wait, records: Sequence[Record]) -> list[Record]:
    """Parts of the collective of `wait`, on any rank."""
    mine = wait.record
    return [r for r in records if not (r.is_message or mine.is_message) and (r.group, r.seq) == (mine.group, mine.seq)]


def _has_vanished(sight: Sight, sights: Mapping[int, Sight]) -> bool:
    """True of a process that ended without having said that it would, not because of another or another machine."""
    if not sight.is_gone or sight.status.state != RUNNING or sight.how == BECAUSE_OF_ANOTHER:
        return False
    told = [one.status.stalled for one in sights.values()]
    waited = any(one and one.kind == "unreachable" and sight.status.rank not in one.ranks for one in told)
    return not (waited and sight.how.startswith("was ended by its launcher"))


def _quote(sight: Sight) -> list[str]:
    """The sentence, what is quoted in it in a line of its own."""
    who, colon, words = how_it_ended(sight).partition(": ")
    return [who + colon.strip(), *([f"  {words}"] if words else [])]


def _wanted(wait: Wait) -> str:
    record = wait.record
    article = "an" if re.match(r"8|1[18](\d{3})*$", str(record.seq + 1)) else "a"  # an 8th, an 11th, an 11000th
    what = f"{article} {ordinal(record.seq + 1)} ({record.text.split()[0]}, {record.site})"
    return f"{names([wait.rank])} wanted {f'a message ({wording.operation(record)})' if record.is_message else what}"
