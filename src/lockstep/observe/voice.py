"""What a guard says: every thing once, on standard error and to whoever keeps it; also that it fails itself.

The evidence of a finding is a folder of text: for every rank where it stands and what it did last.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, TextIO, final

from lockstep.observe.endings import goes_on, sequel, stalled_by
from lockstep.observe.flight import Record
from lockstep.observe.scene import Records
from lockstep.observe.status import Sight, Stalled
from lockstep.observe.wording import STANDSTILLS, Finding, step_after

_BREATH_S = 1e-6  # the kernel makes 50 times that of it: as long as it takes to wake who waits
_GO_S = 3e-4  # and after so long it is taken: what wakes up too often is in the way, too
_SHOWN = 16  # of what was said


@final
class Spared:
    """Around what may fail: `failed` is told, and the error goes no further. As a generator it costs thrice."""

    __slots__ = ("_after", "_failed", "_what")

    def __init__(
        self, failed: Callable[[str, Exception], None], what: str, after: Callable[[], None] | None = None
    ) -> None:
        """after: called at the end in any case."""
        self._failed, self._what, self._after = failed, what, after

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        is_spared = isinstance(error, Exception)  # of our own, or of what we call
        if is_spared:
            self._failed(self._what, error)
        if self._after is not None and (is_spared or error is None):
            self._after()
        return is_spared


@final
class Voice:
    """Of one rank's guard."""

    def __init__(self, rank: int, evidence: str, records_of: Records) -> None:
        self.on_finding: list[Callable[[Finding], None]] = []  # called with what this rank says
        self.stalled: Stalled | None = None  # what it said last of ranks that stand still
        self.failures = 0  # of parts of the guard
        self.looker = 0  # the thread that looks now and then
        self._breathed_s = 0.0
        self._rank, self._evidence, self._records_of = rank, evidence, records_of
        self._said: dict[str, None] = {}  # keys of findings, in their order

    def is_news(self, found: Finding, sights: Mapping[int, Sight]) -> bool:
        """Whether no rank has said this yet."""
        return found.key not in self._said and not any(found.key in one.status.said for one in sights.values())

    def shown(self) -> dict[str, Any]:
        """Of this, in a status: what other ranks need not say."""
        return {"stalled": self.stalled, "said": tuple(self._said)[-_SHOWN:]}

    def marked(self, found: Finding) -> Finding:
        """`found`, to be said here."""
        return replace(self._with_place(found), said_to=f"{place_of(sys.stderr)} {self._rank}")

    def _with_place(self, found: Finding) -> Finding:
        """`found`, which names no folder of evidence where none can be written, but why."""
        place = next(path for path in Path(self._evidence, "it").parents if os.path.exists(path))
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(bytes(1 << 14))
        except OSError as error:
            why = f"No evidence could be kept in {self._evidence}: {error.strerror}"
            return replace(found, text=re.sub("^Evidence: .*", lambda _: why, found.text, flags=re.MULTILINE))
        return found

    def say(self, found: Finding, text: str = "") -> None:
        """Whatever becomes of one way, the others are gone."""
        self._said[found.key] = None
        self._write(text or found.text)
        self.call(self.on_finding, found)

    def say_if_news(self, found: Finding | None, sights: Mapping[int, Sight]) -> None:
        """Unless a rank has said it."""
        if found is not None and self.is_news(found, sights):
            self.say(found)

    def say_with_evidence(self, found: Finding, sights: Mapping[int, Sight]) -> None:
        """Also what may pass; as the end of what was said before, where it is that."""
        here, found = place_of(sys.stderr), self._with_place(found)
        self.say(found, sequel(found, self.stalled, sights, here))
        if found.kind in STANDSTILLS:
            self.stalled = stalled_by(found, sights, here)
        if self._evidence:
            with self.spared("keeping the evidence"):
                keep_evidence(self._evidence, found, sights, self._records_of)

    def say_if_over(self, sights: Mapping[int, Sight]) -> None:
        """That ranks which stood still go on."""
        if self.stalled is not None and (over := goes_on(self.stalled, sights)):
            self.stalled = None
            self._write(over)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it, it is closed, there is none
            sys.stderr.write(text.rstrip("\n") + "\n")
            sys.stderr.flush()

    def spared(self, what: str) -> Spared:
        """An error within is said once, and goes no further: neither the run nor the rest of its guard ends by it."""
        return Spared(self.failed, what)

    def failed(self, what: str, error: Exception) -> None:
        """Of the guard itself."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        lines = (
            f"lockstep: GUARD of rank {self._rank}: {what} failed: {type(error).__name__}: {error} ({where}).",
            "  The run goes on, and all else is watched; this is tried again with every look.",
            "  Until it succeeds, what it would find stays unsaid. Please report these lines: the error is ours.",
        )
        self.failures += 1
        found = Finding("guard", (self._rank,), "\n".join(lines), is_certain=False, key=f"guard:{where}")
        self.say_if_news(found, {})

    def part(self, what: str) -> Spared:
        """A part of a look, `spared`. The `looker` takes a breath after it, if the last one was a while ago.

        For as long as it goes on in one go, it may hold the interpreter, for which the rank's own thread waits.
        """
        return Spared(self.failed, what, self._breathe)

    def _breathe(self) -> None:
        if time.monotonic() - self._breathed_s > _GO_S and get_ident() == self.looker:
            time.sleep(_BREATH_S)
            self._breathed_s = time.monotonic()

    def call(self, hooks: Sequence[Callable[..., None]], *told: object) -> None:
        """Each of them, whatever becomes of the others."""
        for hook in tuple(hooks):
            with self.part(f"its {getattr(hook, '__qualname__', 'hook')}"):
                hook(*told)

    def as_shown(self, error: BaseException, found: Finding | None) -> BaseException:
        """What to print for `error` at this rank's end: its first line, where the same output has all of it already."""
        here = place_of(sys.__stderr__)  # torch prints by way of a `sys.stderr` of its own
        if found is None or not here or found.said_to.rpartition(" ")[0] != here or str(error) != found.words:
            return error
        head = str(error).partition("\n")[0]
        shown = type(error).__new__(type(error))
        shown.args = (f"{head}\n  (all of it: see lockstep's report in this output)",)
        shown.__cause__, shown.__suppress_context__ = error.__cause__, error.__suppress_context__
        shown.__context__ = error.__context__
        return shown.with_traceback(error.__traceback__)


