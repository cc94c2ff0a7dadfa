"""Checkpoints made in one process, as ranks would write them, and files that no rank would write."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lockstep.checkpoint import shares
from lockstep.checkpoint.flatten import flatten
from lockstep.checkpoint.manifest import FORMAT, NAME, Manifest, file_name, to_text
from lockstep.checkpoint.shares import layout_of, plan_pieces
from lockstep.checkpoint.state import State
from lockstep.checkpoint.tensor_file import Piece, write_tensor_file


def write_checkpoint(parent: Path, step: int, state: State, world_size: int, generation: int = 1) -> Path:
    """The folder of a checkpoint of `state`, which all of `world_size` ranks have."""
    folder = parent / f"step-{step:08}"
    folder.mkdir()
    flat = flatten(state)
    layouts = {path: layout_of(tensor, path) for path, tensor in flat.tensors.items()}
    files = {}
    for rank in range(world_size):
        with mock.patch.object(shares, "_SMALL_BYTES", 0):  # or all would be rank 0's
            pieces = plan_pieces(layouts, rank, world_size)
        if pieces:
            name = file_name(rank)
            files[name] = write_tensor_file(folder / name, pieces, lambda i, of=pieces: part_of(flat.tensors, of[i]))
    table = {path: (layout.dtype, layout.shape) for path, layout in layouts.items()}
    manifest = Manifest(step, generation, "", world_size, files, table, flat.aliases, flat.kinds, flat.values)
    (folder / NAME).write_text(to_text(manifest))
    return folder


def part_of(tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
    """The elements of `piece`."""
    return tensors[piece.path][piece.part.slices]


def raw_file(header: Any, data: bytes) -> bytes:
    """A safetensors file with any `header`: text or JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: Sequence[Any], begin: Any, end: Any) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def raw_manifest(body: Any) -> bytes:
    """A manifest with any `body`, text or JSON, whose digest fits."""
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"format":"{FORMAT}","sha256":"{digest}","manifest":{text}}}\n'.encode()


def body_for(files: Mapping[str, tuple[bytes, Sequence[bytes]]], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's body with digests that fit `files`: name -> content, and the bytes of its pieces."""
    records = {
        name: {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "crc32": "".join(f"{zlib.crc32(piece):08x}" for piece in pieces),
        }
        for name, (content, pieces) in files.items()
    }
    tables = {"files": records, "tensors": dict(tensors), "aliases": {}, "kinds": {}, "values": {}}
    return {"step": 1, "generation": 1, "parent": "", "world_size": 2, **tables}


def small_state(step: int) -> State:
    """A state in which there is one of everything; another one for each `step`, of the same layout."""
    torch.manual_seed(step)
    weight = torch.randn(7, 5)
    return {
        "model": {"h.0.weight": weight, "h.0.bias": torch.randn(5), "head.weight": weight},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(7, 5).bfloat16()}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0]}],
        },
        "rng": {"torch": torch.arange(64, dtype=torch.uint8) + step, "none": None},
        "best": float("inf"),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
    }
