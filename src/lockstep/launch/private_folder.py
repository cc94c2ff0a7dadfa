"""The folder of one launcher: removed when it ends, or by the next launcher where it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "lockstep-launch-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder for temporary files, removed at the end with all that is in it.

    Its launcher holds a lock on it, which the kernel gives back however the launcher ends: a folder of this user that
    nobody holds was left by one that was killed, and is removed here. Who cleans /tmp after some days spares it too.
    """
    top = Path(tempfile.gettempdir())
    _sweep(top)
    folder, lock = _create(top)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _create(top: Path) -> tuple[Path, int | None]:
    """(folder, its lock); no lock on filesystems that have none, where nobody can sweep either."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=top))
    lock = _lock(folder, 0)  # it waits for whoever has taken the new folder for one that was left, and then it is gone
    return (folder, lock) if lock is not None or folder.exists() else _create(top)


def _sweep(top: Path) -> None:
    left: list[str] = []
    with contextlib.suppress(PermissionError):  # a folder to write to, and not to be read
        left = [name for name in os.listdir(top) if name.startswith(PREFIX)]
    for folder in (top / name for name in left):
        lock = _lock(folder, fcntl.LOCK_NB)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, how: int) -> int | None:
    """A descriptor that holds `folder`; None where it is held, gone, no folder of this user's, or cannot be held."""
    try:
        handle = os.open(folder, _OPEN)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | how)
        found = os.fstat(handle)
        is_there = os.path.samestat(found, os.stat(folder, follow_symlinks=False))
        if is_there and found.st_uid == os.getuid():
            return handle
    os.close(handle)
    return None
