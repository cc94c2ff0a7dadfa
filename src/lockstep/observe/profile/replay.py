"""What a step would have taken had something been otherwise: the recorded step, played again.

A rank's own thread computes, starts collectives, and stands in them until all ranks have started them and the data has
moved. What it computes between two such points is known, and how long the data took is what the last rank to arrive
still stood there. From these the step is put together again, with some of them changed. Nothing is known of collectives
that the thread did not stand in: they stay hidden. The result is an estimate, and the replay with nothing changed says
how good: it should be the step that was recorded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.observe.profile.run_record import Op, Run, Steps
from lockstep.observe.profile.waits import compare, weighted

_STEPS_MAX, _STOPS_MAX = 64, 40_000  # that are played: the newest


Key = tuple[str, str, int]


class Stop(NamedTuple):
    """A point at which a rank's thread stood for others; microseconds of its own work before it."""

    key: Key
    stood_us: float  # began to stand in it


class Move(NamedTuple):
    """How long the data of a collective was under way, for the rank that came last: hidden by its work, then not."""

    hidden_us: float
    exposed_us: float

    def after(self, network: float) -> float:
        """What is left to stand for where data takes `network` times as long."""
        return max(0.0, (self.hidden_us + self.exposed_us) * network - self.hidden_us) if self.exposed_us else 0.0


class Track(NamedTuple):
    """One rank in one step, without what it waited."""

    work_us: float
    data_us: float  # of the work: for the data, taken to be at the beginning
    stops: tuple[Stop, ...]


_NOTHING = Move(0.0, 0.0)


class Play(NamedTuple):
    """One step on all ranks."""

    tracks: Mapping[int, Track]
    moves: Mapping[Key, Move]


class Change(NamedTuple):
    """What is otherwise. factor: of each rank's work; network: of the time that moving takes; data: of waiting."""

    factor: Mapping[int, float] = {}
    network: float = 1.0
    data: float = 1.0


class WhatIf(NamedTuple):
    """An answer, for the mean of the steps that were played."""

    name: str
    step_ms: float
    speed_up: float


def track_of(line: Steps) -> Track:
    """One rank's step. Its thread stands in one collective at a time."""
    waits = sorted((op for op in line.ops or () if op.began_us >= 0), key=lambda op: op.began_us)
    stops: list[Stop] = []
    waited = 0
    for op in waits:
        stops.append(Stop(op.key, op.began_us - waited))
        waited += op.waited_us
    return Track(max(0, line.wall_us - waited), line.phase("data"), tuple(stops))


def play_of(lines: Mapping[int, Steps]) -> Play:
    """One step, from the line of each rank. Collectives that not all of these list are taken to cost no time."""
    ops: dict[Key, dict[int, Op]] = {}
    for rank, line in lines.items():
        for op in line.ops or ():
            ops.setdefault(op.key, {})[rank] = op
    found = {key: compare(seen) for key, seen in ops.items()}
    moves = {
        key: Move(float(wait.op.began_us - wait.op.entered_us), float(wait.real_us))
        for key, wait in found.items()
        if wait is not None
    }
    return Play({rank: track_of(line) for rank, line in lines.items()}, moves)


def replay_us(play: Play, change: Change) -> float:
    """How long the step takes, until the slowest rank has ended it."""
    shared: dict[Key, list[int]] = {}
    for rank, track in play.tracks.items():
        for stop in track.stops:
            shared.setdefault(stop.key, []).append(rank)
    at = dict.fromkeys(play.tracks, 0)  # stops that are behind each rank
    lag = dict.fromkeys(play.tracks, 0.0)  # what it has waited
    work = {rank: _Work(track, change.factor.get(rank, 1.0), change.data) for rank, track in play.tracks.items()}
    arrived: dict[Key, dict[int, float]] = {}
    moved = True
    while moved:
        moved = False
        for rank, track in play.tracks.items():
            while at[rank] < len(track.stops):
                stop = track.stops[at[rank]]
                here = arrived.setdefault(stop.key, {})
                here.setdefault(rank, lag[rank] + work[rank].at(stop.stood_us))
                if len(here) < len(shared[stop.key]):
                    break
                ended = max(here.values()) + play.moves.get(stop.key, _NOTHING).after(change.network)
                lag[rank] = max(lag[rank], ended - work[rank].at(stop.stood_us))
                at[rank] += 1
                moved = True
    return max(lag[rank] + work[rank].at(track.work_us) for rank, track in play.tracks.items())


class _Work(NamedTuple):
    """A rank's own work with something changed."""

    track: Track
    factor: float
    data: float

    def at(self, work_us: float) -> float:
        """When it has done what took it `work_us`."""
        return max(0.0, work_us - min(work_us, self.track.data_us) * (1 - self.data)) * self.factor


def plays_of(run: Run) -> list[Play]:
    """The newest steps whose operations all ranks have listed; fewer of them where there are many ranks."""
    by_step: dict[int, dict[int, Steps]] = {}
    for rank, record in run.ranks.items():
        for line, _ in weighted(record.steady):
            by_step.setdefault(line.step, {})[rank] = line
    whole = [lines for step, lines in sorted(by_step.items()) if len(lines) == len(run.ranks)]
    stops = max((sum(len(line.ops or ()) for line in lines.values()) for lines in whole[-1:]), default=0)
    return [play_of(lines) for lines in whole[-max(1, min(_STEPS_MAX, _STOPS_MAX // max(1, stops))) :]]


def what_ifs(plays: Sequence[Play]) -> list[WhatIf]:
    """As recorded, and with each thing otherwise; empty where there is nothing to play."""
    if not plays:
        return []
    work = {rank: statistics.fmean(p.tracks[rank].work_us for p in plays) for rank in plays[0].tracks}
    slowest = max(work, key=lambda rank: work[rank])
    others = [us for rank, us in work.items() if rank != slowest]
    factor = min(1.0, statistics.median(others) / max(1.0, work[slowest])) if others else 1.0
    changes = {
        "as recorded": Change(),
        f"rank {slowest} as fast as the others": Change(factor={slowest: factor}),
        "network twice as fast": Change(network=0.5),
        "communication for nothing": Change(network=0.0),
        "data always there": Change(data=0.0),
    }
    took = {name: statistics.fmean(replay_us(play, change) for play in plays) / 1e3 for name, change in changes.items()}
    return [WhatIf(name, ms, took["as recorded"] / max(1e-6, ms)) for name, ms in took.items()]
