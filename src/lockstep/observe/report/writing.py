"""The page of a run as a file in its folder, and the document of a run as it is now."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import final

from lockstep.errors import ConfigError
from lockstep.observe.profile.run_record import Run, file_of
from lockstep.observe.report.document import Document, document_of
from lockstep.observe.report.page import render
from lockstep.observe.report.run_rows import Status, look
from lockstep.observe.report.source import RunReader, Source, find_run

PAGE = "report.html"
_DAMAGES = (LookupError, TypeError, ValueError, AttributeError)  # of what others have written into a record
_PERIOD_S, _SHARE = 1.0, 10  # of a live document: at most so often, and in a tenth of the time


def write_page(document: Document, path: Path) -> None:
    """Let `path` be the page of `document`: as a whole, or as it was.  Raises: ConfigError where it cannot be."""
    unfinished = path.parent / f".{path.name}.{socket.gethostname()}-{os.getpid()}"  # of each machine of a run
    try:
        unfinished.write_text(render(document), encoding="ascii")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        elsewhere = "`lockstep report RUN --out FILE`"
        raise ConfigError(f"cannot write {path}: {error.strerror}; another place: {elsewhere}") from error


def shown(path: Path) -> str:
    """As it can be typed here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@final
class LiveDocument:
    """The document of a run that goes on. May be asked by any thread, and costs little where nothing is new."""

    def __init__(self, folder: Path) -> None:
        self._reader = RunReader(folder)
        self._lock = threading.Lock()
        self._built: tuple[Document, int, Status] | None = None  # of so many bytes
        self._due_s = 0.0

    def __call__(self) -> Document:
        """As of now, or of a moment ago.  Raises: ConfigError where the record is none of ours."""
        with self._lock:
            began_s = time.monotonic()
            if self._built is None or began_s >= self._due_s:
                self._look()
                now_s = time.monotonic()
                self._due_s = now_s + max(_PERIOD_S, _SHARE * (now_s - began_s))
            assert self._built is not None
            return self._built[0]

    def _look(self) -> None:
        source, status = look(self._reader)
        if source.problems and not source.run.ranks and source.launch is None:
            raise ConfigError(f"{source.folder} holds no record that can be read: {source.problems[0]}")
        now = self._reader.size, status
        if self._built is not None and self._built[1:] == now:
            return
        try:
            found = document_of(source, status, time.time_ns())
        except _DAMAGES as error:
            found = document_of(_mended(source, error), status, time.time_ns())
        self._built = found, *now


def _mended(source: Source, cause: Exception) -> Source:
    """Without the notes that nothing can be made of: these are problems.  Raises: ConfigError where it is not them."""
    ranks, problems = dict(source.run.ranks), list(source.problems)
    for rank, record in ranks.items():
        kept = [one for one in record.notes if one.kind == "values"]  # of these only numbers are taken
        for one in (one for one in record.notes if one.kind != "values"):
            alone = Run(source.run.folder, {rank: replace(record, lines=(), notes=(one,))})
            try:
                document_of(Source(source.folder, alone, None, ()), "unknown", 0)
                kept.append(one)
            except _DAMAGES as error:
                at = "".join(f" of {name} {one.fields[name]}" for name in ("step", "epoch") if name in one.fields)
                problems.append(f"{file_of(Path(), rank)}: its note of {one.kind}{at} is damaged: {error!r}")
        ranks[rank] = replace(record, notes=tuple(kept))
    if len(problems) == len(source.problems):
        raise ConfigError(f"the record in {source.run.folder} is of another version, or damaged: {cause!r}") from cause
    return source._replace(run=Run(source.run.folder, ranks), problems=tuple(problems))


def document_in(folder: Path | None, below: Path = Path("runs")) -> tuple[Path, Document]:
    """(its folder, its document) of the run in `folder`, or of the newest `below`.  Raises: ConfigError."""
    place = find_run(folder, below)
    return place, LiveDocument(place)()
