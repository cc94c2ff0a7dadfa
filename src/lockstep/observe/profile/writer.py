"""Writes one rank's record of a run, off the rank's own thread: by the guard's, where there is one."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

from lockstep.observe.flight import Record
from lockstep.observe.profile.notes import Later, note_line
from lockstep.observe.profile.run_record import (
    OPERATIONS_MAX,
    SPANS_MAX,
    TAIL_GROUP,
    Start,
    Steps,
    file_of,
    is_listed,
    start_line,
    steps_line,
    steps_per_line,
    word_line,
)
from lockstep.observe.profile.step_clock import TAIL, Step, StepClock, Wait, outermost, spans_in
from lockstep.observe.profile.torch_phases import forwards_found
from lockstep.observe.scene import read_message
from lockstep.observe.torch_groups import FROM_CPP

_PERIOD_S = 0.25  # without a guard
_NOTES = 4096  # that nobody has written yet
_TAILS_MAX = 64  # backward passes of one step that are told apart
_MESSAGES_MAX = 64  # from one rank to another in one step that are listed: if they are more, none is
_PAGE_MIB = os.sysconf("SC_PAGESIZE") / (1 << 20)

Records = Callable[[int, int], Sequence[Record]]  # of the flight record, from a number to a number
Item = TypeVar("Item")
Word = tuple[str, str, str, str]  # group, text, site, label


def attempt_of(environ: Mapping[str, str]) -> str:
    """A name for this start of this run, equal on all its ranks."""
    name = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
    return f"{name}/{environ.get('TORCHELASTIC_RESTART_COUNT') or environ.get('SLURM_RESTART_COUNT') or 0}"


class _Pending(NamedTuple):
    """A note that is not written yet."""

    kind: str
    time_ns: int
    fields: Mapping[str, Any]
    later: Later | None


@final
class RunWriter:
    """Takes the steps that `clock` has ended, and notes, and appends them to the file of this rank.

    `note`, `look` and `close` may be called from any thread.
    """

    def __init__(
        self,
        folder: Path,
        clock: StepClock,
        *,
        rank: int,
        world_size: int,
        attempt: str,
        records: Records | None = None,
        device: str = "cpu",
        flops_per_token: float = 0.0,
        window: range = range(0),
    ) -> None:
        """records: None where there is no flight record, and no thread that calls `look`.

        window: steps whose operations are listed in any case.
        """
        self.clock = clock
        self.path = file_of(folder, rank)
        self._records = records
        self._about = rank, world_size, attempt, device, flops_per_token
        self._words: dict[Word, int] = {}
        self._pending: list[Step] = []  # that become one line
        self._file = -1
        self._opened_ns = time.monotonic_ns()
        self._start_ns = self._size = 0
        self._notes: deque[_Pending] = deque(maxlen=_NOTES)
        self._valued: dict[str, int] = {}  # the last step of which there is a value of that name
        self._is_broken = False
        self._window = window
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._looked_s = time.monotonic()

    def look_now_and_then(self) -> None:
        """`look`, where the last time is a while ago."""
        if time.monotonic() - self._looked_s > _PERIOD_S:
            self.look()

    def note(self, kind: str, later: Later | None = None, /, **fields: Any) -> None:
        """Append a note of `notes.py` at the next look. Of values only as many are kept as there are lines of steps.

        later: more fields, made by who looks; None as long as they are not known. Of values, it fills those given as
            None.
        """
        self._notes.append(_Pending(kind, time.monotonic_ns(), fields, later))

    def _thinned(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        step: int = fields["step"]
        kept, apart = {"step": step}, steps_per_line(step)
        for name, value in fields.items():
            if name != "step" and not 0 < step - self._valued.get(name, -apart) < apart:
                kept[name], self._valued[name] = value, step
        return kept

    def look(self) -> None:
        """Append what has ended since the last call."""
        self._looked_s = time.monotonic()
        if not (self.clock.steps or self._notes) or self._pid != os.getpid():
            return
        memory = _memory_mib()
        with self._lock:
            steps = list(map(forwards_found, _taken(self.clock.steps)))
            if not self._start_ns:
                self._start_ns = min([self._opened_ns, *(step.began_ns for step in steps[:1])])
            lines = [line for step in steps for line in self._add(step, memory)]
            self._append([*self._noted(), *lines])

    def _noted(self) -> Iterator[str]:
        """The lines of what was noted; what is not known yet stays."""
        unknown: list[_Pending] = []
        for one in _taken(self._notes):
            if one.kind == "values":
                one = one._replace(fields=self._thinned(one.fields))
                if len(one.fields) == 1:
                    continue
            more = {} if one.later is None else one.later()
            if more is None:
                unknown.append(one)
            else:
                fields = _filled(one.fields, more) if one.kind == "values" else {**one.fields, **more}
                yield note_line(one.kind, (one.time_ns - self._start_ns) // 1000, fields)
        self._notes.extend(unknown)

    def close(self) -> None:
        """Append what is left and give back the file."""
        self.look()
        with self._lock:
            if self._pid == os.getpid() and self._pending:
                self._append([self._flush(_memory_mib())])
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def withdraw(self) -> None:
        """After `close`: take the file away, where nobody else has written to it."""
        if self._pid == os.getpid() and self.path.is_file() and self.path.stat().st_size == self._size:
            self.path.unlink()

    def _add(self, step: Step, memory: tuple[int, int]) -> Iterable[str]:
        """The lines that are complete with `step`."""
        if is_listed(step.step) or step.step in self._window:
            if self._pending:
                yield self._flush(memory)
            yield from self._listed(step, memory)
            return
        self._pending.append(step)
        if step.step % steps_per_line(step.step) == 0 or is_listed(step.step + 1):
            yield self._flush(memory)

    def _flush(self, memory: tuple[int, int]) -> str:
        steps, self._pending = self._pending, []
        return steps_line(self._line(steps, memory))

    def _listed(self, step: Step, memory: tuple[int, int]) -> Iterable[str]:
        records = [] if self._records is None else self._records(*step.operations)
        stood = outermost(step.waits, step.began_ns)
        timed = [record for record in records if record.text != FROM_CPP]  # of the others a note has the sum
        rows, new, about = self._rows(step, stood, timed)
        yield from new
        waits = [(wait.began_ns, wait.ended_ns) for wait in stood]
        opened = [(record.entered_ns, record.left_ns or step.ended_ns) for record in timed]
        inside = step.began_ns, step.ended_ns
        hidden_ns = covered_ns([*opened, *waits], *inside) - covered_ns(waits, *inside)
        spans = tuple((phase, (at - step.began_ns) // 1000) for phase, at in spans_in(step, SPANS_MAX))
        line = self._line([step], memory)
        line = replace(line, spans=spans, hidden_us=hidden_ns // 1000, **about)
        yield steps_line(line, rows)

    def _rows(
        self, step: Step, stood: Sequence[Wait], records: Sequence[Record]
    ) -> tuple[list[list[int]], list[str], dict[str, int]]:
        """(a row for each operation, lines of words that were not used before, fields of the step about the rows)."""
        rows: list[list[int]] = []
        new: list[str] = []
        collectives = [record for record in records if not record.is_message]
        every = 1 << max(0, -(-len(collectives) // OPERATIONS_MAX) - 1).bit_length()
        waits = waits_by_number(stood)
        listed = [record for record in collectives if record.seq % every == 0]  # all ranks list the same ones
        for record in (*listed, *messages_in(records, self._about[0], step.step)):
            began_ns, waited_ns = waits.get(record.number, (-1, 0))
            word = record.group, record.text, record.site, record.label
            times = record.entered_ns, record.left_ns or step.ended_ns, began_ns
            rows.append(self._row(word, record.seq, step.began_ns, times, waited_ns, new))
        about = {"every": every if every > 1 else 0, "unlisted": len(records) - len(rows)}
        tails = [wait for wait in stood if wait.number == TAIL][:_TAILS_MAX]
        for number, tail in enumerate(tails):
            word = TAIL_GROUP, "all that DistributedDataParallel waits for", self.clock.tail_site, ""
            times = tail.began_ns, tail.ended_ns, tail.began_ns
            seq = step.step * _TAILS_MAX + number
            rows.append(self._row(word, seq, step.began_ns, times, tail.ended_ns - tail.began_ns, new))
        return rows, new, about

    def _row(
        self, word: Word, seq: int, zero_ns: int, times: tuple[int, int, int], waited_ns: int, new: list[str]
    ) -> list[int]:
        number = self._words.get(word)
        if number is None:
            number = self._words[word] = len(self._words)
            new.append(word_line(number, *word))
        entered, left, began = [-1 if time_ns < 0 else (time_ns - zero_ns) // 1000 for time_ns in times]
        return [number, seq, entered, left, began, waited_ns // 1000]

    def _line(self, steps: Sequence[Step], memory: tuple[int, int]) -> Steps:
        phases = [sum(spent_ns) // 1000 for spent_ns in zip(*(step.spent_ns() for step in steps), strict=True)]
        return Steps(
            step=steps[-1].step,
            count=len(steps),
            at_us=(steps[0].began_ns - self._start_ns) // 1000,
            wall_us=sum(phases),
            longest_us=max(step.ended_ns - step.began_ns for step in steps) // 1000,
            phases_us=tuple(phases),
            tokens=sum(step.tokens for step in steps),
            samples=sum(step.samples for step in steps),
            rss_mib=memory[0],
            cuda_mib=memory[1],
            operations=sum(step.operations[1] - step.operations[0] for step in steps),
        )

    def _append(self, lines: Sequence[str]) -> None:
        if not lines or self._is_broken:
            return
        try:
            text = "".join(lines)
            if self._file < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                text = start_line(self._start()) + text
            self._size += os.write(self._file, text.encode())
        except OSError as error:  # training goes on
            self._is_broken = True
            sys.stderr.write(f"lockstep: rank {self._about[0]} is not recorded any more: {error}\n")

    def _start(self) -> Start:
        rank, world_size, attempt, device, flops_per_token = self._about
        torch = sys.modules.get("torch")
        lag_ns = time.monotonic_ns() - self._start_ns
        return Start(
            rank=rank,
            world_size=world_size,
            attempt=attempt,
            pid=self._pid,
            host=socket.gethostname(),
            time_ns=time.time_ns() - lag_ns,
            clock_ns=self._start_ns,
            program=" ".join(sys.argv[:1]),
            device=device,
            threads=1 if torch is None else torch.get_num_threads(),
            flops_per_token=flops_per_token,
        )


def _taken(queue: deque[Item]) -> Iterator[Item]:
    while queue:
        yield queue.popleft()


def _filled(fields: Mapping[str, Any], more: Mapping[str, float]) -> dict[str, float]:
    """Seven digits of each: as many as a curve shows, and a float32 has."""
    known = {name: more.get(name) if value is None else value for name, value in fields.items()}
    return {name: v if isinstance(v, int) else float(f"{v:.7g}") for name, v in known.items() if v is not None}


def messages_in(records: Iterable[Record], rank: int, step: int) -> Iterator[Record]:
    """Those that are known by both ranks: as of a group of these two, with numbers that are equal on both."""
    ways: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        message = read_message(record.text) if record.is_message else None
        if message is not None and message.peer is not None:
            ends = (rank, message.peer) if message.is_send else (message.peer, rank)
            ways["{} {} > {}".format(record.group, *ends)].append(record)
    for way, ones in ways.items():
        for number, one in enumerate(ones if len(ones) <= _MESSAGES_MAX else ()):
            yield one._replace(group=way, seq=step * _MESSAGES_MAX + number)


def waits_by_number(waits: Iterable[Wait]) -> dict[int, tuple[int, int]]:
    """Of each operation that was waited for: when that began, and for how long in all."""
    found: dict[int, tuple[int, int]] = {}
    for wait in waits:
        began_ns, waited_ns = found.get(wait.number, (wait.began_ns, 0))
        found[wait.number] = began_ns, waited_ns + wait.ended_ns - wait.began_ns
    return found


Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time, in spans that do not touch, by time."""
    found: list[Span] = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(ended, found[-1][1])
        elif ended > began:
            found.append((began, ended))
    return found


def covered_ns(spans: Iterable[Span], began: int, ended: int) -> int:
    """How much of the time from `began` to `ended` lies in at least one of `spans`."""
    return sum(max(0, min(ended, last) - max(began, first)) for first, last in merged(spans))


def _memory_mib() -> tuple[int, int]:
    """(resident memory of this process, most that torch has had of a CUDA device)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux
        pages = 0
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    used = cuda.max_memory_allocated() if cuda is not None and cuda.is_initialized() else 0
    return round(pages * _PAGE_MIB), used >> 20
