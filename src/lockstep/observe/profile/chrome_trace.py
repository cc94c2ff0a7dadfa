"""The windows of all ranks as one trace for chrome://tracing or ui.perfetto.dev.

Every rank is a process there, with the threads torch.profiler saw and one more: where its own thread stood in
collectives, each with an arrow from the rank that came last. What C++ sends during backward is waited for as a whole;
its parts have arrows of their own, between the slices that torch.profiler saw. Clocks of different machines are brought
together by the ends of collectives, which are one moment for all ranks that stood in them; ranks of one machine share a
clock.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.observe.profile.run_record import TAIL_GROUP, Key, Op, Run, Steps, of_all
from lockstep.observe.profile.waits import Wait, compare
from lockstep.observe.profile.window import trace_of

Event = dict[str, Any]
_WAITS_THREAD, _OPEN_THREAD, _FIRST_THREAD = 1, 2, 3
_THREADS = 1_000  # of a rank: Perfetto knows threads by their numbers, so those of two ranks are not alike
_IS_DONE = re.compile("(gloo|nccl):")  # slices of torch's from where a collective begins to where it has ended
_STOOD_US = 20  # below, an end says little of when the data had come


class Moment(NamedTuple):
    """A collective on one rank, in microseconds since the epoch by that rank's clock."""

    op: Op
    zero_us: float  # its step began

    @property
    def ended_us(self) -> float:
        """When the rank's thread went on."""
        return self.zero_us + self.op.stood_until_us


class Clocks(NamedTuple):
    """How far each rank's clock is ahead, and how far apart the ends of a collective still are after that."""

    ahead_us: Mapping[int, float]
    residual_us: float  # median over collectives; 0 where there are none


Moments = list[dict[int, Moment]]  # of each collective, by rank


def moments_of(run: Run, steps: Container[int]) -> Moments:
    """The collectives of these steps that are listed."""
    found: dict[Key, dict[int, Moment]] = {}
    for rank, line, zero_us in placed_lines(run, steps):
        for op in line.ops or ():
            found.setdefault(op.key, {})[rank] = Moment(op, zero_us)
    return list(found.values())


def placed_lines(run: Run, steps: Container[int]) -> Iterator[tuple[int, Steps, float]]:
    """(rank, line, when it began in microseconds since the epoch by that rank's clock) of these steps."""
    for rank, record in run.ranks.items():
        began_us = {start.attempt: start.time_ns / 1e3 for start in record.starts}
        yield from ((rank, line, began_us[line.attempt] + line.at_us) for line in record.lines if line.step in steps)


def align(moments: Moments, hosts: Mapping[int, str]) -> Clocks:
    """Bring the clocks of machines together. The first rank's machine has the time that counts."""
    reference = hosts[min(hosts)]
    apart: dict[str, list[float]] = {host: [] for host in hosts.values()}
    stood = [
        {rank: moment for rank, moment in ops.items() if moment.op.began_us >= 0 and moment.op.waited_us >= _STOOD_US}
        for ops in moments
    ]
    for ops in stood:
        here = [moment.ended_us for rank, moment in ops.items() if hosts[rank] == reference]
        for rank, moment in ops.items():
            if here and hosts[rank] != reference:
                apart[hosts[rank]].append(moment.ended_us - statistics.median(here))
    ahead = {rank: statistics.median(apart[host]) if apart[host] else 0.0 for rank, host in hosts.items()}
    ends = [[moment.ended_us - ahead[rank] for rank, moment in ops.items()] for ops in stood if len(ops) > 1]
    return Clocks(ahead, statistics.median(max(each) - min(each) for each in ends) if ends else 0.0)


