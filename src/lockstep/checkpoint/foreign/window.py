"""A range of an open file that may hold anything: read by position, checked for its end, never mapped into memory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from lockstep.checkpoint.open_files import fill
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

    def fail(self, what: str) -> NoReturn:
        """Raises: CheckpointDamaged, for what was read and cannot be right."""
        raise CheckpointDamaged(f"{self.name} is damaged: {what}")

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` of this window. Raises: CheckpointDamaged where they are not there."""
        out = bytearray(self.part(start, count, self.name).bytes)
        self.read_into(memoryview(out), start)
        return bytes(out)

    def read_all(self, most: int) -> bytes:
        """All of it. Raises: CheckpointError for more than `most` bytes."""
        if self.bytes > most:
            raise CheckpointError(f"{self.name} has {self.bytes} bytes, more than the {most} that are read")
        return self.read(0, self.bytes)

    def read_into(self, out: memoryview, start: int) -> None:
        """Fill `out` from `start` on. Raises: as `read_blocks`."""
        for _ in self.read_blocks(out, start):
            pass

    def read_blocks(self, out: memoryview, start: int) -> Iterator[memoryview]:
        """Fill `out` from `start` on, block by block; gives each block when it is there.

        Raises: CheckpointDamaged where the file ends before, CheckpointError where it cannot be read.
        """
        part = self.part(start, len(out), self.name)
        for done in range(0, len(out), _BLOCK_BYTES):
            block = out[done : done + _BLOCK_BYTES]
            try:
                fill(self.descriptor, block, part.start + done)
            except EOFError as error:
                raise CheckpointDamaged(f"{self.name} became shorter while it was read") from error
            except OSError as error:
                raise CheckpointError(f"cannot read {self.name}: {error}") from error
            yield block


class Folder(NamedTuple):
    """An open folder, whose files are opened by their names alone."""

    path: Path
    descriptor: int

    def names(self) -> list[str]:
        """What is in it. Raises: OSError."""
        return os.listdir(self.descriptor)

    def open(self, name: str) -> AbstractContextManager[Window]:
        """All of its file `name`. Raises: as `open_window`; CheckpointError for a link, and for what is not in it."""
        if name in ("", ".", "..") or set(name) & set("/\\\0"):
            raise CheckpointError(f"{self.path}: the file {name!a:.200} is asked for, only names in there are followed")
        return open_window(self.path / name, self.descriptor)


@contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    """The folder `path`, for a `with` block. Raises: CheckpointMissing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointMissing(f"cannot open the folder {path}: {error}") from error
    try:
        yield Folder(path, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_window(path: Path, folder: int | None = None) -> Iterator[Window]:
    """All of the file `path`, for a `with` block; with the descriptor of its `folder` the file there, and no link.

    Raises: CheckpointMissing where there is none, CheckpointError where it is no ordinary file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a pipe is refused below, not waited for
    try:
        if folder is None:
            descriptor = os.open(path, flags)
        else:
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW, dir_fd=folder)
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
