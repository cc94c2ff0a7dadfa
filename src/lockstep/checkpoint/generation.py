"""Who may change a directory of checkpoints, and the renames by which it is changed.

    step-00000100-g6/        the checkpoint of step 100 that generation 6 wrote: all of it, or it is not there
    step-00000150-g7/
    .generation-7/           the newest generation; what is being written, and what is being deleted, is in here

A generation is one start of a run. It makes a folder of its own, and moves the folders of those before it away. A
checkpoint comes into being by one rename out of the generation's folder, and ends by one rename into it. So a process
that was left over from an earlier start changes nothing any more: its next rename has no source, or no target.

Where renames are not atomic ("marker"), a checkpoint is written in place, beside a file that says it is unfinished, and
its end is that file's; the manifest, which is written last, carries a digest of its own. A process that was left over
looks before that; should it be stopped between looking and the end, its checkpoint is whole, and older than any of the
new generation's.

Of two checkpoints the newer one is that of the later generation, then that of the later step.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, final

from lockstep.checkpoint.manifest import UNFINISHED
from lockstep.durable import sync_folder
from lockstep.errors import CheckpointError, CheckpointMissing, StaleGeneration

CommitMode = Literal["rename", "marker"]

STEP_END = 10**18  # steps have so few digits that a number in a folder's name is nothing else

_CHECKPOINT = re.compile(r"step-(\d{8,18})-g(\d{1,9})")
_GENERATION = re.compile(r"\.generation-(\d{1,9})")


class Name(NamedTuple):
    """Which checkpoint of a directory. Names sort by age."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:08}-g{self.generation}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """The name that a folder's name spells; None where it is no checkpoint's."""
        found = _CHECKPOINT.fullmatch(text)
        name = None if found is None else cls(int(found[2]), int(found[1]))
        return name if name is not None and str(name) == text else None


def names_in(directory: Path) -> list[Name]:
    """The checkpoints in `directory`, the newest first; whether they are good is not looked at.

    Raises: CheckpointError where `directory` cannot be read, as where it is a file.
    """
    try:
        found = [name for entry in os.listdir(directory) if (name := Name.parse(entry)) is not None]
        return sorted((name for name in found if not _is_unfinished(directory / str(name))), reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {directory}: {error}") from error


def of_step(names: Sequence[Name], step: int, directory: Path) -> list[Name]:
    """Those of `names`, the checkpoints in `directory`, that are of `step`. Raises: CheckpointMissing for none."""
    found = [name for name in names if name.step == step]
    if not found:
        there = sorted({name.step for name in names})
        raise CheckpointMissing(f"{directory} has no checkpoint of step {step}: it has {there or 'none'}")
    return found


def _is_unfinished(folder: Path) -> bool:
    """Whether it was killed in the making, or in its end, where both happen in place."""
    return (folder / UNFINISHED).exists() or (folder.is_dir() and not os.listdir(folder))


@final
class Generation:
    """The right of one process to change `directory`, until a later generation takes it."""

    def __init__(self, directory: Path, mode: CommitMode, own: int | None = None) -> None:
        """Take the directory over from all that were before.

        own: the number of this process's own generation before, to go on from where it is still the newest.
        Raises: StaleGeneration where another process is just doing the same and comes later; OSError.
        """
        self.directory = directory
        self.mode: CommitMode = mode
        directory.mkdir(parents=True, exist_ok=True)
        self.number, self.folder = _claim(directory) if own is None else _claim_next(directory, own)
        sync_folder(directory)
        self.check()
        with fenced(self.directory, self.number):
            for older in _numbers(directory):
                if older < self.number:
                    self._end(_folder_of(directory, older))
            self._clear()
            if mode == "marker":
                for entry in os.listdir(directory):
                    if Name.parse(entry) is not None and _is_unfinished(directory / entry):
                        _delete(directory / entry)

    def check(self) -> None:
        """Raises: StaleGeneration where a later generation has begun."""
        check_newest(self.directory, self.number)

    def begin(self, step: int) -> Path:
        """An empty folder in which the checkpoint of `step` can be written.

        Raises: StaleGeneration; OSError.
        """
        self.check()
        name = str(Name(self.number, step))
        with fenced(self.directory, self.number):
            self._clear()
            folder = self.directory / name if self.mode == "marker" else self.folder / name
            folder.mkdir()
            if self.mode == "marker":
                (folder / UNFINISHED).touch()
                sync_folder(folder)
        return folder

    def publish(self, unfinished: Path) -> Path:
        """Make what `begin` gave, now complete and durable, a checkpoint. Its name is durable on return.

        Raises: StaleGeneration; OSError.
        """
        final = self.directory / unfinished.name
        with fenced(self.directory, self.number):
            if self.mode == "rename":
                unfinished.rename(final)
            else:
                (final / UNFINISHED).unlink()
                sync_folder(final)
            sync_folder(self.directory)
        return final

    def retire(self, name: Name) -> None:
        """Delete a checkpoint: it is there as a whole, or not at all.

        Raises: StaleGeneration; OSError.
        """
        gone = self.directory / str(name)
        self.check()
        with fenced(self.directory, self.number):
            if self.mode == "rename":
                gone = gone.rename(self.folder / f"pruned-{name}")
                sync_folder(self.directory)
            else:
                (gone / UNFINISHED).touch()
                sync_folder(gone)
            _delete(gone)

    def discard(self, unfinished: Path) -> None:
        """Delete what `begin` gave, after a failure. Raises: OSError."""
        _delete(unfinished)

    def _end(self, older: Path) -> None:
        """Take an older generation's folder away from it: from then on none of its renames has a source."""
        if self.mode == "marker":
            _delete(older)
            return
        with contextlib.suppress(FileNotFoundError):  # another process, between these two, was faster
            _delete(older.rename(self.folder / f"ended{older.name}"))

    def _clear(self) -> None:
        """Delete what killed processes left in the folder of this generation."""
        for entry in os.listdir(self.folder):
            _delete(self.folder / entry)


