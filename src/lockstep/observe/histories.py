"""Two histories of the calls of one group: where they part, and what the odd one did there. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from lockstep.observe.flight import Record
from lockstep.observe.scene import FROM_CPP
from lockstep.observe.status import Progress

Fault = Literal["skipped", "extra", "changed", "batches", "handling", ""]
INVERSE: dict[Fault, Fault] = {"skipped": "extra", "extra": "skipped", "changed": "changed", "": ""}
_LOOK_AHEAD = 8
_SETTLED = 3  # steps: of more, the first of them is no example
_NAMES = ("kind", "dtype", "shape", "reduction", "root", "algorithm")

Shape = tuple[tuple[str, str], ...]  # text and site of each call of a step


def classes(members: dict[int, Progress]) -> list[tuple[int, ...]]:
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


class Side(NamedTuple):
    """Ranks whose digests agree."""

    ranks: tuple[int, ...]
    history: list[Record]  # of the first of them whose record can be read; by seq


class Parting(NamedTuple):
    """Where two histories part."""

    usual: Side
    odd: Side
    a: Record  # of the usual one
    b: Record  # of the odd one
    is_origin: bool  # nothing differs before it
    is_step: bool  # the collectives are the same, but in different steps

    @property
    def step(self) -> int:
        """The one in which they do."""
        return min(self.a.step, self.b.step)

    @property
    def pairs(self) -> list[tuple[Record, Record]]:
        """The collectives that both histories have, by seq."""
        return _pairs(self.usual, self.odd)

    def swapped(self) -> Parting:
        """The roles were only a guess."""
        return self._replace(usual=self.odd, odd=self.usual, a=self.b, b=self.a)


def _pairs(first: Side, second: Side) -> list[tuple[Record, Record]]:
    by_seq = {record.seq: record for record in second.history}
    return [(record, by_seq[record.seq]) for record in first.history if record.seq in by_seq]


def first_parting(usual: Side, odd: Side) -> Parting | None:
    """Where their digests do."""
    pairs = _pairs(usual, odd)
    for before, (a, b) in zip([None, *pairs], pairs, strict=False):
        if a.digest != b.digest:
            is_origin = a.seq == 0 or (before is not None and before[0].seq == a.seq - 1)
            is_step = a.step != b.step and (a.text == b.text or not a.text or not b.text)
            return Parting(usual, odd, a, b, is_origin, is_step)
    return None


def first_other_text(parting: Parting) -> Parting | None:
    """After one that is of no account: where the calls differ in more than their step."""
    for a, b in parting.pairs:
        if a.seq > parting.a.seq and a.text and b.text and a.text != b.text:
            return parting._replace(a=a, b=b, is_origin=True, is_step=False)
    return None


def where_lines_part(parting: Parting) -> Parting:
    """Back to where equal calls began to come from lines that do not go together: one was left out or put in there."""
    step = parting.step
    pairs = [pair for pair in parting.pairs if pair[0].seq < parting.a.seq]
    together: dict[str, set[str]] = defaultdict(set)
    for a, b in pairs:
        if a.step < step:
            together[a.site].add(b.site)
            together[b.site].add(a.site)
    for a, b in reversed(pairs):
        if a.text == FROM_CPP or b.site in together[a.site] or not together[a.site] | together[b.site]:
            break
        parting = parting._replace(a=a, b=b)
    return parting


# ------------------------------------------------------------------ by their steps


def is_drift(parting: Parting) -> bool:
    """True where both make the same calls from the same lines, and only number their steps differently."""
    step, usual, odd = parting.step, parting.usual, parting.odd
    pairs = [(a, b) for a, b in parting.pairs if min(a.step, b.step) >= step]
    is_same_program = all(a.text and _line(a) == _line(b) for a, b in pairs)
    apart = [abs(a.step - b.step) for a, b in pairs if a.seq >= parting.a.seq]
    is_lasting = apart == sorted(apart)  # a step that was left out is never made up for, and may not be the last
    late, ahead = (usual, odd) if parting.a.step == step else (odd, usual)
    stays = late.history[-1].step == step
    shape, known, following = _shape(late.history, step), _shapes((usual, odd), step), _shape(ahead.history, step + 1)
    begun = {following[: length + 1] for length in range(len(following))}
    is_new = shape not in _shapes((ahead,), step)
    return is_same_program and (is_lasting or stays) and is_new and _are_several(shape, known | begun)


def _are_several(shape: Shape, known: set[Shape]) -> bool:
    """True where the calls are those of two or more whole steps."""
    heads = [one for one in known if len(one) < len(shape) and shape[: len(one)] == one]
    tails = [shape[len(one) :] for one in heads]
    return any(tail in known or _are_several(tail, known) for tail in tails)


def is_whole(side: Side, step: int) -> bool:
    """True where the calls in `step` are all those of a step that has ended."""
    return bool(shape := _shape(side.history, step)) and shape in _shapes((side,), step)


def unusual(parting: Parting) -> Side | None:
    """Of two: the one whose calls in the step are those of no other, or come out of turn; None where nobody knows."""
    sides, known = (parting.usual, parting.odd), _shapes((parting.usual, parting.odd), parting.step)
    knows_usual, knows_odd = (_is_known(side.history, parting.step, known) for side in sides)
    past = [[record for record in side.history if record.seq <= parting.a.seq] for side in sides]
    if knows_usual and knows_odd:
        before = [_line(record) for record in past[0][:-1]]
        seldom = min((_line(mine[-1]) for mine in past), key=before.count)  # that which begins an epoch, say
        knows_usual, knows_odd = (_is_in_turn(mine, seldom) for mine in past)
    if knows_usual == knows_odd or _has_begun_anew(past[knows_usual]):
        return None
    return parting.odd if knows_usual else parting.usual


def changed(parting: Parting) -> Side | None:
    """Of two at one line: the one that has always made another call there, where the other has made this one before."""
    sides = ((parting.usual, parting.a), (parting.odd, parting.b))
    past = [{r.text for r in side.history if r.seq < mine.seq and r.site == mine.site} for side, mine in sides]
    new = [side for (side, mine), texts in zip(sides, past, strict=True) if texts and mine.text not in texts]
    return new[0] if len(new) == 1 and parting.a.site == parting.b.site else None


def _has_begun_anew(history: Sequence[Record]) -> bool:
    """Whether the last call was made in the first step, of which not all may be known, and not since."""
    last = _line(history[-1])
    return {record.step for record in history[:-1] if _line(record) == last} == {history[0].step}


def _is_in_turn(history: Sequence[Record], seldom: tuple[str, str]) -> bool:
    """Whether the last step's calls are those that came so many steps after `seldom` the time before, and the epochs
    are of one length, which one alone does not show: nobody can say of a call that must come that it is out of turn.
    """
    rounds = sorted({record.step for record in history[:-1] if _line(record) == seldom})[-3:]
    lengths = {after - before for before, after in pairwise(rounds)}
    now, length = history[-1].step, max(lengths, default=0)
    shape = _shape(history, now)
    return len(rounds) == 3 and lengths == {length} != {1} and _shape(history, now - length)[: len(shape)] == shape


def _is_known(history: Sequence[Record], step: int, known: set[Shape]) -> bool:
    shape = _shape(history, step)
    if history[-1].step == step:  # it is still in it
        return any(whole[: len(shape)] == shape for whole in known)
    is_first = step == history[0].step  # of optimizers that nobody shares, the first two steps are counted as one
    return shape in known or (is_first and _are_several(shape, known))


def _shape(history: Sequence[Record], step: int) -> Shape:
    return tuple([_line(record) for record in history if record.step == step])


def _line(record: Record) -> tuple[str, str]:
    """Text and site; what C++ has started was seen from this line or that one."""
    return record.text, "" if record.text == FROM_CPP else record.site


def _shapes(sides: Iterable[Side], but: int) -> set[Shape]:
    """The calls of every whole step, but of that one."""
    found: set[Shape] = set()
    for history in (side.history for side in sides):
        steps = sorted({record.step for record in history} - {but, history[0].step, history[-1].step})
        is_rebuilt = len(steps) > _SETTLED and any(record.text == FROM_CPP for record in history)
        settled = steps[1:] if is_rebuilt else steps  # in the second one DDP rebuilds its buckets
        found |= {_shape(history, step) for step in settled}
    return found


def adds_calls(history: Sequence[Record], step: int) -> bool:
    """Whether any call was made more often in `step` than in the one before."""
    return bool(Counter(_shape(history, step)) - Counter(_shape(history, step - 1)))


# ------------------------------------------------------------------ by their calls


def fault_of_odd(parting: Parting, *, is_counted: bool) -> Fault:
    """What the odd one did, taken that the usual one is right; "" where that cannot be said.

    is_counted: both count their steps alike. Up to the parting all was alike: who is a step ahead there has ended it.
    """
    if not parting.is_origin:
        return ""
    if parting.is_step or (is_counted and parting.a.step != parting.b.step):
        return "skipped" if parting.b.step > parting.a.step else "extra"
    sides = (parting.usual, parting.odd)
    a, b = ([record for record in side.history if record.seq >= parting.a.seq][:_LOOK_AHEAD] for side in sides)
    if _agree(a[1:], b[1:]):
        return "changed"
    if _agree(a[1:], b):
        return "skipped"
    if _agree(a, b[1:]):
        return "extra"
    usual, odd = ({_place(record) for record in side.history if record.seq < parting.a.seq} for side in sides)
    is_of_odd, is_of_usual = _place(parting.a) in odd, _place(parting.b) in usual
    if is_of_odd == is_of_usual:
        return ""
    return "extra" if is_of_odd else "skipped"  # it went past a line of both, or stays at one that the usual has left


def _place(record: Record) -> str:
    return record.site.partition(" ")[0]  # the function is not always known


def _agree(a: Sequence[Record], b: Sequence[Record]) -> bool:
    length = min(len(a), len(b))
    return length > 0 and all((x.text, x.step) == (y.text, y.step) for x, y in zip(a, b, strict=False))


def calls_in(side: Side, step: int) -> Counter[tuple[str, str]]:
    """Text and site of the calls in `step`."""
    return Counter((record.text, record.site) for record in side.history if record.step == step)


def is_line_of_many(parting: Parting) -> bool:
    """Whether both came to it by one line of the user's that made calls of other kinds before, as a trainer's does."""
    before = [one for side in (parting.usual, parting.odd) for one in side.history if one.seq < parting.a.seq]
    kinds = {one.text.partition(" ")[0] for one in before if one.site == parting.a.site and one.text}
    return parting.a.site == parting.b.site and len(kinds) > 1


def are_lines_of_both(parting: Parting) -> bool:
    """Whether the two calls are of two lines, each of which both have been at before: one of them was left out."""
    lines = {parting.a.site, parting.b.site}
    sides = (parting.usual, parting.odd)
    return len(lines) > 1 and all(lines <= {r.site for r in side.history if r.seq < parting.a.seq} for side in sides)


def what_differs(first: str, second: str) -> list[str]:
    """Of `_NAMES`: what two texts do not share. The kind says it all."""
    if not first or not second:
        return []
    a, b = _parts(first), _parts(second)
    if a["kind"] == b["kind"] == "new_group":
        return ["ranks"]
    return ["kind"] if a["kind"] != b["kind"] else [name for name in _NAMES if a[name] != b[name]]


def _parts(text: str) -> dict[str, str]:
    before, bracket, rest = text.partition("[")
    shape, _, after = rest.partition("]")
    words = before.split() + after.split()
    roots = [word for word in words if word.startswith("root=")]
    ways = [way for by, way in pairwise(words) if by == "by"]
    words = [word for word in words if word not in (*roots, "by", *ways)] + ["", ""]
    parts = (words[0], words[1], bracket + shape, " ".join(words[2:]).strip(), "".join(roots), "".join(ways))
    return dict(zip(_NAMES, parts, strict=True))
