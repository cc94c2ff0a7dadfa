"""Messages that stand without their other half: which end has left its habit, and what is said of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.observe import histories, wording
from lockstep.observe.scene import Scene, Wait, read_message
from lockstep.observe.wording import names, step_after

FIX = "let one side send first, or post both with batch_isend_irecv; tags must match."


def find_unpaired(scene: Scene, ranks: Sequence[int]) -> tuple[list[int], list[Wait]]:
    """Messages of `ranks`, which stand still, that lack their other half; and who of both ends left its habit there."""
    found = [one for one in scene.waits if one.record.is_message and {one.rank, *one.absent} & set(ranks)]
    found = [one for one in found if one.absent and one.absent[0] in scene.sights and not one.is_any]
    since = min((one.record.step for one in found), default=0)
    ends = {rank for one in found for rank in (one.rank, *one.absent)}
    records = {rank: scene.records_of(rank) for rank in ends}
    odd = {rank for rank, its in records.items() if not histories.keeps_habit(its, since)}
    are_known = all(records[rank] and records[rank][-1].step >= since for rank in odd)
    if odd == ends or not are_known:  # nobody can tell the two ends apart
        odd = set()
    is_waited_for = any(scene.blocked.get(one.rank) is one for one in found)
    if not odd and not (is_waited_for and scene.blocked.keys() >= set(ranks)):
        return [], []
    return sorted(odd), sorted(found, key=lambda one: (not {one.rank, *one.absent} & odd, one.record.step, one.rank))


def waiters(scene: Scene, waits: Sequence[Wait], unpaired: Sequence[Wait]) -> list[str]:
    """Who waits in what; of the `unpaired` messages: what the other end did last in place of its half."""
    lines: dict[tuple[str, str], None] = {}  # one line may post many
    for one in unpaired:
        lines[wording.waiters([one])[0], _missing_half(scene, one)] = None
    others = [one for one in waits if one not in unpaired]
    return [*(line for both in lines for line in both), *wording.waiters(others)]


def _missing_half(scene: Scene, wait: Wait) -> str:
    is_send = not wait.record.text.startswith("send")
    last = ""
    for record in scene.records_of(wait.absent[0]):
        said = read_message(record.text)
        if said is not None and said.is_send == is_send and said.peer in (wait.rank, None):
            last = f"; its last: {wording.call(record)} ({step_after(record.step)})"
    return f"  not {'sent' if is_send else 'asked for'} by {names(wait.absent)}{last}"
