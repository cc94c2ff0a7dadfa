"""What stands around a layer that records: a guard that only listens, and a transport that moves nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport
from lockstep.errors import CommError, PeerFailed, PeerLost
from lockstep.observe.flight import FlightRecorder, Record, pack_words
from lockstep.observe.sights import FlightRecord


class Watcher:
    """A guard that only writes down what it is told."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.recorder = FlightRecorder(folder / f"{rank}", rank, world_size)
        self.record = FlightRecord(folder / f"{rank}")
        self.groups: dict[str, tuple[int, ...]] = {}
        self.parts: Counter[tuple[int, ...]] = Counter()
        self.ends: list[BaseException | None] = []
        self.asked: list[CommError] = []
        self.has_failed = False
        self.finished = self.closed = 0

    def group(self, name: str, ranks: Sequence[int]) -> None:
        assert name not in self.groups
        self.groups[name] = tuple(ranks)

    def lost(self, error: CommError) -> CommError:
        self.asked.append(error)
        return PeerFailed("rank 1 failed at train.py:31", 1) if isinstance(error, PeerLost) else error

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def finish(self) -> None:
        self.finished += 1

    def end(self, error: BaseException | None = None) -> None:
        self.ends.append(error)

    def close(self) -> None:
        self.closed += 1

    def records(self) -> list[Record]:
        return self.record.records()

    def texts(self, group: str = "world") -> list[str]:
        return [record.text for record in self.records() if record.group == group]

    def open(self) -> list[str]:
        """What has not ended yet."""
        return [record.text for record in self.records() if not record.left_ns]

    def give_back(self) -> None:
        self.record.close()
        self.recorder.close()


class Silent(Transport):
    """A transport that does nothing. `refuses` fails when an operation is started, `error` when it is waited for."""

    def __init__(self, world_size: int) -> None:
        self.name, self.rank, self.world_size = "silent", 0, world_size
        self.global_ranks, self.timeout_s = tuple(range(world_size)), 1.0
        self.device = torch.device("cpu")
        self.works: list[Pending] = []
        self.refuses: Exception | None = None
        self.error: BaseException | None = None

    def submit(self, op: CommOp) -> Work:
        if self.refuses is not None:
            raise self.refuses
        self.works.append(Pending(self.error))
        return self.works[-1]

    def split(self, groups: Sequence[Sequence[int]]) -> Transport | None:
        return None

    def abort(self, error: CommError) -> None:
        pass

    def close(self) -> None:
        pass


class Pending(Work):
    def __init__(self, error: BaseException | None) -> None:
        self.done = False
        self.error = error

    def wait(self, timeout_s: float | None = None) -> None:
        if self.error is not None:
            raise self.error

    def is_done(self) -> bool:
        return self.done


def leave_one(recorder: FlightRecorder) -> None:
    """An operation that C++ has started, to be entered by whoever takes the record up."""
    words = pack_words("later", "all_reduce float32 [1] sum", "train.py:1")
    recorder.left.append(lambda: recorder.enter_all(iter([7]), words, 1, 3))
