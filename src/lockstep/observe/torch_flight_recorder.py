"""What torch's own Flight Recorder knows of operations, also of those that C++ code starts.

It counts, per group and in the numbers of `ProcessGroup._get_sequence_number_for_group`, what was started and what has
ended: 3 us to ask. The operations themselves take 20 ms, so they are asked for only where one does not end. When none
of it may be asked: see `first_uses`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

# of Gloo and others; of NCCL. Where an operation has the number that the groups count by
_DUMPS = {"_dump_fr_trace_json": "op_id", "_dump_nccl_trace_json": "collective_seq_id"}
TIMING = "TORCH_NCCL_ENABLE_TIMING"  # has torch record an event also before each operation of NCCL
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}

Source = tuple[str, int]  # which recorder, and its number of a group


class Count(NamedTuple):
    """Of one group of one backend."""

    started: int  # by its caller
    ended: int
    begun: int = -1  # by the GPU, as far as torch has seen: only where it was asked to look (see `TIMING`)


class Entry(NamedTuple):
    """One operation; who started it is not known."""

    group: str
    source: Source
    number: int
    has_ended: bool
    text: str
    began_ns: int  # by time.monotonic_ns


@final
class TorchFlightRecorder:
    """Torch's recorders of this process, one per kind of backend."""

    def __init__(self, dumps: Mapping[str, Callable[..., bytes]]) -> None:
        """dumps: what `torch._C._distributed_c10d` has, by name; others than the known are left out."""
        self._dumps = {name: dumps[name] for name in _DUMPS if name in dumps}
        self._groups: dict[Source, str] = {}  # name of the group
        self._counts: dict[Source, Count] = {}
        self._same: dict[Source, int] = {}  # for how many looks the count has stayed
        self._verified: dict[Source, tuple[Count, int]] = {}  # the count, and what has ended indeed

    def look(self) -> bool:
        """Read the counts that `ended` answers from. True: done."""
        before, self._counts = self._counts, {}
        for name, dump in self._dumps.items():
            for number, status in json.loads(dump(False, False)).get("pg_status", {}).items():
                counts = [
                    int(status.get(f"last_{what}_collective", -1)) for what in ("enqueued", "completed", "started")
                ]
                self._counts[name, int(number)] = Count(*counts)
        if self._counts.keys() - self._groups.keys():  # a new group: its name stands with its operations only
            self._groups.update({entry.source: entry.group for entry in self._entries()})
        doubtful = []
        for source, count in self._counts.items():
            same = self._same[source] = self._same.get(source, 0) + 1 if before.get(source) == count else 0
            if count.ended < count.started and same and same & (same - 1) == 0:  # seldom, and ever more seldom
                doubtful.append(source)
        entries = self._entries() if doubtful else []
        for source in doubtful:
            self._verified[source] = self._counts[source], _ended(source, self._counts[source], entries)
        return True

    def ended(self, group: str) -> float | None:
        """All operations of the group up to this number have ended; None where nothing is known of it."""
        counts = self._of(group)
        if not counts:
            return None
        ends = [math.inf]
        for source, count in counts:
            verified, indeed = self._verified.get(source, (None, 0))
            ended = indeed if verified == count else count.ended
            if ended < count.started:
                ends.append(ended)
        return min(ends)

    def _of(self, group: str) -> list[tuple[Source, Count]]:
        return [(source, count) for source, count in self._counts.items() if self._groups.get(source) == group]

    def begun(self, group: str) -> int:
        """As `Count.begun`, -1 where that is not known."""
        return max((count.begun for _, count in self._of(group)), default=-1)

    def since(self, group: str, first: int) -> dict[int, Entry]:
        """What the group counts as `first` and higher, as far as it is still known."""
        newest_last = reversed(self._entries())  # a group that is made anew begins to count anew
        return {one.number: one for one in newest_last if one.group == group and one.number >= first}

    def _entries(self) -> list[Entry]:
        """The last operations, newest first. The recorder's `pg_config` is no help: Gloo leaves the names empty."""
        ahead_ns = time.time_ns() - time.monotonic_ns()
        return [
            Entry(
                entry["process_group"][0],
                (name, int(entry["pg_id"])),
                int(entry[_DUMPS[name]]),
                entry["retired"] or entry["state"] == "completed",
                _text_of(entry),
                entry["time_created_ns"] - ahead_ns,
            )
            for name, dump in self._dumps.items()
            for entry in reversed(json.loads(dump(True, False)).get("entries", ()))
            if not entry["is_p2p"]
        ]


def _ended(source: Source, count: Count, entries: Sequence[Entry]) -> int:
    """As `Count.ended`, which is that of whichever operation ended last: an earlier one, at times."""
    open_ = [entry.number for entry in entries if entry.source == source and not entry.has_ended]
    return min(open_, default=count.started + 1) - 1


def _text_of(entry: Mapping[str, Any]) -> str:
    """Short, for the label of a record."""
    kind = entry["profiling_name"].rpartition(":")[2].strip("_")
    sizes, dtypes = entry["input_sizes"], [_DTYPES.get(name, "") for name in entry.get("input_dtypes", ())]
    return f"{kind} {''.join(dtypes[:1])}".strip() + (str(sizes[0]).replace(" ", "") if sizes else "")
