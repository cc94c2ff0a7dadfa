"""A corpus as tokens: exact tokenizers, a cache that appears whole, the same on every rank."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.communicator import Communicator
from lockstep.data import tokens as tokens_module
from lockstep.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from lockstep.data.tokens import prepare_tokens
from lockstep.errors import ConfigError, DataError
from lockstep.testing.failures import RankFailed
from lockstep.testing.worlds import run_threads

TEXT = b"the cat sat on the mat, the cat ate the rat\n" * 200
BPE = train_bpe([TEXT], 300)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(12):
        (root / f"{number}.txt").write_bytes(b"document %d: " % number + TEXT)
    return root


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "tokens").iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(words=st.text())
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, words: str) -> None:
    ids = tokenizer.encode([words.encode()])[0].tolist()
    assert tokenizer.decode(ids) == words
    assert all(0 <= token < tokenizer.vocab_size and token != tokenizer.end_of_text for token in ids)
    assert tokenizer.decode([*ids, tokenizer.end_of_text, *ids]) == f"{words}\n{words}"


def test_the_words_of_the_end_do_not_end_a_text() -> None:
    ids = BPE.encode([b"a <|endoftext|> b"])[0].tolist()
    assert BPE.end_of_text not in ids
    assert BPE.decode(ids) == "a <|endoftext|> b"


def test_byte_pairs_are_trained_the_same_again_and_load() -> None:
    again = train_bpe([TEXT[:1000], TEXT[1000:]], 300)
    loaded = load_tokenizer("bpe", BPE.to_json())
    assert train_bpe([TEXT], 300).to_json() == BPE.to_json()
    assert loaded.encode([TEXT])[0].tolist() == BPE.encode([TEXT])[0].tolist()
    assert len(BPE.encode([TEXT])[0]) < len(TEXT) / 3
    assert BPE.vocab_size <= 300
    assert again.vocab_size <= 300


def test_bytes_are_their_own_tokens(corpus: Path, tmp_path: Path) -> None:
    text = prepare_tokens(corpus, held_out=0.1, cache=tmp_path)
    documents = (
        bytes(text.train[text.train < 256].astype(np.uint8)),
        bytes(text.held_out[text.held_out < 256].astype(np.uint8)),
    )
    assert documents[0].count(b"document") == 11 == (text.train == 256).sum()
    assert documents[1].count(b"document") == 1 == (text.held_out == 256).sum()
    assert len(documents[0]) + len(documents[1]) == sum(path.stat().st_size for path in corpus.iterdir())
    assert text.tokenizer.vocab_size == 257
    assert text.train.dtype == np.uint16


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_second_time_it_comes_from_the_cache(
    corpus: Path, tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_tokens(corpus, kind=kind, vocab_size=300, held_out=0.1, cache=tmp_path)
    monkeypatch.setattr(tokens_module, "_make", None)  # calling it would fail
    second = prepare_tokens(corpus, kind=kind, vocab_size=300, held_out=0.1, cache=tmp_path)
    assert np.array_equal(first.train, second.train)
    assert first.tokenizer.to_json() == second.tokenizer.to_json()
    assert (first.digest, first.description) == (second.digest, second.description)
    assert len(entries(tmp_path)) == 1


def test_other_text_or_settings_are_other_entries(corpus: Path, tmp_path: Path) -> None:
    digests = [prepare_tokens(corpus, held_out=0.1, cache=tmp_path).digest]
    digests.append(prepare_tokens(corpus, held_out=0.2, cache=tmp_path).digest)
    digests.append(prepare_tokens(corpus, kind="bpe", vocab_size=300, held_out=0.1, cache=tmp_path).digest)
    digests.append(prepare_tokens(corpus, kind="bpe", vocab_size=290, held_out=0.1, cache=tmp_path).digest)
    (corpus / "0.txt").write_bytes(b"changed")
    digests.append(prepare_tokens(corpus, held_out=0.1, cache=tmp_path).digest)
    assert len(set(digests)) == len(entries(tmp_path)) == 5


def test_a_long_line_and_a_long_file_are_cut_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "_TEXT_BYTES", 100)
    data = b"short\n" + b"x" * 500 + b"\n" + "ä ö\n".encode() * 300
    (tmp_path / "long.txt").write_bytes(data)
    text = prepare_tokens(tmp_path / "long.txt", kind="bpe", vocab_size=270, held_out=0.1, cache=tmp_path)
    both = [*text.train.tolist()[:-1], *text.held_out.tolist()[:-1]]
    assert text.tokenizer.decode(both).encode() == data


def test_the_cache_follows_the_environment(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepare_tokens(corpus, held_out=0.1)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare_tokens(corpus, held_out=0.1)
    assert entries(tmp_path / "xdg/lockstep") == entries(tmp_path / "home/.cache/lockstep")


def test_a_failure_leaves_no_entry(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "write_tokens", full)
        with pytest.raises(DataError, match=r"No space left on device\. Set XDG_CACHE_HOME"):
            prepare_tokens(corpus, held_out=0.1, cache=tmp_path)
    assert entries(tmp_path) == []
    prepare_tokens(corpus, held_out=0.1, cache=tmp_path)


def test_what_a_killed_process_left_is_cleared(corpus: Path, tmp_path: Path) -> None:
    prepare_tokens(corpus, held_out=0.1, cache=tmp_path)
    (entry,) = entries(tmp_path)
    whole = tmp_path / "tokens" / entry
    whole.rename(tmp_path / "tokens" / f"{entry}.tmp-abc")
    prepare_tokens(corpus, held_out=0.1, cache=tmp_path)
    assert entries(tmp_path) == [entry]


@pytest.mark.parametrize("name", ["train.bin", "about.json", "tokenizer.json"])
def test_a_damaged_entry_is_refused(corpus: Path, tmp_path: Path, name: str) -> None:
    prepare_tokens(corpus, kind="bpe", vocab_size=300, held_out=0.1, cache=tmp_path)
    path = tmp_path / "tokens" / entries(tmp_path)[0] / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"the token cache is damaged: .*Delete .*it is made again"):
        prepare_tokens(corpus, kind="bpe", vocab_size=300, held_out=0.1, cache=tmp_path)


def test_two_jobs_at_once_make_one_entry(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], tokens_module._make
    together = threading.Barrier(4)

    def counted(*args: Any) -> None:
        made.append(1)
        make(*args)

    def job() -> None:
        together.wait(20)
        prepare_tokens(corpus, kind="bpe", vocab_size=300, held_out=0.1, cache=tmp_path)

    monkeypatch.setattr(tokens_module, "_make", counted)
    threads = [threading.Thread(target=job) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == 1
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"kind": "words"}, "tokens='words': choose one of bytes, bpe"),
        ({"kind": "bpe", "vocab_size": 256}, "vocab_size=256: byte-pair encodings start at 257"),
        ({"held_out": 0.0}, "held-out share is 0.0"),
    ],
)
def test_wrong_settings_are_refused(corpus: Path, tmp_path: Path, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        prepare_tokens(corpus, cache=tmp_path, **kwargs)


# ---------------------------------------------------------------------- several ranks


def test_rank_0_prepares_and_all_ranks_use_it(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], tokens_module._make

    def counted(*args: Any) -> None:
        made.append(threading.current_thread().name)
        make(*args)

    def rank(comm: Communicator) -> str:
        return prepare_tokens(corpus, held_out=0.1, cache=tmp_path, comm=comm).digest

    monkeypatch.setattr(tokens_module, "_make", counted)
    assert len(set(run_threads(3, rank))) == 1
    assert made == ["rank 0"]


def test_ranks_of_another_host_prepare_the_same_again(corpus: Path, tmp_path: Path) -> None:
    def rank(comm: Communicator) -> str:
        return prepare_tokens(corpus, held_out=0.1, cache=tmp_path / f"host {comm.rank // 2}", comm=comm).digest

    assert len(set(run_threads(4, rank))) == 1
    assert entries(tmp_path / "host 0") == entries(tmp_path / "host 1")


def test_other_text_on_another_host_is_refused_everywhere(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_bytes(TEXT)

    def rank(comm: Communicator) -> None:
        path = corpus if comm.rank == 0 else tmp_path / "other.txt"
        with pytest.raises(DataError, match="rank 1 has other text than rank 0"):
            prepare_tokens(path, held_out=0.1, cache=tmp_path / f"host {comm.rank}", comm=comm)

    run_threads(2, rank)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_prepare_fails_every_rank(corpus: Path, tmp_path: Path, broken: int) -> None:
    (tmp_path / "binary").write_bytes(b"\0")

    def rank(comm: Communicator) -> None:
        path = tmp_path / "binary" if comm.rank == broken else corpus
        prepare_tokens(path, held_out=0.1, cache=tmp_path / f"host {comm.rank}", comm=comm)

    with pytest.raises(RankFailed) as failed:
        run_threads(2, rank)
    assert sorted(failed.value.errors) == [0, 1]
    assert "is not a text file" in str(failed.value)
