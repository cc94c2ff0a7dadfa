"""What a run was: how it stands, its attempts, and the facts of its machine and command."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Literal

from lockstep.comm.kernel import read_proc
from lockstep.observe.report.source import Attempt, RunReader, Source

Status = Literal["running", "finished", "failed", "stopped", "unknown"]
STOPPED = (75, 130)  # exit codes of a run that was asked to stop
_FRESH_S = 60.0  # of a file of another machine
_FACTS_MAX, _CHARS = 400, 300
_SECTIONS = {
    "run": ("command", "cwd", "commit", "data", "config_sha256"),
    "versions": ("lockstep", "torch", "python", "system"),
    "machine": ("host", "cores", "device", "threads"),
}


def look(reader: RunReader) -> tuple[Source, Status]:
    """The run as it is now, and how it stands. Where nobody writes any more, an unfinished line is a problem too."""
    source = reader.read()
    status = status_of(source)
    cut_off = () if status == "running" else reader.cut_off()
    return source._replace(problems=(*source.problems, *cut_off)), status


def status_of(source: Source) -> Status:
    """How the run stands: as its launcher says, or whether any of its processes lives."""
    launch = source.launch
    if launch is not None and launch.code is not None:
        return "finished" if launch.code == 0 else "stopped" if launch.code in STOPPED else "failed"
    processes = {(s.host, s.pid, s.time_ns) for record in source.run.ranks.values() for s in record.starts[-1:]}
    if launch is not None:
        processes.add((launch.host, launch.pid, launch.began_ns))
    here = [(pid, time_ns) for host, pid, time_ns in processes if host == socket.gethostname()]
    if any(is_alive(pid, time_ns / 1e9) for pid, time_ns in here):
        return "running"
    newest_s = max((path.stat().st_mtime for path in source.run.folder.glob("*.jsonl")), default=0.0)
    if len(here) < len(processes) and time.time() - newest_s < _FRESH_S:
        return "running"
    return "unknown" if launch is None else "failed"


def is_alive(pid: int, seen_s: float) -> bool:
    """Whether the process `pid`, which was there at `seen_s` since the epoch, still is: not one with its number."""
    words = read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if not words or words[0] in b"ZX":
        return False
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_s + int(words[19]) / os.sysconf("SC_CLK_TCK") <= seen_s + 1


def run_of(source: Source, status: Status, now_ns: int) -> dict[str, Any]:
    """How the run stands and what it was."""
    lines = [line for record in source.run.ranks.values() for line in record.lines]
    began_ns = began_ns_of(source)
    return {
        "id": source.folder.name,
        "folder": str(source.folder),
        "status": status,
        "began": datetime.fromtimestamp(began_ns / 1e9, timezone.utc).isoformat(timespec="seconds"),
        "wall_s": round(max(0, _ended_ns(source, status, now_ns) - began_ns) / 1e9, 3),
        "world_size": world_size_of(source),
        "steps": 0 if source.run.is_whole else max((line.step for line in lines), default=0),
        "attempts": [_attempt_row(source, attempt, began_ns) for attempt in attempts_of(source)],
        "facts": list(_facts(source))[:_FACTS_MAX],
    }


def began_ns_of(source: Source) -> int:
    """Since the epoch."""
    times = [start.time_ns for record in source.run.ranks.values() for start in record.starts]
    times += [source.launch.began_ns] if source.launch else []
    return min(times, default=0)


def world_size_of(source: Source) -> int:
    """Ranks of the last attempt; 0 where there was none."""
    return max((attempt.began_ns, attempt.world_size) for attempt in attempts_of(source) or [Attempt("", 0, 0)])[1]


def attempts_of(source: Source) -> list[Attempt]:
    """By time. Where no launcher has told of one, its ranks have."""
    told = {attempt.name: attempt for attempt in (source.launch.attempts if source.launch else ())}
    starts = (start for record in source.run.ranks.values() for start in record.starts)
    for start in sorted(starts, key=lambda start: start.time_ns):
        told.setdefault(start.attempt, Attempt(start.attempt, start.world_size, start.time_ns))
    return sorted(told.values(), key=lambda attempt: attempt.began_ns)


def _ended_ns(source: Source, status: Status, now_ns: int) -> int:
    if status == "running":
        return now_ns
    if source.launch is not None and source.launch.over_ns:
        return source.launch.over_ns
    return max((_end_ns(source, attempt) for attempt in attempts_of(source)), default=0)


def _end_ns(source: Source, attempt: Attempt) -> int:
    """As its launcher says, or when its last step ended."""
    ends = [attempt.ended_ns or attempt.began_ns]
    for record in source.run.ranks.values():
        began = {start.attempt: start.time_ns for start in record.starts}
        last = [line for line in record.lines if line.attempt == attempt.name][-1:]
        ends += [began[attempt.name] + 1000 * (line.at_us + line.wall_us) for line in last if not attempt.ended_ns]
    return max(ends)


def _attempt_row(source: Source, attempt: Attempt, began_ns: int) -> dict[str, Any]:
    lines = [line for record in source.run.ranks.values() for line in record.lines if line.attempt == attempt.name]
    return {
        "name": attempt.name,
        "world_size": attempt.world_size,
        "began_s": round((attempt.began_ns - began_ns) / 1e9, 3),
        "ended_s": round((attempt.ended_ns - began_ns) / 1e9, 3) if attempt.ended_ns else None,
        "first_step": min((line.step - line.count + 1 for line in lines), default=None),
        "last_step": max((line.step for line in lines), default=None),  # both of what no later attempt has done again
        "reached": max((moment.steps for moment in attempt.left), default=0),
        "code": attempt.code,
        "causes": list(attempt.causes),
    }


def facts_by_rank(source: Source) -> dict[int, Mapping[str, Any]]:
    """What each rank has said of itself last."""
    return {rank: note.fields for rank, note in source.notes("facts")}


def _facts(source: Source) -> Iterator[list[str]]:
    """[section, name, value, where it came from], of the lowest rank."""
    if not source.run.ranks:
        if source.launch is not None:
            yield ["run", "command", _text(source.launch.command), ""]
        return
    rank = min(source.run.ranks)
    start = source.run.ranks[rank].starts[-1]
    facts = {"command": start.program, "host": start.host, "device": start.device, "threads": start.threads}
    facts |= facts_by_rank(source).get(rank, {})
    for section, names in _SECTIONS.items():
        yield from ([section, name, _text(facts[name]), ""] for name in names if facts.get(name) not in (None, ""))
    for name, (value, origin) in facts.get("variables", {}).items():
        yield ["environment", name, _text(value), origin]
    for name, value in facts.get("config", {}).items():
        yield ["config", name, _text(value), ""]


def _text(value: object) -> str:
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return words if len(words) <= _CHARS else words[: _CHARS - 3] + "..."
