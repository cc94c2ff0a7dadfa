"""The record of a run on disk: `rank-<n>.jsonl` per rank, only ever appended to.

Each line is a JSON object of one of these kinds, told by its first key:

    {"start": 1, ...}  a process begins: the fields of `Start`; 1 is the version of the format
    {"word": 3, ...}   the operation that later lines call 3: group, text, site, label, bytes
    {"step": 12, ...}  the fields of `Steps`: one step, or several in a row as sums
    others             see `notes.py`

A run that is started again appends another start; its steps replace those of the same numbers. So that a long run stays
small, from step 1024 on a line stands for 2 steps, from 2048 on for 4, and so on. Operations are listed of steps that
are looked at closely, see `pace`: of all at first, then of ever fewer, alike on all ranks. Steps that were only counted
have the phases of the one before that was not.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.observe.pace import FIRST, one_of_each
from lockstep.observe.profile.notes import Note, json_line
from lockstep.observe.profile.phases import PHASES

VERSION = 1
OPERATIONS_MAX, SPANS_MAX = 64, 128  # of one step that are listed
WHOLE_MAX = 256  # of the operations of a program without steps
TAIL_GROUP = "backward"  # of all that DistributedDataParallel waits for at its end; begins with that, of a few ranks
_WARM_UP = 2  # first lines of a run
_ALL_LISTED, _ALL_SINGLE = FIRST, 1024

Key = tuple[str, str, int]  # of an operation, equal on all ranks: its attempt, its group and its number


@dataclass(frozen=True)
class Start:
    """A process of the run begins."""

    rank: int
    world_size: int
    attempt: str  # equal on all ranks that ran together
    pid: int
    host: str
    time_ns: int  # since the epoch, at `clock_ns`
    clock_ns: int  # by time.monotonic_ns
    program: str = ""
    device: str = "cpu"
    threads: int = 1
    flops_per_token: float = 0.0  # forward and backward; 0 where it is not known


class Op(NamedTuple):
    """A collective or a message as one rank saw it; times in microseconds since its step began."""

    attempt: str
    group: str
    seq: int
    text: str
    site: str
    label: str
    bytes: int  # 0 where that is not known
    entered_us: int
    left_us: int
    began_us: int  # when the rank's own thread began to wait; -1: it did not
    waited_us: int

    @property
    def key(self) -> Key:
        """See there."""
        return self.attempt, self.group, self.seq

    @property
    def stood_until_us(self) -> int:
        """When the rank's thread, which has waited for it, went on."""
        return self.began_us + self.waited_us

    @property
    def is_send(self) -> bool:
        """A message goes out: its sender does not stand in it until it is taken."""
        return self.text.startswith("send ")

    @property
    def is_message(self) -> bool:
        """Its group is the two ranks, its number that of the step and of the message in it."""
        return self.text.startswith(("send ", "recv "))


@dataclass(frozen=True)
class Steps:
    """One step of one rank, or several in a row."""

    step: int  # the last of them
    count: int
    at_us: int  # when the first began, since the start of the process
    wall_us: int
    longest_us: int
    phases_us: tuple[int, ...]  # of PHASES, together `wall_us`
    tokens: int = 0  # over all ranks
    samples: int = 0  # of this rank
    rss_mib: int = 0
    cuda_mib: int = 0  # most so far
    operations: int = 0  # started
    counted: int = 0  # of its steps that were only counted: phases but "data" are as in a `Typical` one
    on_gpu: int = 0  # of its steps that are told by the times of a GPU's stream, not of the rank's thread
    every: int = 0  # where there are more than OPERATIONS_MAX: one of how many is in `ops`
    unlisted: int = 0  # operations that are not in `ops`, where the others are
    hidden_us: int | None = None  # operations were open and the thread did not wait; None where `ops` are not listed
    ops: tuple[Op, ...] | None = None  # of a single step; at most OPERATIONS_MAX, or WHOLE_MAX
    spans: tuple[tuple[int, int], ...] = ()  # where `ops` are: phases, and when each began, since the step did
    whole: int = 0  # 1: not a step, but the last WHOLE_MAX operations of a program that has ended none
    attempt: str = ""  # as of the start before it, once it is read

    def phase(self, name: str) -> int:
        """Microseconds in a phase."""
        return self.phases_us[PHASES.index(name)]


@dataclass(frozen=True)
class RankRecord:
    """What one rank has left."""

    rank: int
    starts: tuple[Start, ...]
    lines: tuple[Steps, ...]  # by step, each step once
    notes: tuple[Note, ...] = ()  # in the order in which they were written

    @property
    def steady(self) -> tuple[Steps, ...]:
        """The lines without those of the first steps, which allocate, compile and start workers."""
        return self.lines[_WARM_UP:] if len(self.lines) > 2 * _WARM_UP else self.lines

    @property
    def buckets(self) -> Mapping[str, Any] | None:
        """What DistributedDataParallel said last of its buckets, and how much it hid on average; None if nothing."""
        said = [note.fields for note in self.notes if note.kind == "buckets"]
        return {**said[-1], "hidden_us": statistics.fmean(one["hidden_us"] for one in said)} if said else None


