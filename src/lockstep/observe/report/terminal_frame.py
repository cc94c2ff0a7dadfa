"""The picture of a run in a terminal, line by line. Pure: figures in, lines out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from lockstep.observe.report.rank_rows import RankRow, folded
from lockstep.observe.wording import names

_COLOURS = {"good": "green", "idle": "bright_black", "note": "cyan", "warning": "yellow", "error": "bold red"}
_STATUS_COLOURS = {"running": "green", "failed": "bold red", "stopped": "yellow"}
_LETTERS = "dfbco."  # as step_clock.PHASES
_PHASE_COLOURS = ("magenta", "green", "cyan", "red", "yellow", "bright_black")
_SHORT = ("data", "fwd", "bwd", "comm", "opt", "other")
_LEGEND = "d data  f forward  b backward  c exposed communication  o optimizer  . other"
_SPARKS = "▁▂▃▄▅▆▇█"
_NARROWEST, _NARROW, _WIDE = 64, 110, 160  # columns
_CARD_LINES = 7  # that are left for cards before rows are folded
_RULER = Console(width=1)  # which knows how wide characters are


class Picture(NamedTuple):
    """All that is drawn."""

    run: Mapping[str, Any]  # of the report's document
    rows: Sequence[RankRow]
    values: Mapping[str, float]  # the newest scalars
    cards: Sequence[Mapping[str, Any]]  # of the document, the worst first
    about: str = ""  # where else it is shown

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.run["status"] in ("finished", "failed", "stopped")

    @property
    def step(self) -> int:
        """That all ranks have come to."""
        return min((row.step for row in self.rows if row.step), default=0)


class _Column(NamedTuple):
    title: str
    width: int  # negative: the text stands to the left
    cell: Callable[[RankRow], str | Text]


def frame(picture: Picture, width: int, height: int | None = None) -> list[Text]:
    """The lines of `picture`, none wider than `width`; not more than `height`, where there is such a limit.

    Ranks that do the same share a row where there is no room for all.
    """
    columns = _columns(picture.rows, width)
    heads = [*header(picture), *([Text(picture.about, "bright_black")] if picture.about else [])]
    lines = [line for head in heads for line in head.wrap(_RULER, width)]
    legend = [Text(_LEGEND, "bright_black")] if any(column.title == "time" for column in columns) else []
    rows, per_row, room = picture.rows, 2, None
    if height is not None:
        room = height - len(lines) - len(legend) - 1
        for_rows = room - _CARD_LINES * bool(picture.cards)
        rows = folded(rows, max(1, for_rows))
        per_row = 2 if 2 * len(rows) <= for_rows else 1
    lines += [*_table(rows, columns, width, per_row), *legend]
    if picture.cards:
        lines += _below(picture.cards, width, None if height is None else height - len(lines))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def header(picture: Picture) -> list[Text]:
    """How far the run is, and its newest figures."""
    run, rows, steps = picture.run, picture.rows, _steps(picture.run)
    step_ms = max((row.step_ms for row in rows), default=0.0)
    ranks = sum(len(row.ranks) for row in rows)
    starts = len(run.get("attempts", ()))
    words = [f"{ranks} rank{'' if ranks == 1 else 's'}"]
    words += [f"start {starts}"] * (starts > 1)
    words += [f"step {picture.step}{f' of {steps}' * bool(steps)}"] * bool(picture.step)
    if steps > picture.step > 0 and not picture.is_over:
        words.append(f"ETA {timedelta(seconds=round((steps - picture.step) * step_ms / 1000))}")
    lasted = f" {timedelta(seconds=round(run['wall_s']))}" if run.get("wall_s") else ""
    first = Text(run["id"], "bold").append("  ").append(run["status"], _STATUS_COLOURS.get(run["status"], ""))
    first.append("  ".join([lasted, *words]), "not bold default")
    rate = max((row.tokens_per_s for row in rows), default=0.0)
    figures = [f"{name} {value:.5g}" for name, value in picture.values.items()]
    figures += [f"{step_ms:.1f} ms per step"] * bool(step_ms) + [f"{rate:,.0f} tokens/s"] * bool(rate)
    return [first, *([Text("  ".join(figures))] if figures else [])]


def _steps(run: Mapping[str, Any]) -> int:
    """That are asked for, where the run has said so."""
    asked = [str(value) for _, name, value, *_ in run.get("facts", ()) if name == "train.steps"]
    return int(asked[0]) if asked and asked[0].isdigit() else 0


# ------------------------------------------------------------------ ranks


def _table(rows: Sequence[RankRow], columns: Sequence[_Column], width: int, per_row: int) -> Iterator[Text]:
    """per_row: lines that a row may have."""
    left = sum(abs(column.width) + 1 for column in columns) + 1
    yield Text("".join(_fit(column.title, column.width) + " " for column in columns) + " state", "bright_black")
    for row in rows:
        line = Text()
        for column in columns:
            cell = column.cell(row)
            line.append_text(cell if isinstance(cell, Text) else Text(_fit(cell, column.width))).append(" ")
        state = Text(str(row.stand), _COLOURS[row.stand.mood])
        parts = list(state.wrap(_RULER, max(10, width - left))) if per_row > 1 and state.plain else [state]
        yield line.append(" ").append_text(parts[0])
        if len(parts) > 1:
            yield Text(" " * left).append_text(Text("").join(parts[1:]))


def _columns(rows: Sequence[RankRow], width: int) -> list[_Column]:
    top_ms = 2 * max((row.step_ms for row in rows), default=0.0)
    rates = {"tokens/s": [row.tokens_per_s for row in rows], "samples/s": [row.samples_per_s for row in rows]}
    rate = next((name for name, each in rates.items() if any(each)), "")
    sparks = 8 if width < _NARROW else 16
    columns = [_Column("rank", -max([4, *(len(_ranks(row)) for row in rows)]), _ranks)]
    if width >= _NARROW:
        columns.append(_Column("host", -max([4, *(min(16, len(row.host)) for row in rows)]), lambda row: row.host))
    columns.append(_Column("step", 7, lambda row: str(row.step or "")))
    if any(row.steps_ms for row in rows) and width >= _NARROWEST:  # else what a rank does has no room
        columns.append(_Column("ms", 7, lambda row: f"{row.step_ms:.1f}" if row.steps_ms else ""))
        columns.append(_Column("", -sparks, lambda row: _spark(row.steps_ms[-sparks:], top_ms)))
        if width < _WIDE:
            columns.append(_Column("time", -10, lambda row: _bar(row.shares, 10)))
        else:
            columns += [_Column(title, 5, partial(_share, phase=phase)) for phase, title in enumerate(_SHORT)]
    if width >= _NARROW and rate:
        columns.append(_Column(rate, 10, lambda row: f"{row.tokens_per_s or row.samples_per_s:,.0f}"))
    if width >= _NARROW and any(row.memory_mib for row in rows):
        columns.append(_Column("memory", 9, lambda row: _memory(row.memory_mib)))
    return columns


def _ranks(row: RankRow) -> str:
    text = names(row.ranks).partition(" ")[2]
    return text if len(text) <= 12 else f"{len(row.ranks)} ranks"


def _share(row: RankRow, phase: int) -> Text:
    share = row.shares[phase] if row.shares else 0.0
    return Text(_fit(f"{share:.0%}", 5), _PHASE_COLOURS[phase] if share >= 0.1 else "bright_black")


def _memory(mib: int) -> str:
    return "" if not mib else f"{mib} MiB" if mib < 10_000 else f"{mib / 1024:.1f} GiB"


def _spark(steps_ms: Sequence[float], top_ms: float) -> str:
    """Each step against the same scale on all ranks, so that an uneven one stands out."""
    return "".join(_SPARKS[min(7, int(8 * ms / top_ms))] for ms in steps_ms)


def _bar(shares: Sequence[float], width: int) -> Text:
    """As many letters of each phase as it has of the time; the letters are there where colours are not."""
    bar, done = Text(), 0.0
    for letter, colour, share in zip(_LETTERS, _PHASE_COLOURS, shares, strict=False):
        before, done = round(done * width), done + share
        bar.append(letter * (round(done * width) - before), colour)
    bar.append(" " * (width - len(bar)))
    return bar


def _fit(text: str, width: int) -> str:
    """In exactly that many columns."""
    return text[: abs(width)].ljust(-width) if width < 0 else text[:width].rjust(width)


# ------------------------------------------------------------------ cards


def card_lines(card: Mapping[str, Any], width: int | None = None) -> Iterator[Text]:
    """What a card says, in lines of `width`."""
    severity, texts = card["severity"], str(card["text"]).splitlines()
    texts += [f"to change that: {card['lever']}"] if card.get("lever") else []
    title, *more = _wrapped(f"{severity}: {card['title']}", width)
    head = Text(title, "bold")
    head.stylize(f"not bold {_COLOURS.get(severity, 'default')}", 0, len(severity) + 1)
    yield head
    yield from map(Text, [*more, *(line for text in texts for line in _wrapped(f"  {text}", width))])


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, max(width, len(indent) + 10), subsequent_indent=indent) or [""]


def _below(cards: Sequence[Mapping[str, Any]], width: int, room: int | None) -> list[Text]:
    """An empty line and the cards, in at most `room` lines; the last one says what is missing."""
    lines = [Text(""), *(line for card in cards for line in card_lines(card, width))]
    if room is not None and len(lines) > room:
        lines[max(0, room - 1) :] = [Text(f"... {len(lines) - room + 1} more lines", "bright_black")] * bool(room)
    return lines
