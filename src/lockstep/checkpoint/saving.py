"""One save: what each rank writes, and how it becomes a checkpoint.

(agree)     every rank: it is one state, and who writes which piece of it; see plan.py
(copy)      a save in the background goes on with copies from here
begin       rank 0: an empty folder in that of its generation
write       every rank: its file, hashed while it is written, made durable; it reports bytes, digests, its own values
publish     rank 0: the manifest, the folder made durable, the name
verify      every rank, where older checkpoints are to go: its file, read back
prune       rank 0: the checkpoints that are not among the newest
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint.generation import CommitMode, Generation, Name, fenced, names_in
from lockstep.checkpoint.manifest import NAME as MANIFEST
from lockstep.checkpoint.manifest import UNFINISHED, Manifest, digest_of, file_name, to_text
from lockstep.checkpoint.plan import Job
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.tensor_file import FileRecord, write_tensor_file
from lockstep.checkpoint.together import together
from lockstep.comm.communicator import Communicator
from lockstep.durable import new_file, sync_folder
from lockstep.errors import CheckpointError


@dataclass
class Directory:
    """A directory of checkpoints as the process that writes them knows it."""

    path: Path
    keep: int | None
    mode: CommitMode
    generation: Generation | None = None  # on rank 0, from the first save on
    parent: str = ""  # digest of the manifest that the next one follows: of the checkpoint saved or loaded last


def write(comm: Communicator, what: str, job: Job, read: Callable[[int], Tensor], directory: Directory) -> Path:
    """Write the pieces, of which `read(i)` gives the elements, and give the checkpoint its name. Collective.

    Raises: CheckpointError on every rank; the checkpoints that were there are then untouched.
    """
    _, begun = together(comm, what, lambda: (None, _begin(comm.rank, job.step, directory)))
    number, folder = begun[0][0], Path(begun[0][1])
    published: list[Any] = []

    def take(action: Callable[[], Any], what: str = what) -> list[Any]:
        """What `action` returns on each rank. Where it fails because this process was left over, that is said."""

        def attempt() -> tuple[None, Any]:
            with fenced(directory.path, number):
                return None, action()

        return together(comm, what, attempt)[1]

    def publish() -> Any:
        if comm.rank == 0:
            published.append(_publish(folder, job, records, directory))
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
        own = [file_name(comm.rank)] if job.plan.pieces else []
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


def _write_own(folder: Path, rank: int, job: Job, read: Callable[[int], Tensor]) -> Any:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see the folder that rank 0 has made, {folder}: checkpoints of several hosts must be "
            "in a folder that all of them see"
        )
    pieces = job.plan.pieces
    record = write_tensor_file(folder / file_name(rank), pieces, read) if pieces else None
    return record, job.own.values, job.own.kinds


def _publish(folder: Path, job: Job, records: Sequence[Any], directory: Directory) -> Any:
    generation = directory.generation
    assert generation is not None, "rank 0 has begun"
    files, kinds, values = {}, dict(job.common.kinds), dict(job.common.values)
    for rank, (record, own_values, own_kinds) in enumerate(records):
        if record is not None:
            size, sha256, crc32 = record
            files[file_name(rank)] = FileRecord(size, sha256, tuple(crc32))
        values |= own_values
        kinds |= own_kinds
    plan = job.plan
    start = (job.step, generation.number, directory.parent, len(records))
    manifest = Manifest(*start, files, plan.tensors, plan.aliases, kinds, values)
    text = to_text(manifest)
    if directory.mode == "marker":
        sync_folder(folder)  # the manifest must not be there before the files
        generation.check()
    with new_file(folder / MANIFEST) as file:
        file.write(text.encode())
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
