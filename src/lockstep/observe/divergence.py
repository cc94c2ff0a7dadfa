"""Ranks that issued different collectives: found by comparing digests, explained by comparing records.

A digest covers all collectives of a group up to a number, and the step each was in. Two that differ are a fact that
nothing undoes, however old the sights are: all that remains is to say which collective was the first, and whose fault
it is. With three ranks the majority is right; with two, whoever does other than in its other steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from lockstep.observe import wording
from lockstep.observe.flight import Record
from lockstep.observe.scene import GRACE_S, Scene
from lockstep.observe.status import Progress
from lockstep.observe.torch_groups import FROM_CPP
from lockstep.observe.wording import Finding, call, names, step_after, times

_PATIENCE = 64  # collectives that a rank may go on while the majority is waited for
_LOOK_AHEAD = 8
_SHOWN = 3  # of the calls that one rank makes and another does not
_ASKED = 3  # ranks of the same digest whose records are tried: one on another machine may take a second
_JOIN = "join"
_SELDOM = 4  # steps: ranks with nothing in common for longer may each train a model of their own

_Shape = tuple[tuple[str, str], ...]  # text and site of each call of a step
Fault = Literal["skipped", "extra", "changed", ""]
_INVERSE: dict[Fault, Fault] = {"skipped": "extra", "extra": "skipped", "changed": "changed", "": ""}
_NAMES = ("kind", "dtype", "shape", "reduction", "root", "algorithm")

_WHY = {
    "order": "collectives pair by their order: from here on ranks mix values that do not belong together.",
    "same": "the ranks of a collective must agree on it; some mismatches hang, others give wrong numbers.",
}
_FIX = {
    "skipped": "look for a condition that is false on {culprits}, or an exception that is caught there.",
    "extra": "look for a condition that is true only on {culprits}: every rank must make this call, or none.",
    "": "make the same calls on every rank, in one order; look for a condition, or a caught exception.",
    "dtype": "convert the tensor to one dtype before the call.",
    "shape": "give it the same shape on every rank: pad or gather the sizes first; drop uneven last batches.",
    "reduction": "use one reduction on every rank.",
    "root": "name the same root on every rank; it is a rank, not `rank == 0 or ...`.",
    "algorithm": "pass the same algorithm= on every rank: each sends other messages, which do not match.",
    "steps": "call optimizer.step() on every rank in every step.",
}
SYNC_ALIKE = "decide by the number of the micro-batch alone, alike on all ranks, whether to use no_sync()."


class _Class(NamedTuple):
    """Ranks whose digests agree."""

    ranks: tuple[int, ...]
    history: list[Record]  # of the first of them whose record can be read; by seq


class _Difference(NamedTuple):
    """Where two histories part."""

    usual: Record
    odd: Record
    is_origin: bool  # nothing differs before it
    is_step: bool  # the collectives are the same, but in different steps


def find_mismatch(scene: Scene) -> Finding | None:
    """The first collective of any group that was not the same on all of its ranks."""
    found = [_compare(scene, *key, members) for key, members in sorted(scene.groups.items())]
    return min((finding for finding in found if finding), key=lambda finding: not finding.is_certain, default=None)


def _compare(scene: Scene, group: str, whole: tuple[int, ...], members: dict[int, Progress]) -> Finding | None:
    classes = _classes(members)
    if len(classes) < 2 or _may_yet_be_decided(scene, group, whole, members, classes):
        return None
    usual, odd = (_with_history(scene, group, members, ranks) for ranks in classes[:2])
    difference = _first_difference(usual.history, odd.history)
    if difference is not None and difference.is_step and _is_without_fault(scene, usual, odd, difference):
        difference = _first_other_text(usual.history, odd.history, difference.usual.seq)
    if difference is None:
        return None
    if difference.is_step and _is_drift(usual, odd, difference):
        return _report_drift(scene, group, usual, odd, difference)
    if difference.is_origin and not difference.is_step:
        difference = _where_lines_part(usual.history, odd.history, difference)
    fault = _fault_of_odd(usual.history, odd.history, difference)
    step = min(difference.usual.step, difference.odd.step)
    is_majority = len(classes[0]) > len(classes[1])
    blamed = odd if is_majority else _unusual(usual, odd, step) if difference.is_origin else None
    everybody = {rank for ranks in classes for rank in ranks}
    unsynced = _unsynced(scene, everybody, step)
    if blamed is None:
        without = [side for side in (odd, usual) if unsynced.keys() & set(side.ranks)]
        blamed = without[0] if len(without) == 1 else None
    if blamed is usual:  # two ranks: the roles were only a guess
        usual, odd, fault = odd, usual, _INVERSE[fault]
        difference = difference._replace(usual=difference.odd, odd=difference.usual)
    culprits = tuple(sorted(everybody - set(usual.ranks) if blamed is not None else everybody))
    return _report(scene, group, usual, odd, difference, fault, culprits, unsynced)


def _classes(members: dict[int, Progress]) -> list[tuple[int, ...]]:
    """The ranks by digest, most ranks first, at the collective that most ranks have passed of those that differ."""
    first: dict[int, int] = {}  # digest by number, of whichever rank came first
    differing = set()
    for progress in members.values():
        for seq, _, digest in progress.marks:
            if first.setdefault(seq, digest) != digest:
                differing.add(seq)
    if not differing:
        return []
    seen: dict[int, dict[int, list[int]]] = {seq: defaultdict(list) for seq in differing}
    for rank, progress in sorted(members.items()):
        for seq, _, digest in progress.marks:
            if seq in differing:
                seen[seq][digest].append(rank)
    classes = min(seen.items(), key=lambda item: (-sum(map(len, item[1].values())), item[0]))[1]
    return sorted((tuple(ranks) for ranks in classes.values()), key=lambda ranks: (-len(ranks), ranks))


def _may_yet_be_decided(
    scene: Scene,
    group: str,
    whole: tuple[int, ...],
    members: dict[int, Progress],
    classes: list[tuple[int, ...]],
) -> bool:
    """True while there is no majority and a rank that could make one is on its way."""
    if len(classes[0]) > len(classes[1]):
        return False
    compared = {rank for ranks in classes for rank in ranks}
    if not any(scene.is_running(rank) and not scene.is_silent(rank) for rank in set(whole) - compared):
        return False
    counts = [members[rank].count for rank in compared]
    ages = [wait.age_s for wait in scene.waits if wait.rank in compared and wait.record.group == group]
    return max(ages, default=0.0) < GRACE_S and max(counts) - min(p.count for p in members.values()) < _PATIENCE


def _with_history(scene: Scene, group: str, members: dict[int, Progress], ranks: tuple[int, ...]) -> _Class:
    for rank in ranks[:_ASKED]:
        found = [r for r in scene.records_of(rank) if r.group == group and not r.is_message and r.digest]
        if found:
            return _Class(ranks, sorted(found, key=lambda record: record.seq))
    marks = members[ranks[0]].marks  # records without words: they still tell the steps
    return _Class(ranks, [Record(-1, m.seq, m.step, 0, 0, m.digest, False, group, "", "", "") for m in marks])


# ------------------------------------------------------------------ where they part


def _pairs(first: list[Record], second: list[Record]) -> list[tuple[Record, Record]]:
    by_seq = {record.seq: record for record in second}
    return [(record, by_seq[record.seq]) for record in first if record.seq in by_seq]


def _first_difference(first: list[Record], second: list[Record]) -> _Difference | None:
    pairs = _pairs(first, second)
    for before, (a, b) in zip([None, *pairs], pairs, strict=False):
        if a.digest != b.digest:
            is_origin = a.seq == 0 or (before is not None and before[0].seq == a.seq - 1)
            is_step = a.step != b.step and (a.text == b.text or not a.text or not b.text)
            return _Difference(a, b, is_origin, is_step)
    return None


def _first_other_text(first: list[Record], second: list[Record], after: int) -> _Difference | None:
    for a, b in _pairs(first, second):
        if a.seq > after and a.text and b.text and a.text != b.text:
            return _Difference(a, b, is_origin=True, is_step=False)
    return None


def _where_lines_part(first: list[Record], second: list[Record], difference: _Difference) -> _Difference:
    """Back to where equal calls began to come from lines that do not go together: one was left out or put in there."""
    step = min(difference.usual.step, difference.odd.step)
    pairs = [pair for pair in _pairs(first, second) if pair[0].seq < difference.usual.seq]
    together: dict[str, set[str]] = defaultdict(set)
    for a, b in pairs:
        if a.step < step:
            together[a.site].add(b.site)
            together[b.site].add(a.site)
    for a, b in reversed(pairs):
        if a.text == FROM_CPP or b.site in together[a.site] or not together[a.site] | together[b.site]:
            break
        difference = difference._replace(usual=a, odd=b)
    return difference


def _is_without_fault(scene: Scene, usual: _Class, odd: _Class, difference: _Difference) -> bool:
    """True where a difference of steps says nothing: one side does not count them, or keeps another company."""
    sides = [scene.status(rank) for rank in (*usual.ranks, *odd.ranks)]
    if any(status.step == 0 for status in sides) or any(status.activity == _JOIN for status in sides):
        return True
    steps = {difference.usual.step, difference.odd.step}
    near = [record for side in (usual, odd) for record in side.history if record.step in steps]
    if any(_JOIN in record.label for record in near) or not _are_in_step(scene, usual.ranks[0], odd.ranks[0]):
        return True
    pairs = [(a, b) for a, b in _pairs(usual.history, odd.history) if a.seq >= difference.usual.seq]
    return not difference.is_origin and len({a.step - b.step for a, b in pairs}) == 1


def _are_in_step(scene: Scene, first: int, second: int) -> bool:
    """Whether a chain of groups that are used in every few steps joins the two: else they train models of their own."""
    steps = {rank: sight.status.step for rank, sight in scene.sights.items()}
    often = [
        set(ranks)
        for (_, ranks), members in scene.groups.items()
        if all(_is_used_often(progress, steps[rank]) for rank, progress in members.items() if progress.marks)
    ]
    reached, more = set[int](), {first}
    while more - reached:
        reached |= more
        more = {rank for ranks in often if ranks & reached for rank in ranks}
    return second in reached


def _is_used_often(progress: Progress, step: int) -> bool:
    newest = [mark for back, mark in enumerate(reversed(progress.marks), 1) if mark.seq == progress.count - back]
    since = newest[-1].step if newest[-1].seq else 0
    return len({mark.step for mark in newest}) * _SELDOM >= step - since + 1


def _is_drift(usual: _Class, odd: _Class, difference: _Difference) -> bool:
    """True where both make the same calls from the same lines, and only number their steps differently."""
    step = min(difference.usual.step, difference.odd.step)
    pairs = [(a, b) for a, b in _pairs(usual.history, odd.history) if min(a.step, b.step) >= step]
    is_same_program = all(a.text and _line(a) == _line(b) for a, b in pairs)
    is_constant = len({a.step - b.step for a, b in pairs if a.seq >= difference.usual.seq}) == 1
    late = usual if difference.usual.step == step else odd
    stays = late.history[-1].step == step
    shape, known = _shape(late.history, step), _shapes((usual, odd), step)
    is_several = shape not in known and _are_several(shape, known)
    return is_same_program and (is_constant or stays) and is_several


def _are_several(shape: _Shape, known: set[_Shape]) -> bool:
    """True where the calls are those of two or more whole steps."""
    heads = [one for one in known if len(one) < len(shape) and shape[: len(one)] == one]
    tails = [shape[len(one) :] for one in heads]
    return any(tail in known or _are_several(tail, known) for tail in tails)


# ------------------------------------------------------------------ whose fault it is


def _fault_of_odd(usual: list[Record], odd: list[Record], difference: _Difference) -> Fault:
    """What the odd one did, taken that the usual one is right; "" where that cannot be said."""
    if not difference.is_origin:
        return ""
    if difference.is_step:
        return "skipped" if difference.odd.step > difference.usual.step else "extra"
    seq = difference.usual.seq
    a, b = ([record for record in side if record.seq >= seq][:_LOOK_AHEAD] for side in (usual, odd))
    if _agree(a[1:], b[1:]):
        return "changed"
    if _agree(a[1:], b):
        return "skipped"
    return "extra" if _agree(a, b[1:]) else ""


def _agree(a: Sequence[Record], b: Sequence[Record]) -> bool:
    length = min(len(a), len(b))
    return length > 0 and all((x.text, x.step) == (y.text, y.step) for x, y in zip(a, b, strict=False))


def _unusual(usual: _Class, odd: _Class, step: int) -> _Class | None:
    """Of two: the one whose calls in `step` are not those of any other step; None where that cannot be said."""
    known = _shapes((usual, odd), step)
    knows_usual, knows_odd = (_is_known(side.history, step, known) for side in (usual, odd))
    if knows_usual == knows_odd:
        return None
    return odd if knows_usual else usual


def _unsynced(scene: Scene, ranks: Iterable[int], step: int) -> dict[int, str]:
    """The ranks that ran fewer synchronised backwards in that step than others, and others in no_sync(); and where."""
    told: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank in sorted(ranks):
        for topic, values in scene.status(rank).facts.items():
            is_it = topic.startswith("sync ")
            for value in [value for key, value in values.items() if is_it and int(key) <= step]:
                told[topic][rank] = value  # the last one holds
    return {
        rank: f"{names([rank])} ran {unsynced} backward in no_sync(), at {site}"
        for values in told.values()
        for rank, (synced, unsynced, site) in values.items()
        if unsynced and synced < max(value[0] for value in values.values()) and scene.status(rank).step > step
    }


def _is_known(history: Sequence[Record], step: int, known: set[_Shape]) -> bool:
    shape = _shape(history, step)
    if history[-1].step == step:  # it is still in it
        return any(whole[: len(shape)] == shape for whole in known)
    return shape in known


def _shape(history: Sequence[Record], step: int) -> _Shape:
    return tuple(_line(record) for record in history if record.step == step)


def _line(record: Record) -> tuple[str, str]:
    """Text and site; what C++ has started was seen from this line or that one."""
    return record.text, "" if record.text == FROM_CPP else record.site


def _shapes(sides: Sequence[_Class], but: int) -> set[_Shape]:
    """The calls of every whole step, but of that one."""
    found: set[_Shape] = set()
    for history in (side.history for side in sides):
        partial = {but, history[0].step, history[-1].step}
        steps = {record.step for record in history} - partial
        found |= {_shape(history, step) for step in steps}
    return found


def _count(history: Sequence[Record], step: int) -> int:
    return sum(record.step == step for record in history)


# ------------------------------------------------------------------ in words


def _report(
    scene: Scene,
    group: str,
    usual: _Class,
    odd: _Class,
    difference: _Difference,
    fault: Fault,
    culprits: tuple[int, ...],
    unsynced: Mapping[int, str],
) -> Finding:
    a, b = difference.usual, difference.odd
    step = min(a.step, b.step)
    differing = _what_differs(a.text, b.text)
    counts = _counts(group, usual, odd, step) if difference.is_origin else ""
    if not difference.is_origin:
        first = f"the first difference is older than the records, which begin with collective #{a.seq}"
    elif differing:
        first = f"first difference: collective #{a.seq}: they differ in {' and '.join(differing)}"
    else:
        is_same = not difference.is_step and a.text and b.text
        how = ", in what the record has no room for" if a.digest != b.digest else ", by its line"
        first = f"first difference: collective #{a.seq}" + how * bool(is_same)
    body = [counts, first] if counts else [first]
    body += [f"  {names(usual.ranks)}: {_placed(a)}", f"  {names(odd.ranks)}: {_placed(b)}"]
    body += [*unsynced.values(), *_deed(usual, odd, step, fault, difference)]
    others = set(culprits) - {*usual.ranks, *odd.ranks}
    body += [f"{names(others)}: something else again"] * bool(others)
    is_one_call = bool(differing) and (a.site == b.site or len(differing) == 1) and differing != ["kind"]
    advice = _FIX[fault] if fault in ("skipped", "extra") else _FIX[differing[0] if is_one_call else ""]
    head = "MISMATCH"
    if unsynced and not {*culprits, *unsynced} & set(usual.ranks):  # as `_synced` has it, whichever is seen first
        head, advice = "NO_SYNC on some ranks only,", SYNC_ALIKE
    return wording.compose(
        scene,
        "mismatch",
        group,
        f"{head} in {step_after(step)}, group {group}.",
        culprits,
        body,
        why=_WHY["order" if difference.is_step or fault in ("skipped", "extra") else "same"],
        fix=advice.format(culprits=names(culprits)),
        least=wording.waiters([w for w in scene.waits if w.record.group == group and w.age_s >= GRACE_S]),
        done=step,
    )


def _counts(group: str, usual: _Class, odd: _Class, step: int) -> str:
    parts = []
    for side in (usual, odd):
        so_far = " so far" if side.history[-1].step == step else ""
        parts.append((names(side.ranks), _count(side.history, step), so_far))
    (who, number, so_far), (other, its, its_so_far) = parts
    if number == its:
        return ""
    return (
        f"{step_after(step)}: {who} issued {times(number)} in group {group}{so_far}, {other} issued {its}{its_so_far}"
    )


def _deed(usual: _Class, odd: _Class, step: int, fault: Fault, difference: _Difference) -> list[str]:
    """Who left out or put in which call."""
    if fault not in ("skipped", "extra"):
        return []
    verb = "skipped" if fault == "skipped" else "alone issued"
    has, lacks = (usual, odd) if fault == "skipped" else (odd, usual)
    beyond = _calls(has.history, step) - _calls(lacks.history, step)
    if not difference.is_step:  # the step is still under way: others may be missing for now
        record = difference.usual if fault == "skipped" else difference.odd
        beyond = Counter({(record.text, record.site): 1})
    shown = [f"{text} at {site}" for text, site in beyond if text][:_SHOWN]
    return [f"{names(odd.ranks)} {verb} {one}" for one in shown]


def _calls(history: Sequence[Record], step: int) -> Counter[tuple[str, str]]:
    return Counter((record.text, record.site) for record in history if record.step == step)


def _placed(record: Record) -> str:
    return f"{call(record)} ({step_after(record.step)})"


def _what_differs(first: str, second: str) -> list[str]:
    """Of `_NAMES`: what two texts do not share. The kind says it all."""
    if not first or not second:
        return []
    a, b = _parts(first), _parts(second)
    return ["kind"] if a["kind"] != b["kind"] else [name for name in _NAMES if a[name] != b[name]]


def _parts(text: str) -> dict[str, str]:
    before, bracket, rest = text.partition("[")
    shape, _, after = rest.partition("]")
    words = before.split() + after.split()
    roots = [word for word in words if word.startswith("root=")]
    ways = [way for by, way in pairwise(words) if by == "by"]
    words = [word for word in words if word not in (*roots, "by", *ways)] + ["", ""]
    return {
        "kind": words[0],
        "dtype": words[1],
        "shape": bracket + shape,
        "reduction": " ".join(words[2:]).strip(),
        "root": "".join(roots),
        "algorithm": "".join(ways),
    }


def _report_drift(scene: Scene, group: str, usual: _Class, odd: _Class, difference: _Difference) -> Finding:
    a, b = difference.usual, difference.odd
    late, other = (usual, odd) if a.step < b.step else (odd, usual)
    facts = scene.status(other.ranks[0]).facts
    sites = (told["now"].get("step", "") for topic, told in facts.items() if topic.startswith("lines "))
    where = next(filter(None, sites), "optimizer.step() there")
    step = min(a.step, b.step)
    return wording.compose(
        scene,
        "steps",
        group,
        f"STEPS differ since {step_after(step)}, group {group}.",
        late.ranks,
        [
            f"collective #{a.seq} is the same on all, {call(a)}",
            f"but for {names(usual.ranks)} it belongs to {step_after(a.step)}, "
            f"for {names(odd.ranks)} to {step_after(b.step)}",
            f"{names(late.ranks)} did not call {where}, or ran a step twice",
        ],
        why="a replica whose optimizer steps less often is another model from then on.",
        fix=_FIX["steps"],
        done=step,
    )
