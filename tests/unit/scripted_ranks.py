"""Ranks that are lists of acts, on a clock that tests move: the real record of runs whose truth is known.

Work lets a rank's clock go on by as long as it takes; a collective ends so many microseconds after the last rank has
started it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lockstep.comm.op import CommOp, Work
from lockstep.observe import flight
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.profile import step_clock
from lockstep.observe.profile.phases import PHASES
from lockstep.observe.profile.run_record import Run
from lockstep.observe.profile.writer import RunWriter
from lockstep.observe.recording import GuardLayer
from lockstep.observe.sights import FlightRecord
from whole_records import read_run

STEPS = 6


class Act(NamedTuple):
    """One thing that a rank does. us: that work takes, or the data of a collective after its last rank's start."""

    what: str  # a phase of PHASES, "start", "wait", "stand"
    us: int = 0
    name: str = ""
    ranks: tuple[int, ...] = ()  # of the group; () is all


Ends = dict[tuple[int, ...], list[int]]  # of each group, when its collectives begin or end


def forward(us: int) -> Act:
    return Act("forward", us)


def backward(us: int) -> Act:
    return Act("backward", us)


def data(us: int) -> Act:
    return Act("data", us)


def optimizer(us: int) -> Act:
    return Act("optimizer", us)


def start(name: str, us: int, *ranks: int) -> Act:
    return Act("start", us, name, ranks)


def wait(name: str) -> Act:
    return Act("wait", 0, name)


def stand(name: str, us: int, *ranks: int) -> Act:
    return Act("stand", us, name, ranks)


class Clock:
    """Of one rank, in nanoseconds."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns


class Flying(Work):
    """A collective that ends at a known time."""

    says = True  # when that was

    def __init__(self, clock: Clock, ends_ns: int) -> None:
        self.clock, self.ends_ns = clock, ends_ns
        self.ended_ns = 0

    def wait(self, timeout_s: float | None = None) -> None:
        self.clock.ns = max(self.clock.ns + 1, self.ends_ns)  # asking takes some time
        self.ended_ns = self.ends_ns * self.says

    def is_done(self) -> bool:
        return self.clock.ns >= self.ends_ns


class Network:
    """The transport of one rank."""

    name, world_size, device, timeout_s = "known", 2, torch.device("cpu"), 1.0

    def __init__(self, rank: int, ranks: Sequence[int], clock: Clock, ends_ns: Sequence[int]) -> None:
        self.rank, self.global_ranks, self.clock, self.ends_ns = rank, tuple(ranks), clock, ends_ns
        self.began_ns: list[int] = []

    def submit(self, op: CommOp) -> Work:
        number = len(self.began_ns)
        self.began_ns.append(self.clock.ns)
        return Flying(self.clock, self.ends_ns[number] if number < len(self.ends_ns) else 0)


class Watching:
    """As a guard, as far as its layer needs one."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self.recorder = recorder

    def group(self, name: str, ranks: Sequence[int]) -> None: ...


def played(rank: int, size: int, acts: Sequence[Act], ends_ns: Ends, folder: Path) -> Ends:
    """Do `acts` in each step, and record that; when each collective was started."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for module in (flight, step_clock):
            patch.setattr(module, "monotonic_ns", clock)
        recorder = FlightRecorder(folder / f"flight-{rank}", rank, size)
        steps = recorder.clock
        steps.close_reader = lambda: None
        networks: dict[tuple[int, ...], Any] = {
            ranks: Network(rank, ranks or range(size), clock, ends_ns.get(ranks, ()))
            for ranks in dict.fromkeys(act.ranks for act in acts)
        }
        guard: Any = Watching(recorder)
        layers: Any = {ranks: GuardLayer(one, guard, name=f"group {ranks}") for ranks, one in networks.items()}
        steps.restart()
        works: dict[str, Work] = {}
        for step in range(1, STEPS + 1):
            for number, act in enumerate(acts):
                if act.what in ("start", "stand"):
                    op = CommOp(number, "all_reduce", (torch.ones(1000),), reduce="sum", label=act.name)
                    works[act.name] = layers[act.ranks].submit(op._replace(async_op=act.what == "start"))
                elif act.what == "wait":
                    if step > 1 or act.name in works:  # else it is one of the step before
                        works.pop(act.name).wait()
                else:
                    steps.switch(PHASES.index(act.what))
                    clock.ns += 1000 * act.us
            steps.step_done(step, recorder.started, tokens=64)
            recorder.set_step(step)
        record = FlightRecord(recorder.path)
        writer = RunWriter(folder, steps, rank=rank, world_size=size, attempt="a/0", records=record.records)
        writer.close()
        record.close()
        recorder.close()
    return {ranks: one.began_ns for ranks, one in networks.items()}


def recorded(folder: Path, *ranks: Sequence[Act], is_one_link: bool = False, later_us: Sequence[int] = ()) -> Run:
    """Each rank does its acts `STEPS` times; a collective ends when its data has moved after its last rank's start.

    is_one_link: it carries the data of one collective of a group after the other. later_us: by which each rank has its
    own later.
    """
    later_ns = [1000 * us for us in later_us] or [0] * len(ranks)
    moves: dict[tuple[int, ...], list[int]] = {}
    for rank, acts in enumerate(ranks):
        for group in {act.ranks for act in acts if act.what in ("start", "stand")}:
            ones = [act.us for act in acts if act.what in ("start", "stand") and act.ranks == group]
            assert moves.setdefault(group, ones) == ones
            assert rank in (group or [rank])
    ends: Ends = {}
    for attempt in range(200):  # until the starts that follow from the ends are those that they follow from
        place = folder / str(attempt)
        place.mkdir(parents=True)
        begun = [
            played(
                rank,
                len(ranks),
                acts,
                {group: [at + later_ns[rank] for at in ones] for group, ones in ends.items()},
                place,
            )
            for rank, acts in enumerate(ranks)
        ]
        before, ends = ends, {}
        for group, took_us in moves.items():
            free_ns, ends[group] = 0, []
            members = group or range(len(ranks))
            for *times, us in zip(*(begun[rank][group] for rank in members), took_us * STEPS, strict=True):
                ends[group].append(max(*times, free_ns) + 1000 * us)
                free_ns = ends[group][-1] if is_one_link else 0
        if ends == before:
            return read_run(place)
    raise AssertionError("no end")
