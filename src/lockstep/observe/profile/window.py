"""A few steps of each rank under torch.profiler, when asked for: `--profile steps=10:13`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, final

from lockstep.errors import ConfigError

RUN = "LOCKSTEP_RUN"  # folder for the records of a run; set by `lockstep run`
LAUNCH = "launch.jsonl"  # in that folder, what the launcher did
PROFILE = "LOCKSTEP_PROFILE"


def read_window(text: str, said_by: str = "--profile") -> range:
    """The steps of "steps=10:13": 10, 11, 12 and 13; none of "".  Raises: ConfigError, which names who said it."""
    if not text:
        return range(0)
    found = re.fullmatch(r"steps=(\d+):(\d+)", text)
    if found is None or not 2 <= int(found[1]) <= int(found[2]):
        raise ConfigError(f"{said_by} {text}: it takes the first and the last step, from 2 on, like steps=10:13")
    return range(int(found[1]), int(found[2]) + 1)


def trace_of(folder: Path, rank: int) -> Path:
    """The file of one rank's window."""
    return folder / f"trace-{rank}.json"


@final
class Window:
    """Runs torch.profiler over `steps` on this rank and writes what it saw into `folder`."""

    def __init__(self, steps: range, folder: Path, rank: int) -> None:
        self.steps = steps
        self._path = trace_of(folder, rank)
        self._rank = rank
        self._profiler: Any = None

    def step_done(self, step: int) -> bool:
        """A step has ended; whether that began or ended the window. To be called by the thread that trains."""
        if (step + 1 in self.steps) == (self._profiler is not None):
            return False
        self._begin() if self._profiler is None else self.close()
        return True

    def _begin(self) -> None:
        profiler = sys.modules["torch"].profiler
        kinds = profiler.ProfilerActivity
        activities = [kinds.CPU, *([kinds.CUDA] if sys.modules["torch"].cuda.is_available() else [])]
        self._profiler = profiler.profile(activities=activities)
        self._profiler.start()
        self._profiler.add_metadata_json("lockstep", json.dumps({"rank": self._rank}))

    def close(self) -> None:
        """Write what was seen, where the run ends within the window."""
        running, self._profiler = self._profiler, None
        if running is not None:
            running.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._path.with_suffix(".partial")
            running.export_chrome_trace(str(unfinished))
            unfinished.replace(self._path)
