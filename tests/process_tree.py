"""The processes that one process has started, and theirs: seen through /proc, struck through pidfds. Linux only.

A process id can be given away again the moment its process has ended. So a process is known by its id and the time of
its start, and a signal goes through a file descriptor that was checked to be this very process.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from lockstep.launch.processes import children


class Process(NamedTuple):
    """A process that lives."""

    pid: int
    parent: int
    session: int  # that of the process which began it
    started: int  # clock ticks since the machine booted
    is_zombie: bool


def descendants(pid: int) -> list[Process]:
    """All that descends from `pid` now, parents before their children, zombies too."""
    found: list[Process] = []
    for child in children(pid):
        process = look(child)
        if process is not None:
            found += [process, *descendants(child)]
    return found


def look(pid: int) -> Process | None:
    """The process `pid`, None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0] == "Z")


def age_s(process: Process) -> float:
    """Seconds since it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / os.sysconf("SC_CLK_TCK")


def words_of(pid: int) -> str:
    """Its command line; "" where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def mapped_files(pid: int) -> list[str]:
    """The files that `pid` has in its memory; [] where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if line.count("/")))


def strike(process: Process, number: signal.Signals) -> bool:
    """Send a signal to this very process; False where it has ended by itself before."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        now = look(process.pid)
        if now is None or now.started != process.started or now.is_zombie:
            return False
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
