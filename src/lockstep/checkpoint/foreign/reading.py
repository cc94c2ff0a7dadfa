"""Whatever another library has saved, as a state: recognised by what it is, read without running anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.foreign.dcp import METADATA, read_dcp_folder
from lockstep.checkpoint.foreign.huggingface import (
    INDEX_SUFFIX,
    SINGLE_FILES,
    read_huggingface_folder,
    read_safetensors,
)
from lockstep.checkpoint.foreign.torch_files import read_torch_window
from lockstep.checkpoint.foreign.window import open_folder, open_window
from lockstep.checkpoint.foreign.zip_records import MAGIC
from lockstep.checkpoint.generation import names_in
from lockstep.checkpoint.manifest import NAME as MANIFEST
from lockstep.checkpoint.state import SHARDS, keys_of
from lockstep.errors import CheckpointError

_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")  # of a shard
_UNDERSTOOD = (
    "What is read: a file of torch.save (torch 1.6 and later), a .safetensors file, a Hugging Face folder "
    f"({' or '.join(SINGLE_FILES)}, or the index of several), a folder of torch.distributed.checkpoint ({METADATA})"
)


def read_foreign(path: Path | str) -> Any:
    """What another library has saved at `path`: a dict of tensors on the CPU and values, as it was nested.

    Memory: the tensors. No code is run, no class made, no link followed in folders.
    Raises: CheckpointMissing; CheckpointDamaged for what is not whole; CheckpointError for what would need code, by its
    name, and for what is not understood.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    with open_window(path) as file:
        start = file.read(0, min(9, file.bytes))
        if start[8:] == b"{":  # behind the header's length, which may be any bytes
            return read_safetensors(file)
        if start.startswith((MAGIC, b"\x80")):
            return read_torch_window(file)
        raise CheckpointError(f"{path} is of no format that is known here. {_UNDERSTOOD}")


def _read_folder(folder: Path) -> Any:
    with open_folder(folder) as opened:
        names = opened.names()
    if METADATA in names:
        return read_dcp_folder(folder)
    if any(name in names or name + INDEX_SUFFIX in names for name in SINGLE_FILES):
        return read_huggingface_folder(folder)
    if MANIFEST in names:
        raise CheckpointError(f"{folder} is a checkpoint of lockstep itself: Checkpointer({folder.parent}) loads it")
    if any(name.endswith(METADATA) for name in names):
        raise CheckpointError(f"{folder} was saved rank by rank, without the {METADATA} of all. {_UNDERSTOOD}")
    raise CheckpointError(f"{folder} holds no checkpoint that is known here. {_UNDERSTOOD}")


def import_checkpoint(source: Path | str, directory: Path | str, *, step: int | None = None, key: str = "") -> Path:
    """Make the first checkpoint of `directory` out of what another library has saved at `source`; returns its folder.

    `step`: None for the state's own "step", else 0. `key`: the path in the new state where it comes, "" for the state
    itself; then what lockstep has exported with its shards gets them back.
    Raises: as `read_foreign`; CheckpointError for values that a checkpoint cannot hold, by their path, and where
    `directory` has checkpoints: they are a run's, which would lose its right to write there.
    """
    if names_in(Path(directory)):
        raise CheckpointError(f"{directory} has checkpoints of a run: import into a directory of its own")
    state = read_foreign(source)
    if step is None:
        own = state.get("step") if isinstance(state, dict) else None
        step = own if type(own) is int and own >= 0 else 0
    for name in reversed(keys_of(key.strip("/"))):
        state = {name: state}
    shards = {}
    found = state.get(SHARDS) if isinstance(state, dict) else None
    if isinstance(found, dict) and all(isinstance(n, str) and _NUMBER.fullmatch(n) for n in found):
        shards = {int(number): shard for number, shard in state.pop(SHARDS).items()}
    with Checkpointer(directory, keep=None) as checkpointer:
        return checkpointer.save(step, state, shards=shards)
