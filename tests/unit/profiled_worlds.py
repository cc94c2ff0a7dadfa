"""Runs that never happened: ranks with given work and clocks, recorded as real ones are. All times in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.observe.flight import Record
from lockstep.observe.profile.run_record import Run, read_run
from lockstep.observe.profile.step_clock import BACKWARD, DATA, EXPOSED, PHASES, Step, StepClock, Wait
from lockstep.observe.profile.writer import RunWriter


@dataclass(frozen=True)
class World:
    """Every step: data, then `collectives` times some work and an all-reduce that takes `moves_us`."""

    work_us: Callable[[int, int], int]  # of (rank, step), before each collective
    data_us: Callable[[int, int], int] = lambda rank, step: 0
    world_size: int = 2
    collectives: int = 3
    moves_us: int = 500
    steps: int = 20
    ahead_us: Sequence[int] = ()  # of each rank's clock
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
            for _ in range(self.collectives):
                for rank in range(size):
                    now[rank] += self.work_us(rank, step)
                ended = max(now) + self.moves_us
                for rank in range(size):
                    entered_ns, left_ns = (1000 * (t + ahead[rank]) for t in (now[rank], ended))
                    number = len(records[rank])
                    text = f"all_reduce float32 [{self.elements}] sum"
                    place = "world", text, f"train.py:{number % self.collectives}", ""
                    records[rank].append(Record(number, number, step, entered_ns, left_ns, 0, False, *place))
                    waits[rank].append(Wait(number, entered_ns, left_ns))
                    now[rank] = ended
            for rank in range(size):
                clocks[rank].steps.append(self._step(rank, step, begun[rank] + ahead[rank], waits[rank]))
            if step % 7 == 0:
                for writer in writers:
                    writer.look()
        for writer in writers:
            writer.close()
        return read_run(folder)

    def _step(self, rank: int, step: int, began_us: int, waits: Sequence[Wait]) -> Step:
        spent = [0] * len(PHASES)
        spent[DATA] = 1000 * self.data_us(rank, step)
        spent[BACKWARD] = 1000 * self.work_us(rank, step) * self.collectives
        spent[EXPOSED] = sum(wait.ended_ns - wait.began_ns for wait in waits)
        first = (step - 1) * self.collectives
        span = first, first + self.collectives
        ended_ns = 1000 * began_us + sum(spent)
        marks = (DATA, 1000 * began_us), (BACKWARD, 1000 * began_us + spent[DATA])
        return Step(step, 1000 * began_us, ended_ns, tuple(spent), self.tokens, 8, span, tuple(waits), marks)


def reader(records: list[Record]) -> Callable[[int, int], Sequence[Record]]:
    """As a guard reads its flight record."""
    return lambda since, until: records[since:until]
