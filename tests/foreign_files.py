"""Files that another library, or someone who means harm, could have written; and when two states are the same."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.foreign.torch_files import read_torch_window
from lockstep.checkpoint.foreign.window import Window, open_window
from lockstep.errors import CheckpointError

BOOM = b"X\x04\x00\x00\x00boom\x85"
HARMFUL_PICKLES = {
    "reduce": b"\x80\x02cos\nsystem\n" + BOOM + b"R.",
    "eval": b"\x80\x02cbuiltins\neval\n" + BOOM + b"R.",
    "in a dict": b"\x80\x02}X\x01\x00\x00\x00acos\nsystem\n" + BOOM + b"Rs.",
    "new object": b"\x80\x02csubprocess\nPopen\n" + BOOM + b"\x81.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + BOOM + b"R.",
    "import of a module": b"\x80\x04\x8c\x04this\x8c\x01s\x93.",
    "attributes of a call": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\x00\x00\x00x\x86R" + BOOM + b"R.",
    "state": b"\x80\x02ctorch.nn.modules.module\nModule\n)\x81}X\x01\x00\x00\x00xK\x01sb.",
    "ordered dict of harm": b"\x80\x02ccollections\nOrderedDict\n)RX\x01\x00\x00\x00acos\nsystem\n" + BOOM + b"Rs.",
    "rebuilt parameter": b"\x80\x02ctorch._utils\n_rebuild_parameter\ncos\nsystem\n" + BOOM + b"R\x89)\x87R.",
    "rebuilt from a type": b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n"
    + BOOM
    + b"}tR.",
    "storage": b"\x80\x02X\x07\x00\x00\x00storageQ.",
    "storage of a class": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagecos\nsystem\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00)K\x01\x85\x89ccollections\nOrderedDict\n)RtR.",
    "load from bytes": b"\x80\x02ctorch.storage\n_load_from_bytes\n" + BOOM + b"R.",
    "persistent id": b"\x80\x02cos\nsystem\n" + BOOM + b"RQ.",
}


def zip_of(records: Mapping[str, bytes], *, large: bool = False, **changed: Any) -> bytes:
    """An archive as torch writes it; `large`: all sizes and places in the 64-bit fields.

    `changed`: a field of the directory's first record, `method`, `flags`, `size`, `packed`, `header`, `crc` or `disk`;
    or `count` and `comment` of the end.
    """
    out, directory = bytearray(), bytearray()
    for index, (name, data) in enumerate(records.items()):
        change = changed if index == 0 else {}
        encoded, crc, header = name.encode(), zlib.crc32(data), len(out)
        full = 0xFFFFFFFF if large else len(data)
        wide = struct.pack("<2H2Q", 1, 16, len(data), len(data)) if large else b""
        out += struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, crc, full, full, len(encoded), len(wide))
        out += encoded + wide + data
        listed = {
            "flags": 0,
            "method": 0,
            "crc": crc,
            "packed": full,
            "size": full,
            "disk": 0,
            "header": header,
            **change,
        }
        if large:
            wide = struct.pack("<2H3Q", 1, 24, len(data), len(data), header)
            wide = struct.pack("<2HL", 7, 4, 9) + wide  # another field comes first
            listed["header"] = 0xFFFFFFFF
        directory += struct.pack("<4s4H2H", b"PK\x01\x02", 45, 45, listed["flags"], listed["method"], 0, 0)
        directory += struct.pack("<3L3H", listed["crc"], listed["packed"], listed["size"], len(encoded), len(wide), 0)
        directory += struct.pack("<2H2L", listed["disk"], 0, 0, listed["header"]) + encoded + wide
    start, count = len(out), changed.get("count", len(records))
    out += directory
    if large:
        end = len(out)
        out += struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
        out += struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
        out += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    else:
        comment = changed.get("comment", b"")
        end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), start, len(comment))
        out += end + comment
    return bytes(out)


def torch_file_of(pickle: bytes, storages: Mapping[str, bytes] | None = None, **others: bytes) -> bytes:
    """A file of torch.save with this `data.pkl`."""
    records = {"archive/data.pkl": pickle, "archive/byteorder": b"little", "archive/version": b"3\n"}
    records |= {f"archive/data/{key}": data for key, data in (storages or {}).items()}
    return zip_of({**records, **{f"archive/{name}": data for name, data in others.items()}})


def difference(found: Any, expected: Any, path: str = "") -> str:
    """Where a state that was read differs from what torch.load gives; "" where it does not."""
    if isinstance(expected, Tensor):
        plain = expected.detach().resolve_conj().resolve_neg()
        if not isinstance(found, Tensor) or found.dtype != plain.dtype or found.shape != plain.shape:
            return f"{path}: {found!r:.80} in place of {expected.dtype} {list(expected.shape)}"
        same = torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (found, plain)))
        return "" if (same and found.stride() == plain.stride()) or not found.numel() else f"{path}: other elements"
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(found) != list(expected):
            return f"{path}: {found!r:.80} in place of {expected!r:.80}"
        return next(filter(None, (difference(found[key], expected[key], f"{path}/{key}") for key in expected)), "")
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"{path}: {found!r:.80} in place of {expected!r:.80}"
        pairs = enumerate(zip(found, expected, strict=True))
        return next(filter(None, (difference(*pair, f"{path}/{index}") for index, pair in pairs)), "")
    if isinstance(expected, torch.dtype | torch.device):
        return "" if found == str(expected) else f"{path}: {found!r} in place of {expected}"
    same_type = type(found) is type(expected) or isinstance(expected, np.generic)
    return "" if same_type and found == expected else f"{path}: {found!r:.80} in place of {expected!r:.80}"


def read_torch_file(path: Path) -> Any:
    with open_window(path) as file:
        return read_torch_window(file)


def outcome(read: Any, path: Path, data: bytes) -> Any:
    """What `read` makes of a file of `data`: a value, or None for an error that names it. Others are not caught."""
    path.write_bytes(data)
    return _outcome(lambda: read(path), path.name)


class MemoryFile:
    """A file that is written again and again, many times faster than on a disk that others use."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("sample")

    def outcome(self, read: Any, data: bytes) -> Any:
        """As `outcome`, for readers of a window."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        return _outcome(lambda: read(Window(self._descriptor, 0, len(data), "sample.pt")), "sample.pt")

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _outcome(read: Callable[[], Any], name: str) -> Any:
    try:
        return read()
    except CheckpointError as error:
        if name not in str(error):
            raise AssertionError("the error does not name the file") from error
        return None
