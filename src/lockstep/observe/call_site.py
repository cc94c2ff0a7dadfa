"""Where in the user's code an operation was asked for."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from sys import _getframe
from types import CodeType, FrameType
from typing import NamedTuple

_SITE_MAX = 58  # characters; of longer ones the path loses its first folders
_REMEMBERED = 4096  # files and lines; a program with more of them, which makes code as it runs, is looked at anew

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PROGRAMS = tuple([_PACKAGE + folder + os.sep for folder in ("recipes", "demos")])  # like a user's, which we ship
_LOOPS = _PACKAGE + "train" + os.sep  # ours, but what they do they do for the user, who has no line there
_TYPED = ("<string>", "<stdin>", "<ipython-input")  # `python -c`, the prompt, a notebook
_OURS, _OTHER, _LOOP, _USER = range(4)

_OUTERMOST = ("<module>", "_bootstrap")  # of the main thread, and of one that Python has made: not of autograd's
_MANY_WAYS = 4  # that are remembered from one line, as from torch's in forward and in backward
_DEEP = 3  # frames that tell one way from another

# both by (id of code, instruction), and with the code, which keeps the id
WAYS: dict[tuple[int, int], tuple[CodeType, list[Way]]] = {}  # newest first
SITES: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}  # the line in words; whether no other would be better
backward_site = [""]  # the user's line of the last backward, which autograd's own threads work for, as each GPU has one


def call_site(depth: int = 1) -> str:
    """The innermost line of the user's own code that this thread is in, as "train.py:88 train_step".

    Not lockstep's, torch's, another installed package's or the standard library's. In a thread that autograd has made,
    where there is none, that of the last backward; where there is no other the innermost that is not lockstep's. Costs
    a microsecond: files and lines are looked at once, and so is the way from a line of torch's up to the user's.
    depth: how many frames away it begins to look.
    """
    try:
        frame = _getframe(depth)
    except ValueError:  # the stack is not so deep
        return site_from(_getframe(1))
    line = id(frame.f_code), frame.f_lasti
    known = SITES.get(line)
    if known is not None and known[2]:
        return known[1]
    _, ways = WAYS.get(line, (None, ()))
    for way in ways:
        if way.leads(depth + 1):
            return way.site
    site, steps, found = _up_from(frame)
    if steps > _DEEP and is_users(found.f_code.co_filename):
        if len(WAYS) >= _REMEMBERED:
            WAYS.clear()
        below = [*map(_getframe, range(depth + steps - 1, depth + steps - 1 - _DEEP, -1))]  # comprehensions add a frame
        new = Way(steps, found.f_code, found.f_lasti, [frame.f_code for frame in below], site)
        WAYS[line] = frame.f_code, [new, *ways[: _MANY_WAYS - 1]]
    return site


class Way(NamedTuple):
    """From a line of torch's up to one of the user's: a walk over all frames between would make an object of each.

    It is known by its length and by what the user's line has called. Torch takes two frames to call a module, and the
    third is its forward: one of torch's own, as of a Sequential, or another one of the user's.
    """

    steps: int
    code: CodeType
    instruction: int
    below: list[CodeType]
    site: str

    def leads(self, depth: int) -> bool:
        """Whether this thread has come that way, `depth` frames away from here."""
        steps, code, instruction, (first, second, third), _ = self
        depth += steps
        try:
            frame = _getframe(depth)
            is_line = frame.f_code is code and frame.f_lasti == instruction and _getframe(depth - 1).f_code is first
            return is_line and _getframe(depth - 2).f_code is second and _getframe(depth - 3).f_code is third
        except ValueError:  # the stack is not so deep
            return False


def site_from(frame: FrameType) -> str:
    """`call_site` as seen from `frame`."""
    known = SITES.get((id(frame.f_code), frame.f_lasti))
    return known[1] if known is not None and known[2] else _up_from(frame)[0]


def _up_from(frame: FrameType) -> tuple[str, int, FrameType]:
    """The best line from `frame` on, how many frames away it is, and that frame."""
    found, best = frame, -1
    at = steps = 0
    while True:
        kind = _kind_of(frame.f_code.co_filename)
        if kind > best:
            best, found, steps = kind, frame, at
            if kind >= _LOOP:
                break
        before = frame.f_back
        if before is None:
            if backward_site[0] and frame.f_code.co_name not in _OUTERMOST:
                return backward_site[0], steps, found
            break
        frame = before
        at += 1
    return _site_of(found), steps, found


def users_stack(frame: FrameType | None) -> tuple[str, ...]:
    """The frames from the outermost to `frame` that are the user's own, as `call_site` names them; all, if none is."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    own = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    files = [frame for frame in own if not frame.f_code.co_filename.startswith("<")]  # beside them, who started it
    return tuple([_site_of(frame) for frame in reversed(files or own or frames)])


def is_users(file: str) -> bool:
    """Whether code of this file is the user's own."""
    return _kind_of(file) == _USER


def _site_of(frame: FrameType) -> str:
    known = SITES.get((id(frame.f_code), frame.f_lasti))
    return _remember_site(frame) if known is None else known[1]


def _remember_site(frame: FrameType) -> str:
    if len(SITES) >= _REMEMBERED:
        SITES.clear()
    words = f"{frame.f_lineno or 0} {frame.f_code.co_name}"
    words = f"{short_path(frame.f_code.co_filename, _SITE_MAX - len(words) - 1)}:{words}"
    SITES[id(frame.f_code), frame.f_lasti] = frame.f_code, words, _kind_of(frame.f_code.co_filename) >= _LOOP
    return words


@lru_cache(_REMEMBERED)
def _kind_of(file: str) -> int:
    if file.startswith("<"):
        is_launchers = file == "<string>" and any("from lockstep.launch." in word for word in sys.orig_argv)
        return _USER if file.startswith(_TYPED) and not is_launchers else _OTHER
    path = os.path.abspath(file)
    if path.startswith(_PACKAGE):
        return _USER if path.startswith(_PROGRAMS) else _LOOP if path.startswith(_LOOPS) else _OURS
    return _OTHER if path.startswith(_installed_folders()) else _USER


def _installed_folders() -> tuple[str, ...]:
    """Where the standard library, installed packages and their commands lie, torch's also where it is no package."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    torch = sys.modules.get("torch")
    folders += [os.path.dirname(torch.__file__)] if torch is not None and torch.__file__ else []
    both_ways = {way(folder) for folder in folders for way in (os.path.abspath, os.path.realpath)}
    return tuple([folder + os.sep for folder in both_ways])


def short_path(file: str, room: int = _SITE_MAX) -> str:
    """`file` as seen from the current folder, else with the folder it lies in; its end where that has no `room`."""
    if file.startswith("<"):
        return file
    path = Path(file).absolute()
    try:
        parts = path.relative_to(Path.cwd()).parts
    except (ValueError, FileNotFoundError):  # elsewhere, or the current folder was deleted
        parts = path.parts[-2:]
    while len(parts) > 1 and len("/".join(parts)) > room:
        parts = parts[1:]
    return "/".join(parts)
