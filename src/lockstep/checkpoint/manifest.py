"""What a checkpoint holds: one JSON text, written last, with the digests of all files and one of its own.

There is exactly one text for a manifest, so that no byte of it can be another one without being noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

from lockstep.checkpoint.state import FlatState, check_paths, is_at, keys_of, unflatten
from lockstep.checkpoint.tensor_file import (
    DTYPES,
    TOKENS_MAX,
    FileRecord,
    checked_dtype,
    natural,
    parse_json,
    shape_of,
    tokens_in,
)
from lockstep.errors import CheckpointDamaged, CheckpointError

NAME = "manifest.json"
UNFINISHED = "unfinished"  # beside what is not yet a checkpoint, where folders are made in place
FORMAT = "lockstep-checkpoint-2"
BYTES_MAX = 64 << 20
ENTRIES_MAX = 1_000_000  # tensors, aliases, values, kinds and files together

_HEAD = f'{{"format":"{FORMAT}","sha256":"'
_BODY = '","manifest":'
_TAIL = "}\n"
# of any format
_BEGINNING = re.compile(r'\{"format":"(lockstep-[a-z]+-[0-9]{1,4})","sha256":"([0-9a-f]{64})","manifest":')
_FILE_NAME = re.compile(r"rank-([0-9]{5})\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CRC32S = re.compile(r"(?:[0-9a-f]{8})*")
_TABLES = ("files", "tensors", "aliases", "kinds", "values")
_INT_BITS = 63
_DATA_MIN = 10  # bytes of a file without pieces: the length, and {}


@dataclass(frozen=True)
class Manifest:
    """The whole state without its numbers. Paths are those of `checkpoint/state.py`."""

    step: int
    generation: int  # which start of the run wrote it
    parent: str  # digest of the manifest of the checkpoint before, "" for none
    world_size: int
    files: dict[str, FileRecord]  # by name in the folder
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # path -> dtype in the format's words, whole shape
    aliases: dict[str, str]  # path of a tensor that is another one -> path of that one
    kinds: dict[str, str]
    values: dict[str, Any]

    def target(self, path: str) -> str:
        """Where the elements of tensor `path` are found."""
        return self.aliases.get(path, path)

    def has(self, prefix: str) -> bool:
        """Whether a tensor or a value is at `prefix`, or under it."""
        return any(is_at(path, prefix) for table in (self.tensors, self.aliases, self.values) for path in table)

    def subtree(self, prefix: str, make: Callable[[str], Any]) -> Any:
        """What the state has at `prefix`, its tensors made by `make`: tied ones once, for the first of their paths."""
        firsts: dict[str, str] = {}
        aliases: dict[str, str] = {}
        for path in (*self.tensors, *self.aliases):
            if is_at(path, prefix) and firsts.setdefault(self.target(path), path) != path:
                aliases[path] = firsts[self.target(path)]
        tensors = {path: make(path) for path in firsts.values()}
        values = {path: value for path, value in self.values.items() if is_at(path, prefix)}
        kinds = {path: kind for path, kind in self.kinds.items() if is_at(path, prefix)}
        found: Any = unflatten(FlatState(tensors, values, kinds, aliases))
        for key in keys_of(prefix):
            found = found[key]
        return found


def file_name(rank: int) -> str:
    """The name of the file that `rank` writes."""
    return f"rank-{rank:05}.safetensors"


def to_text(manifest: Manifest) -> str:
    """The one text of `manifest`: ASCII, JSON.

    Raises: CheckpointError for what cannot be in a manifest, or is more than fits into one.
    """
    try:
        _check_count(vars(manifest))
        body = _body(manifest)
        _check(manifest)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"this state cannot be saved: {error}") from error
    text = f"{_HEAD}{hashlib.sha256(body.encode()).hexdigest()}{_BODY}{body}{_TAIL}"
    if len(text) > BYTES_MAX or tokens_in(text.encode()) > TOKENS_MAX:
        raise CheckpointError(
            f"the manifest would have {len(text)} bytes, of {BYTES_MAX}, or {TOKENS_MAX} values: make tensors of lists"
        )
    return text


def from_text(text: str, source: str | Path) -> Manifest:
    """The manifest that `text`, of the file `source`, is. Memory: at most about 20 times the text.

    Raises: CheckpointDamaged for what `to_text` has not written; CheckpointError for a whole one of another version.
    """
    found, other = _BEGINNING.match(text), ""
    try:
        if found is None:
            raise ValueError(f"it is not the manifest of a checkpoint in the format {FORMAT}")
        if len(text) > BYTES_MAX or not text.endswith(_TAIL):
            raise ValueError("it was cut off, or is damaged")
        body = text[found.end() : -len(_TAIL)]
        if hashlib.sha256(body.encode()).hexdigest() != found[2]:
            raise ValueError("its digest does not fit what it says")
        other = "" if found[1] == FORMAT else found[1]
        manifest = _parsed(parse_json(body))
        if _body(manifest) != body:
            raise ValueError("it is not written as this library writes it")
        _check(manifest)
        if other:
            other = ""
            raise ValueError(f"it is of the format {FORMAT}, and says {found[1]}")
    except (ValueError, TypeError, struct.error) as error:  # TypeError: a list where a key is expected
        if other:
            what = f"{source} is of the format {other}, this version of lockstep reads {FORMAT}"
            hint = "go on with the version that has written it, or move its folder away"
            raise CheckpointError(f"{what}: {hint}") from error
        raise CheckpointDamaged(f"{source} is damaged: {error}") from error
    return manifest


def digest_of(text: str) -> str:
    """What a later checkpoint calls this one, as its parent."""
    return hashlib.sha256(text.encode()).hexdigest()


def plain_name(name: str, source: Path) -> str:
    """`name`, if it is that of a file beside `source`.

    Raises: CheckpointError for any path that could leave the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{source} names the file {name!r}: only names of files in its own folder are followed")
    return name


