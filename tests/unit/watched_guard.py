"""A guard that looks at ranks which exist only on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
from rank_sights import PaperRank, waiting_for_rank_1

from lockstep.observe.board import Board
from lockstep.observe.flight import FlightRecorder, Record
from lockstep.observe.guard import Guard
from lockstep.observe.settings import GuardSettings
from lockstep.observe.status import Sight, Status


class PaperBoard:
    """Shows the ranks as they are on paper, but for the one that looks, which says itself how it is."""

    def __init__(self, me: int) -> None:
        self.me = me
        self.here = range(3)
        self.ranks: Sequence[PaperRank] = ()
        self.urgent: Sequence[PaperRank] = ()  # as they are by now
        self.up = ""
        self.told: Status | None = None

    def tell(self, status: Status) -> None:
        self.told = status

    def sights(self, *, is_urgent: bool = False) -> Mapping[int, Sight]:
        return {one.rank: one.sight() for one in (is_urgent and self.urgent) or self.ranks}

    def records_here(self) -> None:
        """Their memory is not to be had."""

    def records_of(self, rank: int) -> list[Record]:
        return next((one.kept_records() for one in self.urgent or self.ranks if one.rank == rank), [])

    def announce(self, finding: str) -> str:
        self.up = self.up or finding
        return self.up

    def announced(self) -> str:
        return self.up

    def close(self) -> None:
        pass


class Watched:
    """The guard of rank `me`, which looks at one scene after the other."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], me: int = 0, evidence: str = "") -> None:
        self.board = PaperBoard(me)
        recorder = FlightRecorder(folder / f"flight-{me}", me, 3)
        self.guard = Guard(recorder, cast(Board, self.board), GuardSettings(evidence=evidence))
        self._capsys = capsys

    def sees(self, ranks: Sequence[PaperRank]) -> list[str]:
        """The lines that it says of them."""
        self.board.ranks = ranks
        self.guard.look()
        return self._capsys.readouterr().err.splitlines()


def stopped(age_s: float = 2.1) -> list[PaperRank]:
    ranks = waiting_for_rank_1(3, age_s)
    ranks[1].age_s, ranks[1].is_stopped = age_s, True
    return ranks


def failed() -> list[PaperRank]:
    ranks = waiting_for_rank_1(3, 12)
    ranks[1].raises("ValueError", "label 7", "data.py:31")
    return ranks
