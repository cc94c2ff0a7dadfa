"""`launch.jsonl`, beside the records of the ranks: what the launcher did, and how each start of the run ended.

    {"launch": id, "command": [...], "flags": {...}, "host", "pid"}   once per launcher
    {"attempt": name, "world_size": n, "flights": folder}             a start of the ranks, which have that name too
    {"found": text}                                                   in the flight records of ranks that are dead
    {"left": name, "ranks": [...]}                                    the step that was not ended: see `Moment`
    {"record": folder}                                                written by a rank that records there instead
    {"ended": name, "code": n, "causes": [text, ...]}                 the cause of all first
    {"elsewhere": name, "finding": {...}}             what a guard of another machine has found in it
    {"over": id, "code": n}                                           the exit code of the run

Each has a "time_ns" since the epoch. A run that was killed with its launcher lacks the last ones.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from lockstep.launch.ended import Ended, describe, first_failure
from lockstep.launch.words import say
from lockstep.launch.worker import REQUEUE
from lockstep.observe.profile.run_facts import is_secret, without_secrets
from lockstep.observe.profile.window import LAUNCH
from lockstep.observe.report.open_step import moments_in


@final
class LaunchLog:
    """One launcher's lines."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        command: Sequence[str] = (),
        flags: Mapping[str, Any] | None = None,
        is_ours: bool = True,
    ) -> None:
        """folder: None where the run leaves no record, or does no more. flags: that were given, and what they say.

        is_ours: else a rank makes the folder, and may move an older one away before.
        """
        self.folder = folder
        self._command = without_secrets(command)
        self._flags = {name: "..." if is_secret(name) else value for name, value in (flags or {}).items()}
        self._waits = not is_ours
        self._began_ns = time.time_ns()
        self._lines: list[str] = []
        self._id = f"{socket.gethostname()}/{os.getpid()}/{self._began_ns}"

    def begin(self) -> None:
        """The launcher begins."""
        about = {"command": self._command, "flags": self._flags}
        self._write("launch", self._id, **about, host=socket.gethostname(), pid=os.getpid())

    def attempt(self, name: str, world_size: int, flights: Path) -> None:
        """The ranks are about to be started."""
        self._write("attempt", name, world_size=world_size, flights=str(flights))

    def ended(
        self, name: str, ended: Sequence[Ended], found: str = "", flights: Path | None = None, *, elsewhere: str = ""
    ) -> None:
        """All processes of this machine have ended.

        found: what their flight records, in `flights`, show. elsewhere: how the run failed on another machine.
        """
        if found:
            self._write("found", found)
        first = first_failure(ended)
        is_cut = any(one.exit_code not in (0, REQUEUE) for one in ended)
        if is_cut and flights is not None and self.folder is not None:
            others = {one.rank for one in ended if one.was_ended}
            self._write("left", name, ranks=[moment.told(moment.rank in others) for moment in moments_in([flights])])
        failed = [] if first is None else [first, *(one for one in ended if one.failed and one is not first)]
        causes = [f"rank {one.rank} {describe(one, above='')}" for one in failed] or [elsewhere] * bool(elsewhere)
        self._write("ended", name, code=first.exit_code if first is not None else int(bool(elsewhere)), causes=causes)

    def found_elsewhere(self, name: str, finding: Mapping[str, Any], host: str) -> None:
        """A guard on `host` has."""
        text = finding["text"].replace("\nEvidence: ", f"\nEvidence, on {host}: ")
        self._write("elsewhere", name, finding={**finding, "text": text})

    def over(self, code: int) -> None:
        """The run is."""
        self._write("over", self._id, code=code)

    def flush(self) -> None:
        """Append what could not be written before."""
        if self.folder is None or not self._lines:
            return
        made_ns = (path.stat().st_mtime_ns for path in self.folder.glob("rank-*.jsonl"))
        if self._waits and not any(at_ns >= self._began_ns for at_ns in made_ns):
            return
        self._waits = False
        text, self._lines = "".join(self._lines), []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LAUNCH).open("a") as file:
                file.write(text)
        except OSError as error:  # the run goes on
            say(f"what the launcher does is not recorded: {self.folder}: {error.strerror}")
            self.folder = None

    def _write(self, kind: str, subject: str, **fields: Any) -> None:
        self._lines.append(json.dumps({kind: subject, **fields, "time_ns": time.time_ns()}, default=str) + "\n")
        self.flush()