# ------------------------------------------------------------------ writing


def _body(manifest: Manifest) -> str:
    files = {
        name: {"bytes": size, "sha256": sha256, "crc32": "".join(f"{crc:08x}" for crc in crc32)}
        for name, (size, sha256, crc32) in manifest.files.items()
    }
    values = {
        path: [_encoded(item) for item in value] if isinstance(value, list) else _encoded(value)
        for path, value in manifest.values.items()
    }
    body = {**vars(manifest), "files": files, "values": values}
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _encoded(value: Any) -> Any:
    """Integers that JSON readers would round, and floats that JSON does not have, bit by bit."""
    if type(value) is int and value.bit_length() > _INT_BITS:
        return {"int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if value is None or type(value) in (bool, int, float, str) or value == {}:
        return value
    raise ValueError(f"a value of type {type(value).__name__}")


# ------------------------------------------------------------------ reading


def _parsed(fields: Any) -> Manifest:
    _keys(fields, list(Manifest.__dataclass_fields__), "the manifest")
    for name in _TABLES:
        if type(fields[name]) is not dict:
            raise ValueError(f"{name} is no table")
    _check_count(fields)
    fields["files"] = {name: _record(name, entry) for name, entry in fields["files"].items()}
    fields["tensors"] = {path: _tensor(path, entry) for path, entry in fields["tensors"].items()}
    fields["values"] = {path: _value(value) for path, value in fields["values"].items()}
    return Manifest(**fields)


def _keys(found: Any, expected: list[str], what: str) -> None:
    if type(found) is not dict or list(found) != expected:
        raise ValueError(f"{what[:200]!r} has not exactly {', '.join(expected)}")


def _record(name: str, entry: Any) -> FileRecord:
    _keys(entry, ["bytes", "sha256", "crc32"], name)
    crc32 = entry["crc32"]
    if type(crc32) is not str or not _CRC32S.fullmatch(crc32):
        raise ValueError(f"the crc32 of {name[:200]!r} are no hexadecimal numbers")
    packed = bytes.fromhex(crc32)
    return FileRecord(entry["bytes"], entry["sha256"], struct.unpack(f">{len(packed) // 4}I", packed))


def _tensor(path: str, entry: Any) -> tuple[str, tuple[int, ...]]:
    if type(entry) is not list or len(entry) != 2:
        raise ValueError(f"{path[:200]!r} is not described by dtype and shape")
    return checked_dtype(entry[0]), shape_of(entry[1])


def _value(value: Any) -> Any:
    if type(value) is list:
        return [_scalar(item) for item in value]
    return {} if value == {} else _scalar(value)


def _scalar(value: Any) -> Any:
    if type(value) is list:
        raise ValueError("a list in a list of values")
    if type(value) is str and not value.isascii():
        value.encode()  # raises where it is no text
    if type(value) is not dict:
        return value
    (kind, digits), *others = value.items() or [("", "")]
    if others or kind not in ("int", "float") or type(digits) is not str:
        raise ValueError(f"{short(value)} is no value")
    return int(digits, 16) if kind == "int" else struct.unpack(">d", bytes.fromhex(digits))[0]


def _check(manifest: Manifest) -> None:
    """Raises: ValueError for what contradicts itself or is out of range. Types within tables are right."""
    natural(manifest.step)
    natural(manifest.generation)
    if type(manifest.parent) is not str or (manifest.parent and not _SHA256.fullmatch(manifest.parent)):
        raise ValueError("its parent is no digest")
    if natural(manifest.world_size, 100_001) == 0:
        raise ValueError("it is of 0 ranks")
    for name, record in manifest.files.items():
        _check_file(name, record, manifest.world_size)
    needed = sum(math.prod(shape) * DTYPES[checked_dtype(dtype)].itemsize for dtype, shape in manifest.tensors.values())
    room = sum(record.bytes - _DATA_MIN for record in manifest.files.values())
    if needed > room:
        raise ValueError(f"its tensors have {needed} bytes, its files at most {room}")
    for path, target in manifest.aliases.items():
        if type(target) is not str or target not in manifest.tensors:
            raise ValueError(f"{path[:200]!r} is said to be {short(target)}, which is no tensor of it")
    twice = manifest.aliases.keys() & manifest.tensors.keys()
    twice |= manifest.values.keys() & (manifest.aliases.keys() | manifest.tensors.keys())
    if twice:
        raise ValueError(f"{min(twice)[:200]!r} is there twice")
    check_paths([*manifest.tensors, *manifest.aliases], manifest.values, manifest.kinds)


def _check_count(fields: Mapping[str, Any]) -> None:
    if sum(len(fields[name]) for name in _TABLES) > ENTRIES_MAX:
        raise ValueError(f"it has more than {ENTRIES_MAX} entries")


def _check_file(name: str, record: FileRecord, world_size: int) -> None:
    found = _FILE_NAME.fullmatch(name)
    if found is None or int(found[1]) >= world_size:
        raise ValueError(f"{name[:200]!r} is no name of a file of {world_size} ranks")
    if natural(record.bytes) < _DATA_MIN:
        raise ValueError(f"{name} is said to have {record.bytes} bytes, less than any file")
    if type(record.sha256) is not str or not _SHA256.fullmatch(record.sha256):
        raise ValueError(f"the digest of {name} is none")
