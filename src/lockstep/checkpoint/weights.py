"""Published weights into a model, sharded or not: every rank reads its own rows of the safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lockstep.checkpoint.manifest import plain_name
from lockstep.checkpoint.tensor_file import DTYPES, open_tensors
from lockstep.comm.tensor_parts import give_memory, local_of, part_of
from lockstep.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

KeyMap = Callable[[str], "str | None"] | Mapping[str, "str | None"]


class LoadedKeys(NamedTuple):
    """What did not take part, as torch's `load_state_dict` says it."""

    missing_keys: list[str]  # of the model, in no file
    unexpected_keys: list[str]  # in a file, not of the model


class _Stored(NamedTuple):
    file: Path
    key: str
    dtype: torch.dtype | str
    shape: tuple[int, ...]


def load_safetensors(
    model: Module,
    path: Path | str,
    *,
    strict: bool = True,
    key_map: KeyMap | None = None,
    cast: bool = False,
    device: torch.device | str | None = None,
) -> LoadedKeys:
    """Fill the parameters and persistent buffers of `model` from a safetensors file, or from a Hugging Face folder.

    `key_map`: name in the file -> name in the model, None for what is to be left out; names that a mapping lacks stay.
    `cast=True`: dtypes may differ. Of tied tensors the first that a file has is read. A model on the meta device gets
    its memory here, on `device` (None for that of its mesh, else the CPU). Not collective.
    Memory: this rank's piece of one tensor.
    Raises: CheckpointError, naming all, for missing and unexpected keys (not with `strict=False`), other shapes and
    dtypes, links out of the folder, and for what would be left without a value.
    """
    stored = _renamed(_stored_in(Path(path)), key_map)
    tensors = _tensors_of(model)
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    chosen = {names[0]: next((name for name in names if name in stored), None) for names in tied.values()}
    keys = LoadedKeys(
        [name for names in tied.values() if chosen[names[0]] is None for name in names],
        [name for name in stored if name not in tensors],
    )
    _check(path, model, tensors, stored, keys, strict, cast)
    give_memory(model, device)
    tensors = _tensors_of(model)
    wanted: dict[Path, list[tuple[Tensor, _Stored]]] = {}
    for first, name in chosen.items():
        if name is not None:
            wanted.setdefault(stored[name].file, []).append((tensors[first], stored[name]))
    for file, pairs in wanted.items():
        with open_tensors(file) as opened, torch.no_grad():
            for tensor, source in pairs:
                part = part_of(tensor)
                if part.numel:
                    local_of(tensor).copy_(opened.get_slice(source.key)[part.slices])
    return keys


def _tensors_of(model: Module) -> dict[str, Tensor]:
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}


def _check(
    path: Path | str,
    model: Module,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, _Stored],
    keys: LoadedKeys,
    strict: bool,
    cast: bool,
) -> None:
    problems = []
    if strict:
        problems += [f"missing: {name}" for name in keys.missing_keys]
        problems += [f"unexpected: {name}" for name in keys.unexpected_keys]
    for name, (_, _, dtype, shape) in stored.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            problems.append(f"{name} is {list(tensor.shape)}, the file has {list(shape)}")
        elif tensor.dtype != dtype and not (cast and isinstance(dtype, torch.dtype)):
            problems.append(f"{name} is {tensor.dtype}, the file has {dtype} (cast=True converts)")
    if problems:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems)}")
    missing = set(keys.missing_keys)
    empty = [name for name, t in [*tensors.items(), *model.named_buffers()] if t.is_meta]
    empty = [name for name in dict.fromkeys(empty) if name not in tensors or name in missing]
    if empty:
        raise CheckpointError(
            f"{path} has no values for {', '.join(empty)}, which are on the meta device: call "
            "lockstep.materialize(model, parameters=False) first, or materialize(model) where parameters are missing"
        )


def _renamed(stored: dict[str, _Stored], key_map: KeyMap | None) -> dict[str, _Stored]:
    if key_map is None:
        return stored
    renamed: dict[str, _Stored] = {}
    for key, source in stored.items():
        name = key_map.get(key, key) if isinstance(key_map, Mapping) else key_map(key)
        if name in renamed:
            raise CheckpointError(f"key_map gives {renamed[name].key!r} and {key!r} the same name, {name!r}")
        if name is not None:
            renamed[name] = source
    return renamed


# ------------------------------------------------------------------ files


def _stored_in(path: Path) -> dict[str, _Stored]:
    if not path.is_dir():
        return _listed(path)
    index = path / _INDEX
    if not index.exists():
        return _listed(_inside(path, _SINGLE, path))
    try:
        places = json.loads(_inside(path, _INDEX, path).read_text(encoding="utf-8"))["weight_map"]
        files = {name: _inside(path, plain_name(name, index), index) for name in sorted(set(places.values()))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {index}: {type(error).__name__}: {error}") from error
    listed = {name: _listed(file) for name, file in files.items()}
    absent = sorted(key for key, name in places.items() if key not in listed[name])
    if absent:
        raise CheckpointError(f"{index} places {', '.join(absent)} in files that do not have them")
    return {key: listed[name][key] for key, name in places.items()}


def _listed(file: Path) -> dict[str, _Stored]:
    with open_tensors(file) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
        return {
            key: _Stored(file, key, DTYPES.get(found.get_dtype()) or found.get_dtype(), tuple(found.get_shape()))
            for key, found in slices.items()
        }


def _inside(folder: Path, name: str, source: Path) -> Path:
    """The file `name` of `folder`. Raises: CheckpointError where it is a link out of it."""
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{source}: {name} is a link out of its folder; pass a copy without links (cp -rL)")
    return file
