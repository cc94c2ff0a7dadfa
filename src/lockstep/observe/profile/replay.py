"""What a step would have taken had something been otherwise: the recorded step, played again.

A rank's own thread computes, starts collectives, and stands in them until all ranks have started them and the data has
moved. What it computes between two such points is known, and how long the data took is how long the collective was open
on the rank that started it last. From these the step is put together again, with some of them changed. Nothing is known
of collectives that the thread did not stand in: they stay hidden. The result is an estimate, and the replay with
nothing changed says how good: it should be the step that was recorded.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from lockstep.observe.profile.run_record import TAIL_GROUP, Op, RankRecord, Run, Steps
from lockstep.observe.profile.waits import Wait, compare, weighted

_STEPS_MAX, _STOPS_MAX = 64, 40_000  # that are played: the newest


Key = tuple[str, str, int]


class Stop(NamedTuple):
    """A point at which a rank's thread stood for others; microseconds of its own work before it."""

    key: Key
    stood_us: float  # began to stand in it
    goes_on: bool = False  # at once: others stand there for it


class Move(NamedTuple):
    """How long the data of a collective was under way, for the rank that came last: hidden by its work, then not."""

    hidden_us: float
    exposed_us: float
    last_part: float = 0.0  # of the data, which could not be sent before that work was done

    def after(self, network: float) -> float:
        """What is left to stand for where data takes `network` times as long."""
        all_us = self.hidden_us + self.exposed_us
        least_us = network * min(self.exposed_us, self.last_part * all_us)
        return max(least_us, all_us * network - self.hidden_us) if self.exposed_us else 0.0


class Track(NamedTuple):
    """One rank in one step, without what it waited."""

    work_us: float
    data_us: float  # of the work: for the data, taken to be at the beginning
    stops: tuple[Stop, ...]

    def parts(self) -> Iterator[tuple[tuple[Key | None, Key | None], float]]:
        """(between which stops, how much work)."""
        ends = [(None, 0.0), *((stop.key, stop.stood_us) for stop in self.stops), (None, self.work_us)]
        yield from (((before, after), until - since) for (before, since), (after, until) in pairwise(ends))


_NOTHING = Move(0.0, 0.0)


class Play(NamedTuple):
    """One step on all ranks."""

    tracks: Mapping[int, Track]
    moves: Mapping[Key, Move]


class Change(NamedTuple):
    """What is otherwise. network: of the time that moving takes; data: of waiting for it."""

    network: float = 1.0
    data: float = 1.0


class WhatIf(NamedTuple):
    """An answer, for the mean of the steps that were played."""

    name: str
    step_ms: float
    speed_up: float
    is_least: bool = False  # it may be more: how much communication was hidden is not known


def track_of(line: Steps, left: Container[Key]) -> Track:
    """One rank's step. Its thread stands in one operation at a time, which is there for others once it is started.

    left: messages that whoever sent them had done with before they were asked for.
    """
    stood = [op for op in line.ops or () if op.began_us >= 0]
    events = [(op.entered_us, False, op) for op in stood if op.is_message or op.entered_us < op.began_us]
    events += [(op.began_us, True, op) for op in stood if not (op.is_send and op.key in left)]
    stops: list[Stop] = []
    waited = 0
    for at_us, stands, op in sorted(events):
        stops.append(Stop(op.key, at_us - waited, not stands))
        waited += op.waited_us if stands else 0
    return Track(max(0, line.wall_us - waited), line.phase("data"), tuple(stops))


def play_of(
    lines: Mapping[int, Steps],
    began_us: Mapping[int, float] | None = None,
    buckets: Mapping[int, Mapping[str, Any]] | None = None,
) -> Play:
    """One step, from the line of each rank. Collectives that not all of these list are taken to cost no time.

    began_us: when it began on each, on one clock. buckets: what DistributedDataParallel said there of what it sends.
    """
    ops: dict[Key, dict[int, Op]] = {}
    for rank, line in lines.items():
        for op in line.ops or ():
            ops.setdefault(op.key, {})[rank] = op
    found = {key: wait for key, seen in ops.items() if (wait := compare(seen)) is not None}
    left = {key for key in found if _was_left(ops[key], began_us or dict.fromkeys(lines, 0.0))}
    moves = {key: _move_of(wait, buckets or {}) for key, wait in found.items()}
    return Play({rank: track_of(line, left) for rank, line in lines.items()}, moves)


def _was_left(ends: Mapping[int, Op], began_us: Mapping[int, float]) -> bool:
    """Of a message: whether its sender was done with it before the receiver asked for it."""
    sent = [began_us[rank] + op.began_us + op.waited_us for rank, op in ends.items() if op.is_send]
    asked = [began_us[rank] + op.entered_us for rank, op in ends.items() if not op.is_send]
    return bool(sent and asked) and sent[0] < asked[0]


def _move_of(wait: Wait, buckets: Mapping[int, Mapping[str, Any]]) -> Move:
    said = buckets.get(wait.last) if wait.op.group == TAIL_GROUP else None
    if said is None:
        return Move(0.0, float(wait.real_us))
    return Move(said["hidden_us"], float(wait.real_us), said.get("last_bytes", 0) / max(1, said["bytes"]))


