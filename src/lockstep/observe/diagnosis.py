"""From what all ranks say of themselves to one sentence: what is wrong, and whose fault it is.

Pure: statuses in, a finding out. Each case is a function from a scene to a finding; what is certain comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from lockstep.observe.deadlock import find_cycle
from lockstep.observe.divergence import find_mismatch
from lockstep.observe.endings import find_finished, find_gone, find_raised
from lockstep.observe.hang import find_hang, find_stopped, find_waiting
from lockstep.observe.scene import Limits, Records, Scene
from lockstep.observe.standstill import find_idle, find_unreachable
from lockstep.observe.status import Sight
from lockstep.observe.training_findings import Training
from lockstep.observe.wording import Finding

_ENDS = (find_raised, find_gone, find_finished)
_CASES = (find_mismatch, *_ENDS, find_cycle, find_unreachable, find_stopped, find_hang, find_waiting, find_idle)


def diagnose(
    me: int,
    sights: Mapping[int, Sight],
    records_of: Records,
    limits: Limits,
    spared: Callable[[str], AbstractContextManager[object]] = nullcontext,
    training: Training | None = None,
) -> Finding | None:
    """What is wrong with the job, as rank `me` sees it; None where nothing is.

    sights: of all ranks that have been heard of, also of `me`.
    records_of: the records of a rank that can still be read, oldest first; empty where it is on another host. Only
        called once something differs, so it may be slow.
    spared: around each case, by its name; what it lets pass ends the case alone.
    training: who has looked at these ranks before, if anybody has.
    """
    scene = Scene(me, sights, records_of, limits)
    for case in ((training or Training()).find_training, *_CASES):
        with spared(case.__name__):
            if (finding := case(scene)) is not None:
                return finding
    return None
