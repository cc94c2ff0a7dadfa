"""Sleeping until a word of shared memory changes, and waking those who do.

On Linux a futex: the kernel compares the word and puts the caller to sleep in one step. Elsewhere short sleeps.
"""

from __future__ import annotations

import abc
import ctypes
import os
import platform
import sys
import threading
import time
from typing import final

_WAIT, _WAKE = 0, 1  # without the PRIVATE flag: the word is shared between processes
_EVERYBODY = 2**31 - 1
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}  # the system call's number; little-endian all

# x86 keeps the order of one core's stores, and of its loads; the others must be told.
ORDERED = platform.machine() in ("x86_64", "AMD64")

_gate = threading.local()


def fence() -> None:
    """Let every store before it be seen by the other cores before any load after it.

    A lock's release and then its acquire are the full barrier that Python has: both are atomic read-modify-writes.
    """
    try:
        lock = _gate.lock
    except AttributeError:
        lock = _gate.lock = threading.Lock()
    if lock.locked():  # not so the first time, and after an interrupt between the two
        lock.release()
    lock.acquire(blocking=False)


def yield_core() -> None:
    """Let another process that waits for this core have it now."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


class Parking(abc.ABC):
    """Where a thread sleeps. `address` is that of the low four bytes of an aligned eight-byte word."""

    @abc.abstractmethod
    def sleep(self, address: int, seen: int, timeout_s: float) -> None:
        """Return when the word may differ from `seen`, after `timeout_s` at the latest; may return early."""

    @abc.abstractmethod
    def wake(self, address: int) -> None:
        """Wake all who sleep on this word."""


@final
class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@final
class FutexParking(Parking):
    """The kernel's own queue of sleepers. Source: man 2 futex."""

    def __init__(self) -> None:
        number = _FUTEX.get(platform.machine())
        if not sys.platform.startswith("linux") or number is None:
            raise NotImplementedError(f"no futex on {sys.platform} {platform.machine()}")
        kinds = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._sleep = ctypes.CDLL(None).syscall  # releases the interpreter's lock while it sleeps
        self._wake = ctypes.PyDLL(None).syscall  # returns at once, so it keeps it
        self._sleep.argtypes = self._wake.argtypes = kinds
        self._number = number

    def sleep(self, address: int, seen: int, timeout_s: float) -> None:
        whole = int(timeout_s)
        limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
        self._sleep(self._number, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit))

    def wake(self, address: int) -> None:
        self._wake(self._number, address, _WAKE, _EVERYBODY, None)


@final
class PollingParking(Parking):
    """For systems without a futex: looks again every millisecond, sooner at first."""

    _FIRST_S, _LONGEST_S = 20e-6, 1e-3

    def sleep(self, address: int, seen: int, timeout_s: float) -> None:
        word = ctypes.c_uint32.from_address(address)
        end = time.monotonic() + timeout_s
        pause_s = self._FIRST_S
        while word.value == seen & 0xFFFFFFFF and time.monotonic() < end:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, self._LONGEST_S)

    def wake(self, address: int) -> None:
        """Nobody needs it: sleepers look by themselves."""


def best_parking() -> Parking:
    """A futex where there is one."""
    try:
        return FutexParking()
    except (NotImplementedError, AttributeError):
        return PollingParking()
