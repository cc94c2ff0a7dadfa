"""The record of a run, where nothing may be wrong with it."""

from __future__ import annotations

from pathlib import Path

from lockstep.observe.profile.run_record import Run
from lockstep.observe.report.source import RunReader


def read_run(folder: Path) -> Run:
    """What all ranks have left."""
    source = RunReader(folder).read()
    assert not source.problems
    assert source.run.ranks
    return source.run
