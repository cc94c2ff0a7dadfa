"""A screen of a lesson as lines of text: one column for each rank, time runs down, an arrow is a message."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple

from rich.text import Text

from lockstep.learn.events import Event, count, numbers, words

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")  # of ranks, in turn; dimmed from the seventh on
_LANE_MIN = 14  # columns; where there is less room, ranks are told one after the other


class Row(NamedTuple):
    """What stands on one line: the same thing on several ranks, or one message."""

    level: int  # rows of one level did not wait for each other
    at_ns: int
    events: tuple[Event, ...]  # one of each rank that has it; of a message (send, recv)


def colour_of(rank: int) -> str:
    """The same for a rank on every screen."""
    dim = "dim " if rank // len(COLOURS) % 2 else ""
    return dim + COLOURS[rank % len(COLOURS)]


def rows(events: Iterable[Event]) -> list[Row]:
    """The events in rows. The n-th collective of a kind is one row, the n-th value of a name, a message.

    Ordered by what had to be before what, and only then by time: on busy machines the ranks of one step of an algorithm
    come one after the other, though none of them waits for another.
    """
    groups: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    seen: Counter[tuple[object, ...]] = Counter()
    for event in events:
        if event.is_message:
            ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
            name: tuple[object, ...] = ("message", *ends)
        else:
            name = (event.kind, event.text if event.kind == "say" else event.name)
        one = (event.rank, event.kind, *name)
        seen[one] += 1
        groups[(*name, seen[one])].append(event)
    found = list(groups.values())
    levels = _levels(found)
    unsorted = [Row(level, _at_ns(group), tuple(group)) for level, group in zip(levels, found, strict=True)]
    return sorted(unsorted, key=lambda row: (row.level, row.at_ns))


def _levels(groups: Sequence[Sequence[Event]]) -> list[int]:
    """For each group, how many others had to end one after the other before it began, on any of its ranks."""
    of_rank: dict[int, list[tuple[int, Event]]] = defaultdict(list)
    for number, group in enumerate(groups):
        for event in group:
            of_rank[event.rank].append((number, event))
    levels: dict[int, int] = {}

    def before(number: int) -> Iterator[int]:
        for mine in groups[number]:
            yield from (other for other, event in of_rank[mine.rank] if other != number and _is_before(event, mine))

    def level(number: int) -> int:
        if number not in levels:
            levels[number] = 0  # where messages overtake each other, the one that was asked first counts
            levels[number] = 1 + max(map(level, before(number)), default=-1)
        return levels[number]

    return [level(number) for number in range(len(groups))]


def _is_before(event: Event, other: Event) -> bool:
    """On one rank: it had ended when the other began, or it is a message that the other one is made of."""
    is_part = event.is_message and not other.is_message
    is_within = other.began_ns <= event.began_ns and event.ended_ns <= other.ended_ns
    return event.ended_ns <= other.began_ns or (is_part and is_within)


def _at_ns(group: Sequence[Event]) -> int:
    """When it was done; of a message, when it had arrived: its sender may hear of that later than others act on it."""
    return max(event.ended_ns for event in [one for one in group if one.kind == "recv"] or group)


def draw(events: Sequence[Event], world_size: int, width: int) -> list[Text]:
    """The lines of a screen, at most `width` columns wide; the first one names the ranks, where each has a column."""
    if not events:
        return []
    lane = min(30, (width - 1) // world_size)
    if lane < _LANE_MIN:
        return [_told(event) for rank in range(world_size) for event in events if event.rank == rank]
    lines = _cells({rank: f"rank {rank}" for rank in range(world_size)}, lane, bold=True)
    began_ns = min(event.began_ns for event in events)
    for _, together in groupby(rows(events), key=lambda row: (row.level, row.events[0].is_message)):
        found = list(together)
        lines += (
            _arrows(found, lane)
            if found[0].events[0].is_message
            else [line for row in found for line in _lines(row, lane)]
        )
        if found[-1].events[0].kind not in ("show", "curve", "say") and lines[-1].cell_len + 12 < width:
            lines[-1].append(f"  {(found[-1].at_ns - began_ns) // 1000} us", "dim")
    return lines


def _told(event: Event) -> Text:
    return Text.assemble((f"rank {event.rank}  ", colour_of(event.rank)), words(event))


def _lines(row: Row, lane: int) -> list[Text]:
    first = row.events[0]
    if first.kind in ("say", "curve"):
        return [_told(event) for event in sorted(row.events, key=lambda event: event.rank)]
    if first.kind == "show":
        values = {e.rank: numbers(e.after, e.shape) for e in row.events}
        if len(f"{first.name} = ") + max(map(len, values.values())) <= lane - 2:
            return _cells({rank: f"{first.name} = {value}" for rank, value in values.items()}, lane)
        return [Text(f" {first.name}:", "dim"), *_cells(values, lane)]
    return _collective(row.events, lane)


def _cells(texts: Mapping[int, str], lane: int, *, bold: bool = False) -> list[Text]:
    """One text in each lane, over as many lines as the longest needs."""
    wrapped = {rank: wrap(text, lane - 2) for rank, text in texts.items()}
    lines: list[Text] = []
    for number in range(max(map(len, wrapped.values()))):
        line = Text()
        for rank in range(max(texts) + 1):
            text = "".join(wrapped.get(rank, ())[number : number + 1])
            line.append(f" {text:{lane - 1}}", ("bold " if bold else "") + colour_of(rank))
        line.rstrip()
        lines.append(line)
    return lines


def _arrows(found: Sequence[Row], lane: int) -> list[Text]:
    """Messages of one level, side by side where they do not cross."""
    lines: list[Text] = []
    for row in sorted(found, key=lambda row: min(row.events[0].rank, row.events[0].peer or 0)):
        begin, text, colour = _arrow(row.events, lane)
        line = next((line for line in lines if line.cell_len <= begin), None)
        if line is None:
            lines.append(line := Text())
        line.append(" " * (begin - line.cell_len)).append(text, colour)
    return lines


def _arrow(ends: Sequence[Event], lane: int) -> tuple[int, str, str]:
    """A message from the middle of one lane to the middle of another: where it begins, the arrow, its colour.

    Open at the side that was not recorded.
    """
    some = ends[0]
    sender, receiver = (some.rank, some.peer) if some.kind == "send" else (some.peer, some.rank)
    assert sender is not None
    assert receiver is not None
    kinds = {event.kind for event in ends}
    values = next((event.before for event in ends if event.kind == "send"), some.after)
    left, right = sorted((sender, receiver))
    begin, end = left * lane + lane // 2 + 1, right * lane + lane // 2
    room = end - begin - 2
    wordings = (
        f" {numbers(values, some.shape)} {count(some.bytes)} ",
        f" {numbers(values[:1])}.. {count(some.bytes)} ",
    )
    body = next((words for words in wordings if len(words) <= room - 2), "")
    shaft = body.center(room, "-")
    tail, head = ("o" if "send" in kinds else "?"), ("*" if "recv" in kinds else "?")
    text = f"{tail}{shaft[:-1]}>{head}" if sender == left else f"{head}<{shaft[1:]}{tail}"
    return begin, text, colour_of(sender)


def _collective(events: Sequence[Event], lane: int) -> list[Text]:
    first = events[0]
    ranks = sorted(event.rank for event in events)
    root = "" if first.peer is None else f" root {first.peer}"
    what = f" {first.kind}{' ' + first.reduce if first.reduce else ''}{root}{' ' + first.name if first.name else ''} "
    begin, end = ranks[0] * lane + 1, (ranks[-1] + 1) * lane - 2
    bar = Text(" " * begin + f"[{what.center(max(0, end - begin - 1), '=')}]")
    before = {e.rank: numbers(e.before, e.shape) for e in events if e.before}
    after = {e.rank: numbers(e.after, e.shape) for e in events if e.after}
    return [*(_cells(before, lane) if before else ()), bar, *(_cells(after, lane) if after else ())]
