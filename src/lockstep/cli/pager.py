"""Screens of a lesson in a terminal: one at a time, forwards and backwards by keys; in a pipe, one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
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
        for number in range(len(screens)):
            console.print(_page(screens, number, world_size, name, console.width))
        return
    number = 0
    with _single_keys(), console.screen() as full:
        while 0 <= number < len(screens):
            page = _page(screens, number, world_size, name, console.width)
            full.update(Group(page, Text("\n" + _HELP, "dim")))
            key = _key()
            if key in _QUIT:
                return
            number = min(number + 1, len(screens)) if key in _NEXT else max(0, number - (key in _BACK))


def _page(screens: Sequence[Screen], number: int, world_size: int, name: str, width: int) -> RenderableType:
    screen = screens[number]
    head = Text.assemble((f"{name}  {number + 1}/{len(screens)}  ", "dim"), (screen.title, "bold"))
    lanes = draw(screen.events, world_size, width)
    return Group(Text(), head, Padding(Text(screen.text), (0, 0, 1, 0)), *lanes)


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
