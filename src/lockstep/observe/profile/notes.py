"""What a rank writes down of a run beside its steps, and who takes it: the record that this thread has open.

A line of `rank-<n>.jsonl` is {kind: subject, "at_us": when, ...}:

    {"facts": {...}}       once per start: command, versions, variables, config
    {"values": step, ...}  numbers of a step: loss, lr, what `lockstep.log` is given
    {"layout": step, ...}  what this rank holds, after its first step
    {"buckets": step, ...} what DistributedDataParallel says of the backward before: count, bytes, those of the last
                           one, and hidden_us
    {"coverage": epoch}    which samples of an epoch this rank was trained on
    {"replicas": step}     whether the ranks were equal
    {"finding": {...}}     what the guard said

No torch is imported here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from lockstep.observe.profile.session import Profile

SUBJECTS: Final = {
    "facts": "",  # the line has a dict of its own
    "finding": "",
    "values": "step",
    "layout": "step",
    "buckets": "step",
    "replicas": "step",
    "coverage": "epoch",
}
_BUCKETS = ("count", "bytes", "hidden_us")  # that such a note has
_OF_STEPS = ("values", "layout", "buckets", "replicas")  # done again by a later attempt

Later = Callable[[], Mapping[str, Any] | None]

_encoded = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one for every call
_takers: dict[int, Profile] = {}  # by thread: a rank is a process, and in tests also a thread


class Note(NamedTuple):
    """One of them."""

    kind: str
    at_us: int  # since the start of the attempt, like `Steps.at_us`
    attempt: str
    fields: Mapping[str, Any]  # the subject too, by its name

    @property
    def step(self) -> int | None:
        """The step that it is of, where a later attempt that does that step again makes it void."""
        return self.fields["step"] if self.kind in _OF_STEPS else None


def note(kind: str, later: Later | None = None, /, **fields: Any) -> None:
    """Write that down, with the record that this thread has open; without one, nothing happens.

    It takes microseconds: another thread writes it. later: more fields, made there; None as long as they are not known.
    """
    taker = _taker()
    if taker is not None:
        taker.note(kind, later, **fields)


def log_values(step: int | None, values: Mapping[str, Any]) -> None:
    """The user's own numbers of a step, or CUDA tensors; None is the last step that has ended."""
    taker = _taker()
    if taker is not None:
        taker.log(step, values)


def takes_notes() -> bool:
    """Whether this thread has a record open."""
    return _taker() is not None


def _taker() -> Profile | None:
    return _takers.get(get_ident()) or _takers.get(main_thread().ident or 0)


def take_notes(taker: Profile) -> Callable[[], None]:
    """From now on those of this thread are given to `taker`. The result ends that."""
    me = get_ident()
    _takers[me] = taker

    def end() -> None:
        if _takers.get(me) is taker:
            del _takers[me]

    return end


def note_line(kind: str, at_us: int, fields: Mapping[str, Any]) -> str:
    """As `read_note` reads it."""
    name = SUBJECTS[kind]
    rest = {key: value for key, value in fields.items() if key != name} if name else {}
    return json_line({kind: fields[name] if name else fields, "at_us": at_us, **rest})


def json_line(values: Mapping[str, Any]) -> str:
    """Of a record, as short as JSON can be."""
    return _encoded(values) + "\n"


def filled(fields: Mapping[str, Any], more: Mapping[str, float]) -> dict[str, float]:
    """Values of a step, with those that came later. Seven digits of each: as a curve shows, and a float32 has."""
    known = {name: more.get(name) if value is None else value for name, value in fields.items()}
    return {name: v if isinstance(v, int) else float(f"{v:.7g}") for name, v in known.items() if v is not None}


def read_note(kind: str, values: dict[str, Any], attempt: str) -> Note:
    """The note in a line.  Raises: KeyError where it has no such kind, or lacks something; ValueError."""
    name, subject, at_us = SUBJECTS[kind], values.pop(kind), values.pop("at_us")
    said = [*(values[n] for n in _BUCKETS), values.get("last_bytes", 0)] if kind == "buckets" else []
    numbers = [at_us, *([subject] if name else ()), *said]
    is_whole = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    if not is_whole or not (name or isinstance(subject, dict)):
        raise ValueError(f"its {kind} are none")
    return Note(kind, at_us, attempt, {name: subject, **values} if name else subject)
