"""Machines of which nothing is heard any more, while ranks of others wait for theirs, or do nothing. Pure."""

from __future__ import annotations

from lockstep.observe import wording
from lockstep.observe.idle import idle_s
from lockstep.observe.replica_diff import alike
from lockstep.observe.scene import SILENT_S, Scene
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
    if not waits and not (lost and idle_s(scene, [rank for rank in running if rank not in silent])):
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
