"""What `lockstep checkpoint ls`, `verify` and `show` print: plain columns, or a table where someone looks at it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.checkpoint.generation import Name, names_in, of_step
from lockstep.checkpoint.manifest import NAME as MANIFEST
from lockstep.checkpoint.reader import CheckpointReader, open_checkpoint
from lockstep.checkpoint.tensor_file import DTYPES, Piece
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing

_RUN_FOLDER = "checkpoints"
_LARGE_BYTES = 500 << 20


@dataclass(frozen=True)
class Line:
    """One checkpoint in a list."""

    step: int
    written: str  # ISO 8601, in local time
    bytes: int
    ranks: int | None  # None where the manifest cannot be read
    generation: int
    state: str  # complete (not verified), good, damaged, unreadable or unfinished
    path: str
    why: str = ""


# ------------------------------------------------------------------ which checkpoints


def checkpoints_of(directory: Path) -> list[Path]:
    """Folders of the checkpoints in `directory`, in its checkpoints/, or itself; the newest first, without unfinished.

    Raises: CheckpointMissing where there are none.
    """
    if Name.parse(directory.absolute().name) is not None or (directory / MANIFEST).is_file():
        return [directory.absolute()]
    for place in (directory, directory / _RUN_FOLDER):
        found = [place / str(name) for name in names_in(place)] if place.is_dir() else []
        if found:
            return found
    there = "has no checkpoints" if directory.is_dir() else "is no folder"
    what = there if directory.exists() else "does not exist"
    raise CheckpointMissing(f"{directory} {what}: name the folder of a run, or of its checkpoints")


def checkpoint_of(directory: Path, step: int | None) -> Path:
    """The newest of `checkpoints_of`, or the newest of `step`. Raises: CheckpointMissing."""
    found = checkpoints_of(directory)
    if step is None:
        return found[0]
    names = {name: path for path in found if (name := Name.parse(path.absolute().name)) is not None}
    return names[of_step(list(names), step, directory)[0]]


def _unfinished_in(directory: Path) -> list[Path]:
    """Folders that a save is writing now, or was writing when it was killed."""
    found = []
    for place in filter(Path.is_dir, (directory, directory / _RUN_FOLDER)):
        finished = {str(name) for name in names_in(place)}
        in_place = [path for path in place.glob("step-*") if path.name not in finished]
        found += [path for path in [*in_place, *place.glob(".generation-*/step-*")] if Name.parse(path.name)]
    return sorted(found)


# ------------------------------------------------------------------ ls


def list_checkpoints(directory: Path, *, verify: bool, as_json: bool) -> int:
    """Print one line for each; 1 where one cannot be used."""
    try:
        found = checkpoints_of(directory)
    except CheckpointMissing:
        found = []
        if not _unfinished_in(directory):
            raise
    lines = [line for path in found if (line := _line(path, verify)) is not None]
    lines += [_described(path, "unfinished") for path in _unfinished_in(directory)]
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        rows: list[tuple[str, ...]] = []
        for line in lines:
            how = f"{line.state}: {line.why}" if line.why else line.state
            written, size, ranks = line.written.replace("T", " "), size_text(line.bytes), str(line.ranks or "?")
            rows.append((str(line.step), written, size, ranks, str(line.generation), how))
        print_table(("step", "written", "size", "ranks", "generation", "state"), rows)
    return 1 if any(line.state in ("damaged", "unreadable") for line in lines) else 0


def _line(path: Path, verify: bool) -> Line | None:
    """What is known of one checkpoint; None where its run has deleted it since it was listed."""
    state, why, ranks = "good" if verify else "complete", "", None
    try:
        with open_checkpoint(path) as reader:
            ranks = reader.manifest.world_size
            if verify:
                reader.verify()
            _check_sizes(reader)
    except CheckpointMissing:
        return None
    except CheckpointError as error:
        state, why = _how(error), str(error)
    return _described(path, state, ranks, why)


def _how(error: CheckpointError) -> str:
    return "damaged" if isinstance(error, CheckpointDamaged) else "unreadable"  # no rights, another format


def _check_sizes(reader: CheckpointReader) -> None:
    for name, record in reader.manifest.files.items():
        size = (reader.folder / name).lstat().st_size
        if size != record.bytes:
            raise CheckpointDamaged(f"{reader.folder / name} has {size} bytes, {record.bytes} were written")


def _described(path: Path, state: str, ranks: int | None = None, why: str = "") -> Line:
    name = Name.parse(path.absolute().name) or Name(0, 0)
    written, size = "", 0
    with suppress(FileNotFoundError):  # deleted by its run since it was listed
        found = [(path / file).lstat() for file in os.listdir(path)]
        latest = max([entry.st_mtime for entry in found] or [path.stat().st_mtime])
        written = datetime.fromtimestamp(latest).astimezone().isoformat(timespec="seconds")
        size = sum(entry.st_size for entry in found)
    return Line(name.step, written, size, ranks, name.generation, state, str(path), why)


# ------------------------------------------------------------------ verify


def verify_checkpoints(directory: Path, step: int | None) -> int:
    """Print one line for each, and what is damaged; 1 where something is."""
    found = checkpoints_of(directory) if step is None else [checkpoint_of(directory, step)]
    damaged = 0
    for path in found:
        try:
            with open_checkpoint(path) as reader:
                faults, how = _faults(reader), "damaged"
                size = sum(record.bytes for record in reader.manifest.files.values())
                good = f"good, {len(reader.manifest.tensors)} tensors, {size_text(size)}"
        except CheckpointMissing:
            if step is not None:
                raise
            continue  # its run has deleted it since it was listed
        except CheckpointError as error:
            faults, good, how = [str(error)], "", _how(error)
        damaged += bool(faults)
        print(f"{path}: {good}" if not faults else f"{path}: {how}: {'; '.join(faults)}", flush=True)
    return 1 if damaged else 0


def _faults(reader: CheckpointReader) -> list[str]:
    """What is wrong with each file, with a word on how far it is where that takes long and someone looks at it."""
    files = reader.manifest.files
    total, done = sum(record.bytes for record in files.values()), 0
    tells = sys.stderr.isatty() and total > _LARGE_BYTES
    faults: list[str] = []
    for name, record in files.items():
        if tells:
            sys.stderr.write(f"\r{reader.folder.name}: {name}, {size_text(done)} of {size_text(total)} read \x1b[K")
            sys.stderr.flush()
        try:
            reader.verify([name])
        except CheckpointDamaged as fault:
            faults.append(str(fault))
        done += record.bytes
    if tells:
        sys.stderr.write("\r\x1b[K")
    if not files:
        reader.verify()
    return list(dict.fromkeys(faults))


# ------------------------------------------------------------------ show


def show_checkpoint(directory: Path, step: int | None, pattern: str, *, with_values: bool) -> int:
    """Print the tensors whose paths match, and values where asked; 1 where nothing does."""
    with open_checkpoint(checkpoint_of(directory, step)) as reader:
        manifest, files = reader.manifest, reader.files_of_tensors()
    rows, count, total = [], 0, 0
    for path, (dtype, shape) in manifest.tensors.items():
        if _matches(path, pattern):
            size = Piece.whole(path, dtype, shape).nbytes
            count, total = count + 1, total + size
            name = str(DTYPES[dtype]).removeprefix("torch.")
            places = ", ".join(file.removesuffix(".safetensors") for file in files.get(path, ()))
            rows.append((path, name, str(list(shape)), size_text(size), places))
    rows += [(path, "is", of, "", "") for path, of in manifest.aliases.items() if _matches(path, pattern)]
    values = {path: value for path, value in manifest.values.items() if _matches(path, pattern)}
    if not rows and not values:
        raise CheckpointError(f"{reader.folder} has nothing whose path is {pattern!r}, lies in it or matches it")
    print(
        f"{reader.folder}: step {manifest.step}, generation {manifest.generation}, written by {manifest.world_size} "
        f"rank{'s' if manifest.world_size > 1 else ''}"
    )
    if rows:
        print_table(("path", "dtype", "shape", "size", "files"), sorted(rows))
    if values and with_values:
        print_table(("path", "value"), [(path, json.dumps(value)) for path, value in sorted(values.items())])
    more = f"; {len(values)} values, seen with --values" if values and not with_values else ""
    print(f"{count} tensor{'' if count == 1 else 's'}, {size_text(total)}{more}")
    return 0


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or path == pattern or path.startswith(f"{pattern.rstrip('/')}/")


# ------------------------------------------------------------------ text


def size_text(count: int) -> str:
    """A number of bytes for people: 1.2 GB."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns with spaces between them; on a terminal a table that fits it. What cannot be printed is escaped."""
    shown = [[_printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        table = Table(*head, box=None, pad_edge=False, header_style="bold")
        for row in shown:
            table.add_row(*(Text(cell, overflow="fold") for cell in row))
        Console().print(table)
        return
    widths = [max(len(row[index]) for row in [list(head), *shown]) for index in range(len(head))]
    for row in [head, *shown]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _printable(text: Any) -> str:
    """A path may come from anyone: no control characters reach a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]
