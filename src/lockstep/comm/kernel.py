"""What the kernel tells of this machine and the processes on it. Standard library only."""

from __future__ import annotations

import os


def read_proc(path: str) -> bytes:
    """What the kernel tells in a file of /proc; nothing where it is not Linux, or tells another user only."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # also of a process that has ended
        return b""


def free_memory() -> float:
    """Bytes that programs can still have; infinite where the system does not say."""
    lines = read_proc("/proc/meminfo").splitlines()
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith(b"MemAvailable:")), float("inf"))


def process_state(pid: int) -> str:
    """One letter, as /proc has it (R, S, D, T, t, Z); "" where the process has gone, or /proc does not say."""
    return state_and_cpu_s(f"/proc/{pid}/stat")[0]


def state_and_cpu_s(path: str) -> tuple[str, float]:
    """That letter of a thread or process, and its time on cores; "" and 0 where that is not told."""
    words = read_proc(path).rpartition(b")")[2].split()  # it may call itself anything, also "x) T"
    if not words:
        return "", 0.0
    return words[0].decode(), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def core_mask() -> int:
    """The cores that this process may run on, as bits."""
    if hasattr(os, "sched_getaffinity"):
        return sum(1 << core for core in os.sched_getaffinity(0))
    return (1 << (os.cpu_count() or 1)) - 1
