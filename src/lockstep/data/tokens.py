"""A corpus as token files in a cache, made once and used by every rank and every later run.

An entry is a directory that appears whole or not at all: it is written under another name, flushed, then renamed. Its
name is the digest of everything that decides its content, so it is never out of date.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import tokenizers

from lockstep.comm.communicator import Communicator
from lockstep.data.corpus import Corpus, Piece, read_corpus, split
from lockstep.data.token_file import Tokens, read_tokens, write_tokens
from lockstep.data.tokenizer import MIN_BPE_VOCAB, ByteTokenizer, Tokenizer, TokenKind, load_tokenizer, train_bpe
from lockstep.durable import new_file, rename_durably, sync_folder
from lockstep.errors import ConfigError, DataError, LockstepError

_FORMAT = 1  # raise it when the same corpus and settings would make other tokens
_TEXT_BYTES = 1 << 20  # text that is encoded at a time


@dataclass(frozen=True)
class TokenizedText:
    """A corpus, ready to train on."""

    train: Tokens
    held_out: Tokens
    tokenizer: Tokenizer
    source: str  # the corpus, in words
    corpus_digest: str
    digest: str  # of the training tokens: equal digests, equal training data

    @property
    def description(self) -> str:
        """One line for the head of a run."""
        return (
            f"{self.source}: {len(self.train):,} tokens to train on, {len(self.held_out):,} held out, vocabulary "
            f"{self.tokenizer.vocab_size}, sha256 {self.corpus_digest[:12]}"
        )


def prepare_tokens(
    path: Path | None = None,
    *,
    kind: TokenKind = "bytes",
    vocab_size: int = 4096,
    held_out: float = 0.01,
    cache: Path | None = None,
    comm: Communicator | None = None,
) -> TokenizedText:
    """The tokens of the corpus in `path` (None: the standard library), from the cache where they are there already.

    vocab_size: of the byte-pair encoding; bytes have their own.
    cache: None is $XDG_CACHE_HOME/lockstep, else ~/.cache/lockstep.
    Collective: with `comm`, every rank of it; blocks. Rank 0 reads and prepares while the others wait, within the
        communicator's timeout; a rank that does not find the result, on another host, prepares the same again.
    Raises: ConfigError, DataError; with `comm` on every rank.
    """
    if kind not in get_args(TokenKind):
        raise ConfigError(f"tokens={kind!r}: choose one of {', '.join(get_args(TokenKind))}")
    if kind == "bpe" and vocab_size < MIN_BPE_VOCAB:
        raise ConfigError(f"vocab_size={vocab_size}: byte-pair encodings start at {MIN_BPE_VOCAB}, one for each byte")
    settings = {"kind": kind, "held_out": held_out}
    if kind == "bpe":
        settings |= {"vocab_size": vocab_size, "tokenizers": tokenizers.__version__}
    root = (cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lockstep")) / "tokens"
    if comm is None or comm.world_size == 1:
        corpus = read_corpus(path)
        return _open(_entry(root, corpus, settings))
    return _prepare_together(path, settings, root, comm)


def _prepare_together(path: Path | None, settings: dict[str, Any], root: Path, comm: Communicator) -> TokenizedText:
    text: TokenizedText | None = None
    error: LockstepError | None = None
    name = ""  # stays empty where rank 0 failed: then no other rank tries
    if comm.rank == 0:
        try:
            entry = _entry(root, read_corpus(path), settings)
            name, text = entry.name, _open(entry)
        except LockstepError as caught:
            error = caught
    name = comm.broadcast_object(name, label="tokens")
    if comm.rank != 0 and name:
        try:
            there = (root / name).exists()
            text = _open(root / name if there else _entry(root, read_corpus(path), settings))
        except LockstepError as caught:
            error = caught
    reports = comm.all_gather_object([text.digest if text else "", str(error or "")], label="tokens")
    if error is not None:
        raise error
    for rank, (digest, problem) in enumerate(reports):
        if problem:
            raise DataError(f"rank {rank} could not prepare the tokens: {problem}")
        if digest != reports[0][0]:
            raise DataError(
                f"rank {rank} has other text than rank 0: tokens {digest[:12]}, on rank 0 {reports[0][0][:12]}. All "
                "hosts need the same files; for the default text, the same Python version"
            )
    assert text is not None
    return text


def _entry(root: Path, corpus: Corpus, settings: dict[str, Any]) -> Path:
    """The cache entry of `corpus`, made now where it is not there."""
    key = json.dumps({"format": _FORMAT, "corpus": corpus.digest, **settings}, sort_keys=True)
    entry = root / hashlib.sha256(key.encode()).hexdigest()[:32]
    if entry.exists():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{entry.name}.lock").open("wb") as lock:
            # one process at a time, on this host and on file systems that have locks; the kernel unlocks for the dead
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in root.glob(f"{entry.name}.tmp-*"):  # of a killed process
                shutil.rmtree(leftover)
            if not entry.exists():
                _make(entry, corpus, settings)
    except OSError as error:
        raise DataError(
            f"cannot write the token cache {root}: {error.strerror}. Set XDG_CACHE_HOME to a directory with room"
        ) from error
    return entry


def _make(entry: Path, corpus: Corpus, settings: dict[str, Any]) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
    try:
        train, held_out = split(corpus, settings["held_out"])
        is_bpe = settings["kind"] == "bpe"
        tokenizer = train_bpe(_texts(train), settings["vocab_size"]) if is_bpe else ByteTokenizer()
        counts = {}
        for name, pieces in (("train", train), ("held_out", held_out)):
            with new_file(temporary / f"{name}.bin") as file:
                counts[name] = write_tokens(file, _encoded(pieces, tokenizer), tokenizer.vocab_size)
        saved = tokenizer.to_json()
        with new_file(temporary / "tokenizer.json") as file:
            file.write(saved.encode())
        about = {
            "format": _FORMAT,
            **settings,
            "source": corpus.source,
            "corpus_digest": corpus.digest,
            "digest": hashlib.sha256(np.memmap(temporary / "train.bin", mode="r").data).hexdigest(),
            "tokens": counts,
            "tokenizer": hashlib.sha256(saved.encode()).hexdigest(),
        }
        with new_file(temporary / "about.json") as file:
            file.write(json.dumps(about, indent=1).encode())
        sync_folder(temporary)
        rename_durably(temporary, entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _open(entry: Path) -> TokenizedText:
    """Raises: DataError where the entry is damaged, which no crash of ours can cause."""
    try:
        about = json.loads((entry / "about.json").read_text())
        saved = (entry / "tokenizer.json").read_bytes()
        if hashlib.sha256(saved).hexdigest() != about["tokenizer"]:
            raise DataError("tokenizer.json is not what was written")
        tokenizer = load_tokenizer(about["kind"], saved.decode())
        train, held_out = (read_tokens(entry / f"{name}.bin") for name in ("train", "held_out"))
        if {"train": len(train), "held_out": len(held_out)} != about["tokens"]:
            raise DataError(f"{len(train)} and {len(held_out)} tokens instead of {about['tokens']}")
        return TokenizedText(train, held_out, tokenizer, about["source"], about["corpus_digest"], about["digest"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the token cache is damaged: {error}. Delete {entry}; it is made again") from error


def _texts(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """The pieces in parts of about a megabyte that begin with a line, so that one huge file needs little memory."""
    for piece in pieces:
        data = piece.read()
        start = 0
        while start < len(data):
            stop = data.find(b"\n", start + _TEXT_BYTES) + 1 or len(data)
            yield data[start:stop]
            start = stop


def _encoded(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.uint32]]:
    end = np.array([tokenizer.end_of_text], dtype=np.uint32)
    for piece in pieces:
        yield from (ids for text in _texts([piece]) for ids in tokenizer.encode([text]))
        yield end