@dataclass(frozen=True)
class Run:
    """All ranks of a run."""

    folder: Path
    ranks: Mapping[int, RankRecord]

    @property
    def world_size(self) -> int:
        """Ranks of the last attempt."""
        return self._last.world_size

    @property
    def is_of_one_host(self) -> bool:
        """All ranks share a clock."""
        return len({record.starts[-1].host for record in self.ranks.values()}) < 2

    @property
    def is_whole(self) -> bool:
        """No rank has ended a step: what there is, is all of the program: see `Steps.whole`."""
        return any(line.whole for record in self.ranks.values() for line in record.lines)

    @property
    def is_on_gpu(self) -> bool:
        """Its times are those of GPUs: see `Steps.on_gpu`."""
        return any(line.on_gpu for record in self.ranks.values() for line in record.lines)

    @property
    def _last(self) -> Start:
        return max((record.starts[-1] for record in self.ranks.values()), key=lambda start: start.time_ns)

    def of_last_attempt(self) -> Run:
        """The ranks that were there in the end: a run may go on with fewer."""
        last = self._last.attempt if self.ranks else ""
        return Run(self.folder, {r: record for r, record in self.ranks.items() if record.starts[-1].attempt == last})


def without_wholes(ranks: Mapping[int, RankRecord]) -> dict[int, RankRecord]:
    """Without what programs tell that have ended no step: beside the steps of other ranks it belongs to none."""
    wholes = {rank for rank, record in ranks.items() if any(line.whole for line in record.lines)}
    return {rank: replace(record, lines=()) if rank in wholes else record for rank, record in ranks.items()}


def steps_per_line(step: int) -> int:
    """How many steps a line stands for."""
    return 1 if step < _ALL_SINGLE else 1 << (step // (_ALL_SINGLE // 2)).bit_length() - 1


def last_in_line(step: int) -> int:
    """The last of the steps that share the line of `step`, which is not listed."""
    size = steps_per_line(step)
    return min(-(-step // size) * size, listed_after(step) - 1)


def is_listed(step: int) -> bool:
    """Whether the operations of `step` are listed: it has a line of its own."""
    return listed_after(step - 1) == step


def listed_after(step: int) -> int:
    """The first step after `step` whose operations are listed."""
    return step + 1 if step < _ALL_LISTED else one_of_each(step, max(1, steps_per_line(step) // 2))


def bytes_of(text: str, ranks: int = 0, group: str = "") -> int:
    """Of "all_reduce float32 [4, 2] sum" 32; 0: it is not said. Of what torch gathers the text has one rank's part."""
    found = re.search(r"(?P<dtype>complex|bfloat|float|uint|int|bool)(?P<bits>\d*)[^ [\]]* ?(?P<sizes>.*)", text)
    shape = re.search(r"(?:(\d+) x )?\[([\d, ]*)\]", found["sizes"]) if found else None
    if found is None or shape is None:
        return 0
    sizes = [int(size) for size in shape[2].split(",") if size.strip()]
    in_parts = shape[1] is None and text.startswith(("all_gather ", "reduce_scatter "))
    is_one = in_parts and ranks and re.match(r"WORLD|\S+ \[", group)  # a group of torch's
    uneven = in_parts and not is_one and len(sizes) > 1
    elements = sum(sizes) if uneven else math.prod(sizes) * (ranks if is_one else int(shape[1] or 1))
    return elements * (int(found["bits"] or 8) // 8)


def of_all(op: Op, ranks: int) -> Op:
    """With the bytes of all ranks' parts. ranks: of its group."""
    return op._replace(bytes=bytes_of(op.text, ranks, op.group) or op.bytes)


def attempt_of(environ: Mapping[str, str]) -> str:
    """A name for this start of this run, equal on all its ranks."""
    name = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID", "")
    return f"{name}/{environ.get('TORCHELASTIC_RESTART_COUNT') or environ.get('SLURM_RESTART_COUNT') or 0}"


def file_of(folder: Path, rank: int) -> Path:
    """Of one rank's record."""
    return folder / f"rank-{rank}.jsonl"


# ------------------------------------------------------------------ lines


def start_line(start: Start) -> str:
    """As `RankReader` reads it."""
    return json_line({"start": VERSION, **asdict(start)})


def word_line(number: int, group: str, text: str, site: str, label: str) -> str:
    """As `RankReader` reads it."""
    about = {"group": group, "text": text, "site": site, "label": label}
    return json_line({"word": number, **about, "bytes": bytes_of(text)})


def steps_line(line: Steps, rows: Sequence[Sequence[int]] | None = None) -> str:
    """As `RankReader` reads it. rows: of each operation its word, then the numbers of `Op` in their order."""
    return json_line({name: value for name, value in {**vars(line), "ops": rows}.items() if value or name == "step"})
