"""`lockstep learn`: lessons on real processes, one idea on a screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lockstep.lessons
from lockstep.cli import ends_with_me
from lockstep.cli.pager import show_screens
from lockstep.errors import ConfigError
from lockstep.launch.words import Words, refuse_name
from lockstep.learn.events import screens
from lockstep.learn.program import play, title_of
from lockstep.learn.replay import replay
from lockstep.lessons import KILLED, LESSONS

_RANKS_MAX = 8
_FOLDER = Path("runs")


def learn(words: Sequence[str]) -> int:
    """`lockstep learn [NAME]`; the exit code of the lesson. Raises: ConfigError for one that there is not."""
    parser = Words(prog="lockstep learn", description=__doc__)
    parser.add_argument("name", nargs="?", help="which one, or a file of your own; without a name, all are listed")
    parser.add_argument("-n", "--ranks", type=int, default=3, help=f"processes, 2 to {_RANKS_MAX} (default: 3)")
    parser.add_argument("--auto", action="store_true", help="all screens one after the other, no keys")
    parser.add_argument("--source", action="store_true", help="show the program, run nothing")
    args = parser.read(words)
    if args.name is None and args.source:
        raise ConfigError("--source shows the program of one lesson: `lockstep learn NAME --source`")
    if args.name is None:
        _list()
        return 0
    path = _path_of(args.name)
    if args.source:
        print(f"# {path}\n{path.read_text(encoding='utf-8', errors='replace')}", end="")
        return 0
    if not 2 <= args.ranks <= _RANKS_MAX:
        raise ConfigError(f"-n {args.ranks}: a lesson runs on 2 to {_RANKS_MAX} processes")
    print(f"{title_of(path)}\n{path}: starting {args.ranks} processes ...", flush=True)
    folder = _FOLDER / f"learn-{path.stem}"
    played = play(path, args.ranks, folder, ends_with_me(), restarts=int(args.name in KILLED))
    shown = screens(played.ranks)
    page = folder / "replay.html"
    page.write_text(replay(path.stem, title_of(path), shown, args.ranks), encoding="ascii")
    show_screens(shown, args.ranks, path.stem, is_auto=args.auto)
    told = [line for line in played.output.splitlines() if not line.startswith("[rank")]
    if told:
        print("\nthe processes said:", *told, sep="\n  ")
    print(f"\nto play it back: {page}")
    return 1 if played.exit_code is None else played.exit_code


def _list() -> None:
    width = max(map(len, LESSONS))
    for number, name in enumerate(LESSONS, 1):
        print(f"{number:2}  {name:{width}}  {title_of(_shipped(name))}")
    print(f"\n`lockstep learn {LESSONS[0]}` runs one on real processes; --source shows its program.")


def _shipped(name: str) -> Path:
    return Path(lockstep.lessons.__file__).with_name(f"{name}.py")


def _path_of(name: str) -> Path:
    if name in LESSONS:
        return _shipped(name)
    if not name.endswith(".py"):
        refuse_name("no lesson is called", name, LESSONS, "lockstep learn", "lockstep learn")
    if not Path(name).is_file():
        raise ConfigError(f"there is no file {name!r}; `lockstep learn` lists the lessons")
    return Path(name)
