"""Runs that never happened: ranks with given work and clocks, recorded as real ones are. All times in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.observe.flight import Record
from lockstep.observe.profile.phases import BACKWARD, DATA, EXPOSED, PHASES, Step, Wait, worked_out
from lockstep.observe.profile.rank_reader import RankReader
from lockstep.observe.profile.run_record import RankRecord, Run
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.writer import RunWriter
from whole_records import read_run


@dataclass(frozen=True)
class World:
    """Every step: data, then `collectives` times some work and an all-reduce that takes `moves_us`."""

    work_us: Callable[[int, int], int]  # of (rank, step), before each collective
    data_us: Callable[[int, int], int] = lambda rank, step: 0
    world_size: int = 2
    collectives: int = 3
    moves_us: int = 500
    held_up_us: Callable[[int, int], int] = lambda step, number: 0  # more, of one collective of a step
    steps: int = 20
    ahead_us: Sequence[int] = ()  # of each rank's clock, on a machine of its own
    elements: int = 65536
    tokens: int = 0

    def run(self, folder: Path) -> Run:
        """Play it, write the records, read them."""
        size = self.world_size
        ahead = [*self.ahead_us, *[0] * size][:size]
        now = [1_000_000] * size
        records: list[list[Record]] = [[] for _ in range(size)]
        clocks = [StepClock() for _ in range(size)]
        writers = [
            RunWriter(folder, clock, rank=r, world_size=size, attempt="a/0", records=reader(records[r]))
            for r, clock in enumerate(clocks)
        ]
        for step in range(1, self.steps + 1):
            begun, waits = list(now), [list[Wait]() for _ in range(size)]
            for rank in range(size):
                now[rank] += self.data_us(rank, step)
            for at in range(self.collectives):
                for rank in range(size):
                    now[rank] += self.work_us(rank, step)
                ended = max(now) + self.moves_us + self.held_up_us(step, at)
                for rank in range(size):
                    entered_ns, left_ns = (1000 * (t + ahead[rank]) for t in (now[rank], ended))
                    number = len(records[rank])
                    text = f"all_reduce float32 [{self.elements}] sum"
                    place = "world", text, f"train.py:{number % self.collectives}", ""
                    records[rank].append(Record(number, number, step, entered_ns, left_ns, 0, False, *place))
                    waits[rank].append((number, entered_ns, left_ns))
                    now[rank] = ended
            for rank in range(size):
                clocks[rank].steps.append(worked_out(self._step(rank, step, begun[rank] + ahead[rank], waits[rank])))
            if step % 7 == 0:
                for writer in writers:
                    writer.look()
        for writer in writers:
            writer.close()
        run = read_run(folder)
        return run_of_machines(run) if self.ahead_us else run

    def _step(self, rank: int, step: int, began_us: int, waits: Sequence[Wait]) -> Step:
        spent = [0] * len(PHASES)
        spent[DATA] = 1000 * self.data_us(rank, step)
        spent[BACKWARD] = 1000 * self.work_us(rank, step) * self.collectives
        spent[EXPOSED] = sum(ended_ns - began_ns for _, began_ns, ended_ns in waits)
        first = (step - 1) * self.collectives
        span = first, first + self.collectives
        ended_ns = 1000 * began_us + sum(spent)
        marks = (DATA, 1000 * began_us), (BACKWARD, 1000 * began_us + spent[DATA])
        return Step(step, 1000 * began_us, ended_ns, self.tokens, 8, span, waits, marks)


@dataclass(frozen=True)
class Pipeline:
    """Every step: a batch down a chain of ranks and its gradient back up; then an all-reduce.

    A message is there at once, and who sends it does not wait.
    """

    work_us: int = 8000  # of each rank, forward and again backward
    world_size: int = 3
    steps: int = 12
    messages: int = 1  # that a batch is sent in

    @property
    def step_us(self) -> int:
        """All work of a step, one after the other."""
        return 2 * self.world_size * self.work_us

    def run(self, folder: Path) -> Run:
        """Play it, write the records, read them."""
        for rank in range(self.world_size):
            clock, records = StepClock(), list[Record]()
            writer = RunWriter(
                folder, clock, rank=rank, world_size=self.world_size, attempt="a/0", records=reader(records)
            )
            for step in range(1, self.steps + 1):
                first, began_ns = len(records), 1000 * step * self.step_us
                waits: list[Wait] = []
                for number, (text, since_ns, until_ns) in enumerate(self._operations(rank), first):
                    times, place = (
                        (began_ns + since_ns, began_ns + until_ns),
                        ("WORLD", text, f"pipe.py:{text[:4]}", ""),
                    )
                    records.append(Record(number, step, step, *times, 0, text[:4] in ("send", "recv"), *place))
                    waits.append((number, *times))
                span, marks = (first, len(records)), [(BACKWARD, began_ns)]
                clock.steps.append(
                    worked_out(Step(step, began_ns, began_ns + 1000 * self.step_us, 0, 0, span, waits, marks))
                )
            writer.close()
        return read_run(folder)

    def _operations(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """(text, from, until) of all that a rank stands in, in nanoseconds since the step began. Between, it works."""
        down, up = rank * self.work_us, self.step_us - (rank + 1) * self.work_us  # it begins its forward, its backward
        if rank:
            yield from self._sent(f"recv float32 [4, 8] from rank {rank - 1} tag 0", 0, down)
        if rank < self.world_size - 1:
            there_us = down + self.work_us
            yield from self._sent(f"send float32 [4, 8] to rank {rank + 1} tag 0", there_us, there_us)
            yield from self._sent(f"recv float32 [4, 8] from rank {rank + 1} tag 0", there_us, up)
        if rank:
            back_us = up + self.work_us
            yield from self._sent(f"send float32 [4, 8] to rank {rank - 1} tag 0", back_us, back_us)
        yield "all_reduce float32 [1] sum", 1000 * (up + self.work_us), 1000 * self.step_us

    def _sent(self, text: str, since_us: int, until_us: int) -> Iterator[tuple[str, int, int]]:
        """Each of the messages is a nanosecond behind the one before."""
        began_ns, first_ns = 1000 * since_us, 1000 * until_us - self.messages
        for number in range(self.messages):
            yield text, min(began_ns, first_ns) if number == 0 else first_ns + number, first_ns + number + 1


def run_of_machines(run: Run) -> Run:
    """The same, each rank on a machine of its own: their clocks say nothing of each other."""
    ranks: dict[int, RankRecord] = {}
    for rank, record in run.ranks.items():
        starts = tuple(replace(start, host=f"machine {rank}") for start in record.starts)
        ranks[rank] = replace(record, starts=starts)
    return replace(run, ranks=ranks)


def read_rank(lines: Iterable[str]) -> RankRecord | None:
    """One rank's record, of which the last line may be cut off; None where nothing is left."""
    rank = RankReader()
    for line in lines:
        if line.endswith("\n"):
            rank.feed(line)
    return rank.record()


def reader(records: list[Record]) -> Callable[[int, int], Sequence[Record]]:
    """As a guard reads its flight record."""
    return lambda since, until: records[since:until]
