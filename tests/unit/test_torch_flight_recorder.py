"""What torch's Flight Recorder is asked, and what is made of answers that are late, out of order or of nobody known."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.observe.torch_flight_recorder import TorchFlightRecorder


class Torch:
    """Stands for torch's recorder of one kind of backend: one group "7", which it calls 3."""

    def __init__(self, numbered_by: str = "op_id") -> None:
        self.started = self.ended = self.begun = 0
        self.entries: list[dict[str, Any]] = []
        self.full_dumps = 0
        self.numbered_by = numbered_by

    def start(self) -> None:
        self.started += 1
        entry = {"process_group": ["7", "undefined"], "pg_id": 3, "op_id": 0, "collective_seq_id": 0, "is_p2p": False}
        entry |= {
            self.numbered_by: self.started,
            "profiling_name": "gloo:all_reduce",
            "input_sizes": [[4, self.started]],
            "time_created_ns": 5000 + self.started,
        }
        self.entries.append(entry | {"retired": False, "state": "scheduled"})

    def end(self, number: int) -> None:
        self.ended = number
        self.entries[number - 1]["retired"] = True

    def dump(self, with_entries: bool, only_active: bool) -> bytes:
        assert not only_active
        self.full_dumps += with_entries
        status = {"last_enqueued_collective": str(self.started), "last_completed_collective": str(self.ended)}
        status |= {"last_started_collective": str(self.begun)} if self.begun else {}
        answer = {"pg_config": {"": {"name": ""}}, "pg_status": {"3": status} if self.started else {}}
        return json.dumps(answer | ({"entries": self.entries} if with_entries else {})).encode()


def test_counts_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = SimpleNamespace(time_ns=lambda: 6000, monotonic_ns=lambda: 4000)
    monkeypatch.setattr("lockstep.observe.torch_flight_recorder.time", clocks)
    for name, numbered_by in (("_dump_fr_trace_json", "op_id"), ("_dump_nccl_trace_json", "collective_seq_id")):
        torch = Torch(numbered_by)
        recorder = TorchFlightRecorder({name: torch.dump, "_another": torch.dump})
        recorder.look()
        assert recorder.ended("7") is None
        for _ in range(3):
            torch.start()
        torch.end(1)
        recorder.look()
        assert recorder.ended("7") == 1
        assert recorder.ended("8") is None
        known = recorder.since("7", 2)
        assert {number: one.text for number, one in known.items()} == {2: "all_reduce[4,2]", 3: "all_reduce[4,3]"}
        assert (known[2].began_ns, known[3].began_ns) == (3002, 3003), "by the clock of the record"
        assert recorder.since("7", 9) == recorder.since("8", 2) == {}
        torch.end(2)
        torch.end(3)
        recorder.look()
        assert recorder.ended("7") == math.inf


def test_what_a_gpu_has_come_to() -> None:
    torch = Torch("collective_seq_id")
    recorder = TorchFlightRecorder({"_dump_nccl_trace_json": torch.dump})
    torch.start()
    recorder.look()
    assert recorder.begun("7") == recorder.begun("8") == -1, "torch does not say"
    torch.begun = 1
    recorder.look()
    assert (recorder.begun("7"), recorder.begun("8")) == (1, -1)
    torch.started = 0  # the group has gone
    recorder.look()
    assert recorder.begun("7") == -1


def test_an_earlier_operation_that_ended_last_hides_nothing() -> None:
    torch = Torch()
    recorder = TorchFlightRecorder({"_dump_fr_trace_json": torch.dump})
    for _ in range(3):
        torch.start()
    torch.end(1)
    torch.end(3)
    torch.end(2)
    recorder.look()
    assert recorder.ended("7") == 2  # torch's word
    recorder.look()
    assert recorder.ended("7") == math.inf  # its entries say more
    torch.start()
    recorder.look()
    assert recorder.ended("7") == 2


def test_long_waits_ask_for_the_operations_ever_more_seldom() -> None:
    torch = Torch()
    recorder = TorchFlightRecorder({"_dump_fr_trace_json": torch.dump})
    torch.start()
    for _ in range(1000):
        recorder.look()
        assert recorder.ended("7") == 0
    assert torch.full_dumps < 15
