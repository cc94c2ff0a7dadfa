"""Reads the record of one rank back, line by line: see `run_record`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any, final

from lockstep.errors import ConfigError
from lockstep.observe.profile.notes import Note, read_note
from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.run_record import VERSION, Op, RankRecord, Start, Steps, is_listed

_WORD = ("group", "text", "site", "label", "bytes")
_Word = tuple[Any, ...]  # values of _WORD
_ROW = len(Op._fields) - len(_WORD)  # of an operation in a line: that of its word in place of the attempt
_op_of = partial(tuple.__new__, Op)  # as Op._make, without a call of Python: a record has a million of them
_NO_WORDS: Mapping[int, _Word] = {}


@final
class OtherFormat(ConfigError):
    """Another version of lockstep has written it: of what a line means there, nothing is known."""


@final
class RankReader:
    """Reads one rank's record, line by line, also while it is being written."""

    def __init__(self) -> None:
        self._starts: list[Start] = []
        self._words: dict[int, _Word] = {}
        self._kept: dict[int, Steps] = {}
        self._notes: list[Note] = []
        self._number = 0

    def feed(self, line: str) -> None:
        """The next whole line.  Raises: ConfigError where it is none of ours, OtherFormat where it may be one."""
        self._number += 1
        try:
            values = _object(line)
            kind = next(iter(values))
            if kind == "start":
                version = values.pop("start")
                if version != VERSION:
                    way = "upgrade lockstep, or " * (version > VERSION) + "use the version that wrote it"
                    what = f"line {self._number} begins a record of format {version}"
                    raise OtherFormat(f"{what}, and this lockstep knows format {VERSION}: {way}")
                start, types = Start(**values), Start.__annotations__
                kinds = {name: type(value).__name__ for name, value in vars(start).items()}
                if any(kinds[name] not in (of, of.replace("float", "int")) for name, of in types.items()):
                    raise ValueError("its values are not those of a process")
                self._starts.append(start)
                self._words = {}
            elif not self._starts:
                raise ValueError("there is no start before it")
            elif kind == "word":
                word = self._words[values["word"]] = tuple([values[name] for name in _WORD])
                if [type(each) for each in word] != [str, str, str, str, int]:
                    raise ValueError("it names no operation")
            elif kind == "step":
                steps = steps_of(values, self._words, self._starts[-1].attempt)
                if not (steps.whole and self._kept):  # else there were steps before it was started again
                    _replace(self._kept, steps)
            else:
                self._notes.append(read_note(kind, values, self._starts[-1].attempt))
        except OtherFormat:
            raise
        except (ValueError, TypeError, LookupError, OverflowError, StopIteration) as error:
            what = error if isinstance(error, ValueError) else repr(error)
            raise ConfigError(f"line {self._number} is none of a record: {what}") from error

    def record(self) -> RankRecord | None:
        """What was fed; None before the first start."""
        if not self._starts:
            return None
        lines = tuple([self._kept[step] for step in sorted(self._kept)])
        return RankRecord(self._starts[-1].rank, tuple(self._starts), lines, _valid(self._notes))


def _valid(notes: Sequence[Note]) -> tuple[Note, ...]:
    """Without those of steps that a later attempt has done again."""
    kept: list[Note] = []
    attempt, bound, lowest = "", math.inf, math.inf
    for one in reversed(notes):
        if one.attempt != attempt:
            attempt, bound = one.attempt, lowest
        if one.step is None or one.step < bound:
            kept.append(one)
            lowest = lowest if one.step is None else min(lowest, one.step)
    return tuple(reversed(kept))


def _object(text: str) -> dict[str, Any]:
    """Of a whole line. A process that was killed may leave half a line, and after it a start."""
    try:
        values = json.loads(text)
    except ValueError:
        at = text.rfind('{"start":')
        values = _object(text[at:]) if at > 0 else None
    if not isinstance(values, dict):
        raise ValueError(f"it is no JSON object, but {text[:24].rstrip()!a}")
    return values


def steps_of(values: dict[str, Any], words: Mapping[int, _Word] = _NO_WORDS, attempt: str = "") -> Steps:
    """What a line of steps says.  Raises: ValueError, TypeError, LookupError where it is none."""
    values = {"operations": 0, "at_us": 0, "wall_us": 0, "longest_us": 0, "count": 1} | values
    rows = values.pop("ops", [] if is_listed(int(values["step"])) else None)
    hidden = values.pop("hidden_us", None if rows is None else 0)
    phases, spans = values.pop("phases_us", (0,) * len(PHASES)), values.pop("spans", ())
    types = {*map(type, chain(values.values(), phases, (hidden or 0,), *spans, *rows or ()))}
    is_whole = len(phases) == len(PHASES) > max(spans, default=(0,))[0] and values["count"] > 0
    if not is_whole or types != {int} or {*map(len, spans)} - {2} or {*map(len, rows or ())} - {_ROW}:
        raise ValueError("its numbers are not those of a step")
    worded = [(words[row[0]], row) for row in rows or ()]
    ops = None if rows is None else tuple([_op_of((attempt, w[0], row[1], *w[1:], *row[2:])) for w, row in worded])
    spans = tuple([tuple(span) for span in spans])
    return Steps(**values, phases_us=tuple(phases), hidden_us=hidden, ops=ops, spans=spans, attempt=attempt)


def _replace(kept: dict[int, Steps], line: Steps) -> None:
    """A later attempt does steps again from where it began."""
    first = line.step - line.count + 1
    for step in list(takewhile(lambda step: step >= first, reversed(kept))):
        if kept[step].attempt != line.attempt:
            del kept[step]
    kept[line.step] = line
