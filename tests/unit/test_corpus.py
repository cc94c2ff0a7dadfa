"""Which text a corpus is, in which order, and what of it is held out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.corpus import Corpus, Document, Piece, _line_start, read_corpus, split
from lockstep.errors import ConfigError, DataError


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def text(pieces: list[Piece]) -> bytes:
    return b"".join(piece.read() for piece in pieces)


def test_the_standard_library_is_always_there() -> None:
    corpus = read_corpus()
    names = [document.name for document in corpus.documents]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert names == sorted(names)
    assert not {"test", "tests", "site-packages", "__pycache__"} & {part for name in names for part in name.split("/")}
    assert 5e6 < corpus.nbytes < 20e6
    train, held_out = split(corpus, 0.01)
    share = sum(piece.stop - piece.start for piece in held_out) / corpus.nbytes
    assert 0.009 < share <= 0.01
    assert len(train) + len(held_out) == len(names)


def test_a_directory_is_read_by_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"b.txt": b"b", "a/z.md": b"z", "a.py": b"a", "image.png": b"\0", ".git/x.txt": b"x", ".hidden.txt": b"h"},
    )
    corpus = read_corpus(tmp_path)
    assert [document.name for document in corpus.documents] == ["a.py", "a/z.md", "b.txt"]


def test_what_is_not_text_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"ok", "b.txt": b"\xff\xfe", "c.txt": b"a\0b", "d.txt": b"", "e.txt": b" \n"})
    corpus = read_corpus(tmp_path)
    assert [document.name for document in corpus.documents] == ["a.txt"]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "holds no text files: looked for .c "),
        ({"a.png": b"x"}, "holds no text files"),
        ({"a.txt": b"\xff", "b.txt": b""}, "none of its 2 files holds UTF-8 text"),
    ],
)
def test_a_directory_without_text_is_refused(tmp_path: Path, files: dict[str, bytes], match: str) -> None:
    with pytest.raises(DataError, match=match):
        read_corpus(write(tmp_path, files))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is not a text file: it is empty"),
        (b"  \n", "it is empty"),
        (b"ab\0", "byte 2 is zero, as in binary files"),
        (b"caf\xe9 latin", "byte 3 is not UTF-8; if it is text, convert it: iconv"),
    ],
)
def test_a_file_that_is_not_text_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    with pytest.raises(DataError, match=match):
        read_corpus(write(tmp_path, {"data": data}) / "data")


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        read_corpus(tmp_path / "nowhere")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    write(tmp_path, {"a.txt": b"a"})
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*gone.txt: No such file"):
        read_corpus(tmp_path)


def test_a_link_in_a_circle_ends(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"a"})
    (tmp_path / "again").symlink_to(tmp_path)
    assert len(read_corpus(tmp_path).documents) == 1


def test_the_digest_is_of_names_and_contents_only(tmp_path: Path) -> None:
    files = {"a.txt": b"a", "b.txt": b"b"}
    here = read_corpus(write(tmp_path / "here", files)).digest
    assert read_corpus(write(tmp_path / "there", files)).digest == here
    others = [
        {"a.txt": b"a", "b.txt": b"c"},
        {"a.txt": b"a", "c.txt": b"b"},
        {"a.txt": b"ab", "b.txt": b"b"},
        {"a.txt": b"a"},
    ]
    digests = {read_corpus(write(tmp_path / str(number), other)).digest for number, other in enumerate(others)}
    assert len(digests | {here}) == 5
    one, two = write(tmp_path, {"one.txt": b"text", "two.log": b"text"}) / "one.txt", tmp_path / "two.log"
    assert read_corpus(one).digest == read_corpus(two).digest


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    corpus = read_corpus(write(tmp_path, {"a.txt": b"a"}))
    (tmp_path / "a.txt").write_bytes(b"b")
    with pytest.raises(DataError, match=r"a\.txt changed while it was being read"):
        corpus.documents[0].read()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.floats(0.001, 0.9))
def test_whole_documents_are_held_out_and_never_too_much(sizes: list[int], fraction: float) -> None:
    documents = tuple(Document(f"{i}.txt", Path(), size, "") for i, size in enumerate(sizes))
    corpus = Corpus("sizes", documents, "")
    room = int(sum(sizes) * fraction)
    if min(sizes) > room:
        return  # the end of a document is held out instead: the next test
    train, held_out = split(corpus, fraction)
    assert sorted(piece.document.name for piece in train + held_out) == sorted(d.name for d in documents)
    assert train
    assert 0 < sum(piece.stop for piece in held_out) <= room
    assert all((piece.start, piece.stop) == (0, piece.document.nbytes) for piece in train + held_out)


def test_of_a_single_file_the_end_is_held_out(tmp_path: Path) -> None:
    data = b"".join(b"line %d\n" % number for number in range(200))
    train, held_out = split(read_corpus(write(tmp_path, {"a.txt": data}) / "a.txt"), 0.1)
    assert text(train) + text(held_out) == data
    assert text(held_out).startswith(b"line ")
    assert 0.05 * len(data) < len(text(held_out)) <= 0.1 * len(data)


def test_of_two_large_files_the_end_of_the_largest_is_held_out(tmp_path: Path) -> None:
    files = {"a.txt": b"a\n" * 100, "b.txt": b"b\n" * 150}
    train, held_out = split(read_corpus(write(tmp_path, files)), 0.1)
    assert text(train) == files["a.txt"] + b"b\n" * 125
    assert text(held_out) == b"b\n" * 25


@given(st.text(min_size=1, max_size=80), st.data())
def test_a_cut_is_between_characters(words: str, data: st.DataObject) -> None:
    encoded = words.encode()
    about = data.draw(st.integers(0, len(encoded)))
    cut = _line_start(encoded, about)
    assert about <= cut
    assert encoded[:cut].decode() + encoded[cut:].decode() == words


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_a_share_out_of_range_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 1"):
        split(read_corpus(write(tmp_path, {"a.txt": b"a b c"})), fraction)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too few to hold out"):
        split(read_corpus(write(tmp_path, {"a.txt": b"abc"})), 0.01)
