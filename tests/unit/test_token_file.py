"""Token files: what is written is read, what others write is read, and what is damaged is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.token_file import read_tokens, token_dtype, write_tokens
from lockstep.errors import ConfigError, DataError


def write(path: Path, chunks: list[list[int]], vocab_size: int) -> Path:
    with path.open("wb") as file:
        assert write_tokens(file, [np.array(c, dtype=np.int64) for c in chunks], vocab_size) == sum(map(len, chunks))
    return path


@pytest.mark.parametrize(("vocab_size", "nbytes"), [(257, 2), (65536, 2), (65537, 4), (128256, 4)])
def test_what_is_written_is_read(tmp_path: Path, vocab_size: int, nbytes: int) -> None:
    path = write(tmp_path / "t.bin", [[0, 1], [], [vocab_size - 1]], vocab_size)
    tokens = read_tokens(path)
    assert tokens.tolist() == [0, 1, vocab_size - 1]
    assert tokens.itemsize == nbytes
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 3


@given(st.lists(st.lists(st.integers(0, 65535)), max_size=5))
def test_the_header_is_that_of_llm_c(chunks: list[list[int]]) -> None:
    file = io.BytesIO()
    write_tokens(file, [np.array(chunk, dtype=np.uint32) for chunk in chunks], 65536)
    tokens = [token for chunk in chunks for token in chunk]
    header = np.frombuffer(file.getvalue()[:1024], dtype="<i4")
    assert header.tolist() == [20240520, 1, len(tokens)] + [0] * 253
    assert np.frombuffer(file.getvalue()[1024:], dtype="<u2").tolist() == tokens


def test_files_of_others_are_read(tmp_path: Path) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240801, 7, 2
    (tmp_path / "llama.bin").write_bytes(header.tobytes() + np.array([5, 128000], dtype=np.uint32).tobytes())
    assert read_tokens(tmp_path / "llama.bin").tolist() == [5, 128000]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda data: data[:-1], "its header says 4 tokens, which makes 1032 bytes, but it has 1031"),
        (lambda data: data + b"\0\0", "but it has 1034"),
        (lambda data: data[:1024], "but it has 1024"),
        (lambda data: data[:1023], "has 1023 bytes, less than the header"),
        (lambda data: b"", "has 0 bytes, less than the header"),
        (lambda data: bytes(1024) + data[1024:], "is no token file, or was not finished: it begins with 0, 0"),
        (lambda data: data[:4] + b"\x07" + data[5:], "begins with 20240520, 7"),
        (lambda data: data[:8] + bytes(4), "has 12 bytes"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Any, match: str) -> None:
    path = write(tmp_path / "t.bin", [[1, 2, 3, 4]], 257)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=match):
        read_tokens(path)


def test_an_empty_token_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="says 0 tokens"):
        read_tokens(write(tmp_path / "t.bin", [], 257))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the token file .*t\.bin: No such file"):
        read_tokens(tmp_path / "t.bin")


@pytest.mark.parametrize("token", [-1, 257, 70000])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(DataError, match="do not fit a vocabulary of 257"):
        write_tokens(io.BytesIO(), [np.array([0, token])], 257)


def test_a_file_that_was_not_finished_is_not_one(tmp_path: Path) -> None:
    with (tmp_path / "t.bin").open("wb") as file, pytest.raises(DataError, match="do not fit"):
        write_tokens(file, [np.array([1, 2]), np.array([300])], 257)
    with pytest.raises(DataError, match="was not finished"):
        read_tokens(tmp_path / "t.bin")


@pytest.mark.parametrize("vocab_size", [0, 2**32 + 1])
def test_vocabularies_out_of_range_are_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size={vocab_size}"):
        token_dtype(vocab_size)
