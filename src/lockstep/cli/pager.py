"""Screens of a lesson in a terminal: one at a time, forwards and backwards by keys; in a pipe, one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from lockstep.learn.events import Screen
from lockstep.learn.lanes import draw

_NEXT, _BACK, _QUIT = (
    ("\r", "\n", " ", "\x1b[C", "\x1bOC", "\x1b[B", "l", "n"),
    ("\x1b[D", "\x1bOD", "\x1b[A", "h", "p"),
    ("q", "\x1b", "\x04"),
)
_HELP = "Enter or right: next    left: back    q: quit"


def show_screens(screens: Sequence[Screen], world_size: int, name: str, *, is_auto: bool = False) -> None:
    """Show them all, by keys where standard input and output are a terminal and `is_auto` is not asked for."""
    console = Console(highlight=False, soft_wrap=False)
    if is_auto or not screens or not (sys.stdin.isatty() and console.is_terminal) or os.name != "posix":
        for page in pages(screens, world_size, name, console.width):
            console.print(Text(), *page, sep="\n")
        return
    at = 0
    with _single_keys(), console.screen() as full:
        while True:
            found = pages(screens, world_size, name, console.width, console.height - 3)  # an empty line, and the keys
            at = min(at, len(found) - 1)  # the window may have become larger
            full.update(Text("\n").join([Text(), *found[at], Text(), Text(_HELP, "dim")]))
            key = _key()
            if key in _QUIT or (key in _NEXT and at == len(found) - 1):
                return
            at = max(0, at + (key in _NEXT) - (key in _BACK))


def pages(
    screens: Sequence[Screen], world_size: int, name: str, width: int, height: int | None = None
) -> list[list[Text]]:
    """The lines of each page. A screen that is higher than `height` goes on on the next, under the same title."""
    found: list[list[Text]] = []
    for number, screen in enumerate(screens, 1):
        title = Text.assemble((f"{name}  {number}/{len(screens)}  ", "dim"), (screen.title, "bold"))
        ranks, *lines = draw(screen.events, world_size, width) or [Text()]
        head = [title, *map(Text, wrap(screen.text, width)), Text(), ranks]
        while True:
            room = max(1, height - len(head)) if height else len(lines)
            found.append([*head, *lines[:room]])
            lines = lines[room:]
            if not lines:
                break
            head = [title.copy().append("  (goes on)", "dim"), Text(), ranks]
    return found


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one, without Enter and unseen."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key() -> str:
    """The next key; Ctrl-C as ever."""
    found = os.read(sys.stdin.fileno(), 8)
    with suppress(UnicodeDecodeError):
        return found.decode()
    return ""
