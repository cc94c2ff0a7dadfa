"""The step that was never ended: what each rank was in when a run crashed, hung or was stopped.

It is read from the flight records, which outlive their processes: by the launcher once its ranks are dead, for a line
of `launch.jsonl`, and by who looks at a run that stands still.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.observe.flight import Record
from lockstep.observe.onlooker import Onlooker
from lockstep.observe.profile.phases import EXPOSED, PHASES
from lockstep.observe.profile.run_record import Op, RankRecord, Steps, bytes_of
from lockstep.observe.report.rank_rows import GONE, stand_of
from lockstep.observe.scene import FROM_CPP, Limits, Scene, read_message
from lockstep.observe.status import Waiting
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
    steps: int  # that it had ended
    until_ns: int
    says: str
    ops: Sequence[OpenOp]
    phases: Sequence[tuple[int, int]] = ()  # of its thread, and when each began; nothing where that is not known

    def told(self, was_ended: bool) -> Moment:
        """As its launcher tells of it. was_ended: by that, because of another rank."""
        return self._replace(says=self.says.replace(GONE, "ended because of another")) if was_ended else self


def moments_in(folders: Sequence[Path]) -> list[Moment]:
    """Of the ranks whose flight records are in `folders`."""
    with closing(Onlooker()) as onlooker:
        onlooker.follow(folders)
        sights = onlooker.sights()
        as_they_are = Scene(-1, sights, onlooker.records_of, Limits())
        before = {rank: one._replace(is_gone=False, age_s=0.0) if one.is_gone else one for rank, one in sights.items()}
        scene = Scene(-1, before, onlooker.records_of, Limits())
        return [_moment(rank, scene, as_they_are) for rank in sights]


def _moment(rank: int, before: Scene, as_they_are: Scene) -> Moment:
    """before: as the dead were when they lived."""
    sight, status = as_they_are.sights[rank], before.status(rank)
    stand = stand_of(before, rank)
    if sight.is_gone and stand.mood == "good":
        stand = stand_of(as_they_are, rank)
    says = str(stand._replace(age_s=0.0))
    newest = before.records_of(rank)[-_OPS_MAX:]  # also of steps before: by then it was alive
    records = [record for record in newest if record.step == status.step]
    words = status.words
    is_left = words is not None and (words.is_consequence or words.kind in ("KeyboardInterrupt", "SystemExit"))
    ops = [
        OpenOp(r.group, r.seq, r.text, r.site, r.label, r.entered_ns, r.left_ns, _absent(before, rank, r, is_left))
        for r in records
    ]
    seen_ns = time.monotonic_ns() - (round(1e9 * sight.age_s) if sight.is_gone else 0)
    until_ns = max([seen_ns, *(max(record.entered_ns, record.left_ns) for record in newest)])
    missed = next((op for op in ops if op.absent), None)
    waited = "" if missed is None else f"waited for {names(missed.absent)}: {missed.text} at {missed.site}"
    if waited and words is not None and is_left:
        says = f"{waited}; then {words.kind}"
    elif waited and says.startswith(GONE):  # where it was seen last may be where it was before
        says = f"{GONE}, while it {waited}"
    phases = list(status.phases)
    if phases and (wait := before.blocked.get(rank)) is not None:  # a clock knows of waits that have ended
        phases.append((EXPOSED, max(phases[-1][1], wait.record.entered_ns)))
    return Moment(rank, status.step, until_ns, says, ops, phases)


def _absent(scene: Scene, rank: int, record: Record, was_cut: bool) -> list[int]:
    """Without whom it cannot have ended. was_cut: the newest may have, by an error or a signal.

    Of ranks of other machines nothing is known here: whoever has left it otherwise has not waited for them.
    """
    if record.is_message:
        message = read_message(record.text)
        return [message.peer] if message and message.peer is not None and not record.left_ns else []
    may_be_cut = not record.left_ns or (was_cut and record == scene.records_of(rank)[-1])
    return [one for one in scene.wait_of(rank, Waiting(record, 0.0)).absent if may_be_cut or one in scene.sights]


def moment_of(values: Sequence[Any]) -> Moment:
    """From a line of JSON.  Raises: TypeError where it is none."""
    rank, steps, until_ns, says, ops, *more = values  # of phases older launchers know nothing
    phases = [(phase, began_ns) for each in more for phase, began_ns in each]
    return Moment(rank, steps, until_ns, says, [OpenOp(*op) for op in ops], phases)


def line_of(moment: Moment, record: RankRecord) -> Steps:
    """The step as far as the rank had come, in the numbers and on the clock of its record."""
    start = record.starts[-1]
    own = [line for line in record.lines if line.attempt == start.attempt]
    step = moment.steps + 1
    seen = [(op.entered_ns - start.clock_ns) // 1000 for op in moment.ops]
    seen += [(began_ns - start.clock_ns) // 1000 for _, began_ns in moment.phases[:1]]
    until = (moment.until_ns - start.clock_ns) // 1000
    began = min([own[-1].at_us + own[-1].wall_us, *seen]) if own else 0
    if moment.steps and not (own and own[-1].step >= step - 1):  # killed before it had written down the last ones
        began = min(seen, default=until)
    wall = max(0, until - began)
    zero_ns = start.clock_ns + 1000 * began
    missed = next((op for op in moment.ops if op.absent), None)  # the first is where the thread stood
    behind_ns = max((op.left_ns for op in moment.ops if not op.absent), default=0)
    stood_ns = max((at_ns for phase, at_ns in moment.phases if phase == EXPOSED and at_ns >= behind_ns), default=0)
    ops = tuple([_op(op, start.attempt, zero_ns, wall, stood_ns if op is missed else None) for op in moment.ops])
    phases = [(phase, (at_ns - zero_ns) // 1000) for phase, at_ns in moment.phases]
    first = max((n for n, (_, at) in enumerate(phases) if at <= 0), default=0)
    spans = tuple([(phase, max(0, at)) for phase, at in phases[first:]])
    return Steps(step, 1, began, wall, wall, (0,) * len(PHASES), ops=ops, spans=spans)


def _op(op: OpenOp, attempt: str, zero_ns: int, wall_us: int, stood_ns: int | None) -> Op:
    """Where ranks were absent, it was under way to the end, though the wait for it may have been broken off.

    stood_ns: when the thread began to stand; 0 where only the operation says that, None where it did not.
    """
    late_ns = op.entered_ns - stood_ns if stood_ns and op.text == FROM_CPP else 0  # what C++ starts is seen later
    entered = (op.entered_ns - max(0, late_ns) - zero_ns) // 1000
    left = (op.left_ns - zero_ns) // 1000 if op.left_ns and not op.absent else wall_us
    stood = (-1, 0) if stood_ns is None else (entered, left - entered)
    size = bytes_of(op.text) or bytes_of(op.label)  # of what C++ has started the label says what it is
    return Op(attempt, op.group, op.seq, op.text, op.site, op.label, size, entered, left, *stood)
