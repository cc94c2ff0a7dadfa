"""Text to token ids and back: one per byte, or a byte-pair encoding. Decoding either gives back the same bytes."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lockstep.errors import ConfigError, DataError

TokenKind = Literal["bytes", "bpe"]
MIN_BPE_VOCAB = 257  # every byte and the end of a text
_END_OF_TEXT = "<|endoftext|>"


class Tokenizer(abc.ABC):
    """Encodes UTF-8 text."""

    vocab_size: int
    end_of_text: int  # stands between documents; never made from text

    @abc.abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.uint32]]:
        """The token ids of each text."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with a newline where a document ends; bytes that are no UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def to_json(self) -> str:
        """What `load_tokenizer` needs: the `tokenizers` library's own file, which transformers reads too."""

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@final
class ByteTokenizer(Tokenizer):
    """One token per byte."""

    vocab_size = 257
    end_of_text = 256

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.uint32]]:
        return [np.frombuffer(text, dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(ord("\n") if token == self.end_of_text else token for token in ids).decode(errors="replace")

    def to_json(self) -> str:
        letters = set(pre_tokenizers.ByteLevel.alphabet())  # one for each byte: its own, or the next that is left
        left = iter(sorted(letter for letter in letters if ord(letter) > 255))
        vocabulary = {chr(byte) if chr(byte) in letters else next(left): byte for byte in range(256)}
        return _byte_level(models.BPE(vocabulary, [])).to_str()


@final
class BpeTokenizer(Tokenizer):
    """Byte-level byte-pair encoding as GPT-2's, by the `tokenizers` library.

    Source: Sennrich, Haddow and Birch 2016, section 3.2; Radford et al. 2019, section 2.2.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        end_of_text = tokenizer.token_to_id(_END_OF_TEXT)
        if end_of_text is None:
            raise DataError(f"this tokenizer has no {_END_OF_TEXT} token")
        tokenizer.encode_special_tokens = True  # a text that contains the words <|endoftext|> does not end there
        self.end_of_text = end_of_text
        self.vocab_size = tokenizer.get_vocab_size()
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.uint32]]:
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        documents: list[list[int]] = [[]]
        for token in ids:
            if token == self.end_of_text:
                documents.append([])
            else:
                documents[-1].append(token)
        return "\n".join(self._tokenizer.decode(document) for document in documents)

    def to_json(self) -> str:
        return self._tokenizer.to_str()


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
    """A byte-pair encoding with at most `vocab_size` tokens, fewer for a short text. Equal for equal texts."""
    if not MIN_BPE_VOCAB <= vocab_size <= 2**20:
        raise ConfigError(f"a byte-pair vocabulary has {MIN_BPE_VOCAB} to {2**20} tokens, not {vocab_size}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in texts), trainer)
    return BpeTokenizer(tokenizer)


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """With the end of a text after the tokens that `model` has."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END_OF_TEXT])
    return tokenizer


def load_tokenizer(kind: TokenKind, saved: str) -> Tokenizer:
    """The tokenizer whose `to_json` gave `saved`."""
    return ByteTokenizer() if kind == "bytes" else BpeTokenizer(tokenizers.Tokenizer.from_str(saved))
