"""Where in the user's code an operation was asked for."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

_SITE_MAX = 58  # characters; of longer ones the path loses its first folders
_REMEMBERED = 4096  # files and lines; a program with more of them, which makes code as it runs, is looked at anew

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PROGRAMS = tuple(_PACKAGE + folder + os.sep for folder in ("recipes", "demos"))  # like a user's, which we ship
_LOOPS = _PACKAGE + "train" + os.sep  # ours, but what they do they do for the user, who has no line there
_TYPED = ("<string>", "<stdin>", "<ipython-input")  # `python -c`, the prompt, a notebook
_OURS, _OTHER, _LOOP, _USER = range(4)

_kinds: dict[str, int] = {}  # file -> whose it is
SITES: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}
# (id of code, instruction) -> the code, which keeps the id; the line in words; whether no other would be better


def call_site(depth: int = 1) -> str:
    """The innermost line of the user's own code that this thread is in, as "train.py:88 train_step".

    Not lockstep's, torch's, another installed package's or the standard library's; where there is no other (a thread
    that autograd has made) the innermost that is not lockstep's. Costs a microsecond: files and lines are looked at
    once. depth: how many frames away it begins to look.
    """
    try:
        return site_from(sys._getframe(depth))
    except ValueError:  # the stack is not so deep
        return site_from(sys._getframe(1))


def site_from(frame: FrameType) -> str:
    """`call_site` as seen from `frame`."""
    known = SITES.get((id(frame.f_code), frame.f_lasti))
    if known is not None and known[2]:
        return known[1]
    found = frame
    best = -1
    kinds = _kinds
    while True:
        file = frame.f_code.co_filename
        kind = kinds.get(file)
        if kind is None:
            kind = _remember_kind(file)
        if kind > best:
            best, found = kind, frame
            if kind >= _LOOP:
                break
        before = frame.f_back
        if before is None:
            break
        frame = before
    return _site_of(found)


def users_stack(frame: FrameType | None) -> tuple[str, ...]:
    """The frames from the outermost to `frame` that are the user's own, as `call_site` names them; all, if none is."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    own = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    files = [frame for frame in own if not frame.f_code.co_filename.startswith("<")]  # beside them, who started it
    return tuple(_site_of(frame) for frame in reversed(files or own or frames))


def is_users(file: str) -> bool:
    """Whether code of this file is the user's own."""
    return _kind(file) == _USER


def _kind(file: str) -> int:
    kind = _kinds.get(file)
    return _remember_kind(file) if kind is None else kind


def _site_of(frame: FrameType) -> str:
    known = SITES.get((id(frame.f_code), frame.f_lasti))
    return _remember_site(frame) if known is None else known[1]


def _remember_kind(file: str) -> int:
    if len(_kinds) >= _REMEMBERED:
        _kinds.clear()
    kind = _kinds[file] = _kind_of(file)
    return kind


def _remember_site(frame: FrameType) -> str:
    if len(SITES) >= _REMEMBERED:
        SITES.clear()
    words = f"{frame.f_lineno or 0} {frame.f_code.co_name}"
    words = f"{short_path(frame.f_code.co_filename, _SITE_MAX - len(words) - 1)}:{words}"
    SITES[id(frame.f_code), frame.f_lasti] = frame.f_code, words, _kind(frame.f_code.co_filename) >= _LOOP
    return words


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
    return tuple(folder + os.sep for folder in both_ways)


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
