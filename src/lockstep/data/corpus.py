"""Text to train on: which files, in which order, what is held out, and a digest that says whether it is the same text.

The default is the source of this Python's own standard library: always there, no download, 10 to 12 MB.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import ConfigError, DataError

# Tests and tables add megabytes but little variety; installed packages and build settings differ between machines.
_STDLIB_WITHOUT = frozenset(
    ["test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "site-packages", "dist-packages", "__pycache__"]
)
_STDLIB_BUILD_SETTINGS = "_sysconfigdata"
_TEXT_SUFFIXES = """
    .c .cc .cfg .cpp .css .csv .go .h .hpp .hs .html .ini .java .jl .js .json .jsonl .jsx .kt .lua .md .ml .php .pl .py
    .pyi .r .rb .rs .rst .scala .sh .sql .swift .tex .toml .ts .tsv .tsx .txt .xml .yaml .yml
"""
TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())


@dataclass(frozen=True)
class Document:
    """One file of a corpus, as it was when the corpus was read."""

    name: str  # path within the corpus, with / on every system; "" where the corpus is one file
    path: Path
    nbytes: int
    sha256: str

    def read(self) -> bytes:
        """The text, in UTF-8. Raises: DataError where the file has changed since."""
        data = _read(self.path)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DataError(f"{self.path} changed while it was being read: start again when nothing writes to it")
        return data


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their names."""

    source: str  # what it is, in words
    documents: tuple[Document, ...]
    digest: str  # SHA-256 over names and contents; no path of this machine is in it

    @property
    def nbytes(self) -> int:
        """Bytes of text."""
        return sum(document.nbytes for document in self.documents)


class Piece(NamedTuple):
    """Bytes [start, stop) of a document."""

    document: Document
    start: int
    stop: int

    def read(self) -> bytes:
        """The text, in UTF-8."""
        return self.document.read()[self.start : self.stop]


def read_corpus(path: Path | None = None) -> Corpus:
    """The corpus in `path`: a text file, or a directory and its files with a text suffix. None is the standard library.

    Hidden files and directories are left out, and links to directories are not followed.
    Raises: ConfigError where `path` does not exist; DataError where there is no text in it.
    """
    if path is None:
        return _stdlib()
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give a text file or a directory of text files")
    if not path.is_dir():
        data = _read(path)
        why = _why_not_text(data)
        if why:
            raise DataError(f"{path} is not a text file: {why}")
        return _corpus(str(path), [_document("", path, data)])
    names = [name for name in _walk(path) if Path(name).suffix.lower() in TEXT_SUFFIXES]
    if not names:
        raise DataError(f"{path} holds no text files: looked for {' '.join(sorted(TEXT_SUFFIXES))}")
    return _from_names(str(path), path, names)


def split(corpus: Corpus, fraction: float) -> tuple[list[Piece], list[Piece]]:
    """The text to train on, and about `fraction` of it held out for validation. The same for the same corpus.

    Whole documents are held out, chosen by the hash of their name: a model that has seen half of a file knows its names
    and habits, and would look better than it is. Never more than `fraction` is held out. Where no document is small
    enough, as with a single file, the end of the largest one is held out, from a line's beginning.

    Raises: ConfigError where `fraction` is not between 0 and 1, DataError where one side would be empty.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"the held-out share is {fraction}: it must be between 0 and 1, 0.01 is usual")
    room = int(corpus.nbytes * fraction)
    held_out: set[str] = set()
    for document in sorted(corpus.documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if document.nbytes <= room:
            held_out.add(document.name)
            room -= document.nbytes
    pieces = [Piece(document, 0, document.nbytes) for document in corpus.documents]
    if held_out:
        train = [piece for piece in pieces if piece.document.name not in held_out]
        return train, [piece for piece in pieces if piece.document.name in held_out]
    largest = max(pieces, key=lambda piece: piece.stop)
    cut = _line_start(largest.read(), int(largest.stop - room))
    if not 0 < cut < largest.stop:
        raise DataError(f"{corpus.source} has {corpus.nbytes} bytes of text: too few to hold out a share of {fraction}")
    train = [Piece(piece.document, 0, cut) if piece is largest else piece for piece in pieces]
    return train, [Piece(largest.document, cut, largest.stop)]


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        name
        for name in (_walk(root) if root.is_dir() else ())
        if name.endswith(".py")
        and not _STDLIB_WITHOUT.intersection(name.split("/"))
        and not name.startswith(_STDLIB_BUILD_SETTINGS)
    ]
    if not names:
        raise DataError(f"this Python has no standard library source in {root}: give a text file or directory instead")
    version = sysconfig.get_python_version()
    return _from_names(f"the standard library of Python {version}", root, names)


def _walk(root: Path) -> Iterator[str]:
    """Names of the files under `root`, relative to it."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in files if not name.startswith("."))


def _from_names(source: str, root: Path, names: list[str]) -> Corpus:
    texts = ((name, _read(root / name)) for name in sorted(names))
    documents = [_document(name, root / name, data) for name, data in texts if not _why_not_text(data)]
    if not documents:
        raise DataError(f"{source}: none of its {len(names)} files holds UTF-8 text")
    return _corpus(source, documents)


def _corpus(source: str, documents: list[Document]) -> Corpus:
    listed = "".join(f"{document.name}\0{document.sha256}\n" for document in documents)
    return Corpus(source, tuple(documents), hashlib.sha256(listed.encode()).hexdigest())


def _document(name: str, path: Path, data: bytes) -> Document:
    return Document(name, path, len(data), hashlib.sha256(data).hexdigest())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _why_not_text(data: bytes) -> str:
    """Empty for UTF-8 text, else what is wrong with it."""
    if not data.strip():
        return "it is empty"
    if b"\0" in data:
        return f"byte {data.index(0)} is zero, as in binary files"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8; if it is text, convert it: iconv -f LATIN1 -t UTF-8"
    return ""


def _line_start(data: bytes, about: int) -> int:
    """The first line's beginning from `about` on; where there is none, the next character's beginning."""
    newline = data.find(b"\n", max(0, about - 1))
    if 0 <= newline < len(data) - 1:
        return newline + 1
    while about < len(data) and data[about] & 0xC0 == 0x80:
        about += 1
    return about
