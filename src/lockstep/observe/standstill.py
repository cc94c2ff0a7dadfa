"""What stands still and no call shows why: machines of which nothing is heard any more, ranks that do nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.observe import wording
from lockstep.observe.hang import LONG_WORK_TIMES
from lockstep.observe.replica_diff import alike
from lockstep.observe.scene import SILENT_S, Scene
from lockstep.observe.status import FINISHED, RUNNING, Sight
from lockstep.observe.wording import Finding, names, seconds, step_after


def find_unreachable(scene: Scene) -> Finding | None:
    """All ranks of a machine fell silent: of one alone it is known that it does not run, of all it may be the way."""
    running = [rank for rank in sorted(scene.sights) if scene.is_running(rank)]
    told = {rank for rank, sight in scene.sights.items() if sight.is_stopped or sight.is_seen}  # by a launcher there
    silent = [rank for rank in running if scene.is_silent(rank) and rank not in told]
    heard = {scene.status(rank).machine for rank in running if rank not in silent}
    lost = [rank for rank in silent if scene.status(rank).machine not in heard]
    waits = [one for one in scene.blocked.values() if one.age_s >= SILENT_S and not one.is_any]
    waits = [one for one in waits if set(lost).intersection(one.ranks)]
    if not waits and not (lost and _idle_s(scene, [rank for rank in running if rank not in silent])):
        return None
    machines, lines = alike({rank: scene.status(rank).machine for rank in lost}), wording.waiters(waits)
    for ranks in machines.values():
        ago, host = seconds(min(scene.sights[rank].age_s for rank in ranks)), scene.status(ranks[0]).host
        lines.append(f"nothing has come from {host} ({names(ranks)}) for {ago}: the network is cut, or it stands still")
    lines += wording.whereabouts(scene, dict.fromkeys(lost, "was last heard"))
    host = scene.status(lost[0]).host
    way = f"`ping {host}`" if host != scene.status(scene.me).host else f"ping the other {host}"
    fix = f"{way}, and see there whether its ranks run; `lockstep doctor` tries all ways."
    key, head = ",".join(map(str, machines)), f"UNREACHABLE in {step_after(scene.step)}."
    return wording.compose(scene, "unreachable", key, head, lost, lines, fix=fix, done=scene.step)


def fell_silent(mine: Sight, sights: Mapping[int, Sight], silent_s: float) -> tuple[int, str] | None:
    """Of another machine, where nobody is left to tell how they ended: not even their launcher."""
    away = [one for one in sights.values() if one.status.state == RUNNING and one.status.machine != mine.status.machine]
    quiet = [one.status for one in away if one.age_s > silent_s and not (one.is_gone or one.is_seen)]
    if not quiet:
        return None
    who = names([one.rank for one in quiet if one.machine == quiet[0].machine])
    where, step = quiet[0].host, step_after(quiet[0].step)
    return quiet[0].rank, f"in {step} {who} on {where} fell silent, and the launcher there: killed, or {where} is down"


def find_idle(scene: Scene) -> Finding | None:
    """No operation is open, so this may be as it should: said once of each place."""
    ranks = [rank for rank in sorted(scene.sights) if scene.is_running(rank)]
    has_failed = any(scene.status(rank).state != FINISHED for rank in scene.ended)
    still_s = _idle_s(scene, ranks)
    if not still_s or not 1 < len(scene.sights) == scene.status(scene.me).world_size:
        return None
    if has_failed or scene.blocked or any(map(scene.is_silent, ranks)):
        return None
    done, lines = scene.done_by(ranks), wording.whereabouts(scene, dict.fromkeys(ranks, "is idle"))
    head = f"no rank has moved for {seconds(still_s)} in {step_after(done)}, and none waits for another"
    fix = "see what they wait for: a lock, a file, a key of a store, another program; at _shutdown, a thread."
    key = ",".join(f"{rank}@{scene.status(rank).stack[-1:]}" for rank in ranks)
    return wording.compose(scene, "idle", key, head + wording.NO_FAULT, ranks, lines, fix=fix, done=done)


def _idle_s(scene: Scene, ranks: Sequence[int]) -> float:
    """For how long none of `ranks` has moved; 0 where that is shorter than work may take, or some are at work."""
    still_s = min((scene.status(rank).unmoved_s for rank in ranks), default=0.0)
    is_at_work = any(scene.status(rank).activity or scene.sights[rank].is_working for rank in ranks)
    return 0.0 if is_at_work or still_s < LONG_WORK_TIMES * scene.notice_s else still_s
