"""Ranks that stand still, and the one they all stand still for.

A rank that waits is not the culprit; the rank it waits for may itself wait. Following that from rank to rank ends at
ranks that wait for nobody (the roots), or goes round in a circle. What a root does decides: at work, nothing is wrong.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from lockstep.observe import histories, wording
from lockstep.observe.endings import is_asked_to_stop
from lockstep.observe.flight import Record
from lockstep.observe.messages import let_go
from lockstep.observe.profile.step_clock import DATA
from lockstep.observe.scene import GRACE_S, SILENT_S, STILL_S, Scene, Wait, read_message
from lockstep.observe.stacks import CHILDREN
from lockstep.observe.status import FINISHED, RAISED
from lockstep.observe.wording import Finding, names, seconds, step_after, times

FAILING = "failing"  # activity of a rank that asks why its operation has failed
_LONG_WORK_TIMES = 3  # as long as for work of which nothing is known: a checkpoint, an evaluation, a late start
_LOOP_SHARE = 0.7  # of the limit must have been seen to go into one loop
_MATCH = "let one side send first, or post both with batch_isend_irecv; tags must match."
_LOADS = "is loading data"
_TIMED_OUT = re.compile("(?P<store>wait timeout|Socket Timeout|waiting for clients|client socket has)|[Tt]imed out")
_TRANSPORT_TIMES = 3  # as long as the limit: moving much data is no hang

_Root = Literal["unseen", "ended", "asked", "silent", "active", "moving", "looping", "stuck", "inside"]


def find_cycle(scene: Scene) -> Finding | None:
    """Ranks that provably wait for each other in a circle: none of them can get on."""
    proven = {rank: wait for rank, wait in scene.blocked.items() if _is_proven(scene, wait)}
    circle = _circle({rank: set(wait.absent) & set(proven) for rank, wait in proven.items()})
    return _report_cycle(scene, [proven[rank] for rank in circle]) if circle else None


def find_stopped(scene: Scene) -> Finding | None:
    """A rank whose process exists and does not run."""
    for wait in scene.waits:
        if wait.age_s < STILL_S:
            return None
        roots = [rank for rank in _roots(scene, wait) if _state(scene, rank) == "silent"]
        is_sure = wait.age_s >= SILENT_S or all(scene.sights[rank].is_stopped for rank in roots)
        if roots and is_sure and wait.rank in scene.blocked:
            return _report_stopped(scene, roots, _waits_for(scene, roots))
    return None


def find_hang(scene: Scene) -> Finding | None:
    """Nothing has moved for too long, neither who waits nor who is waited for."""
    for wait in scene.waits:
        if wait.age_s < scene.hang_s:
            return None
        if not _is_still(scene, wait):
            continue
        states = {rank: _state(scene, rank) for rank in _roots(scene, wait)}
        for one in [one for one in scene.waits if one.rank in (wait.rank, *states)]:
            if min(one.age_s, scene.status(one.rank).unmoved_s) >= scene.hang_s and (gone := let_go(scene, one)):
                return _report_transport(scene, one, gone)
        may_be_proven = all(rank in scene.blocked and scene.stands_in(scene.blocked[rank]) for rank in states)
        if may_be_proven and wait.age_s < scene.hang_s + STILL_S:  # of a circle there is more to say
            continue
        if states and set(states.values()) <= {"stuck", "ended"}:
            return _report_hang(scene, wait, sorted(states))
        if not set(states.values()) <= {"inside"} or not _nobody_moves(scene, wait):
            continue
        if more := _with_more_calls(scene, wait):
            return _report_hang(scene, wait, sorted(more), more)
        if wait.age_s >= _TRANSPORT_TIMES * scene.hang_s:
            return _report_transport(scene, wait, {})
    return None


def find_waiting(scene: Scene) -> Finding | None:
    """Somebody works while others wait: no fault, but worth a line; later where it is known to be long work."""
    notice_s = max(scene.limits.notice_s, scene.hang_s)
    limits_s = {"looping": scene.hang_s, "moving": notice_s}
    limits_s |= dict.fromkeys(("unseen", "active"), _LONG_WORK_TIMES * notice_s)
    for wait in scene.waits:
        if wait.age_s < scene.hang_s:
            return None
        busy = [r for r in _roots(scene, wait) if wait.age_s >= limits_s.get(_state(scene, r), math.inf)]
        if busy and wait.rank in scene.blocked:
            return _report_waiting(scene, wait, busy)
    return None


def find_timed_out(scene: Scene, error: str, line: str) -> Finding | None:
    """Who was not there when torch gave up, by `error`, what `scene.me` did at `line`; None where nobody knows."""
    me, step, gave_up = scene.me, scene.status(scene.me).step, _TIMED_OUT.search(error)
    mine = [wait for wait in scene.waits if wait.rank == me and wait.absent]
    here = [wait for wait in mine if wait.record.site.startswith(f"{line} ")]
    if gave_up is None or not (mine or gave_up["store"]):
        return None
    if gave_up["store"] and not here:  # the guard sees no keys, but where the ranks stand
        seen = [(rank, scene.status(rank)) for rank in scene.sights]
        there = {rank for rank, its in seen if its.activity == FAILING or f" {line} " in f" {' '.join(its.stack)}"}
        absent = tuple(rank for rank in range(scene.status(me).world_size) if rank not in {*there, me})
        record = Record(-1, 0, step, 0, 0, 0, True, "", f"the store ({error.splitlines()[0]})", line, "")
        wait, ranks = Wait(me, record, 0.0, absent, absent, is_any=True), [*absent]
    else:
        wait = max(here or mine, key=lambda one: one.record.number)
        wait = wait._replace(age_s=max(0, wait.record.left_ns - wait.record.entered_ns) / 1e9)
        ranks = _roots(scene, wait)
    them = f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'} not there" if ranks else "nobody has set it"
    lines = [text for rank in ranks for text in wording.whereabouts(scene, rank, _not_there(scene, rank))]
    lines += wording.waiters([wait._replace(rank=rank) for rank in (me, *wait.ranks) if rank not in wait.absent])
    lines += wording.waiters([one for one in _waits_for(scene, ranks) if one.rank in wait.absent])
    key, head, least = f"{wait.record.text}@{line}", f"TIMEOUT in {step_after(step)}.", wording.stacks(scene, ranks)
    fix = f"see why {them}; may it be so late: timeout=, there or in init_process_group."
    return wording.compose(scene, "timeout", key, head, ranks, lines, fix=fix, least=least, done=step)


# ------------------------------------------------------------------ who waits for whom


def _roots(scene: Scene, wait: Wait) -> list[int]:
    """Those at the end of all chains that begin at `wait`; ranks of a circle, where there is no end."""
    found: set[int] = set()
    seen = {wait.rank}
    open_waits = [wait]
    while open_waits:
        current = open_waits.pop()
        if not current.absent and current is not wait:
            found.add(current.rank)
        for rank in current.absent:
            following = scene.blocked.get(rank)
            if following is None:
                found.add(rank)
            elif rank not in seen:
                seen.add(rank)
                open_waits.append(following)
    return sorted(found or (seen if wait.absent else ()))


def _state(scene: Scene, rank: int) -> _Root:
    """What the rank at the end of a chain does."""
    sight = scene.sights.get(rank)
    if sight is None:
        return "unseen"
    if not scene.is_running(rank):
        return "asked" if is_asked_to_stop(sight) else "ended"
    if _activity(scene, rank):
        return "active"
    if scene.is_silent(rank):
        return "moving" if sight.is_working else "silent"
    wait = scene.blocked.get(rank)
    if wait is not None and (not wait.absent or scene.stands_in(wait)):
        return "stuck" if wait.absent else "inside"
    if sight.status.looping_s >= _LOOP_SHARE * scene.hang_s:
        return "looping"
    return "stuck" if sight.status.unmoved_s >= max(scene.hang_s, STILL_S) else "moving"


def _activity(scene: Scene, rank: int) -> str:
    """What excuses it; not that processes of its own work, where it stands in an operation."""
    activity = scene.status(rank).activity
    return "" if activity == CHILDREN and rank in scene.blocked else activity


def _circle(following: dict[int, set[int]]) -> list[int]:
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
    circle = path[path.index(rank) :]
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]


def _is_proven(scene: Scene, wait: Wait) -> bool:
    is_fresh = scene.sights[wait.rank].age_s <= GRACE_S
    return is_fresh and wait.age_s >= STILL_S and scene.stands_in(wait) and not wait.is_any


def _is_still(scene: Scene, wait: Wait) -> bool:
    """True where the waiting rank itself stands in this operation, and has begun nothing since."""
    status = scene.status(wait.rank)
    if scene.blocked.get(wait.rank) is not wait or _activity(scene, wait.rank):
        return False
    since_s = 0.0 if status.last is None else (status.last.entered_ns - wait.record.entered_ns) / 1e9
    return wait.age_s - since_s >= scene.hang_s


def _nobody_moves(scene: Scene, wait: Wait) -> bool:
    """True where all others have stood in this operation, or in another one, for too long as well."""
    parts = {found.rank: found.age_s for found in scene.waits if found.is_part_of(wait)}
    for rank in wait.ranks:
        age_s = parts.get(rank, scene.blocked[rank].age_s) if rank in scene.blocked else 0.0
        if (age_s if scene.is_running(rank) else scene.sights[rank].age_s) < scene.hang_s:
            return False
    return True


def _with_more_calls(scene: Scene, wait: Wait) -> dict[int, str]:
    """Of ranks that all stand in collectives: who began more in this step. What C++ starts has no other name."""
    found, ranks = dict[int, str](), [rank for rank in (wait.rank, *wait.ranks) if rank in scene.sights]
    for rank in ranks:
        history = [record for record in scene.records_of(rank) if record.group == wait.record.group]
        step = history[-1].step if history else 0
        if histories.adds_calls(history, step):
            counts = Counter(record.step for record in history)
            text = f"{names([rank])} began {times(counts[step])} of group {wait.record.group} in {step_after(step)}"
            found[rank] = f"{text}, {counts[step - 1]} in the step before"
    return found if len(found) < len(ranks) else {}


def _waits_for(scene: Scene, ranks: list[int]) -> list[Wait]:
    """The operations in which others wait for `ranks`; also of one that stood at its line when that was seen last."""
    sure = [one for one in scene.blocked.values() if one.rank not in ranks and set(_roots(scene, one)) & set(ranks)]
    parts = [wait for wait in scene.waits if any(wait.is_part_of(one) for one in sure)]
    others = [wait for wait in parts if wait.rank not in (*ranks, *scene.blocked)]
    others = [wait for wait in others if wait.record.site in scene.status(wait.rank).stack]
    return sorted([*sure, *others], key=lambda wait: wait.rank)


# ------------------------------------------------------------------ in words


def _report_cycle(scene: Scene, waits: list[Wait]) -> Finding:
    ranks = [wait.rank for wait in waits]
    way = " -> ".join(f"rank {rank}" for rank in (*ranks, ranks[0]))
    groups = sorted({wait.record.group for wait in waits if not wait.record.is_message})
    ahead = _went_on(scene, waits)
    odd, apart = _apart(scene, ranks)
    culprits = ahead or odd or _outvoted(waits)
    whose = "" if len(culprits) == len(ranks) else f".  Culprit{'s' * (len(culprits) > 1)}: {names(culprits)}"
    what, fix = "groups in different order: " if len(groups) > 1 else "", _MATCH
    if ahead:
        fix = f"look for a condition that is false on {names(ahead)}, or an exception that is caught there."
    elif what:
        fix = f"use groups {', '.join(groups)} in the same order on every rank."
    elif groups and not odd:
        fix = "send what another rank receives before the collective, or let that rank receive it later."
    lines = _waiters(scene, [*waits, *_waits_for(scene, ranks)], apart)
    lines += [f"{names([rank])} is in {step_after(scene.status(rank).step)} already" for rank in ahead]
    key, head = _key(scene, sorted(ranks)), f"DEADLOCK in {step_after(scene.step)}: {what}{way}{whose}"
    why, least = "each of them waits for the next one, so none can ever get on.", wording.stacks(scene, ranks)
    return wording.compose(scene, "cycle", key, head, culprits, lines, why=why, fix=fix, least=least, done=scene.step)


def _went_on(scene: Scene, waits: list[Wait]) -> list[int]:
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


def _outvoted(waits: list[Wait]) -> list[int]:
    """Of a circle: those whom most ranks that are in all of its groups wait for in one of them; all, if it is even."""
    ranks = sorted(wait.rank for wait in waits)
    shared = set[int](ranks).union(*(wait.ranks for wait in waits))
    shared.intersection_update(*({wait.rank, *wait.ranks} for wait in waits))
    if any(wait.record.is_message for wait in waits):
        return ranks
    lacking = [set(wait.absent) for wait in waits if 2 * len(shared.intersection(wait.absent)) < len(shared)]
    return [rank for rank in ranks if not lacking or rank in lacking[0]]


def _report_stopped(scene: Scene, ranks: list[int], waits: list[Wait]) -> Finding:
    sights = [scene.sights[rank] for rank in ranks]
    is_known = all(sight.is_stopped for sight in sights)
    why = "a signal, as SIGSTOP" if is_known else "SIGSTOP, swapping or a debugger, or C code that holds the GIL"
    lines = [f"not scheduled for {seconds(max(sight.age_s for sight in sights))}: stopped by {why}"]
    lines += [line for rank in ranks for line in wording.whereabouts(scene, rank, "was last seen")]
    if len(scene.sights) > 2 and len(ranks) == len(scene.sights) - 1:
        lines.append(f"all but {names([scene.me])}: it may as well be that this host is cut off")
    pids = " ".join(str(sight.status.pid) for sight in sights)
    fix = f"`kill -CONT {pids}`." if is_known else f"`ps -o stat,wchan {pids}`; state T: `kill -CONT {pids}`."
    least, lines = wording.stacks(scene, [wait.rank for wait in waits]), [*lines, *wording.waiters(waits)]
    key, head, done = _key(scene, ranks), f"STOPPED in {step_after(scene.step)}.", scene.step
    return wording.compose(scene, "stopped", key, head, ranks, lines, fix=fix, least=least, done=done)


def _report_hang(scene: Scene, wait: Wait, ranks: list[int], more: Mapping[int, str] = MappingProxyType({})) -> Finding:
    """more: see `_with_more_calls`."""
    waits = _waits_for(scene, ranks) or [wait]
    odd, apart = _apart(scene, ranks)
    ranks, done = odd or ranks, apart[0].record.step if apart else scene.step
    lines = [line for rank in ranks for line in wording.whereabouts(scene, rank, _not_there(scene, rank)) if not apart]
    are = f"{names(ranks)} {'is' if len(ranks) == 1 else 'are'}"
    what, why = "nothing has moved", "every rank must issue the same collectives in the same order."
    fix = f"see what {are} stuck in, or which condition led there."
    if all(_not_there(scene, rank) == _LOADS for rank in ranks):
        what, why = "no batch", f"no deadlock: all go on once {are} given the batch."
        fix = "see what it waits for: disk, network, a lock, a worker. Is that usual: a longer LOCKSTEP_HANG_S."
    if apart:
        what, why, fix = "no match of messages", "", _MATCH
    if more:
        lines, fix = [*more.values()], f"look for a call that {names(more)} alone makes, in another thread perhaps."
    key, head = _key(scene, ranks), f"HANG: {what} for {seconds(wait.age_s)} in {step_after(done)}."
    lines, least = [*lines, *_waiters(scene, waits, apart)], wording.stacks(scene, [*ranks, *(w.rank for w in waits)])
    return wording.compose(scene, "hang", key, head, ranks, lines, why=why, fix=fix, least=least, done=done)


def _apart(scene: Scene, ranks: list[int]) -> tuple[list[int], list[Wait]]:
    """Messages of `ranks`, which stand still, that lack their other half; and who of both ends left its habit there."""
    found = [one for one in scene.waits if one.record.is_message and {one.rank, *one.absent} & set(ranks)]
    found = [one for one in found if one.absent and one.absent[0] in scene.sights and not one.is_any]
    ends = {rank for one in found for rank in (one.rank, *one.absent)}
    since = min((one.record.step for one in found), default=0)
    done = {rank: scene.records_of(rank) for rank in ends}
    odd = {rank for rank, records in done.items() if not histories.keeps_habit(records, since)}
    odd = odd if odd < ends and all(done[rank] and done[rank][-1].step >= since for rank in odd) else set[int]()
    is_waited_for = any(scene.blocked.get(one.rank) is one for one in found)
    if not odd and not (is_waited_for and scene.blocked.keys() >= set(ranks)):
        return [], []
    return sorted(odd), sorted(found, key=lambda one: (not {one.rank, *one.absent} & odd, one.record.step, one.rank))


def _waiters(scene: Scene, waits: list[Wait], apart: list[Wait]) -> list[str]:
    """Who waits in what; of a message without its other half: what its other end did last in place of that."""
    lines: dict[tuple[str, str], None] = {}  # one line may post many
    for one in apart:
        way = "asked for" if one.record.text.startswith("send") else "sent"
        others = [(read_message(record.text), record) for record in scene.records_of(one.absent[0])]
        its = [r for said, r in others if said and said.is_send is (way == "sent") and said.peer in (one.rank, None)]
        last = f"; its last: {wording.call(its[-1])} ({step_after(its[-1].step)})" if its else ""
        lines[wording.waiters([one])[0], f"  not {way} by {names(one.absent)}{last}"] = None
    return [*(line for both in lines for line in both), *wording.waiters([one for one in waits if one not in apart])]


def _not_there(scene: Scene, rank: int) -> str:
    if rank not in scene.sights:
        return "has not been heard of: not started yet, or without a guard"
    state = scene.status(rank).state
    if not scene.is_running(rank):
        return f"has {state}" if state in (RAISED, FINISHED) else "is gone"
    phases = scene.status(rank).phases  # known where the run is recorded
    if phases and phases[-1][0] == DATA:
        return _LOADS
    return "is not there" if rank not in scene.blocked else "waits"


def _report_transport(scene: Scene, wait: Wait, gone: dict[int, str]) -> Finding:
    """gone: see `let_go`."""
    waits = [found for found in scene.waits if found.is_part_of(wait)] or [wait]
    head = f"of the transport: all ranks are there, and nothing has moved for {seconds(wait.age_s)}"
    why = "no rank is to blame: what lies between them does not carry their data."
    fix = "`lockstep doctor` tries every pair: interfaces, firewall, shared memory, another job's port."
    if gone:
        head = f"for a lost message, for {seconds(wait.age_s)} in {step_after(scene.step)}."
        why = "Gloo drops a message whose Work goes before it is through: the next takes its place, or none."
        fix = "keep what isend and irecv return, and wait() for it."
    lines = [*wording.waiters(waits), *gone.values(), *wording.waiters(_waits_for(scene, [wait.rank]) if gone else ())]
    return wording.compose(
        scene,
        "transport",
        f"{wait.record.group}:{wait.record.seq}",
        f"HANG {head}",
        [*gone],
        lines,
        why=why,
        fix=fix,
        least=wording.stacks(scene, (wait.rank, *wait.ranks)),
        done=scene.step,
    )


def _report_waiting(scene: Scene, wait: Wait, busy: list[int]) -> Finding:
    lines = []
    for rank in busy:
        if rank not in scene.sights:
            lines += wording.whereabouts(scene, rank, _not_there(scene, rank))
            continue
        activity, looping_s = scene.status(rank).activity, scene.status(rank).looping_s
        what = activity or (f"in one loop for {seconds(looping_s)}" if looping_s else "")
        what = "C code that holds Python's lock" if scene.sights[rank].is_working else what
        lines += wording.whereabouts(scene, rank, f"is at work ({what})" if what else "is at work")
    is_loop = any(_state(scene, rank) == "looping" for rank in busy)
    end = "; is that a loop without an end?" if is_loop else wording.NO_FAULT
    head = f"waiting for {names(busy)} for {seconds(wait.age_s)} in {step_after(scene.step)}{end}"
    fix = "end that loop, or see why what it waits for never comes." if is_loop else ""
    lines += wording.waiters(_waits_for(scene, busy) or [wait])
    key = f"{wait.record.group}:{wait.record.site}:{busy}"
    return wording.compose(scene, "waiting", key, head, busy, lines, fix=fix, done=scene.step)


def _key(scene: Scene, ranks: list[int]) -> str:
    """Of these ranks at this point of their life."""
    last = [scene.status(rank).last for rank in ranks]
    return ",".join(f"{rank}@{-1 if r is None else r.number}" for rank, r in zip(ranks, last, strict=True))