def place_of(stream: TextIO | None) -> str:
    """Equal for ranks whose messages go to one terminal, file or pipe."""
    try:
        place = os.fstat(stream.fileno() if stream is not None else -1)
    except (OSError, ValueError):  # it is no file
        return ""
    return f"{socket.gethostname()} {place.st_dev} {place.st_ino}"


def keep_evidence(folder: str, finding: Finding, sights: Mapping[int, Sight], records_of: Records) -> None:
    """Write finding.txt, a file for each rank that is seen, and this process's stacks, as far as there is room."""
    place = Path(folder)
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        with open(place / "finding.txt", "a", errors="backslashreplace") as file:
            file.write(finding.text + "\n\n")
        for rank, sight in sights.items():
            text = "\n".join(_lines(sight, records_of(rank))) + "\n"
            (place / f"rank-{rank}.txt").write_text(text, errors="backslashreplace")
        with open(place / f"threads-of-pid-{os.getpid()}.txt", "w") as file:
            faulthandler.dump_traceback(file, all_threads=True)


def _lines(sight: Sight, records: Sequence[Record]) -> list[str]:
    status = sight.status
    gone = ", its process has ended" if sight.is_gone else ""
    return [
        f"rank {status.rank}, pid {status.pid} on {status.host}, {step_after(status.step)}, {status.state}{gone}",
        f"as of {sight.age_s:.1f} s ago; at this place without moving for {status.unmoved_s:.1f} s:",
        *(f"  {line}" for line in reversed(status.stack)),
        "last operations, the newest last:",
        *(f"  {line_of(record)}" for record in records),
    ]


def line_of(record: Record) -> str:
    """`#6503 step 812 world seq 6503  all_reduce float32 [262144] sum  train.py:88 train_step  1.200 ms`"""
    took = f"{(record.left_ns - record.entered_ns) / 1e6:.3f} ms" if record.left_ns else "under way"
    label = f"  {record.label!r}" if record.label else ""
    place = f"#{record.number} {step_after(record.step)} {record.group} seq {record.seq}"
    return f"{place}  {record.text}  {record.site}{label}  {took}"
