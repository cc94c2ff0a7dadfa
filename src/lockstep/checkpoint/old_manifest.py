"""What a sharded checkpoint holds: one JSON file in its folder, written last, with the digests of all others."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.old_tensor_file import DTYPES, FileSum, sum_of
from lockstep.errors import CheckpointError

NAME = "manifest.json"
_FORMAT = "lockstep-sharded-1"


@dataclass(frozen=True)
class Manifest:
    """The whole state without its numbers. Paths are those of `checkpoint/state.py`."""

    step: int
    world_size: int
    files: dict[str, FileSum]  # by name in the folder
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # path -> dtype in the format's words, whole shape
    aliases: dict[str, str]  # path of a tensor that is another one -> path of that one
    values: dict[str, Any]  # path -> JSON

    def target(self, path: str) -> str:
        """Where the elements of tensor `path` are found."""
        return self.aliases.get(path, path)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it and make it durable, with a digest of its own."""
    body = json.dumps(asdict(manifest), sort_keys=True)
    text = json.dumps({"format": _FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
    with (folder / NAME).open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of checkpoint `folder`.

    Raises: CheckpointError where it is missing, damaged, or names a file outside of the folder.
    """
    path = folder / NAME
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is not of a lockstep checkpoint of this version ({_FORMAT})")
        if hashlib.sha256(whole["manifest"].encode()).hexdigest() != whole["sha256"]:
            raise CheckpointError(f"{path} is damaged: its digest does not fit; use another checkpoint")
        fields = json.loads(whole["manifest"])
        files = {plain_name(name, path): FileSum(*found) for name, found in fields.pop("files").items()}
        tensors = {name: (dtype, tuple(shape)) for name, (dtype, shape) in fields.pop("tensors").items()}
        manifest = Manifest(files=files, tensors=tensors, **fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    unknown = sorted({dtype for dtype, _ in manifest.tensors.values()} - set(DTYPES))
    lost = sorted(target for target in manifest.aliases.values() if target not in manifest.tensors)
    if unknown or lost:
        raise CheckpointError(f"{path}: unknown dtypes {unknown}, aliases of absent tensors {lost}")
    return manifest


def plain_name(name: str, source: Path) -> str:
    """`name`, if it is that of a file beside `source`.

    Raises: CheckpointError for any path that could leave the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{source} names the file {name!r}: only names of files in its own folder are followed")
    return name


def check_file(folder: Path, name: str, expected: FileSum) -> None:
    """Raises: CheckpointError where file `name` is absent, a link, or not what was written."""
    path = folder / name
    try:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link: a checkpoint holds its files itself")
        size = path.stat().st_size
        found = sum_of(path) if size == expected.bytes else FileSum(size, "")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if found != expected:
        what = "its digest does not fit" if size == expected.bytes else f"{size} bytes, {expected.bytes} were written"
        raise CheckpointError(f"{path} is damaged: {what}; use another checkpoint")
