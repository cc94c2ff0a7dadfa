"""Ranks that stand still, or whose wait has timed out, and whom they all wait for."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from lockstep.observe import histories, wording
from lockstep.observe.flight import Record
from lockstep.observe.messages import PAIR_UP, let_go, unpaired, waiters
from lockstep.observe.profile.phases import DATA
from lockstep.observe.scene import SILENT_S, STILL_S, Scene, Wait
from lockstep.observe.status import FINISHED, RAISED, Stalled
from lockstep.observe.wait_chains import START_TIMES, activity, point_of_life, roots, state, waits_for
from lockstep.observe.wording import Finding, names, seconds, step_after, times

FAILING = "failing"  # activity of a rank that asks why its operation has failed
LONG_WORK_TIMES = 3  # as long as for work of which nothing is known: a checkpoint, an evaluation, a late start
_LOADS = "is loading data"
_COMPUTES = "waits for a GPU that is at what it was given before"
_TIMED_OUT = re.compile("(?P<store>wait timeout|Socket Timeout|waiting for clients|client socket has)|[Tt]imed out")
_TRANSPORT_TIMES = 3  # as long as the limit: moving much data is no hang
_FAILING_S = 5.0  # for what waits for a rank that has failed to be ended by that


def find_stopped(scene: Scene) -> Finding | None:
    """A rank whose process exists and does not run."""
    for wait in scene.waits:
        if wait.age_s < STILL_S:
            return None
        silent = [rank for rank in roots(scene, wait) if state(scene, rank) == "silent"]
        is_sure = wait.age_s >= SILENT_S or all(scene.sights[rank].is_stopped for rank in silent)
        if silent and is_sure and wait.rank in scene.blocked:
            return _report_stopped(scene, silent)
    return None


def find_hang(scene: Scene) -> Finding | None:
    """Nothing has moved for too long, neither who waits nor who is waited for."""
    for wait in scene.waits:
        if wait.age_s < scene.hang_s:
            return None
        finding = _hang_at(scene, wait) if _is_still(scene, wait) else None
        if finding is not None:
            return finding
    return None


def _hang_at(scene: Scene, wait: Wait) -> Finding | None:
    """wait: of a rank that stands still in it for too long. None where another rank that it needs may yet move."""
    states = {rank: state(scene, rank) for rank in roots(scene, wait)}
    for one in scene.waits:
        if one.rank in (wait.rank, *states) and min(one.age_s, scene.status(one.rank).unmoved_s) >= scene.hang_s:
            gone = let_go(scene, one)
            if gone:
                return _report_transport(scene, one, gone)
    may_be_proven = all(rank in scene.blocked and scene.stands_in(scene.blocked[rank]) for rank in states)
    if may_be_proven and wait.age_s < scene.hang_s + STILL_S:  # of a circle there is more to say
        return None
    kinds = set(states.values())
    if kinds and kinds <= {"stuck", "ended"}:
        return _report_hang(scene, wait, sorted(states), {})
    if not kinds <= {"inside"} or not _nobody_moves(scene, wait):
        return None
    more = _with_more_calls(scene, wait)
    if more:
        return _report_hang(scene, wait, sorted(more), more)
    if wait.age_s < _TRANSPORT_TIMES * scene.hang_s:
        return None
    busy = [rank for rank in (wait.rank, *wait.ranks) if _has_not_come_to(scene, rank, wait.record)]
    if busy and len(busy) <= len(wait.ranks):
        return _report_hang(scene, wait, busy, {})
    return _report_transport(scene, wait, {})


def find_waiting(scene: Scene) -> Finding | None:
    """Somebody works while others wait: no fault, but worth a line; later where it is known to be long work."""
    long_s = LONG_WORK_TIMES * scene.notice_s
    limits_s = {"looping": scene.hang_s, "starting": scene.hang_s, "moving": scene.notice_s}
    limits_s |= {"unseen": long_s, "active": long_s}
    for wait in scene.waits:
        if wait.age_s < scene.hang_s:
            return None
        busy = [rank for rank in roots(scene, wait) if wait.age_s >= limits_s.get(state(scene, rank), math.inf)]
        if busy and wait.rank in scene.blocked:
            return _report_waiting(scene, wait, busy)
    return None


def stands_for_s(scene: Scene, told: Stalled) -> float:
    """For how long `scene.me` has stood still, if what was told is its doing, or that of ranks it waits for in vain."""
    is_hang, stood_s = told.kind == "hang", scene.status(scene.me).unmoved_s
    if is_hang and scene.ended.issuperset(told.ranks):
        have_failed = any(scene.status(rank).state != FINISHED for rank in told.ranks)
        return max(0.0, stood_s - _FAILING_S * have_failed) if scene.me in scene.blocked else 0.0
    return stood_s if (is_hang or told.kind == "unreachable") and (scene.me in told.ranks) is is_hang else 0.0


def find_timed_out(scene: Scene, error: str, line: str) -> Finding | None:
    """Who was not there when torch gave up, by `error`, what `scene.me` did at `line`; None where nobody knows."""
    gave_up = _TIMED_OUT.search(error)
    if gave_up is None:
        return None
    mine = [wait for wait in scene.waits if wait.rank == scene.me and wait.absent]
    here = [wait for wait in mine if wait.record.site.startswith(f"{line} ")]
    if gave_up["store"] and not here:
        wait = _wait_at_store(scene, error.splitlines()[0], line)
        return _report_timed_out(scene, wait, wait.absent, line)
    if not mine:
        return None
    wait = max(here or mine, key=lambda one: one.record.number)
    if wait.record.left_ns:
        wait = wait._replace(age_s=max(0, wait.record.left_ns - wait.record.entered_ns) / 1e9)
    return _report_timed_out(scene, wait, roots(scene, wait), line)


def _wait_at_store(scene: Scene, error: str, line: str) -> Wait:
    """The guard sees no keys of the store, but where the ranks stand."""
    mine = scene.status(scene.me)
    there = {scene.me}
    for rank in scene.sights:
        its = scene.status(rank)
        if its.activity == FAILING or f" {line} " in f" {' '.join(its.stack)}":
            there.add(rank)
    absent = tuple([rank for rank in range(mine.world_size) if rank not in there])
    record = Record(-1, 0, mine.step, 0, 0, 0, True, "", f"the store ({error})", line, "")
    return Wait(scene.me, record, 0.0, absent, absent, is_any=True)


# ------------------------------------------------------------------ who moves


def _is_still(scene: Scene, wait: Wait) -> bool:
    """True where the waiting rank itself stands in this operation, and has begun nothing since."""
    status = scene.status(wait.rank)
    if scene.blocked.get(wait.rank) is not wait or activity(scene, wait.rank):
        return False
    since_s = 0.0 if status.last is None else (status.last.entered_ns - wait.record.entered_ns) / 1e9
    return wait.age_s - since_s >= scene.hang_s


def _nobody_moves(scene: Scene, wait: Wait) -> bool:
    """True where all others have stood in this operation, or in another one, for too long as well."""
    ages_s = {rank: blocked.age_s for rank, blocked in scene.blocked.items()}
    ages_s |= {one.rank: one.age_s for one in scene.waits if one.is_part_of(wait) and one.rank in ages_s}
    ages_s |= {rank: scene.sights[rank].age_s for rank in scene.ended}
    return all(ages_s.get(rank, 0.0) >= scene.hang_s for rank in wait.ranks)


def _with_more_calls(scene: Scene, wait: Wait) -> dict[int, str]:
    """Of ranks that all stand in collectives: who began more in this step. What C++ starts has no other name."""
    group = wait.record.group
    ranks = [rank for rank in (wait.rank, *wait.ranks) if rank in scene.sights]
    found: dict[int, str] = {}
    for rank in ranks:
        history = [record for record in scene.records_of(rank) if record.group == group]
        step = history[-1].step if history else 0
        if histories.adds_calls(history, step):
            counts = Counter(record.step for record in history)
            began = f"{names([rank])} began {times(counts[step])} of group {group} in {step_after(step)}"
            found[rank] = f"{began}, {counts[step - 1]} in the step before"
    return found if len(found) < len(ranks) else {}


def _has_not_come_to(scene: Scene, rank: int, record: Record) -> bool:
    """Whether the GPU of `rank` is still at something else, though the rank has begun this collective."""
    queued = scene.status(rank).queued if scene.is_running(rank) else {}
    return not record.is_message and queued.get(record.group, math.inf) <= record.seq


def _not_there(scene: Scene, rank: int) -> str:
    if rank not in scene.sights:
        return "has not been heard of: not started yet, or without a guard"
    status = scene.status(rank)
    if not scene.is_running(rank):
        return f"has {status.state}" if status.state in (RAISED, FINISHED) else "is gone"
    if status.phases and status.phases[-1][0] == DATA:  # known where the run is recorded
        return _LOADS
    wait = scene.blocked.get(rank)
    if wait is not None and _has_not_come_to(scene, rank, wait.record):
        return _COMPUTES
    return "waits" if wait is not None else "is not there"


# ------------------------------------------------------------------ in words


def _report_stopped(scene: Scene, ranks: Sequence[int]) -> Finding:
    sights = [scene.sights[rank] for rank in ranks]
    pids = " ".join(str(sight.status.pid) for sight in sights)
    why = "SIGSTOP, swapping or a debugger, or C code that holds the GIL"
    fix = f"`ps -o stat,wchan {pids}`; state T: `kill -CONT {pids}`."
    if all(sight.is_stopped for sight in sights):
        why, fix = "a signal, as SIGSTOP", f"`kill -CONT {pids}`."
    hosts = {scene.status(rank).host for rank in ranks} - {scene.status(scene.me).host}
    if hosts:
        fix = f"on {', '.join(sorted(hosts))}: {fix}"
    waits = waits_for(scene, ranks)
    lines = [f"not scheduled for {seconds(max(sight.age_s for sight in sights))}: stopped by {why}"]
    lines += wording.whereabouts(scene, dict.fromkeys(ranks, "was last seen"))
    if len(scene.sights) > 2 and len(ranks) == len(scene.sights) - 1:
        lines.append(f"all but {names([scene.me])}: it may as well be that this host is cut off")
    lines += wording.waiters(waits)
    key, done = point_of_life(scene, ranks), scene.done_by(ranks)
    head, least = f"STOPPED in {step_after(done)}.", wording.stacks(scene, [wait.rank for wait in waits])
    return wording.compose(scene, "stopped", key, head, ranks, lines, fix=fix, least=least, done=done)


def _report_hang(scene: Scene, wait: Wait, ranks: Sequence[int], more: Mapping[int, str]) -> Finding:
    """more: see `_with_more_calls`."""
    waits = waits_for(scene, ranks) or [wait]
    odd, alone = unpaired(scene, ranks)
    ranks = [*odd] or ranks
    done = alone[0].record.step if alone else scene.done_by(ranks)
    how = {rank: _not_there(scene, rank) for rank in ranks}
    are = f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'}"
    what, why = "nothing has moved", "every rank must issue the same collectives in the same order."
    fix = f"see what {are} stuck in, or which condition led there."
    if all(text == _LOADS for text in how.values()):
        what, why = "no batch", f"no deadlock: all go on once {are} given the batch."
        fix = "see what it waits for: disk, network, a lock, a worker. Is that usual: a longer LOCKSTEP_HANG_S."
    lines = wording.whereabouts(scene, how)
    if all(text == _COMPUTES for text in how.values()):
        why = "the GPU does what it is given in order: it comes to the collective when that is done, if ever."
        fix = f"see what the GPU of {names(ranks)} was given before: CUDA_LAUNCH_BLOCKING=1 shows the line."
    if scene.ended.issuperset(ranks) and any(one.is_any for one in waits):
        why, fix = "", "as many receives from any rank as sends: nobody is left who could send."
    if alone:
        what, why, fix, lines = "no match of messages", "", PAIR_UP, [*odd.values()]
    if more:
        fix = f"look for a call that {names(more)} alone makes, in another thread perhaps."
        lines = [*more.values()]
    lines += waiters(scene, waits, alone)
    key, head = point_of_life(scene, ranks), f"HANG: {what} for {seconds(wait.age_s)} in {step_after(done)}."
    least = wording.stacks(scene, [*ranks, *(one.rank for one in waits)])
    return wording.compose(scene, "hang", key, head, ranks, lines, why=why, fix=fix, least=least, done=done)


def _report_transport(scene: Scene, wait: Wait, gone: Mapping[int, str]) -> Finding:
    """gone: see `let_go`."""
    head = f"HANG of the transport: all ranks are there, and nothing has moved for {seconds(wait.age_s)}"
    why = "no rank is to blame: what lies between them does not carry their data."
    fix = "`lockstep doctor` tries every pair: interfaces, firewall, shared memory, another job's port."
    waits = [found for found in scene.waits if found.is_part_of(wait)] or [wait]
    lines, done = wording.waiters(waits), scene.done_by(gone or [found.rank for found in waits])
    if gone:
        head = f"HANG for a lost message, for {seconds(wait.age_s)} in {step_after(done)}."
        why = "Gloo drops a message whose Work goes before it is through: the next takes its place, or none."
        fix = "keep what isend and irecv return, and wait() for it."
        lines += [*gone.values(), *wording.waiters(waits_for(scene, [wait.rank]))]
    key, least = f"{wait.record.group}:{wait.record.seq}", wording.stacks(scene, (wait.rank, *wait.ranks))
    return wording.compose(scene, "transport", key, head, [*gone], lines, why=why, fix=fix, least=least, done=done)


def _report_waiting(scene: Scene, wait: Wait, busy: Sequence[int]) -> Finding:
    lines = wording.whereabouts(scene, {rank: _at_work(scene, rank) for rank in busy})
    lines += wording.waiters(waits_for(scene, busy) or [wait])
    end, fix, states = wording.NO_FAULT, "", {state(scene, rank) for rank in busy}
    if "starting" in states:
        fix = f"none while it loads or compiles; else see what holds it. A HANG after {START_TIMES * scene.hang_s:g} s."
    if "looping" in states:
        end, fix = "; is that a loop without an end?", "end that loop, or see why what it waits for never comes."
    done = scene.done_by(busy)
    head = f"waiting for {names(busy)} for {seconds(wait.age_s)} in {step_after(done)}{end}"
    key = f"{wait.record.group}:{wait.record.site}:{busy}"
    return wording.compose(scene, "waiting", key, head, busy, lines, fix=fix, done=done)


def _at_work(scene: Scene, rank: int) -> str:
    if rank not in scene.sights:
        return _not_there(scene, rank)
    if state(scene, rank) == "starting":
        return "is still starting"
    status = scene.status(rank)
    what = status.activity
    if scene.sights[rank].is_working:
        what = "C code that holds Python's lock"
    elif not what and status.looping_s:
        what = f"in one loop for {seconds(status.looping_s)}"
    return f"is at work ({what})" if what else "is at work"


def _report_timed_out(scene: Scene, wait: Wait, ranks: Sequence[int], line: str) -> Finding:
    step = scene.done_by(ranks or (scene.me,))
    them = f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'} not there" if ranks else "nobody has set it"
    lines = wording.whereabouts(scene, {rank: _not_there(scene, rank) for rank in ranks})
    lines += wording.waiters([wait._replace(rank=rank) for rank in (scene.me, *wait.ranks) if rank not in wait.absent])
    lines += wording.waiters([one for one in waits_for(scene, ranks) if one.rank in wait.absent])
    fix = f"see why {them}; may it be so late: timeout=, there or in init_process_group."
    key, head = f"{wait.record.text}@{line}", f"TIMEOUT in {step_after(step)}."
    least = wording.stacks(scene, ranks)
    return wording.compose(scene, "timeout", key, head, ranks, lines, fix=fix, least=least, done=step)
