"""What the flight records of dead ranks show that none of them could say: a launcher's last look at them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.observe.board import FLIGHTS, from_record, status_of
from lockstep.observe.divergence import find_mismatch
from lockstep.observe.flight import FlightRecord, Record
from lockstep.observe.scene import Limits, Scene
from lockstep.observe.status import Sight


def post_mortem(folder: Path) -> str:
    """Which collectives of the ranks in `folder` did not match; "" where all did, or a rank has said so itself.

    A rank may be ended by what another one sends (Gloo aborts the process where sizes differ), before its guard looks.
    """
    records: dict[int, FlightRecord] = {}
    try:
        for path in folder.glob(FLIGHTS):
            with contextlib.suppress(ConfigError):  # killed while making it
                record = FlightRecord(path)
                records[record.header().rank] = record
        if any(record.notice() for record in records.values()):
            return ""
        sights = {
            rank: Sight(from_record(record, status_of(record.status())), 0.0, is_gone=False)
            for rank, record in records.items()
        }

        def records_of(rank: int) -> list[Record]:
            return records[rank].records() if rank in records else []

        found = find_mismatch(Scene(min(records, default=0), sights, records_of, Limits()))
        return found.text if found is not None and found.is_certain else ""
    finally:
        for record in records.values():
            record.close()
