"""`lockstep puzzle`: lessons with a hole. Fill it in, and it is run on real processes and checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lockstep.puzzles
from lockstep.cli import ends_with_me
from lockstep.errors import ConfigError
from lockstep.launch.words import Words
from lockstep.learn.program import play, title_of
from lockstep.learn.puzzle import Puzzle, keep_solved, problems, solved_in, with_hole
from lockstep.puzzles import PUZZLES

_FOLDER = Path("puzzles")
_LIMIT_S = 60.0


def puzzle(words: Sequence[str]) -> int:
    """`lockstep puzzle [N]`; 0 where it is solved, or something was only shown. Raises: ConfigError for a wrong N."""
    parser = Words(prog="lockstep puzzle", description=__doc__)
    parser.add_argument("number", nargs="?", type=int, help="which one; without a number, all are listed")
    parser.add_argument("--hint", type=int, nargs="?", const=1, metavar="K", help="show the first K hints (1)")
    parser.add_argument("--solution", action="store_true", help="show a solution")
    parser.add_argument("--again", action="store_true", help="begin anew: your file is kept as FILE.before")
    args = parser.read(words)
    if args.number is None and words:
        raise ConfigError(f"of which puzzle? `lockstep puzzle 1 {' '.join(words)}`")
    if args.number is None:
        _list()
        return 0
    if not 1 <= args.number <= len(PUZZLES):
        raise ConfigError(f"there is no puzzle {args.number}: they are numbered 1 to {len(PUZZLES)}")
    one = PUZZLES[args.number - 1]
    if args.solution:
        print(_solution(one).read_text(encoding="utf-8"), end="")
        return 0
    if args.hint is not None:
        if args.hint < 1:
            raise ConfigError(f"--hint {args.hint}: they are numbered 1 to {len(one.hints)}")
        print(*one.hints[: args.hint], sep="\n")
        return 0
    path = _FOLDER / f"{one.name}.py"
    if args.again and path.exists():
        path.replace(path.with_suffix(".py.before"))
    if not path.exists():
        _FOLDER.mkdir(exist_ok=True)
        path.write_text(with_hole(_solution(one).read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{title_of(path)}\n\nfill in what {path} asks for, then `lockstep puzzle {args.number}` again")
        return 0
    return _check(one, path, args.number)


def _check(one: Puzzle, path: Path, number: int) -> int:
    for world_size in one.ranks:
        print(f"{path} on {world_size} processes ...", flush=True)
        folder = Path("runs") / f"puzzle-{number}"
        found = problems(one, play(path, world_size, folder, ends_with_me(), limit_s=_LIMIT_S), world_size)
        if found:
            print(*found, sep="\n  ")
            print(f"\nnot yet. `lockstep puzzle {number} --hint` has {len(one.hints)}")
            return 1
    keep_solved(_FOLDER, one.name)
    left = [str(n) for n, other in enumerate(PUZZLES, 1) if other.name not in solved_in(_FOLDER)]
    print(f"solved. Next: `lockstep puzzle {left[0]}`" if left else "solved, and that was the last one")
    return 0


def _list() -> None:
    solved = solved_in(_FOLDER)
    for number, one in enumerate(PUZZLES, 1):
        print(f"{'x' if one.name in solved else ' '} {number:2}  {title_of(_solution(one))}")
    print(f"\n{len(solved)} of {len(PUZZLES)} are solved in {_FOLDER}/. `lockstep puzzle 1` begins the first.")


def _solution(one: Puzzle) -> Path:
    return Path(lockstep.puzzles.__file__).with_name(f"{one.name}.py")
