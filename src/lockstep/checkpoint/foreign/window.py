"""A range of an open file that may hold anything: read by position, checked for its end, never mapped into memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

_BLOCK_BYTES = 1 << 20


class Window(NamedTuple):
    """`bytes` bytes from `start` of the open file `descriptor`, called `name` in errors."""

    descriptor: int
    start: int
    bytes: int
    name: str

    def part(self, start: int, count: int, name: str) -> Window:
        """A window within this one. Raises: CheckpointDamaged where it would look out of it."""
        if start < 0 or count < 0 or start + count > self.bytes:
            raise CheckpointDamaged(
                f"{name} should be bytes {start} to {start + count} of {self.name}, which has {self.bytes}"
            )
        return Window(self.descriptor, self.start + start, count, name)

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` of this window. Raises: CheckpointDamaged where they are not there."""
        out = bytearray(self.part(start, count, self.name).bytes)
        for _ in self.read_blocks(start, memoryview(out)):
            pass
        return bytes(out)

    def read_blocks(self, start: int, out: memoryview) -> Iterator[memoryview]:
        """Fill `out` from `start` on, block by block; gives each block when it is there.

        Raises: CheckpointDamaged where the file ends before, CheckpointError where it cannot be read.
        """
        part = self.part(start, len(out), self.name)
        done = 0
        while done < len(out):
            block = out[done : done + _BLOCK_BYTES]
            try:
                count = os.preadv(self.descriptor, [block], part.start + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {self.name}: {error}") from error
            if not count:
                raise CheckpointDamaged(f"{self.name} became shorter while it was read")
            yield block[:count]
            done += count


@contextmanager
def open_window(path: Path, *, folder: int | None = None) -> Iterator[Window]:
    """All of the file `path`; with the descriptor of its `folder`, the file of this name in it, and no link.

    Raises: CheckpointMissing where there is none, CheckpointError where it is no ordinary file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if folder is None else os.O_NOFOLLOW)
    try:
        descriptor = os.open(
            path if folder is None else path.name, flags, dir_fd=folder
        )  # O_NONBLOCK: a pipe is refused below, not waited for
    except FileNotFoundError as error:
        raise CheckpointMissing(f"{path} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            raise CheckpointError(f"{path} is a link, which is not followed: pass a copy without (cp -rL)") from error
        raise CheckpointError(f"cannot open {path}: {error}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is no ordinary file")
        yield Window(descriptor, 0, found.st_size, str(path))
    finally:
        os.close(descriptor)