def merge(traces: Mapping[int, Mapping[str, Any]], moments: Moments, hosts: Mapping[int, str]) -> dict[str, Any]:
    """One trace. traces: what torch.profiler wrote, by rank; some may be missing."""
    clocks = align(moments, hosts)
    bases_us = {r: trace.get("baseTimeNanoseconds", 0) / 1e3 - clocks.ahead_us[r] for r, trace in traces.items()}
    times = [e["ts"] + bases_us[rank] for rank, trace in traces.items() for e in trace["traceEvents"] if "ts" in e]
    times += [m.zero_us + min(0, m.op.entered_us) - clocks.ahead_us[r] for ops in moments for r, m in ops.items()]
    zero_us = min(times, default=0.0) - 1  # of numbers that large the last digit is a quarter of a microsecond
    events: list[Event] = []
    seen: dict[int, list[Event]] = {}
    arrows = count(len(hosts) << 32)  # their numbers
    for rank in sorted(hosts):
        events.append(_named("process_name", rank, _WAITS_THREAD, f"rank {rank} ({hosts[rank]})"))
        events.append({**events[-1], "name": "process_sort_index", "args": {"sort_index": rank}})
        events.append(_named("thread_name", rank, _WAITS_THREAD, "stands in collectives"))
        events.append(_named("thread_name", rank, _OPEN_THREAD, "collectives that are open"))
        trace = traces.get(rank)
        if trace is not None:
            seen[rank] = _moved(trace, rank, bases_us[rank] - zero_us)
            events += seen[rank]
    if any(TAIL_GROUP in op.op.group for ops in moments for op in ops.values()) and seen.keys() == hosts.keys():
        events += _bucket_arrows(seen, arrows)
    for ops in moments:
        placed = {rank: m._replace(zero_us=m.zero_us - clocks.ahead_us[rank] - zero_us) for rank, m in ops.items()}
        for rank, moment in placed.items():
            events += _slices(rank, moment._replace(op=of_all(moment.op, len(ops))))
        zeros_us = {rank: moment.zero_us for rank, moment in ops.items()}
        found = compare({r: moment.op for r, moment in ops.items()}, zeros_us if len(set(hosts.values())) < 2 else None)
        if found is not None:
            events += _arrows(found, placed, arrows)
    for event in events:
        event["tid"] += event["pid"] * _THREADS
        event |= {"ts": round(event["ts"], 3)} if "ts" in event else {}
    events.sort(key=_begin)
    about = {"clock residual, median us": round(clocks.residual_us, 1), "ranks": len(hosts)}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _named(what: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": name}}


def _moved(trace: Mapping[str, Any], rank: int, shift_us: float) -> list[Event]:
    """The events of one rank's profiler: in the process of the rank, its threads numbered, at the common time."""
    threads: dict[tuple[Any, ...], int] = {}
    numbers: dict[Any, int] = {}
    open_until: dict[tuple[Any, ...], list[float]] = {}
    events: list[Event] = []
    placed = [((event.get("pid"), event.get("tid")), event) for event in trace["traceEvents"]]
    names = {place: event["args"]["name"] for place, event in placed if event["name"] == "thread_name"}
    starting = {place for place, event in placed if event["name"].startswith("c10d::")}
    for place, event in sorted((one for one in placed if one[1]["ph"] != "M"), key=lambda one: _begin(one[1])):
        lane: tuple[Any, ...] = place
        if event["ph"] == "X":
            if place in starting and _IS_DONE.match(event["name"]):
                lane = *lane, "beside"
            while not _fits(open_until.setdefault(lane, []), event["ts"], event["dur"]):
                lane = *lane, "beside"
        thread = threads.setdefault(lane, _FIRST_THREAD + len(threads))
        events.append({**event, "pid": rank, "tid": thread, "ts": event["ts"] + shift_us})
        if "id" in event:  # arrows of one rank are none of another's; Perfetto takes numbers only
            events[-1]["id"] = numbers.setdefault(event["id"], (rank << 32) + len(numbers))
    for (pid, tid, *beside), thread in threads.items():
        name = (names.get((pid, tid)) or str(tid) or "marks") + " (beside it)" * bool(beside)
        events.append(_named("thread_name", rank, thread, name))
    return events


def _fits(open_until: list[float], begin_us: float, took_us: float) -> bool:
    """Whether a slice lies in those of its thread, or after them: Perfetto drops one that ends in the middle."""
    while open_until and open_until[-1] <= begin_us:
        open_until.pop()
    end_us = round(begin_us + took_us, 3)
    if open_until and end_us > open_until[-1]:
        return False
    open_until.append(end_us)
    return True


def _slices(rank: int, moment: Moment) -> list[Event]:
    """Where the thread stood in it; and beside that, from when to when it was open."""
    op = moment.op
    args = {"site": op.site, "group": op.group, "seq": op.seq, "label": op.label, "bytes": op.bytes}
    common = {"name": op.text, "cat": "collective", "pid": rank, "args": args}
    events: list[Event] = []
    if op.began_us >= 0:
        at_us = moment.zero_us + op.began_us
        events.append({**common, "ph": "X", "tid": _WAITS_THREAD, "ts": at_us, "dur": op.waited_us})
    if op.entered_us != op.began_us:
        name = f"{rank}/{op.attempt}/{op.group}/{op.seq}"
        for phase, time_us in (("b", op.entered_us), ("e", max(op.entered_us, op.left_us))):
            events.append({**common, "ph": phase, "tid": _OPEN_THREAD, "id": name, "ts": moment.zero_us + time_us})
    return events


def _arrows(wait: Wait, moments: Mapping[int, Moment], numbers: Iterator[int]) -> Iterator[Event]:
    """From the rank that came last to each of the others."""
    came = moments[wait.last]
    begin_us = came.zero_us + came.op.began_us
    for rank, moment in moments.items():
        if rank != wait.last and moment.ended_us >= begin_us:  # else it had its data without that rank's
            since_us, took_us = moment.zero_us + moment.op.began_us, moment.op.waited_us
            to = {"pid": rank, "tid": _WAITS_THREAD, "ts": since_us, "dur": took_us}
            last = {"pid": wait.last, "tid": _WAITS_THREAD, "ts": begin_us}
            yield from _arrow("last to arrive", next(numbers), last, to)


def _bucket_arrows(seen: Mapping[int, Sequence[Event]], numbers: Iterator[int]) -> Iterator[Event]:
    """From where the last rank started a collective to where it ended on the others, if all started the same ones."""
    slices = {rank: sorted((e for e in events if e["ph"] == "X"), key=_begin) for rank, events in seen.items()}
    begun_by = {rank: [e for e in ones if e["name"].startswith("c10d::")] for rank, ones in slices.items()}
    done = {rank: [e for e in ones if _IS_DONE.match(e["name"])] for rank, ones in slices.items()}
    if len({tuple([e["name"] for e in ones]) for ones in begun_by.values()}) > 1:
        return
    for number, begun in enumerate(zip(*begun_by.values(), strict=True)):
        last = max(begun, key=_begin)
        for rank in sorted(seen.keys() - {last["pid"]}):
            to = done[rank][number] if len(done[rank]) == len(begun_by[rank]) else {"ts": 0, "dur": 0}
            if to["ts"] + to["dur"] > last["ts"]:
                yield from _arrow("last to start", next(numbers), last, to)


def _begin(event: Event) -> tuple[float, float]:
    return event.get("ts", -1), -event.get("dur", 0)  # what lies in a slice comes after it


def _arrow(name: str, number: int, since: Event, to: Event) -> Iterator[Event]:
    """From where one slice begins to where another ends, inside that still: at its very end it is one to the next."""
    common = {"name": name, "cat": "collective", "id": number}
    yield {**common, "ph": "s", "pid": since["pid"], "tid": since["tid"], "ts": since["ts"]}
    ends_us = to["ts"] + to["dur"] - min(1.0, to["dur"] / 2)
    yield {**common, "ph": "f", "bp": "e", "pid": to["pid"], "tid": to["tid"], "ts": max(since["ts"], ends_us)}


def merge_files(run: Run, steps: Container[int]) -> tuple[Path, int, float] | None:
    """Merge the windows that the ranks have left in the folder of `run`: (file, ranks in it, residual in us).

    None where there are none.
    """
    paths = {rank: trace_of(run.folder, rank) for rank in run.ranks}
    traces: dict[int, Any] = {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.is_file()}
    if not traces:
        return None
    hosts = {rank: record.starts[-1].host for rank, record in run.ranks.items()}
    merged = merge(traces, moments_of(run, steps), hosts)
    path = run.folder / "trace.json"
    path.write_text(json.dumps(merged, separators=(",", ":")))
    return path, len(traces), merged["otherData"]["clock residual, median us"]
