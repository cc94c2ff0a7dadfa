"""What the flight records of dead ranks show: a launcher's last look at them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import CollectiveMismatch, ConfigError
from lockstep.observe.board import FLIGHTS, from_record, status_of
from lockstep.observe.divergence import find_mismatch
from lockstep.observe.flight import FlightRecord
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.status import Sight, Status


def told_in(folder: Path) -> dict[int, Status]:
    """What ranks have said last: how they left, too, also of an exception that `sys.exit(1)` followed."""
    with _records_in(folder) as records:
        told = ((rank, status_of(record.status())) for rank, record in records.items())
        return {rank: status for rank, status in told if status is not None}


def noticed(folder: Path) -> str:
    """What a guard of any machine has found, as those of this one know; their records are in `folder`."""
    with _records_in(folder) as records:
        return next((found.decode() for record in records.values() if (found := record.notice())), "")


def post_mortem(folder: Path) -> str:
    """Which operations of the ranks in `folder` did not match; "" where all did, or a rank has said so itself.

    A rank may be ended by what another one sends (Gloo aborts the process where sizes differ), before its guard looks.
    """
    with _records_in(folder) as records:
        told = {rank: from_record(record, status_of(record.status())) for rank, record in records.items()}
        raised = {one.words.kind for one in told.values() if one.words is not None}
        if CollectiveMismatch.__name__ in raised or any(record.notice() for record in records.values()):
            return ""
        sights = {rank: Sight(status, 0.0, is_gone=False) for rank, status in told.items()}
        done = {rank: record.records() for rank, record in records.items()}
        scenes = (Scene(me, sights, lambda rank: done.get(rank, []), Limits(grace_s=0.0)) for me in sorted(records))
        return next((found.text for found in map(find_mismatch, scenes) if found and found.is_certain), "")


@contextlib.contextmanager
def _records_in(folder: Path) -> Iterator[dict[int, FlightRecord]]:
    """Of all ranks that have made one, by rank."""
    with contextlib.ExitStack() as stack:
        records: dict[int, FlightRecord] = {}
        for path in folder.glob(FLIGHTS):
            with contextlib.suppress(ConfigError):  # killed while making it
                record = stack.enter_context(contextlib.closing(FlightRecord(path)))
                records[record.header().rank] = record
        yield records
