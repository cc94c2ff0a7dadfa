"""One save: what all ranks agree on, what each of them writes, and how it gets its name.

agree       every rank: what is saved (names, shapes, values) is one state; who writes which piece follows from it
(copy)      a save in the background goes on with copies from here
begin       rank 0: an empty folder in that of its generation
write       every rank: its file, hashed while it is written, made durable; it reports bytes and digests
publish     rank 0: the manifest, the folder made durable, the name
verify      every rank, where older checkpoints are to go: its file, read back
prune       rank 0: the checkpoints that are not among the newest
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.generation import STEP_END, CommitMode, Generation, Name, check_newest, names_in, sync_folder
from lockstep.checkpoint.manifest import NAME as MANIFEST
from lockstep.checkpoint.manifest import UNFINISHED, Manifest, digest_of, file_name, to_text
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.shares import Layout, layout_of, plan_pieces
from lockstep.checkpoint.state import FlatState, State, flatten, tied_as
from lockstep.checkpoint.tensor_file import FileRecord, Piece, dtype_name, write_tensor_file
from lockstep.checkpoint.together import together
from lockstep.comm.communicator import Communicator
from lockstep.comm.tensor_parts import TensorPieces, held, is_dtensor
from lockstep.errors import CheckpointError, CheckpointMismatch

SHARDS = "shards"  # under this key lies the state of each shard, by its number
_DIFFERENCES_SHOWN = 5


@dataclass
class Directory:
    """A directory of checkpoints as the process that writes them knows it."""

    path: Path
    keep: int | None
    mode: CommitMode
    generation: Generation | None = None  # on rank 0, from the first save on
    parent: str = ""  # digest of the manifest that the next one follows: of the checkpoint saved or loaded last


@dataclass(frozen=True)
class Job:
    """What this rank knows once all ranks have agreed on what is saved."""

    step: int
    whole: FlatState  # what all ranks have, and all ranks' shards; its tensors are those of this rank
    table: Mapping[str, tuple[str, tuple[int, ...]]]  # all tensors' dtype and whole shape
    pieces: Sequence[Piece] = field(default=())  # that this rank writes


# ------------------------------------------------------------------ agree


def agree(
    comm: Communicator,
    what: str,
    step: int,
    state: State,
    shards: Mapping[int, State],
    wait_for_earlier: Callable[[], None],
) -> Job:
    """Find out whether all ranks are saving the same, when the save before is done. Collective: one exchange.

    Raises: CheckpointError on every rank.
    """

    def describe() -> tuple[tuple[FlatState, FlatState, dict[str, Layout]], Any]:
        wait_for_earlier()
        if type(step) is not int or not 0 <= step < STEP_END:
            raise CheckpointError(f"step={step!r}: a step is a number from 0 up, of at most 18 digits")
        common, own = flatten(state), _flat_shards(shards)
        if any(path.partition("/")[0] == SHARDS for path in (*common.tensors, *common.aliases, *common.values)):
            raise CheckpointError(f"{SHARDS!r} cannot be a key of the state: give it as save(..., shards={{id: ...}})")
        layouts = {path: layout_of(t, path) for path, t in common.tensors.items() if not isinstance(t, TensorPieces)}
        said = [_digest(_all_tensors(common)), _digest(common.values, common.kinds), common.aliases]
        return (common, own, layouts), [*said, [sorted(shards), _table(own), own.values, own.kinds, own.aliases]]

    (common, own, layouts), everyone = together(comm, what, describe)
    _check_equal(comm, what, everyone, common)
    aliases = {path: target for *_, seen, _ in everyone for path, target in seen.items()}
    if any(seen != aliases for *_, seen, _ in everyone):
        common, _ = together(comm, what, lambda: (tied_as(common, aliases), None))
    pieces = plan_pieces({p: t for p, t in layouts.items() if p in common.tensors}, comm.rank, comm.world_size)
    alone = own.tensors | {path: t for path, t in common.tensors.items() if path not in layouts}
    for path, tensor in alone.items():
        pieces += [Piece(path, dtype_name(tensor.dtype, path), part) for part, _ in held(tensor)]
    table = _table(common)
    values, kinds = dict(common.values), dict(common.kinds)
    for *_, (_, shard_table, shard_values, shard_kinds, shard_aliases) in everyone:
        table |= {path: (dtype, tuple(shape)) for path, (dtype, shape) in shard_table.items()}
        values, kinds, aliases = values | shard_values, kinds | shard_kinds, aliases | shard_aliases
    return Job(step, FlatState(common.tensors | own.tensors, values, kinds, aliases), table, pieces)


def _flat_shards(shards: Mapping[int, State]) -> FlatState:
    flat = flatten({SHARDS: {_shard_key(number): shard for number, shard in shards.items()}} if shards else {})
    for path, tensor in flat.tensors.items():
        if is_dtensor(tensor) or isinstance(tensor, TensorPieces):
            raise CheckpointError(f"{path} is cut over ranks, but a shard is one rank's: put it into the state")
    return flat


def _check_equal(comm: Communicator, what: str, everyone: Sequence[Any], common: FlatState) -> None:
    """Raises: CheckpointMismatch on every rank where they do not save the same."""
    owners: dict[int, int] = {}
    for rank, (*_, (numbers, *_)) in enumerate(everyone):
        for number in numbers:
            if owners.setdefault(number, rank) != rank:
                raise CheckpointMismatch(
                    f"{what}: ranks {owners[number]} and {rank} both have shard {number}: a shard is one rank's"
                )
    for index, noun in enumerate(("tensors", "values")):
        others = [rank for rank, said in enumerate(everyone) if said[index] != everyone[0][index]]
        if others:
            _, said = together(comm, what, lambda noun=noun: (None, _listed(common, noun)))
            paths = sorted({path for rank in others for path, _ in said[0].items() ^ said[rank].items()})
            raise CheckpointMismatch(
                f"{what}: ranks {others} have other {noun} than rank 0: {', '.join(paths[:_DIFFERENCES_SHOWN])}. Every "
                "rank saves the same state; what is a rank's own belongs into shards={comm.rank: ...}"
            )


def _listed(common: FlatState, noun: str) -> dict[str, str]:
    """A short digest of each entry, to find those that differ."""
    entries = _all_tensors(common) if noun == "tensors" else {**common.values, **common.kinds}
    return {path: _digest(entry)[:16] for path, entry in entries.items()}


def _all_tensors(flat: FlatState) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The table with aliases, too: which paths are these a rank with an empty piece cannot see."""
    table = _table(flat)
    return table | {path: table[target] for path, target in flat.aliases.items()}


