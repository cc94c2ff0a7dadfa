"""The words of a command line: what was meant by one that does not exist, and a parser that says so. No torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn, final

from lockstep.errors import ConfigError


def nearest(word: str, names: Iterable[str]) -> str:
    """The one of `names` that looks most like `word`; for a dotted option its last part counts as much as the whole."""

    def likeness(name: str) -> float:
        pairs = (word, name), (word.rpartition(".")[2].lstrip("-"), name.rpartition(".")[2].lstrip("-"))
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    return max(names, key=likeness)


def refuse(unknown: str, options: Iterable[str], command: str) -> NoReturn:
    """Raises: ConfigError for a word that `command` does not know, with the one of its `options` that is nearest."""
    what = f"unexpected {unknown!r}."
    if unknown.startswith("-"):
        what = f"unknown option {unknown}: did you mean {nearest(unknown.partition('=')[0], options)}?"
    raise ConfigError(f"{what} `{command} --help` explains")


@final
class Words(argparse.ArgumentParser):
    """argparse, whose errors are ours and name what was meant."""

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """What `words` say; options may stand between the others. --help ends the process. Raises: ConfigError."""
        takes_the_rest = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if takes_the_rest else self.parse_known_intermixed_args
        options, unknown = parse(list(words))
        if unknown:
            first = next((word for word in unknown if word.startswith("-")), unknown[0])
            refuse(first, [name for action in self._actions for name in action.option_strings], self.prog)
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.rstrip('.')}. `{self.prog} --help` explains")
