"""Bytes and names that are still there after a kill or a loss of power.

What appears as a whole or not at all is written under another name, made durable, then renamed: a file's bytes are
durable after fsync of the file, a name after fsync of its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_file(path: Path, *, buffering: int = -1) -> Iterator[BinaryIO]:
    """A new file, for a `with` block; its bytes are durable afterwards, its name is not yet.

    Raises: OSError, as where `path` is there already, a link included.
    """
    with path.open("xb", buffering=buffering) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_durably(unfinished: Path, path: Path) -> None:
    """Let what is durable as `unfinished`, in the same folder, be `path`. Raises: OSError."""
    unfinished.replace(path)
    sync_folder(path.parent)


def write_whole(path: Path, text: str) -> None:
    """Let `path` have this text, durably: as a whole, or as it was. Raises: OSError."""
    unfinished = partial_of(path)
    unfinished.unlink(missing_ok=True)
    with new_file(unfinished) as file:
        file.write(text.encode())
    rename_durably(unfinished, path)


def partial_of(path: Path) -> Path:
    """What `write_whole` may have left where it was killed."""
    return path.with_name(f".{path.name}.partial")
