"""The files of one folder, opened without trust: no link is followed, nothing but a regular file is read.

The folder is opened once, and files are opened in it, by their plain names; whatever they are called, nothing outside
is touched. A file that is read is the one that was checked: the same open file, or, of more files than are kept open,
one of the same inode, size and time of change.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import final

from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

_OPEN_MAX = 64
_HASH_BYTES = 4 << 20
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: opening a pipe would wait


@final
class OpenFiles:
    """Files of one folder, opened when they are needed; so many stay open. Raises: CheckpointMissing."""

    def __init__(self, folder: Path) -> None:
        with faults(folder, "is not there", CheckpointMissing):
            self.folder_fd = os.open(folder, _FLAGS | os.O_DIRECTORY)
        self._folder = folder
        self._open: OrderedDict[str, int] = OrderedDict()
        self._seen: dict[str, tuple[int, ...]] = {}

    def descriptor(self, name: str) -> int:
        """File `name`, open. Valid until the next call. Raises: OSError; CheckpointDamaged where it is no file."""
        fd = self._open.get(name)
        if fd is None:
            while len(self._open) >= _OPEN_MAX:
                _close(self._open.popitem(last=False)[1])
            fd = self._open[name] = os.open(name, _FLAGS, dir_fd=self.folder_fd)
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointDamaged(f"{self._folder / name} is no regular file")
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._seen.setdefault(name, identity) != identity:
                raise CheckpointDamaged(f"{self._folder / name} was changed while it was read")
        self._open.move_to_end(name)
        return fd

    def text(self, name: str, absent: str, bytes_max: int) -> str:
        """All of a file of ASCII. Raises: CheckpointDamaged, also for a larger one, and, saying `absent`, for none."""
        source = self._folder / name
        with faults(source, absent):
            fd = self.descriptor(name)
            size = os.fstat(fd).st_size
            if size > bytes_max:
                raise CheckpointDamaged(f"{source} is damaged: {size} bytes, it has at most {bytes_max}")
            data = read_at(fd, 0, size)
        try:
            return data.decode("ascii")
        except UnicodeDecodeError as error:
            raise CheckpointDamaged(f"{source} is damaged: {error}") from error

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            _close(self._open.popitem()[1])
        _close(self.folder_fd)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # the kernel has closed it; of what was only read nothing can be lost
        os.close(fd)


# ------------------------------------------------------------------ bytes


def fill(fd: int, into: memoryview, offset: int) -> None:
    """Fill `into` from byte `offset`. Raises: EOFError where the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise EOFError(f"it ends at byte {offset + done}")
        done += count


def read_at(fd: int, offset: int, size: int) -> bytes:
    """The `size` bytes from `offset`. Raises: EOFError; OSError."""
    data = bytearray(size)
    fill(fd, memoryview(data), offset)
    return bytes(data)


def sha256_of(fd: int, size: int) -> str:
    """The digest of a file of `size` bytes. Memory: 4 MiB. Raises: EOFError; OSError."""
    digest = hashlib.sha256()
    for block in _blocks(fd, 0, size):
        digest.update(block)
    return digest.hexdigest()


def crc32_of(fd: int, offset: int, size: int) -> int:
    """The checksum of `size` bytes from `offset`. Memory: 4 MiB. Raises: EOFError; OSError."""
    crc = 0
    for block in _blocks(fd, offset, size):
        crc = zlib.crc32(block, crc)
    return crc


def _blocks(fd: int, offset: int, size: int) -> Iterator[memoryview]:
    """The bytes, in a buffer that is used again."""
    buffer = memoryview(bytearray(min(size, _HASH_BYTES)))
    for start in range(0, size, _HASH_BYTES):
        block = buffer[: min(_HASH_BYTES, size - start)]
        fill(fd, block, offset + start)
        yield block


@contextlib.contextmanager
def faults(source: Path, absent: str, missing: type[CheckpointError] = CheckpointDamaged) -> Iterator[None]:
    """What the system says of file or folder `source`, as our errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise missing(f"{source} {absent}") from error
    except EOFError as error:
        raise CheckpointDamaged(f"{source} is damaged: {error}") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckpointDamaged(f"{source} is a link, or not of the kind that it should be: {error}") from error
        if error.errno in (errno.EIO, errno.ENXIO, errno.EISDIR):
            raise CheckpointDamaged(f"{source} cannot be read: {error}") from error
        raise CheckpointError(f"cannot read {source}: {error}") from error
