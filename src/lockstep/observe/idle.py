"""Ranks that all stand still while none waits for another: for what, no guard can see."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.observe import wording
from lockstep.observe.hang import LONG_WORK_TIMES
from lockstep.observe.scene import Scene
from lockstep.observe.status import FINISHED
from lockstep.observe.wording import Finding, seconds, step_after


def find_idle(scene: Scene) -> Finding | None:
    """No operation is open, so this may be as it should: said once of each place."""
    ranks = [rank for rank in sorted(scene.sights) if scene.is_running(rank)]
    has_failed = any(scene.status(rank).state != FINISHED for rank in scene.ended)
    still_s = idle_s(scene, ranks)
    if not still_s or not 1 < len(scene.sights) == scene.status(scene.me).world_size:
        return None
    if has_failed or scene.blocked or any(map(scene.is_silent, ranks)):
        return None
    done, lines = scene.done_by(ranks), wording.whereabouts(scene, dict.fromkeys(ranks, "is idle"))
    head = f"no rank has moved for {seconds(still_s)} in {step_after(done)}, and none waits for another"
    fix = "see what they wait for: a lock, a file, a key of a store, another program; at _shutdown, a thread."
    key = ",".join(f"{rank}@{scene.status(rank).stack[-1:]}" for rank in ranks)
    return wording.compose(scene, "idle", key, head + wording.NO_FAULT, ranks, lines, fix=fix, done=done)


def idle_s(scene: Scene, ranks: Sequence[int]) -> float:
    """For how long none of `ranks` has moved; 0 where that is shorter than work may take, or some are at work."""
    still_s = min((scene.status(rank).unmoved_s for rank in ranks), default=0.0)
    is_at_work = any(scene.status(rank).activity or scene.sights[rank].is_working for rank in ranks)
    return 0.0 if is_at_work or still_s < LONG_WORK_TIMES * scene.notice_s else still_s
