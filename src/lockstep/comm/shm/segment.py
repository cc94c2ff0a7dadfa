"""One piece of memory that all ranks of a host map, and each rank's heap in it.

The file is sparse: [ header | heap of rank 0 | heap of rank 1 | ... ], each heap as large as the file system, so every
rank can use all the memory there is, and an offset means the same on every rank. Memory is taken from the system when
a heap gives it out (so that a full file system is an error and not a SIGBUS) and goes back when it is returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from lockstep.comm.kernel import free_memory
from lockstep.comm.shm.free_list import FreeList
from lockstep.errors import SharedMemoryUnavailable

PAGE = mmap.ALLOCATIONGRANULARITY
_SHM = Path("/dev/shm")
_LARGE_BYTES = 16 * 2**20
_ADDRESSES = 2**45  # a process has four times as many


def default_directory() -> Path:
    """Where memory that looks like a file lies; a temporary folder where the system has no such place."""
    return _SHM if _SHM.is_dir() else Path(tempfile.gettempdir())


@final
class Segment:
    """The mapping of one process. It goes when nothing refers to it any more; the memory goes with the last mapping."""

    def __init__(self, fd: int, header_bytes: int, ranks: int, heap_bytes: int) -> None:
        self.size = header_bytes + ranks * heap_bytes
        self.header_bytes = header_bytes
        self.heap_bytes = heap_bytes
        self.map = mmap.mmap(fd, self.size)
        with contextlib.suppress(OSError):  # a core dump need not hold what the peers hold
            self.map.madvise(getattr(mmap, "MADV_DONTDUMP", mmap.MADV_NORMAL))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._whole: dict[torch.dtype, Tensor] = {}

    def place_of(self, tensor: Tensor) -> int | None:
        """The offset at which `tensor`, contiguous, lies; None where it lies elsewhere, or across its own elements."""
        offset = tensor.data_ptr() - self.base
        if offset >= 0 and offset + tensor.nbytes <= self.size and offset % tensor.element_size() == 0:
            return offset
        return None

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements at `offset` as a tensor. Memory: none; it keeps the mapping alive and nothing else."""
        whole = self._whole.get(dtype)
        if whole is None:
            with torch.inference_mode(False):  # one made in that mode could be written in no other
                whole = self._whole[dtype] = torch.frombuffer(self.map, dtype=dtype)
        start = offset // dtype.itemsize
        return whole[start : start + numel]


@final
class SegmentFile:
    """The file while ranks are meeting. It has no name where the system allows that, so nothing can be left behind."""

    def __init__(self, fd: int, path: str, named: bool) -> None:
        self.fd = fd
        self.path = path  # where the other ranks open it
        self._named = named

    @classmethod
    def create(cls, directory: Path, nbytes: int) -> SegmentFile:
        """A sparse file that only this user can open.  Raises: OSError."""
        unnamed = getattr(os, "O_TMPFILE", None)
        if unnamed is not None and Path("/proc/self/fd").is_dir():
            with contextlib.suppress(OSError):  # not every file system can; then it has a name for a moment
                fd = os.open(directory, unnamed | os.O_RDWR | os.O_CLOEXEC, 0o600)
                return cls._sized(cls(fd, f"/proc/{os.getpid()}/fd/{fd}", named=False), nbytes)
        fd, path = tempfile.mkstemp(prefix="lockstep-", dir=directory)  # mode 0600
        return cls._sized(cls(fd, path, named=True), nbytes)

    @classmethod
    def open(cls, path: str) -> SegmentFile:
        """The file another rank created.  Raises: OSError."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path, named=False)

    @staticmethod
    def _sized(file: SegmentFile, nbytes: int) -> SegmentFile:
        try:
            os.ftruncate(file.fd, nbytes)
        except OSError:
            file.close()
            raise
        return file

    def close(self) -> None:
        """Forget the file and its name; mappings stay."""
        if self._named:
            self._named = False
            Path(self.path).unlink(missing_ok=True)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@final
class Heap:
    """The part of the segment that one rank gives out."""

    def __init__(self, segment: Segment, fd: int, index: int, where: str) -> None:
        self._segment = segment
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd)
        self._start = segment.header_bytes + index * segment.heap_bytes
        self._free = FreeList(segment.heap_bytes, PAGE)
        self._lock = threading.Lock()
        self._returned: deque[int] = deque()  # by finalizers, which may run at any moment, also under the lock
        self._where = where

    def allocate(self, nbytes: int) -> int:
        """The offset of `nbytes` bytes of memory, whole pages; zeros where the system gives fresh ones.

        Raises: SharedMemoryUnavailable, with the number of bytes needed.
        """
        with self._lock:
            while self._returned:
                self._free.give_back(self._returned.popleft())
            place = self._free.take(max(nbytes, 1))
            if place is None:
                raise SharedMemoryUnavailable(f"{nbytes} bytes are needed, but all of {self._where} is given out")
            try:
                reserve(self._fd, self._start + place, nbytes)
            except OSError as error:
                self._free.give_back(place)
                raise SharedMemoryUnavailable(shortage(self._where, self._fd, nbytes, error)) from error
            return self._start + place

    def give_back(self, offset: int) -> None:
        """Return what `allocate` gave; the memory goes back to the system now."""
        place = offset - self._start
        remove = getattr(mmap, "MADV_REMOVE", None)
        if remove is not None:
            self._segment.map.madvise(remove, offset, self._free.size_of(place))
        self._returned.append(place)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor [numel > 0] in this heap, whose memory is returned with the last reference to its storage."""
        nbytes = numel * dtype.itemsize
        offset = self.allocate(nbytes)
        window = memoryview(self._segment.map)[offset : offset + nbytes]
        when_dropped(window, self.give_back, offset)
        return torch.frombuffer(window, dtype=dtype)


def when_dropped(window: memoryview, tell: Callable[[int], None], place: int) -> None:
    """Call `tell(place)` once nothing refers to `window` any more; at the end of the process nobody needs to know."""
    weakref.finalize(window, _in_process, os.getpid(), tell, place).atexit = False


def _in_process(owner: int, tell: Callable[[int], None], place: int) -> None:
    if os.getpid() == owner:  # a forked child has the tensor too, but is not the rank
        tell(place)


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Take memory from the system for this part of the file.  Raises: OSError where there is too little.

    A file system in memory may be as large as the memory, and full only when the kernel ends processes: so much is not
    asked for.
    """
    if nbytes > _LARGE_BYTES and nbytes > free_memory():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, max(nbytes, 1))


def shortage(where: str, fd: int, nbytes: int, error: OSError) -> str:
    """The sentence for memory that the system does not give."""
    if error.errno == errno.ENOMEM:
        return f"{nbytes} bytes of shared memory are needed, but the machine has {free_memory():.0f} bytes left"
    if error.errno != errno.ENOSPC:
        return f"{where}: {nbytes} bytes of shared memory cannot be had: {error.strerror}"
    found = os.fstatvfs(fd)
    return (
        f"{where} is too small: {nbytes} bytes are needed, {found.f_bavail * found.f_frsize} of "
        f"{found.f_blocks * found.f_frsize} are free. Make it larger (mount -o remount,size=... {where}, or a "
        f"container's --shm-size)"
    )


def capacity_of(directory: Path, ranks: int) -> int:
    """How large each rank's heap may grow: to all that can lie there, in whole pages, if there are addresses for it."""
    found = os.statvfs(directory)
    limit = found.f_blocks * found.f_frsize or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(limit, _ADDRESSES // ranks), PAGE) // PAGE * PAGE
