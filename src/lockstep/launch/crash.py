"""Where a process was when a signal of C++'s ended it: Python's faulthandler writes it down, its launcher reads it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from lockstep.observe.last_words import innermost, places_in

_STACKS = "stacks-{}"  # of all threads of a rank
_open: list[TextIO] = []  # faulthandler knows the number of the file only


def leave_stacks(folder: str, rank: str) -> None:
    """From now on what faulthandler says of this process is for its launcher, unless the program has it elsewhere.

    folder: of the flight records; "" where there is none: then it is on standard error, as in a process forked off.
    """
    if faulthandler.is_enabled():
        return
    _say_it()
    if folder:
        with contextlib.suppress(OSError):  # no room: it stays on standard error
            _open[:] = [(Path(folder) / _STACKS.format(rank)).open("w")]
            faulthandler.enable(_open[0])
            os.register_at_fork(after_in_child=_say_it)


def _say_it() -> None:
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)


def stacks_of(folder: str | Path, rank: int) -> str:
    """What `rank` has left; "" where it did not end like that."""
    path = Path(folder) / _STACKS.format(rank)
    return path.read_text(errors="replace") if path.exists() else ""


def place_in(stacks: str) -> str:
    """The user's line in the thread that the signal came to, else in the main one; "" where there is none."""
    threads = re.split(r"^(?=(?:Current t|T)hread 0x)", stacks, flags=re.MULTILINE)[1:]
    told = [one for one in threads if one.startswith("Current")] + threads[-1:]  # the main one is the last
    own = ([place for place in places_in(one)[::-1] if place[0] != "<string>"] for one in told)  # by which we start it
    return next(filter(None, map(innermost, own)), "")
