"""`lockstep report [RUN]`: the record of a run as one HTML file, and what matters most of it in words."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.errors import ConfigError
from lockstep.launch.words import RUN_FOLDER, Words, say, tell
from lockstep.observe.profile.chrome_trace import merge_files
from lockstep.observe.profile.window import PROFILE, RUN, read_window
from lockstep.observe.report.source import RunReader
from lockstep.observe.report.writing import PAGE, document_in, shown, write_page

_CARDS_MAX, _LINES_MAX = 6, 12
_LIMIT_S = 30  # a run that is over ends within this time, however large its record


def report(words: Sequence[str]) -> int:
    """`lockstep report ...`; the exit code. Raises: ConfigError for a folder without a record."""
    parser = Words(prog="lockstep report", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=f"{RUN_FOLDER}. It may still go on")
    parser.add_argument("--out", type=Path, metavar="PATH", help=f"the file; by default {PAGE} in the run's folder")
    args = parser.read(words)
    folder, document = document_in(args.run)
    path = args.out or folder / PAGE
    write_page(document, path)
    sys.stdout.write("".join(line + "\n" for line in describe(document)))
    sys.stdout.write(f"\nreport   {shown(path)}\n")
    return 0


def describe(document: dict[str, Any]) -> Iterator[str]:
    """How the run stands and its first cards."""
    run = document["run"]
    ranks = f"{run['world_size']} rank{'' if run['world_size'] == 1 else 's'}"
    starts = f", {len(run['attempts'])} starts" if len(run["attempts"]) > 1 else ""
    yield f"run      {run['id']}: {run['status']}, {ranks}, {run['steps']} steps, {run['wall_s']:.1f} s{starts}"
    for card in document["cards"][:_CARDS_MAX]:
        yield f"{card['severity']:8} {card['title']}"
        lines = card["text"].splitlines()
        yield from (f"         {line}" for line in lines[:_LINES_MAX])
        if len(lines) > _LINES_MAX:
            yield f"         ... and {len(lines) - _LINES_MAX} lines more"
        if card["lever"]:
            yield f"         to change that: {card['lever']}"
    if len(document["cards"]) > _CARDS_MAX:
        yield f"... and {len(document['cards']) - _CARDS_MAX} more in the report"


def tell_record(environ: Mapping[str, str], *, is_quiet: bool) -> None:
    """Of a run that has ended here: merge the windows of torch.profiler, write the report, and say where they lie.

    Whatever is wrong with the record is said too, and never a reason to fail.
    is_quiet: say no more than where the report lies, because the run has failed.
    """
    place = Path(environ.get(RUN) or os.devnull)
    if not place.is_dir():
        return
    try:
        with _ending_after(_LIMIT_S):
            folder, document = document_in(place)
            write_page(document, folder / PAGE)
            trace = _merged(place, environ.get(PROFILE, ""))
    except ConfigError as error:
        say(f"no report: {error}")
    except Exception as error:  # noqa: BLE001 (the run is over, and its end is not ours)
        say(f"no report of {place}: {type(error).__name__}: {error}")
    else:
        begins_line = is_quiet or not os.path.sameopenfile(1, 2)  # else what a rank printed last may have no end
        tell(("" if begins_line else "\n") + ("" if is_quiet else trace))
        say(f"report: {shown(folder / PAGE)}")


def _merged(place: Path, window: str) -> str:
    """Where the merged trace lies, or why there is none; "" where there was no window."""
    steps = read_window(window)
    found = merge_files(RunReader(place).read().run, steps) if steps else None
    if found is None:
        return f"lockstep: no trace: no rank has come to step {steps.start}\n" if steps else ""
    path, ranks, residual_us = found
    return f"lockstep: trace of {ranks} ranks in {shown(path)}, collectives end within {residual_us:.0f} us\n"


@contextmanager
def _ending_after(limit_s: int) -> Iterator[None]:
    """Within, TimeoutError after so long. Of the main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes longer than {limit_s} s: `lockstep report` has the time")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
