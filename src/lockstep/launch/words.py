"""The words of a command line: what was meant by one that does not exist, a parser that says so, replies. No torch."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO, final

from lockstep.errors import ConfigError, LaunchError

RUN_FOLDER = "the folder that `lockstep run` or `lockstep train` has named; by default the newest one in runs/"
_FLAG = r"argument (?:-\w/)?(\S+?)(?:/\S+)?"
_ALIKE = 0.6  # of 1, by difflib: from here on two words look alike
_WRONG = {  # argparse's sentences, and ours
    rf"{_FLAG}: invalid int value: (.+)": r"\1 takes a whole number, not \2",
    rf"{_FLAG}: invalid float value: (.+)": r"\1 takes a number, not \2",
    rf"{_FLAG}: invalid choice: (.+) \(choose from (.+)\)": r"\1 takes one of \3, not \2",
    rf"{_FLAG}: expected one argument": r"\1 needs a value",
    r"the following arguments are required: (.+)": r"missing: \1",
    r"ambiguous option: (.+) could match (.+)": r"\1 is not the whole name of an option: write one of \2",
}


def tell(text: str) -> None:
    """Write to standard error; without a word where nobody reads it any more, as in a terminal that was closed."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        lead_nowhere(sys.stderr)


def lead_nowhere(stream: TextIO) -> None:
    """What is written to `stream` from now on, and what it has not got rid of, is lost."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def printing() -> Iterator[None]:
    """Within, a run prints; without room for that it goes on. Raises: ConfigError where nobody reads it any more."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        lead_nowhere(sys.stdout)
        if isinstance(error, BrokenPipeError):
            gone = "the reader of what is printed has gone, as `| head` does after some lines, and the run ends with it"
            raise ConfigError(f"{gone}; `lockstep train ... > FILE` keeps all lines") from error
        say(f"nothing is printed any more: {error.strerror}; the run goes on")


def read_range(flag: str, text: str, what: str) -> tuple[int, int]:
    """The least and the most of `what` that `flag` allows, as in "2" or "2:4". Raises: ConfigError."""
    first, colon, last = text.partition(":")
    last = last if colon else first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ConfigError(f"{flag} {text}: it takes a number of {what} from 1, or a range like 2:4, the smaller first")
    return int(first), int(last)


def say(text: str, before: str = "") -> None:
    """One line to the user."""
    tell(f"{before}lockstep: {text}\n")


def current_folder() -> str:
    """Raises: LaunchError where it was deleted: no process can be started in it, and few modules bear it."""
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise LaunchError("the current folder was deleted: change to one that is there, by cd") from error


def meant(word: str, names: Iterable[str], shown: str = "{}") -> str:
    """How a sentence on `word` goes on: ": did you mean NAME?", the one of `names` that looks most like it, or "".

    shown: how that is written. For a dotted option its last part counts as much as the whole; what begins a part of a
    name looks like it.
    """

    def likeness(name: str) -> list[float]:
        pairs = (word, name), (word.rpartition(".")[2].lstrip("-"), name.rpartition(".")[2].lstrip("-"))
        return [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs]

    def is_alike(name: str) -> bool:
        begins = len(word) > 2 and any(part.startswith(word) for part in re.split("[_-]", name))
        return begins or max(likeness(name)) >= _ALIKE

    near = max(filter(is_alike, names), key=lambda name: sum(likeness(name)), default=None)
    return "" if near is None else f": did you mean {shown.format(near)}?"


def refuse_name(wrong: str, name: str, names: Iterable[str], command: str, lists: str) -> NoReturn:
    """Raises: ConfigError for a `name` that `command` does not know, with the one of `names` that is meant."""
    near = meant(name, names, f"`{command} {{}}`")
    raise ConfigError(f"{wrong} {name!r}{near or ':'} `{lists}` lists all")


def refuse(unknown: str, options: Iterable[str], command: str) -> NoReturn:
    """Raises: ConfigError for a word that `command` does not know, with the one of its `options` that is meant."""
    what = f"unexpected {unknown!r}."
    if unknown.startswith("-"):
        what = f"unknown option {unknown}{meant(unknown.partition('=')[0], options) or '.'}"
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
        for wrong, said in _WRONG.items():
            message = re.sub(wrong, said, message)
        raise ConfigError(f"{message.rstrip('.')}. `{self.prog} --help` explains")
