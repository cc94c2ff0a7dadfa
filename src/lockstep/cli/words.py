"""What was meant by a word that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str:
    """The one of `names` that looks most like `word`; for a dotted option its last part counts as much as the whole."""

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, word, name).ratio()
        last = difflib.SequenceMatcher(None, _last(word), _last(name)).ratio()
        return whole + last

    return max(names, key=likeness)


def _last(option: str) -> str:
    return option.rpartition(".")[2].lstrip("-")
