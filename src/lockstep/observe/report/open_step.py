"""The step that was never ended: what each rank was in when a run crashed, hung or was stopped.

It is read from the flight records, which outlive their processes: by the launcher once its ranks are dead, for a line
of `launch.jsonl`, and by who looks at a run that stands still.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.observe.flight import Record
from lockstep.observe.profile.run_record import Op, RankRecord, Steps, bytes_of
from lockstep.observe.profile.step_clock import OTHER, PHASES
from lockstep.observe.report.onlooker import Onlooker
from lockstep.observe.report.rank_rows import GONE, stand_of
from lockstep.observe.scene import Limits, Scene, read_message
from lockstep.observe.wording import names

_OPS_MAX = 32  # of a rank, the newest


class OpenOp(NamedTuple):
    """An operation of that step; times by time.monotonic_ns."""

    group: str
    seq: int
    text: str
    site: str
    label: str
    entered_ns: int
    left_ns: int  # 0: never
    absent: Sequence[int]  # ranks that had not begun their part


class Moment(NamedTuple):
    """One rank when it was last seen."""

    rank: int
    steps: int  # that it had ended, as its guard counts them
    until_ns: int
    says: str
    ops: Sequence[OpenOp]

    def told(self, was_ended: bool) -> Moment:
        """As its launcher tells of it. was_ended: by that, because of another rank."""
        return self._replace(says=self.says.replace(GONE, "ended because of another")) if was_ended else self


def moments_in(folders: Sequence[Path]) -> list[Moment]:
    """Of the ranks whose flight records are in `folders`."""
    onlooker = Onlooker()
    try:
        onlooker.follow(folders)
        sights = onlooker.sights()
        as_they_are = Scene(-1, sights, onlooker.records_of, Limits())
        before = {rank: one._replace(is_gone=False, age_s=0.0) if one.is_gone else one for rank, one in sights.items()}
        scene = Scene(-1, before, onlooker.records_of, Limits())
        return [_moment(rank, scene, as_they_are) for rank in sights]
    finally:
        onlooker.close()


def _moment(rank: int, before: Scene, as_they_are: Scene) -> Moment:
    """before: as the dead were when they lived."""
    sight, status = as_they_are.sights[rank], before.status(rank)
    stand = stand_of(before, rank)
    if sight.is_gone and stand.mood == "good":
        stand = stand_of(as_they_are, rank)
    says = str(stand._replace(age_s=0.0))
    records = [record for record in before.records_of(rank) if record.step == status.step][-_OPS_MAX:]
    ops = [
        OpenOp(r.group, r.seq, r.text, r.site, r.label, r.entered_ns, r.left_ns, _absent(before, rank, r))
        for r in records
    ]
    seen_ns = time.monotonic_ns() - (round(1e9 * sight.age_s) if sight.is_gone else 0)
    until_ns = max([seen_ns, *(max(op.entered_ns, op.left_ns) for op in ops)])
    missed, words = next((op for op in ops if op.absent), None), status.words
    if missed is not None and words is not None and (words.is_consequence or words.kind == "KeyboardInterrupt"):
        says = f"waited for {names(missed.absent)}: {missed.text} at {missed.site}; then {words.kind}"
    return Moment(rank, status.step, until_ns, says, ops)


def _absent(scene: Scene, rank: int, record: Record) -> list[int]:
    """Without whom it cannot have ended."""
    if record.is_message:
        message = read_message(record.text)
        return [message.peer] if message and message.peer is not None and not record.left_ns else []
    progress = scene.status(rank).groups.get(record.group)
    ranks = () if progress is None else progress.ranks
    counts = scene.counts(record.group, ranks)
    return [other for other in ranks if other != rank and counts.get(other, 0) <= record.seq]


def moment_of(values: Sequence[Any]) -> Moment:
    """From a line of JSON.  Raises: TypeError where it is none."""
    *about, ops = values
    return Moment(*about, ops=[OpenOp(*op) for op in ops])


def line_of(moment: Moment, record: RankRecord) -> Steps:
    """The step as far as the rank had come, in the numbers and on the clock of its record."""
    start = record.starts[-1]
    own = [line for line, name in zip(record.lines, record.attempts, strict=True) if name == start.attempt]
    step = moment.steps + (own[0].step - own[0].count + 1 if own else 1)
    entered = [(op.entered_ns - start.clock_ns) // 1000 for op in moment.ops]
    began = min([own[-1].at_us + own[-1].wall_us, *entered]) if own else 0
    if own and own[-1].step < step - 1 and entered:  # killed before it had written down the last ones
        began = min(entered)
    wall = max(0, (moment.until_ns - start.clock_ns) // 1000 - began)
    ops = tuple(_op(op, start.attempt, start.clock_ns + 1000 * began, wall) for op in moment.ops)
    return Steps(step, 1, began, wall, wall, (0,) * len(PHASES), ops=ops, spans=((OTHER, 0),))


def _op(op: OpenOp, attempt: str, zero_ns: int, wall_us: int) -> Op:
    """Where ranks were absent, the thread stood in it to the end, though its wait may have been broken off."""
    entered = (op.entered_ns - zero_ns) // 1000
    left = (op.left_ns - zero_ns) // 1000 if op.left_ns and not op.absent else wall_us
    stood = (entered, left - entered) if op.absent else (-1, 0)
    return Op(attempt, op.group, op.seq, op.text, op.site, op.label, bytes_of(op.text), entered, left, *stood)
