"""Writes one rank's record of a run, off the rank's own thread: by the guard's, where there is one."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, final

from lockstep.comm.kernel import read_proc
from lockstep.observe.flight import Record
from lockstep.observe.profile.listed_operations import Records, Word, listing_of
from lockstep.observe.profile.notes import Later, filled, note_line
from lockstep.observe.profile.phases import PHASES, Step, spans_in
from lockstep.observe.profile.run_record import (
    SPANS_MAX,
    WHOLE_MAX,
    Start,
    Steps,
    file_of,
    is_listed,
    last_in_line,
    start_line,
    steps_line,
    steps_per_line,
    word_line,
)
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.stream_times import as_seen

_PERIOD_S = 0.25  # without a guard
_GPU_NS = 1_000_000_000  # that the last steps are waited for
_WEIGH_S = 1.0  # between two looks at the memory that the process has
_NOTES = 4096  # that nobody has written yet
_PAGE_MIB = os.sysconf("SC_PAGESIZE") / (1 << 20)


class _Pending(NamedTuple):
    """A note that is not written yet."""

    kind: str
    time_ns: int
    fields: Mapping[str, Any]
    later: Later | None


@final
class _Line:
    """Steps in a row that become one line."""

    def __init__(self, began_ns: int, until: int) -> None:
        self.began_ns, self.until = began_ns, until  # the last step of the line
        self.step = self.count = self.counted = self.on_gpu = 0
        self.longest_ns = self.tokens = self.samples = self.operations = 0
        self.spent_ns = [0] * len(PHASES)

    def add(self, step: Step) -> None:
        """The next one, or the next ones that are told as one."""
        first, end = step.operations
        self.spent_ns = [*map(add, self.spent_ns, step.summed_ns)]
        self.step = step.step
        self.count += step.together
        self.counted += step.together * step.is_brief
        self.on_gpu += step.together * (step.times is not None)
        self.longest_ns = max(self.longest_ns, step.longest_ns or step.ended_ns - step.began_ns)
        self.tokens += step.tokens
        self.samples += step.samples
        self.operations += end - first


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
        self.is_whole = False  # what ends now is all of a program that has ended no step
        self.path = file_of(folder, rank)
        self._records = records
        self._about = Start(
            rank, world_size, attempt, os.getpid(), socket.gethostname(), time_ns=0, clock_ns=time.monotonic_ns(),
            program=" ".join(sys.argv[:1]), device=device, flops_per_token=flops_per_token,
        )  # fmt: skip
        self._words: dict[Word, int] = {}
        self._line: _Line | None = None  # that is not written yet
        self._file = -1
        self._size, self._rss_mib, self._weighed_s = 0, 0, -_WEIGH_S
        self._notes: deque[_Pending] = deque(maxlen=_NOTES)
        self._valued: dict[str, int] = {}  # the last step of which there is a value of that name
        self._is_over = False
        self._window = window
        self._lock = threading.RLock()  # a finalizer of the program's may run within, and end the run
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
        if self._about.pid != os.getpid():
            return
        with self._lock:
            queue, lines = self.clock.steps, list[str]()
            if not (queue or self._notes):
                return
            if self._looked_s - self._weighed_s >= _WEIGH_S:
                self._rss_mib, self._weighed_s = _resident_mib(), self._looked_s
            if not self._size and queue:
                self._about = replace(self._about, clock_ns=min(self._about.clock_ns, queue[0].began_ns))
            for _ in range(len(queue)):
                step = queue.popleft()
                lines += self._add(step)
                if step.values is not None:
                    fields, later = step.values()
                    self._notes.append(_Pending("values", step.ended_ns, {"step": step.step, **fields}, later))
            self._append([*self._noted(), *lines])

    def _noted(self) -> Iterator[str]:
        """The lines of what was noted; what is not known yet stays."""
        for _ in range(len(self._notes)):
            one = self._notes.popleft()
            if one.kind == "values":
                one = one._replace(fields=self._thinned(one.fields))
                if len(one.fields) == 1:
                    continue
            more = {} if one.later is None else one.later()
            if more is None:
                self._notes.append(one)
            else:
                fields = filled(one.fields, more) if one.kind == "values" else {**one.fields, **more}
                yield note_line(one.kind, (one.time_ns - self._about.clock_ns) // 1000, fields)

    def close(self) -> None:
        """Append what is left and give back the file. Who is about to look in another thread finds nothing to do."""
        if self._about.pid != os.getpid():  # of a process that was forked off, maybe while that thread was writing
            return
        self.clock.until_ns = time.monotonic_ns() + _GPU_NS
        self.look()
        self.clock.until_ns = 0  # another one may go on with the clock
        with self._lock:
            self._append(self._line_so_far())
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            self._is_over = True

    def withdraw(self) -> None:
        """After `close`: take the file away, where nobody else has written to it."""
        if self._about.pid == os.getpid() and self.path.is_file() and self.path.stat().st_size == self._size:
            self.path.unlink()

    def _add(self, step: Step) -> Sequence[str]:
        """The lines that are complete with `step`."""
        line = self._line
        if line is not None and step.step == line.step + step.together:
            line.add(step)
            return self._line_so_far() if step.step == line.until else ()
        before = self._line_so_far()
        if is_listed(step.step) or step.step in self._window:
            return [*before, *self._listed(step)]
        until = last_in_line(step.step)
        is_cut = step.step < self._window.start <= until
        self._line = line = _Line(step.began_ns, self._window.start - 1 if is_cut else until)
        line.add(step)
        return [*before, *self._line_so_far()] if step.step == line.until else before

    def _line_so_far(self) -> Sequence[str]:
        line, self._line = self._line, None
        return () if line is None else [steps_line(self._told(line))]

    def _listed(self, step: Step) -> Iterable[str]:
        """Its line, after those of words that were not used before."""
        read = partial(self._read, step)
        listing = listing_of(step, self.clock, read, self._about.rank, is_whole=self.is_whole)
        rows: list[list[int]] = []
        for word, seq, *times_ns, waited_ns in listing.rows:
            if word not in self._words:
                self._words[word] = len(self._words)
                yield word_line(self._words[word], *word)
            times_us = [-1 if time_ns < 0 else (time_ns - step.began_ns) // 1000 for time_ns in times_ns]
            rows.append([self._words[word], seq, *times_us, waited_ns // 1000])
        alone = _Line(step.began_ns, step.step)
        alone.add(step)
        spans = spans_in(step, 2 * WHOLE_MAX if self.is_whole else SPANS_MAX)
        line = replace(
            self._told(alone),
            spans=tuple([(phase, (at - step.began_ns) // 1000) for phase, at in spans]),
            hidden_us=listing.hidden_ns // 1000,
            every=listing.every if listing.every > 1 else 0,
            unlisted=listing.unlisted,
        )
        yield steps_line(line, rows)

    def _read(self, step: Step, since: int, until: int) -> Sequence[Record]:
        """Of the flight record, with the times that the step has."""
        records = () if self._records is None else self._records(since, until)
        if step.times is None:
            return records
        ends = {number: ended_ns for number, _, ended_ns in step.waits}
        return [as_seen(record, step.times, ends) for record in records]

    def _told(self, line: _Line) -> Steps:
        phases_us = tuple([spent_ns // 1000 for spent_ns in line.spent_ns])
        return Steps(
            step=line.step,
            count=line.count,
            at_us=(line.began_ns - self._about.clock_ns) // 1000,
            wall_us=sum(phases_us),
            longest_us=line.longest_ns // 1000,
            phases_us=phases_us,
            tokens=line.tokens,
            samples=line.samples,
            rss_mib=self._rss_mib,
            cuda_mib=self.clock.peak_mib,
            operations=line.operations,
            counted=line.counted,
            on_gpu=line.on_gpu,
            whole=int(self.is_whole),
        )

    def _append(self, lines: Sequence[str]) -> None:
        if not lines or self._is_over:
            return
        try:
            text = "".join(lines)
            if self._file < 0:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                torch = sys.modules.get("torch")
                ahead_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(8))  # others may run in between
                threads = torch.get_num_threads() if torch else 1
                about = replace(self._about, time_ns=self._about.clock_ns + ahead_ns, threads=threads)
                text = start_line(about) + text
            rest = text.encode()
            while rest:  # a disk that is nearly full takes a part: the next call says so
                written = os.write(self._file, rest)
                self._size, rest = self._size + written, rest[written:]
        except OSError as error:  # training goes on
            self._is_over = True
            who = f"rank {self._about.rank} is not recorded any more"
            sys.stderr.write(f"lockstep: {who}: {self.path}: {error.strerror}\n")


def _resident_mib() -> int:
    """Memory of this process."""
    words = read_proc("/proc/self/statm").split()
    return round(int(words[1]) * _PAGE_MIB) if words else 0  # no Linux
