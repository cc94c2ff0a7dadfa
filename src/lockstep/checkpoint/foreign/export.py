"""A lockstep checkpoint for other libraries: weights as Hugging Face's read them, or a file of `torch.save`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lockstep.checkpoint.foreign.huggingface import write_huggingface_folder, write_safetensors
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.state import is_at, is_under, keys_of
from lockstep.checkpoint.tensor_file import Piece
from lockstep.durable import new_file, rename_durably, sync_folder
from lockstep.errors import CheckpointError, ConfigError

ExportFormat = Literal["hf", "safetensors", "torch"]
SHARD_BYTES = 5 * 10**9  # what transformers takes too
_JSON_BYTES_MAX = 16 << 20


class Exported(NamedTuple):
    """What was written."""

    path: Path
    files: list[str]
    tensors: int
    left_out: list[str]  # paths of values that files of weights cannot hold


def export_checkpoint(
    reader: CheckpointReader,
    out: Path,
    *,
    key: str = "model",
    form: ExportFormat = "hf",
    shard_bytes: int = SHARD_BYTES,
    config: Path | None = None,
) -> Exported:
    """Write what checkpoint `reader` has under the path `key` ("" for all of it) to `out`, which is new or empty.

    "hf": a folder, in files of at most `shard_bytes`, with a config.json: a copy of `config`, or for a model the text
    that the state has as "model_config", and with the run's tokenizer where the state has the digest of it as
    "tokenizer"; "safetensors": one file; both have tensors only, tied ones once, under the
    first of their names. "torch": a file that `torch.load(weights_only=True)` reads, with all values. `out` is there
    as a whole or not at all.
    Memory: one tensor; for "torch" all of them.
    Raises: CheckpointDamaged before anything is written; CheckpointError where there is nothing under `key`, or `out`
    is in use.
    """
    if config is not None and form != "hf":
        raise ConfigError(f"a config.json belongs into a folder: leave it out, or use the format hf, not {form}")
    prefix = key.strip("/")
    with _new(out, is_folder=form == "hf") as unfinished:
        reader.verify()
        if form == "torch":
            return Exported(out, [out.name], _write_torch(reader, unfinished, prefix), [])
        names = _weights(reader, prefix)
        manifest = reader.manifest
        tensors = [Piece.whole(name, *manifest.tensors[manifest.target(path)]) for name, path in names.items()]
        left_out = sorted(path for path in manifest.values if is_under(path, prefix))

        def read(name: str) -> torch.Tensor:
            return reader.read(names[name])

        if form == "safetensors":
            write_safetensors(unfinished, tensors, read)
            return Exported(out, [out.name], len(tensors), left_out)
        files = write_huggingface_folder(unfinished, tensors, read, shard_bytes)
        about = _json_of(config) if config is not None else _known_config(reader, prefix)
        for name, data in {"config.json": about, **_known_tokenizer(reader, prefix)}.items():
            if data:
                with new_file(unfinished / name) as file:
                    file.write(data)
                files.append(name)
        return Exported(out, files, len(tensors), left_out)


def _weights(reader: CheckpointReader, prefix: str) -> dict[str, str]:
    """Paths of the tensors to write, tied ones once, by the name they get: keys joined with dots."""
    manifest = reader.manifest
    names: dict[str, str] = {}
    seen: set[str] = set()
    for path in (*manifest.tensors, *manifest.aliases):
        target = manifest.target(path)
        if not is_under(path, prefix) or target in seen:
            continue
        seen.add(target)
        name = ".".join(keys_of(path.removeprefix(f"{prefix}/") if prefix else path))
        if name in names:
            raise CheckpointError(f"{names[name]} and {path} would both be {name!r} in a file of weights")
        if name == "__metadata__":
            raise CheckpointError(f"{path} cannot be called {name} in a file of weights, whose format uses that name")
        names[name] = path
    if not names:
        raise _nothing(reader, prefix)
    return names


def _write_torch(reader: CheckpointReader, out: Path, prefix: str) -> int:
    manifest = reader.manifest
    if not manifest.has(prefix):
        raise _nothing(reader, prefix)
    state = manifest.subtree(prefix, reader.read)
    with new_file(out) as file:
        torch.save(state, file)  # noqa: TID251 (it is what is asked for; what others write is read without pickle)
    return len({manifest.target(path) for path in (*manifest.tensors, *manifest.aliases) if is_at(path, prefix)})


def _nothing(reader: CheckpointReader, prefix: str) -> CheckpointError:
    manifest = reader.manifest
    paths = (*manifest.tensors, *manifest.aliases, *manifest.values)
    first = sorted({keys_of(path)[0] for path in paths})
    deeper = sorted({path[: path.index(f"/{prefix}/")] for path in paths if prefix and f"/{prefix}/" in path})
    hint = f"; there is one at --key {deeper[0]}/{prefix}" if deeper else ""
    return CheckpointError(f"{reader.folder} has nothing to write under {prefix!r}: its keys are {first}{hint}")


def _known_config(reader: CheckpointReader, prefix: str) -> bytes:
    known = reader.manifest.values.get("model_config")
    return known.encode() if isinstance(known, str) and prefix.endswith("model") else b""


def _known_tokenizer(reader: CheckpointReader, prefix: str) -> dict[str, bytes]:
    """Files for transformers, from the run's own beside its checkpoints; none where that is gone, or another's."""
    path = reader.folder.absolute().parent.parent / "tokenizer.json"
    data = path.read_bytes() if prefix.endswith("model") and path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != reader.manifest.values.get("tokenizer"):
        return {}
    end = json.loads(data)["added_tokens"][0]["content"]
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    return {path.name: data, "tokenizer_config.json": json.dumps(about).encode()}


def _json_of(path: Path) -> bytes:
    try:
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise ConfigError(f"{path} is too large for a config.json")
        data = path.read_bytes()
        json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be copied as config.json: {error}") from error
    return data


@contextlib.contextmanager
def _new(out: Path, *, is_folder: bool) -> Iterator[Path]:
    """A place to write in beside `out`, which gets its name at the end, or is deleted.

    Raises: CheckpointError where `out` is there and not an empty folder, and for what the system says.
    """
    if os.path.lexists(out) and not (is_folder and out.is_dir() and not out.is_symlink() and not os.listdir(out)):
        raise CheckpointError(f"{out} is there already: nothing is written over it, name another one")
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if is_folder:
            unfinished.mkdir()
        yield unfinished
        if is_folder:
            sync_folder(unfinished)
        rename_durably(unfinished, out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error}") from error
    finally:
        if is_folder:
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)
