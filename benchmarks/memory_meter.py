"""What a rank occupies, and the most it occupied between two moments, as the kernel counts it. Linux.

Counted are a rank's private memory (anonymous pages) and its part of the memory that the ranks of its host share: all
that is allocated there, divided by the ranks. So a page is counted once, however many ranks have it mapped, where RSS
counts it on each of them; that is what PSS is too, but PSS takes a walk over all pages to read. Files (the code of the
libraries) are left out.

A thread reads both numbers every millisecond: two system calls. How far such a peak can be trusted is measured with
it: the kernel keeps the exact peak of the process's RSS (VmHWM, reset before), and the thread sees RSS too, so `seen`
is how much of the exact peak its samples have found.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

MIB = 2**20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PERIOD_S = 0.001
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**16
_SHARED = "/dev/shm/"


class Occupied(NamedTuple):
    """Bytes of one rank."""

    private: int
    shared: int  # its part of what the ranks of the host share
    resident: int  # RSS: what the kernel counts on this process, shared pages in full

    @property
    def total(self) -> int:
        """Bytes that the machine would have more, were this rank not there."""
        return self.private + self.shared


@dataclass
class Peak:
    """The most that was occupied at one moment; complete when the block that measures it has ended."""

    occupied: Occupied
    seen: float = 0.0  # peak of RSS in the samples / the kernel's


def can_measure() -> bool:
    """Whether this system tells what the meter reads, and takes back what it allows to."""
    return Path("/proc/self/statm").exists() and os.access("/proc/self/clear_refs", os.W_OK)


def return_large_blocks() -> None:
    """From now on freed tensors go back to the system at once, as the formula has it; glibc keeps some otherwise."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


@final
class Meter:
    """Reads what this process occupies. One of `ranks` ranks on this host."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._segments: list[int] = []
        self._look_for_segments()

    def now(self) -> Occupied:
        """What is occupied at this moment, after everything that is not needed was given back."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._look_for_segments()
        return self._read()

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        """The most that is occupied while the block runs."""
        self._look_for_segments()
        found = Peak(self._read())
        resident = found.occupied.resident
        ended = threading.Event()

        def watch() -> None:
            nonlocal resident
            while not ended.wait(_PERIOD_S):
                now = self._read()
                resident = max(resident, now.resident)
                if now.total > found.occupied.total:
                    found.occupied = now

        thread = threading.Thread(target=watch, name="memory-meter")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()
            found.seen = resident / _exact_peak()

    def _read(self) -> Occupied:
        _, resident, shared, *_ = (int(pages) * _PAGE for pages in os.pread(self._statm, 200, 0).split())
        allocated = sum(os.fstat(segment).st_blocks * 512 for segment in self._segments)
        return Occupied(resident - shared, allocated // self._ranks, resident)

    def _look_for_segments(self) -> None:
        """The open files that are shared memory, each once, whatever opened them."""
        found: dict[int, int] = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the folder's own, closed again
                if os.readlink(f"/proc/self/fd/{name}").startswith(_SHARED):
                    found.setdefault(os.fstat(int(name)).st_ino, int(name))
        self._segments = list(found.values())


def _exact_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
