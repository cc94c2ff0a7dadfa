"""What a step would have taken had something been otherwise: the recorded step, played again.

A rank's own thread computes, starts collectives, and stands in them until all ranks have started them and the data has
moved. What it computes between two such points is known, and how long the data took is how long the collective was open
once the last rank had started it, and the one before was there: those of a group follow each other. From these the
steps are put together again, one after the other on each rank, with some of them changed. Nothing is known of
collectives that the thread did not stand in: they stay hidden. What one takes longer than it does in other steps is no
matter of the network: a rank that has no processor at that moment, say. The result is an estimate, and the replay with
nothing changed says how good: it should be the step that was recorded.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple, final

from lockstep.observe.profile.run_record import TAIL_GROUP, Key, Op, Run, Steps
from lockstep.observe.profile.waits import Wait, compare, weighted

_STEPS_MAX, _STOPS_MAX = 64, 40_000  # that are played

Place = tuple[str, int, str]  # of a collective in a step: its group, the how manieth it is, and what


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
    held_up_us: float = 0.0  # of what is exposed: with whatever network

    def after(self, network: float) -> float:
        """What is left to stand for where data takes `network` times as long."""
        exposed_us = self.exposed_us - self.held_up_us
        all_us = self.hidden_us + exposed_us
        least_us = network * min(exposed_us, self.last_part * all_us)
        left_us = max(least_us, all_us * network - self.hidden_us) if exposed_us else 0.0
        return left_us + self.held_up_us * (network > 0)


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
    moves: dict[Key, dict[int, Move]]  # until each rank had the data
    before: Mapping[Key, Key]  # the one whose data moves first
    alone: Mapping[Key, Place]  # collectives whose data has the network for itself


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
    *,
    is_one_clock: bool = False,
) -> Play:
    """One step, from the line of each rank. Collectives that not all of these list are taken to cost no time.

    began_us: when it began on each. is_one_clock: it is the same for all. buckets: what DistributedDataParallel said
    there of what it sends.
    """
    ops: dict[Key, dict[int, Op]] = {}
    for rank, line in lines.items():
        for op in line.ops or ():
            ops.setdefault(op.key, {})[rank] = op
    clock = began_us if is_one_clock else None
    found = {key: wait for key, seen in ops.items() if (wait := compare(seen, clock)) is not None}
    left = {key for key in found if _was_left(ops[key], began_us or dict.fromkeys(lines, 0.0))}
    collectives = sorted(key for key, wait in found.items() if not wait.op.is_message)
    before = {after: key for key, after in pairwise(collectives) if key[:2] == after[:2]}
    ahead = {key: found[first] for key, first in before.items()}
    moves = {key: _moves_of(wait, ahead.get(key), buckets or {}) for key, wait in found.items()}
    behind = {key for key in before if any(moves[key][r].exposed_us < us for r, us in found[key].moved_us.items())}
    shared = behind | {before[key] for key in behind}
    places = {key: (key[1], at, found[key].op.text) for at, key in enumerate(collectives)}
    alone = {key: place for key, place in places.items() if key not in shared and TAIL_GROUP not in key[1]}
    return Play({rank: track_of(line, left) for rank, line in lines.items()}, moves, before, alone)


def _was_left(ends: Mapping[int, Op], began_us: Mapping[int, float]) -> bool:
    """Of a message: whether its sender was done with it before the receiver asked for it."""
    sent = [began_us[rank] + op.began_us + op.waited_us for rank, op in ends.items() if op.is_send]
    asked = [began_us[rank] + op.entered_us for rank, op in ends.items() if not op.is_send]
    return bool(sent and asked) and sent[0] < asked[0]


def _moves_of(wait: Wait, before: Wait | None, buckets: Mapping[int, Mapping[str, Any]]) -> dict[int, Move]:
    """Of each rank. before: the collective whose data was under way first."""
    said = buckets.get(wait.last) if TAIL_GROUP in wait.op.group else None
    if said is not None:
        part = said.get("last_bytes", 0) / max(1, said["bytes"])
        return {rank: Move(said["hidden_us"], float(us), part) for rank, us in wait.moved_us.items()}
    moves: dict[int, Move] = {}
    for rank, us in wait.moved_us.items():
        behind_us = before.came_us[rank] + before.moved_us[rank] - wait.came_us[rank] if before else 0
        moves[rank] = Move(0.0, float(max(0, us - max(0, behind_us))))
    return moves


def _steadied(plays: list[Play]) -> list[Play]:
    """Tell what of each collective is longer than it is in most steps."""
    took: dict[tuple[Place, int], list[float]] = defaultdict(list)
    ones = [(play.moves[key], rank, at) for play in plays for key, at in play.alone.items() for rank in play.moves[key]]
    for moves, rank, at in ones:
        took[at, rank].append(moves[rank].exposed_us)
    usual = {at: statistics.median(all_us) for at, all_us in took.items()}
    for moves, rank, at in ones:
        moves[rank] = moves[rank]._replace(held_up_us=max(0.0, moves[rank].exposed_us - usual[at, rank]))
    return plays


def replay_us(plays: Sequence[Play], change: Change) -> float:
    """How long a step takes: each rank begins the next one when it has ended its own.

    The first one is played once before, for it begins where the ranks are apart as one before it has left them.
    """
    begins = now = _Playing(plays[0], change, dict.fromkeys(plays[0].tracks, 0.0)).ends()
    for play in plays:
        now = _Playing(play, change, now).ends()
    return max(now[rank] - begins[rank] for rank in begins) / len(plays)


@final
class _Playing:
    """One step, from when each rank begins it."""

    def __init__(self, play: Play, change: Change, begins: Mapping[int, float]) -> None:
        self._play, self._change = play, change
        self._lag = dict(begins)  # of each rank: when it began, and what it has waited
        self._arrived: dict[Key, dict[int, float]] = defaultdict(dict)
        self._there: dict[Key, dict[int, float]] = {}  # when each rank has the data
        self._shared = Counter(key for track in play.tracks.values() for key in {stop.key for stop in track.stops})

    def ends(self) -> dict[int, float]:
        """When each rank has ended it."""
        tracks = self._play.tracks
        at = dict.fromkeys(tracks, 0)  # stops that are behind each rank
        moved = True
        while moved:
            moved = False
            for rank, track in tracks.items():
                while at[rank] < len(track.stops) and self._passes(rank, track, track.stops[at[rank]]):
                    at[rank] += 1
                    moved = True
        return {rank: self._lag[rank] + _done_us(track, track.work_us, self._change) for rank, track in tracks.items()}

    def _passes(self, rank: int, track: Track, stop: Stop) -> bool:
        """Whether the rank can go on from there: all others have come."""
        (key, stood_us, goes_on), here = stop, self._arrived[stop.key]
        if rank not in here:
            here[rank] = self._lag[rank] + _done_us(track, stood_us, self._change)
        if len(here) == self._shared[key] and not goes_on:
            there_us = self._there_us(key)[rank]
            self._lag[rank] = max(self._lag[rank], there_us - _done_us(track, stood_us, self._change))
        return goes_on or len(here) == self._shared[key]

    def _there_us(self, key: Key) -> Mapping[int, float]:
        """When each rank has the data of what all have started."""
        if key not in self._there:
            arrived, before = self._arrived[key], self._play.before.get(key)
            latest, network, moves = max(arrived.values()), self._change.network, self._play.moves.get(key, {})
            is_behind = before is not None and len(self._arrived[before]) == self._shared[before]
            began = self._there_us(before) if before and is_behind else {}
            at = {rank: max(latest, began.get(rank, latest)) for rank in arrived}
            self._there[key] = {rank: us + moves.get(rank, _NOTHING).after(network) for rank, us in at.items()}
        return self._there[key]


def _done_us(track: Track, work_us: float, change: Change) -> float:
    """When a rank that never waits has done what took it `work_us`; less than 0 is in the step before."""
    return work_us if change.data == 1 else work_us - max(0.0, min(work_us, track.data_us)) * (1 - change.data)


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
    return play._replace(tracks={**play.tracks, rank: Track(at_us, data_us, tuple(stops))})


def plays_of(run: Run) -> list[Play]:
    """Steps whose operations all ranks have listed, from all over the run, each as often as others are like it."""
    by_step: dict[int, dict[int, Steps]] = {}
    began_us: dict[int, dict[int, float]] = defaultdict(dict)
    weights: dict[int, int] = {}
    is_one_clock = run.is_of_one_host
    for rank, record in run.ranks.items():
        zero_us = {start.attempt: (start.clock_ns if is_one_clock else start.time_ns) / 1e3 for start in record.starts}
        for line, weight in weighted(record.steady):
            by_step.setdefault(line.step, {})[rank] = line
            began_us[line.step][rank] = zero_us[line.attempt] + line.at_us
            weights[line.step] = weight
    whole = [step for step, lines in sorted(by_step.items()) if len(lines) == len(run.ranks)]
    stops = max((sum(len(line.ops or ()) for line in by_step[step].values()) for step in whole[-1:]), default=0)
    behind = list(accumulate(weights[n] for n in whole))
    count = min(_STEPS_MAX, max(1, _STOPS_MAX // max(1, stops)), *behind[-1:])
    chosen = [whole[bisect_left(behind, (n + 0.5) * behind[-1] / count)] for n in range(count)] if whole else []
    buckets = {rank: said for rank, record in run.ranks.items() if (said := record.buckets) is not None}
    return _steadied([play_of(by_step[step], began_us[step], buckets, is_one_clock=is_one_clock) for step in chosen])


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
        (fed := "data always there"): (plays, Change(data=0.0)),
    }
    named = changes if len(work) > 1 else (recorded, fed)  # of one rank, which has no others
    took = {name: replay_us(*changes[name]) / 1e3 for name in named}
    tails = [move for play in plays for key, m in play.moves.items() if TAIL_GROUP in key[1] for move in m.values()]
    least = {faster} if are_least or any(move.hidden_us == 0 == move.last_part for move in tails) else set[str]()
    least |= {nothing} if are_least else set()
    return [WhatIf(name, ms, took[recorded] / max(1e-6, ms), name in least) for name, ms in took.items()]