def check_newest(directory: Path, number: int) -> None:
    """Raises: StaleGeneration where generation `number` is not the newest of `directory`; CheckpointError where it is
    not there at all, because the directory was deleted, moved or emptied.
    """
    newest = max(_numbers(directory) if directory.is_dir() else (), default=0)
    if newest < number:
        raise CheckpointError(
            f"{_folder_of(directory, number)}, in which this run writes, is gone: {directory} was deleted, moved or "
            "emptied while the run was using it; start the run again"
        )
    if newest > number:
        raise StaleGeneration(
            f"this process (pid {os.getpid()}) belongs to generation {number} of {directory}, and generation {newest} "
            "has taken over: it was left over from an earlier start, or two runs use one directory. Nothing was "
            "changed; end this process, or give each run a directory of its own"
        )


@contextlib.contextmanager
def fenced(directory: Path, number: int) -> Iterator[None]:
    """What fails in here because a later generation has taken the folders away is said so: StaleGeneration."""
    try:
        yield
    except Exception:
        check_newest(directory, number)
        raise


def _claim(directory: Path) -> tuple[int, Path]:
    """A number that is larger than all so far, and no other process's, with its folder."""
    number = 0
    while True:
        named = [name.generation for entry in os.listdir(directory) if (name := Name.parse(entry)) is not None]
        number = max(number, *named, *_numbers(directory), 0) + 1
        folder = _folder_of(directory, number)
        with contextlib.suppress(FileExistsError):  # another process was faster
            folder.mkdir()
            return number, folder


def _claim_next(directory: Path, own: int) -> tuple[int, Path]:
    """`own` + 1, with its folder. Raises: StaleGeneration where another process has taken it."""
    folder = _folder_of(directory, own + 1)
    try:
        folder.mkdir()
    except FileExistsError:
        check_newest(directory, own)
        raise
    return own + 1, folder


def _numbers(directory: Path) -> list[int]:
    """Of the generations whose folders are there."""
    found = [_GENERATION.fullmatch(entry) for entry in os.listdir(directory)]
    return [int(match[1]) for match in found if match is not None]


def _folder_of(directory: Path, number: int) -> Path:
    return directory / f".generation-{number}"


def _delete(path: Path) -> None:
    """A file, or a folder with all that is in it; the file that calls it unfinished last, also after a power failure.

    Raises: OSError, but not for what is gone: a process that was left over deletes its own things at the same time.
    """
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
        if not is_folder:
            path.unlink()
            return
        entries = os.listdir(path)
        for entry in entries:
            if entry != UNFINISHED:
                _delete(path / entry)
        if UNFINISHED in entries:
            sync_folder(path)
            _delete(path / UNFINISHED)
        path.rmdir()
    except FileNotFoundError:
        return
