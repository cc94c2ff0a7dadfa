"""Ranks that issued different collectives: found by comparing digests, explained by comparing records.

A digest covers all collectives of a group up to a number, and the step each was in. Two that differ are a fact that
nothing undoes, however old the sights are: all that remains is to say which collective was the first, and whose fault
it is. With three ranks the majority is right; with two, whoever does other than in its other steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from lockstep.observe import histories, wording
from lockstep.observe.data_facts import uneven
from lockstep.observe.endings import CAUGHT, END, saw_another
from lockstep.observe.flight import Record
from lockstep.observe.histories import Fault, Parting, Side, calls_in
from lockstep.observe.message_findings import find_too_large
from lockstep.observe.model_findings import SYNC_ALIKE, suspects
from lockstep.observe.replica_diff import alike
from lockstep.observe.scene import GRACE_S, Scene
from lockstep.observe.status import FINISHED, Progress, Status
from lockstep.observe.wording import Finding, call, names, step_after, times

_PATIENCE = 64  # collectives that a rank may go on while the majority is waited for
_LAST_S = 0.4  # after one of them has ended: who would not have come by now may never do
_SHOWN = 3  # of the calls that one rank makes and another does not
_ASKED = 3  # ranks of the same digest whose records are tried: one on another machine may take a second
_JOIN = "join"
_SELDOM = 4  # steps: ranks with nothing in common for longer may each train a model of their own

_WHY = {
    "order": "collectives pair by their order: from here on ranks mix values that do not belong together.",
    "same": "the ranks of a collective must agree on it; some mismatches hang, others give wrong numbers.",
}
_FIX = {
    "skipped": "look for a condition that is false on {culprits}, or an exception that is caught there.",
    "extra": "look for a condition that is true only on {culprits}: every rank must make this call, or none.",
    "": "make the same calls on every rank, in one order; look for a condition, or a caught exception.",
    "ranks": "call new_group for the same ranks, in one order, on every rank, also on those that are not in it.",
    "dtype": "convert the tensor to one dtype before the call.",
    "shape": "give it the same shape on every rank: pad or gather the sizes first; drop uneven last batches.",
    "reduction": "use one reduction on every rank.",
    "root": "name the same root on every rank, as src=0: it is not each rank's own number.",
    "algorithm": "pass the same algorithm= on every rank: each sends other messages, which do not match.",
    "steps": "call optimizer.step() on every rank in every step.",
    "threads": "two threads use this group: give one its own, by dist.new_group(), or async_save(process_group=).",
    "handling": "see to that error; in a `finally` or an `except` make no call that the other ranks do not make.",
    "many": "that line makes many calls: look for one that a rank leaves out, as by a callback, or changes.",
    "batches": "give all ranks as many batches: DistributedSampler pads or drops to that; or `model.join()`.",
}


def find_mismatch(scene: Scene) -> Finding | None:
    """The first collective of any group that was not the same on all of its ranks."""
    found = [_compare(scene, *key, members) for key, members in sorted(scene.groups.items())]
    me = None if scene.limits.grace_s or scene.status(scene.me).state == FINISHED else scene.me  # it failed in one
    found += [find_too_large(scene, r) for r, one in sorted(scene.sights.items()) if r == me or "SIGABRT" in one.how]
    return min((finding for finding in found if finding), key=lambda finding: not finding.is_certain, default=None)


def find_left_out(scene: Scene) -> Finding | None:
    """An optimizer.step() that ranks have left out at the very end, as the one that looks can tell at its own end.

    All have made the same calls, the last ones those of a whole step, which some have ended and others have not. If
    anything followed, its digest would tell.
    """
    size = scene.status(scene.me).world_size
    if len(scene.sights) < size or not _have_ended_well(scene) or find_mismatch(scene) is not None:
        return None
    for (group, whole), members in sorted(scene.groups.items()):
        last = {progress.marks[-1:] for progress in members.values()}
        if members.keys() < set(whole) or len(last) > 1 or last == {()}:
            continue
        ((mark,),) = last
        late = tuple([rank for rank in whole if scene.status(rank).step == mark.step])
        others = tuple([rank for rank in whole if scene.status(rank).step == mark.step + 1])
        if not late or not others or len(late + others) < len(whole):
            continue
        side = _with_history(scene, group, members, late)
        if histories.is_whole(side, mark.step):
            lines = [f"{names(whole)} ended after collective #{mark.seq}, {call(side.history[-1])}"]
            return _report_steps(scene, group, late, others, mark.step, lines)
    return None


def _have_ended_well(scene: Scene) -> bool:
    statuses = [sight.status for sight in scene.sights.values()]
    ended = [one for one in statuses if one.state == FINISHED or END in one.facts or one.rank == scene.me]
    is_odd = any(CAUGHT in one.facts or saw_another(one) or one.joins or not one.step for one in statuses)
    return len(ended) == len(statuses) and not is_odd


def _compare(scene: Scene, group: str, whole: tuple[int, ...], members: dict[int, Progress]) -> Finding | None:
    classes = histories.classes(members)
    if len(classes) < 2 or _may_yet_be_decided(scene, group, whole, members, classes):
        return None
    parting = histories.first_parting(*(_with_history(scene, group, members, ranks) for ranks in classes[:2]))
    is_counted = parting is not None and not _is_without_fault(scene, parting)
    if parting is not None and parting.is_step and not is_counted:
        parting = histories.first_other_text(parting)
    if parting is None:
        return None
    if parting.is_step and histories.is_drift(parting):
        return _report_drift(scene, group, parting)
    if parting.is_origin and not parting.is_step:
        parting = histories.where_lines_part(parting)
    fault = histories.fault_of_odd(parting, is_counted=is_counted)
    usual, odd = parting.usual, parting.odd
    everybody = {rank for ranks in classes for rank in ranks}
    counts, changed, are_first = uneven(scene.sights, everybody)
    knows = parting.is_origin and not are_first  # else nobody can say how long an epoch is
    unsynced, twice = suspects(scene, everybody, parting.step)
    handling = {rank: said for rank in sorted(everybody) if (said := scene.status(rank).handling)}
    blamed = None
    if len(classes[0]) > len(classes[1]):
        blamed = odd
    elif knows:
        blamed = histories.unusual(parting)
    if blamed is None:
        without = [side for side in (odd, usual) if {*unsynced, *twice, *changed, *handling} & set(side.ranks)]
        if len(without) == 1:
            blamed = without[0]
        elif knows and not without:
            blamed = histories.changed(parting)
    if blamed is usual:  # two ranks: the roles were only a guess
        parting, fault = parting.swapped(), histories.INVERSE[fault]
    culprits = tuple(sorted(everybody - set(parting.usual.ranks) if blamed is not None else everybody))
    signs = [*counts, *(twice[r] for r in culprits if r in twice)]
    if blamed is not None and handling.keys() == {*culprits}:  # else all do, as a program may within an `except`
        signs += [f"{names(ranks)} was handling {said}" for said, ranks in alike(handling).items()]
        fault = "handling"
    return _report(scene, group, parting, "batches" if counts else fault, culprits, unsynced, signs)


def _may_yet_be_decided(
    scene: Scene, group: str, whole: Sequence[int], members: dict[int, Progress], classes: list[tuple[int, ...]]
) -> bool:
    """True while there is no majority and a rank that could make one is on its way."""
    if len(classes[0]) > len(classes[1]):
        return False
    compared = {rank for ranks in classes for rank in ranks}
    gone = [sight for rank in compared if (sight := scene.sights[rank]).is_gone]  # Gloo aborts who is sent too much
    if any(sight.age_s > _LAST_S for sight in gone):
        return False
    if not any(scene.is_running(rank) and not scene.is_silent(rank) for rank in set(whole) - compared):
        return False
    counts = [members[rank].count for rank in compared]
    ages = [wait.age_s for wait in scene.waits if wait.rank in compared and wait.record.group == group]
    return max(ages, default=0.0) < GRACE_S and max(counts) - min(p.count for p in members.values()) < _PATIENCE


def _with_history(scene: Scene, group: str, members: dict[int, Progress], ranks: tuple[int, ...]) -> Side:
    for rank in ranks[:_ASKED]:
        found = [r for r in scene.records_of(rank) if r.group == group and not r.is_message and r.digest]
        if found:
            return Side(ranks, sorted(found, key=lambda record: record.seq))
    marks = members[ranks[0]].marks  # records without words: they still tell the steps
    return Side(ranks, [Record(-1, m.seq, m.step, 0, 0, m.digest, False, group, "", "", "") for m in marks])


# ------------------------------------------------------------------ whether it is a fault


def _is_without_fault(scene: Scene, parting: Parting) -> bool:
    """True where a difference of steps says nothing: one side does not count them, or keeps another company."""
    sides = (parting.usual, parting.odd)
    statuses = [scene.status(rank) for side in sides for rank in side.ranks]
    if any(status.step == 0 for status in statuses) or any(status.joins for status in statuses):
        return True
    steps = {parting.a.step, parting.b.step}
    near = [record for side in sides for record in side.history if record.step in steps]
    if any(_JOIN in record.label for record in near) or not _are_in_step(scene, sides[0].ranks[0], sides[1].ranks[0]):
        return True
    differences = {a.step - b.step for a, b in parting.pairs if a.seq >= parting.a.seq}
    return not parting.is_origin and len(differences) == 1


def _are_in_step(scene: Scene, first: int, second: int) -> bool:
    """Whether a chain of groups that are used in every few steps joins the two: else they train models of their own."""
    groups = scene.groups.items()
    used = [(ranks, [(its, scene.status(r)) for r, its in told.items() if its.marks]) for (_, ranks), told in groups]
    often = [{*ranks} for ranks, members in used if all(_is_used_often(*one) for one in members)]
    reached, more = set[int](), {first}
    while more - reached:
        reached |= more
        more = {rank for ranks in often if ranks & reached for rank in ranks}
    return second in reached


def _is_used_often(progress: Progress, status: Status) -> bool:
    newest = [mark for back, mark in enumerate(reversed(progress.marks), 1) if mark.seq == progress.count - back]
    since = newest[-1].step if newest[-1].seq else status.step_before
    return len({mark.step for mark in newest}) * _SELDOM >= status.step - since + 1


# ------------------------------------------------------------------ in words


def _report(
    scene: Scene,
    group: str,
    parting: Parting,
    fault: Fault,
    culprits: tuple[int, ...],
    unsynced: Mapping[int, str],
    signs: Sequence[str],
) -> Finding:
    usual, odd, a, b, is_origin, is_step = parting
    step = parting.step
    differing = histories.what_differs(a.text, b.text)
    counts = _counts(group, parting) if is_origin else ""
    if not is_origin:
        first = f"the first difference is older than the records, which begin with collective #{a.seq}"
    elif differing:
        first = f"first difference: collective #{a.seq}: they differ in {' and '.join(differing)}"
    else:
        is_same = not is_step and a.text and b.text
        how = ", in what the record has no room for" if a.digest != b.digest else ", by its line"
        first = f"first difference: collective #{a.seq}" + how * bool(is_same)
    body = [counts, first] if counts else [first]
    body += [f"  {names(side.ranks)}: {call(r)} ({step_after(r.step)})" for side, r in ((usual, a), (odd, b))]
    is_known = not {*culprits} & {*usual.ranks}  # whose fault it is
    deeds = _deed(parting, fault) if is_known else []
    if is_origin and is_step and not is_known:  # what one made besides is a fact, whoever is right
        deeds = _deed(parting if b.step == step else parting.swapped(), "extra")
    body += [*unsynced.values(), *signs, *deeds]
    others = set(culprits) - {*usual.ranks, *odd.ranks}
    body += [f"{names(others)}: something else again"] * bool(others)
    is_of_many = histories.is_line_of_many(parting)
    is_one_place = a.step == b.step and (a.site == b.site or len(differing) == 1)
    is_left_out = is_of_many or histories.are_lines_of_both(parting)
    is_one_call = differing and differing != ["kind"] and is_one_place and not is_left_out
    other = "batches" if fault == "batches" else "many" if is_of_many else ""
    if fault == "handling" or (is_known and fault in ("skipped", "extra")):
        advice = _FIX[fault]
    else:
        advice = _FIX[differing[0] if is_one_call else other]
    head = "MISMATCH"
    if is_known and unsynced and not unsynced.keys() & {*usual.ranks}:  # as `find_unsynced` has it: either may be first
        head, advice = "NO_SYNC on some ranks only,", SYNC_ALIKE
    if any(later.step < one.step for side in (usual, odd) for one, later in pairwise(side.history)):
        step, advice = max(a.step, b.step), _FIX["threads"]  # whoever has no steps of its own counts as in the first
    head = f"{head} in {step_after(step)}, group {group}."
    why = _WHY["order" if is_step or fault in ("skipped", "extra") else "same"]
    fix = advice.format(culprits=names(culprits))
    least = wording.waiters([w for w in scene.waits if w.record.group == group and w.age_s >= GRACE_S])
    return wording.compose(scene, "mismatch", group, head, culprits, body, why=why, fix=fix, least=least, done=step)


def _counts(group: str, parting: Parting) -> str:
    parts, step = [], parting.step
    for side in (parting.usual, parting.odd):
        so_far = " so far" if side.history[-1].step == step else ""
        parts.append((names(side.ranks), calls_in(side, step).total(), so_far))
    (who, number, so_far), (other, its, too) = parts
    if number == its:
        return ""
    return f"{step_after(step)}: {who} issued {times(number)} in group {group}{so_far}, {other} issued {its}{too}"


def _deed(parting: Parting, fault: Fault) -> list[str]:
    """Who left out or put in which call."""
    if fault not in ("skipped", "extra"):
        return []
    verb = "skipped" if fault == "skipped" else "alone issued"
    has, lacks = (parting.usual, parting.odd) if fault == "skipped" else (parting.odd, parting.usual)
    beyond = calls_in(has, parting.step) - calls_in(lacks, parting.step)
    if not parting.is_step:  # the step is still under way: others may be missing for now
        record = parting.a if fault == "skipped" else parting.b
        beyond = Counter({(record.text, record.site): 1})
    shown = [f"{text} at {site}" for text, site in beyond if text][:_SHOWN]
    return [f"{names(parting.odd.ranks)} {verb} {one}" for one in shown]


def _report_drift(scene: Scene, group: str, parting: Parting) -> Finding:
    usual, odd, a, b, *_ = parting
    late, other = (usual, odd) if a.step < b.step else (odd, usual)
    steps = f"{names(usual.ranks)} it belongs to {step_after(a.step)}, for {names(odd.ranks)} to {step_after(b.step)}"
    lines = [f"collective #{a.seq} is the same on all, {call(a)}", f"but for {steps}"]
    return _report_steps(scene, group, late.ranks, other.ranks, parting.step, lines)


def _report_steps(
    scene: Scene, group: str, late: Sequence[int], others: Sequence[int], step: int, lines: Sequence[str]
) -> Finding:
    facts = scene.status(others[0]).facts
    sites = (told["now"].get("step", "") for topic, told in facts.items() if topic.startswith("lines "))
    where = next(filter(None, sites), "optimizer.step() there")
    culprits, deed = late, f"{names(late)} did not call {where}, or ran a step twice"
    if len(late) > len(others):
        culprits, deed = others, f"{names(others)} called {where} once more, or left out all else of a step"
    head, body = f"STEPS differ since {step_after(step)}, group {group}.", [*lines, deed]
    why, fix = "a replica whose optimizer steps less often is another model from then on.", _FIX["steps"]
    return wording.compose(scene, "steps", group, head, culprits, body, why=why, fix=fix, done=step)
