"""How soon `lockstep --help` answers, beside the cheapest Python there is.

python benchmarks/bench_cli.py [--record]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from harness import arguments, compare, interleaved, report

GOAL_S = 0.3


def wall_time(*arguments: str) -> Callable[[int], dict[str, float]]:
    """A variant that runs this Python with `arguments` and returns the seconds until it has ended."""

    def run(_: int) -> dict[str, float]:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return {"wall": time.perf_counter() - start}

    return run


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = arguments("wall time of lockstep --help").parse_args(words)
    variants = {
        "python -c pass": wall_time("-c", "pass"),
        "import lockstep": wall_time("-c", "import lockstep"),
        "lockstep --help": wall_time("-m", "lockstep", "--help"),
        "lockstep train --help": wall_time("-m", "lockstep", "train", "--help"),
    }
    wall = interleaved(variants, rounds=3 if options.quick else 20, warmup=1)["wall"]
    plain = wall.pop("python -c pass")
    goals = {"lockstep --help": f"at most {GOAL_S} s"}
    found = [
        compare(f"{name} / python -c pass", seconds, plain, unit="s", world_size=1, goal=goals.get(name, ""))
        for name, seconds in wall.items()
    ]
    report("cli", found, record=options.record)


if __name__ == "__main__":
    main()
