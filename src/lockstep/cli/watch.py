"""`lockstep watch [RUN]`: the report of a run while it goes on, in a browser and in this terminal."""

from __future__ import annotations

import sys
import threading
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.launch.words import RUN_FOLDER, Words
from lockstep.observe.report.document import Document
from lockstep.observe.report.run_rows import Status
from lockstep.observe.report.server import LOOPBACK, PageServer
from lockstep.observe.report.source import find_run, record_in
from lockstep.observe.report.terminal import TerminalView
from lockstep.observe.report.writing import PAGE, LiveDocument, shown

_PERIOD_S = 1.0
_LINGER_S = 3.0  # an open page asks once more after the end
_ENDS = {"running": "goes on", "finished": "has finished", "failed": "has failed", "stopped": "was stopped"}


def watch(words: Sequence[str]) -> int:
    """`lockstep watch ...`; the exit code. Raises: ConfigError for a folder without a record, a port that is taken."""
    parser = Words(prog="lockstep watch", description=f"{__doc__} Ends with the run, or by Ctrl-C.", allow_abbrev=False)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=RUN_FOLDER)
    parser.add_argument("--port", type=int, default=0, help="of the page; 0 for a free one (default: 0)")
    seen = f"the interface it is served on: whoever reaches another one sees the run (default: {LOOPBACK})"
    parser.add_argument("--host", default=LOOPBACK, help=seen)
    parser.add_argument("--terminal", action=BooleanOptionalAction, default=True, help="show the ranks here too")
    args = parser.read(words)
    folder = find_run(args.run, Path("runs"))
    status = show(folder, "Ctrl-C ends this, not the run", args.host, args.port, has_rows=args.terminal)
    where = f"report: {shown(folder / PAGE)}" if (folder / PAGE).exists() else f"lockstep report {shown(folder)}"
    ended = f"the run {_ENDS.get(status, 'has ended')}; {where}" if folder.is_dir() else f"{shown(folder)} was removed"
    print(f"lockstep: {ended}")
    return int(not folder.is_dir())


def show(folder: Path, hint: str, host: str = LOOPBACK, port: int = 0, *, has_rows: bool = True) -> Status:
    """Serve the page of the run in `folder`, and show its ranks here, to its end or Ctrl-C; how it stands then."""
    live, is_over = LiveDocument(folder), threading.Event()
    live()  # says whether there is anything

    def document() -> Document:
        found = live()
        if found["run"]["status"] != "running" or not folder.is_dir():
            is_over.set()
        return found

    server = PageServer(document, host, port)
    with server.serving(), suppress(KeyboardInterrupt):
        about = f"{server.address} ({hint})"
        print(f"lockstep: watch {shown(folder)} at {about}", flush=True)
        if has_rows:
            TerminalView(record_in(folder), document, sys.stdout, about).show(is_over)
        while not is_over.wait(_PERIOD_S):
            document()
        if server.has_page.is_set():
            server.has_told_end.wait(_LINGER_S)
    return live()["run"]["status"]
