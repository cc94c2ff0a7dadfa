"""Files that are there as a whole, also after a kill or a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.checkpoint.generation import sync_folder


def write_whole(path: Path, text: str) -> None:
    """Let `path` have this text, durably: as a whole, or as it was. Raises: OSError."""
    temporary = partial_of(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def partial_of(path: Path) -> Path:
    """What `write_whole` may have left where it was killed."""
    return path.with_name(f".{path.name}.partial")
