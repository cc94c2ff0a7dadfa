"""Machines of which nothing is heard any more, while ranks of others wait for theirs. Pure."""

from __future__ import annotations

from lockstep.observe import wording
from lockstep.observe.scene import SILENT_S, Scene
from lockstep.observe.wording import Finding, names, seconds, step_after


def find_unreachable(scene: Scene) -> Finding | None:
    """All ranks of a machine fell silent: of one alone it is known that it does not run, of all it may be the way."""
    running = [rank for rank in sorted(scene.sights) if scene.is_running(rank)]
    silent = [rank for rank in running if scene.is_silent(rank) and not scene.sights[rank].is_stopped]
    heard = {scene.status(rank).host for rank in running if rank not in silent}
    lost = [rank for rank in silent if scene.status(rank).host not in heard]
    waits = [one for one in scene.blocked.values() if one.age_s >= SILENT_S and not one.is_any]
    waits = [one for one in waits if set(lost).intersection(one.ranks)]
    if not waits:
        return None
    hosts, lines = sorted({scene.status(rank).host for rank in lost}), list[str]()
    for host in hosts:
        ranks = [rank for rank in lost if scene.status(rank).host == host]
        since = seconds(min(scene.sights[rank].age_s for rank in ranks))
        lines.append(
            f"nothing has come from {host} ({names(ranks)}) for {since}: the network is cut, or it stands still"
        )
    lines += wording.whereabouts(scene, dict.fromkeys(lost, "was last heard"))
    fix = f"`ping {hosts[0]}`, and see there whether its ranks run; `lockstep doctor` tries all ways."
    key, head, least = ",".join(hosts), f"UNREACHABLE in {step_after(scene.step)}.", wording.waiters(waits)
    return wording.compose(scene, "unreachable", key, head, lost, [*least, *lines], fix=fix, done=scene.step)
