"""Which loop a busy thread waits in, as far as its code tells."""

from __future__ import annotations

import dis
import os
import threading
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from types import CodeType, FrameType
from typing import NamedTuple, final

from lockstep.observe.call_site import is_users

_LOOPS = 8  # times that it was seen in a loop, which tell that
_STDLIB = os.path.dirname(threading.__file__) + os.sep
# modules of Python that a program asks whether something has come
_ASKING = ("_collections_abc", "codecs", "concurrent", "fnmatch", "genericpath", "glob", "multiprocessing", "ntpath")
_ASKING += ("os", "pathlib", "posixpath", "queue", "selectors", "signal", "socket", "stat", "subprocess", "threading")
_ASKING_TORCH = f"torch{os.sep}cuda{os.sep}streams.py"
_OURS = tuple([os.path.dirname(os.path.dirname(__file__)) + f"{os.sep}{part}{os.sep}" for part in ("comm", "observe")])
_FOR = ("FOR_ITER", "GET_ANEXT")
# what makes a `for` over it a `while`, with so many arguments: of itertools, and `iter` of a function
_ENDLESS = {"count": (0, 1, 2), "cycle": (1,), "repeat": (1,), "iter": (2,)}
_GENERATOR = 0x20  # inspect.CO_GENERATOR
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


@final
class Loop:
    """Tells waiting in a loop from long work, as far as one can: by where a busy thread is, time after time.

    Whoever waits goes round a `while` and asks, be it in his own code or in what Python has for that; a `for` ends with
    its data, unless it is one of `_ENDLESS`. Work is seen in what does it nearly every time: an evaluation in torch's
    code.
    """

    def __init__(self) -> None:
        self._place: tuple[object, ...] = ()
        self._began_s = 0.0
        self.seen = 0  # times

    def see(self, frame: FrameType | None, now_s: float) -> float:
        """The thread is at `frame` at `now_s`. For how long it has waited in one loop; 0 while that is not known."""
        place = _waiting_loop(frame)
        if not place or place != self._place:
            self._place, self._began_s, self.seen = place, now_s, 0
        self.seen += bool(place)
        return now_s - self._began_s if self.seen >= _LOOPS else 0.0


def _waiting_loop(frame: FrameType | None) -> tuple[object, ...]:
    """The `while` that the thread goes round and the calls around it; () where it does anything else."""
    while frame is not None and _asks(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None:
        code, at = frame.f_code, frame.f_lasti
        within = [loop for loop in _loops_of(code) if loop.first <= at <= loop.last + 2]  # it rests behind the jump
        if within or not (is_users(code.co_filename) or code.co_flags & _GENERATOR):
            break
        frame = frame.f_back
    else:
        return ()
    loop = min(within, key=lambda one: one.last - one.first, default=None)
    if loop is None or loop.ends:
        return ()
    around: list[object] = []
    while frame := frame.f_back:
        around += [frame.f_code, frame.f_lineno]
    return code, loop, *around


class _Loop(NamedTuple):
    """Of a piece of code: its first and last instruction."""

    first: int
    last: int
    ends: bool  # by itself: a `for`


@lru_cache(64)
def _loops_of(code: CodeType) -> tuple[_Loop, ...]:
    """None of a generator: who goes round that is whoever wants its next value."""
    if code.co_flags & _GENERATOR:
        return ()
    every = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]  # to which a long jump goes
    offsets = [one.offset for one in every]
    back = [one for one in every if one.opcode in _JUMPS and one.argval <= one.offset]
    back = [one for one in back if "NO_INTERRUPT" not in one.opname]  # that is an `await`
    return tuple([_Loop(one.argval, one.offset, _ends(every, bisect_left(offsets, one.argval))) for one in back])


def _ends(every: Sequence[dis.Instruction], head: int) -> bool:
    """Whether the loop whose first instruction is that one ends by itself, as most `for` do."""
    if every[head].opname not in _FOR:
        return False
    if every[head - 1].opname != "GET_ITER":
        return True
    first = next(at for at in range(head, -1, -1) if every[at].starts_line or at == 0)
    loads = [one for one in every[first : head - 1] if one.opname != "PUSH_NULL"]
    path = [*takewhile(lambda one: one.opname in ("LOAD_ATTR", "LOAD_METHOD"), loads[1:])]
    callee = [*loads[:1], *path][-1:]
    return not any(every[head - 2].argval in _ENDLESS.get(one.argval, ()) for one in callee)


@lru_cache(256)
def _asks(file: str) -> bool:
    """Whether code of this file is there to ask whether something has come."""
    if file.startswith("<frozen "):
        return file[len("<frozen ") : -1] in _ASKING
    if file.startswith(_OURS) or file.endswith(_ASKING_TORCH):
        return True
    first = file.removeprefix(_STDLIB).partition(os.sep)[0]
    return file.startswith(_STDLIB) and first.removesuffix(".py") in _ASKING
