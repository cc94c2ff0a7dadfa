"""`lockstep watch [RUN]`: the report of a run while it goes on, in a browser and in this terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.cli.typed import RunFolder, read_command
from lockstep.observe.report.document import Document
from lockstep.observe.report.run_rows import Status
from lockstep.observe.report.server import LOOPBACK, PageServer
from lockstep.observe.report.source import find_run, record_in
from lockstep.observe.report.terminal import TerminalView
from lockstep.observe.report.writing import PAGE, LiveDocument, shown

_PERIOD_S = 1.0
_LINGER_S = 3.0  # an open page asks once more after the end
_ENDS = {
    "running": "goes on",
    "finished": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
    "unknown": "has ended",
}


@dataclass(frozen=True)
class WatchCommand:
    """Show a run while it goes on: its report as a live page, a line per rank here. Ends with the run, or by Ctrl-C."""

    run: RunFolder = None
    """The folder that `lockstep run` or `lockstep train` has named; by default the newest one in runs/."""
    port: int = 0
    """Of the page; 0 for a free one."""
    host: str = LOOPBACK
    """The interface it is served on: whoever reaches another one than loopback sees the run."""
    terminal: bool = True
    """Show the ranks here too."""


DEFAULTS = WatchCommand()


def watch(words: Sequence[str]) -> int:
    """`lockstep watch ...`; the exit code. Raises: ConfigError for a folder without a record, a port that is taken."""
    command = read_command(WatchCommand, "watch", words)
    folder = find_run(command.run, Path("runs"))
    status = show(folder, "Ctrl-C ends this, not the run", command)
    page = folder / PAGE
    where = f"report: {shown(page)}" if page.exists() else f"lockstep report {shown(folder)}"
    print(f"lockstep: the run {_ENDS[status]}; {where}")
    return 0


def show(folder: Path, hint: str, options: WatchCommand = DEFAULTS) -> Status:
    """Serve the page of the run in `folder`, and show its ranks here, to its end or Ctrl-C; how it stands then."""
    live, is_over = LiveDocument(folder), threading.Event()
    live()  # says whether there is anything

    def document() -> Document:
        found = live()
        if found["run"]["status"] != "running":
            is_over.set()
        return found

    server = PageServer(document, options.host, options.port)
    with server.serving(), suppress(KeyboardInterrupt):
        about = f"{server.address} ({hint})"
        print(f"lockstep: watch {shown(folder)} at {about}", flush=True)
        if options.terminal:
            TerminalView(record_in(folder), document, sys.stdout, about).show(is_over)
        while not is_over.wait(_PERIOD_S):
            document()
        if server.has_page.is_set():
            server.has_told_end.wait(_LINGER_S)
    return live()["run"]["status"]