def replay_us(play: Play, change: Change) -> float:
    """How long the step takes, until the slowest rank has ended it."""
    shared: dict[Key, set[int]] = defaultdict(set)
    for rank, track in play.tracks.items():
        for stop in track.stops:
            shared[stop.key].add(rank)
    at = dict.fromkeys(play.tracks, 0)  # stops that are behind each rank
    lag = dict.fromkeys(play.tracks, 0.0)  # what it has waited
    arrived: dict[Key, dict[int, float]] = defaultdict(dict)
    moved = True
    while moved:
        moved = False
        for rank, track in play.tracks.items():
            while at[rank] < len(track.stops):
                stop = track.stops[at[rank]]
                here, done_us = arrived[stop.key], _done_us(track, stop.stood_us, change)
                here.setdefault(rank, lag[rank] + done_us)
                if not stop.goes_on:
                    if len(here) < len(shared[stop.key]):
                        break
                    ended = max(here.values()) + play.moves.get(stop.key, _NOTHING).after(change.network)
                    lag[rank] = max(lag[rank], ended - done_us)
                at[rank] += 1
                moved = True
    return max(lag[rank] + _done_us(track, track.work_us, change) for rank, track in play.tracks.items())


def _done_us(track: Track, work_us: float, change: Change) -> float:
    """When a rank that never waits has done what took it `work_us`."""
    return max(0.0, work_us - min(work_us, track.data_us) * (1 - change.data))


def evened(play: Play, rank: int) -> Play:
    """`rank` takes as long from stop to stop as others usually do; where they have no such stops, for all together."""
    own = play.tracks[rank]
    others = [track for other, track in play.tracks.items() if other != rank]
    if not others:
        return play
    usual: dict[tuple[Key | None, Key | None], list[float]] = defaultdict(list)
    for between, took_us in (part for track in others for part in track.parts()):
        usual[between].append(took_us)
    factor = min(1.0, statistics.median(track.work_us for track in others) / max(1.0, own.work_us))
    at_us, stops = 0.0, list[Stop]()
    for (between, took_us), stop in zip_longest(own.parts(), own.stops):
        at_us += min(took_us, statistics.median(usual[between])) if between in usual else factor * took_us
        stops += [] if stop is None else [stop._replace(stood_us=at_us)]
    data_us = min(own.data_us, statistics.median(track.data_us for track in others))
    return Play({**play.tracks, rank: Track(at_us, data_us, tuple(stops))}, play.moves)


def plays_of(run: Run) -> list[Play]:
    """The newest steps whose operations all ranks have listed; fewer of them where there are many ranks."""
    by_step: dict[int, dict[int, Steps]] = {}
    for rank, record in run.ranks.items():
        for line, _ in weighted(record.steady):
            by_step.setdefault(line.step, {})[rank] = line
    whole = [lines for step, lines in sorted(by_step.items()) if len(lines) == len(run.ranks)]
    stops = max((sum(len(line.ops or ()) for line in lines.values()) for lines in whole[-1:]), default=0)
    newest = whole[-max(1, min(_STEPS_MAX, _STOPS_MAX // max(1, stops))) :]
    zero_us = {rank: record.starts[-1].time_ns / 1e3 for rank, record in run.ranks.items()}
    buckets = {rank: said for rank, record in run.ranks.items() if (said := buckets_of(record)) is not None}
    return [play_of(lines, {r: zero_us[r] + line.at_us for r, line in lines.items()}, buckets) for lines in newest]


def buckets_of(record: RankRecord) -> Mapping[str, Any] | None:
    """What DistributedDataParallel said last of its buckets, and how much it hid on average; None if nothing."""
    said = [note.fields for note in record.notes if note.kind == "buckets"]
    return {**said[-1], "hidden_us": statistics.fmean(one["hidden_us"] for one in said)} if said else None


def what_ifs(plays: Sequence[Play], *, are_least: bool = False) -> list[WhatIf]:
    """As recorded, and with each thing otherwise, if there is something to play. are_least: those of communication."""
    if not plays:
        return []
    work = {rank: statistics.fmean(play.tracks[rank].work_us for play in plays) for rank in plays[0].tracks}
    slowest = max(work, key=lambda rank: work[rank])
    recorded, never = "as recorded", Change()
    changes: dict[str, tuple[Sequence[Play], Change]] = {
        recorded: (plays, never),
        f"rank {slowest} as fast as the others": ([evened(play, slowest) for play in plays], never),
        (faster := "network twice as fast"): (plays, Change(network=0.5)),
        (nothing := "communication for nothing"): (plays, Change(network=0.0)),
        "data always there": (plays, Change(data=0.0)),
    }
    took = {
        name: statistics.fmean(replay_us(play, how) for play in ones) / 1e3 for name, (ones, how) in changes.items()
    }
    tails = [move for play in plays for key, move in play.moves.items() if key[1] == TAIL_GROUP]
    least = {faster} if are_least or any(move.hidden_us == 0 == move.last_part for move in tails) else set[str]()
    least |= {nothing} if are_least else set()
    return [WhatIf(name, ms, took[recorded] / max(1e-6, ms), name in least) for name, ms in took.items()]