def _table(flat: FlatState) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {path: (dtype_name(tensor.dtype, path), tuple(tensor.shape)) for path, tensor in flat.tensors.items()}


def _digest(*entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _shard_key(number: Any) -> str:
    if type(number) is not int or number < 0:
        raise CheckpointError(f"{number!r} is no number of a shard: use 0, 1, ...")
    return str(number)


# ------------------------------------------------------------------ write


def write(comm: Communicator, what: str, job: Job, read: Callable[[int], Tensor], directory: Directory) -> Path:
    """Write the pieces, of which `read(i)` gives the elements, and give the checkpoint its name. Collective.

    Raises: CheckpointError on every rank; the checkpoints that were there are then untouched.
    """
    _, begun = together(comm, what, lambda: (None, _begin(comm.rank, job.step, directory)))
    number, folder = begun[0][0], Path(begun[0][1])
    published: list[Any] = []

    def take(action: Callable[[], Any], what: str = what) -> list[Any]:
        """What `action` returns on each rank. Where it fails because this process was left over, that is said."""
        return together(comm, what, lambda: (None, _fenced(directory.path, number, action)))[1]

    def publish() -> Any:
        if comm.rank == 0:
            published.append(_publish(comm.world_size, folder, job, records, directory))
        return published

    try:
        records = take(lambda: _write_own(folder, comm.rank, job, read))
        ((name, digest, has_older),) = take(publish)[0]
    except Exception:
        if comm.rank == 0 and directory.generation is not None and not published:
            with contextlib.suppress(OSError):  # what stays is deleted at the next save
                directory.generation.discard(folder)
        raise
    directory.parent = digest
    final = directory.path / name
    if has_older:
        own = [file_name(comm.rank)] if records[comm.rank] else []
        take(lambda: _verify(final, own), f"{what}; no older one was deleted")
        take(lambda: _prune(comm.rank, directory), f"{what}: it is there, but an older one stays")
    return final


def _begin(rank: int, step: int, directory: Directory) -> Any:
    """On rank 0: the number of the generation, and an empty folder."""
    if rank != 0:
        return None
    generation = directory.generation
    if generation is not None:
        generation.check()  # before a name that is taken already is a reason for a new one
    if generation is None or not _comes_last(Name(generation.number, step), directory.path):
        own = None if generation is None else generation.number
        directory.generation = generation = Generation(directory.path, directory.mode, own)
    return generation.number, str(generation.begin(step))


def _comes_last(name: Name, directory: Path) -> bool:
    """Whether it would be the newest checkpoint; not so for a step that was there, or has been gone back from."""
    return not (directory / str(name)).exists() and max(names_in(directory), default=name) <= name


def _fenced(directory: Path, number: int, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception:
        check_newest(directory, number)
        raise


def _write_own(folder: Path, rank: int, job: Job, read: Callable[[int], Tensor]) -> Any:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see the folder that rank 0 has made, {folder}: checkpoints of several hosts must be "
            "in a folder that all of them see"
        )
    if not job.pieces:
        return None
    record = write_tensor_file(folder / file_name(rank), job.pieces, read)
    return [record.bytes, record.sha256, record.crc32]


def _publish(world_size: int, folder: Path, job: Job, records: Sequence[Any], directory: Directory) -> Any:
    generation = directory.generation
    assert generation is not None, "rank 0 has begun"
    files = {file_name(n): FileRecord(r[0], r[1], tuple(r[2])) for n, r in enumerate(records) if r}
    whole = job.whole
    manifest = Manifest(
        job.step,
        generation.number,
        directory.parent,
        world_size,
        files,
        dict(job.table),
        whole.aliases,
        whole.kinds,
        whole.values,
    )
    text = to_text(manifest)
    if directory.mode == "marker":
        sync_folder(folder)  # the manifest must not be there before the files
        generation.check()
    with (folder / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    with open_checkpoint(folder, allowed=(UNFINISHED,)) as reader:
        reader.verify(())  # every element is in a file once; what could not be loaded gets no name
    sync_folder(folder)
    final = generation.publish(folder)
    has_older = directory.keep is not None and len(names_in(directory.path)) > directory.keep
    return [final.name, digest_of(text), has_older]


def _verify(final: Path, own: Sequence[str]) -> None:
    with open_checkpoint(final) as reader:
        reader.verify(own)


def _prune(rank: int, directory: Directory) -> None:
    if rank == 0:
        assert directory.generation is not None, "rank 0 has begun"
        for name in names_in(directory.path)[directory.keep :]:
            directory.generation.retire(name)
