"""Programs that are right, in processes that are not left in peace: nothing is said of them, and they come to an end.

A rank's own thread is held up where it never waits by itself: by collections, by a thread that keeps the interpreter to
itself, by a stop of the whole process, each on its own rank and at its own moments, with threads that change places
more often or more seldom than usual. All of that comes from the number of the case; only the moments do not, so what
fails once may have to be run some hundred times to fail again.
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_kept_by_one
import test_several_optimizers
import test_torch_training
import test_torch_wrappers
from guarded_programs import Case, guarded
from test_brief_steps import RIGHT as BRIEF
from test_brief_steps import soon

from lockstep.testing.worlds import run_processes

_CLOSE: list[Case] = [
    *test_several_optimizers.RIGHT,
    *test_torch_training.RIGHT,
    *test_torch_wrappers.RIGHT,
    *test_kept_by_one._CASES,
]
_SOME = 24  # of all that there could be


def _collect(stop: threading.Event, chance: random.Random) -> None:
    gc.collect()
    stop.wait(0.02 * chance.random())


def _hog(stop: threading.Event, chance: random.Random) -> None:
    """Sorting lets no other thread of Python in."""
    until = time.monotonic() + 0.05 * chance.random()
    while time.monotonic() < until:
        sorted(range(20_000), reverse=True)
    stop.wait(0.05 * chance.random())


def _halt(stop: threading.Event, chance: random.Random) -> None:
    """Somebody else has to let the process go on."""
    script = f"kill -STOP {os.getpid()}; sleep {0.8 * chance.random():.3f}; kill -CONT {os.getpid()}"
    subprocess.run(["sh", "-c", script], check=True)
    stop.wait(0.3 * chance.random())


_KINDS: list[Callable[[threading.Event, random.Random], None]] = [_collect, _hog, _halt]


def disturbed(rank: int, folder: Path, *, case: Case, seed: int) -> Any:
    """What `case` returns."""
    chance, stop = random.Random(7 * seed + rank), threading.Event()
    kinds = chance.choice([*[[kind] for kind in _KINDS], _KINDS, []])

    def disturb() -> None:
        while kinds and not stop.is_set():
            chance.choice(kinds)(stop, chance)

    before = sys.getswitchinterval()
    sys.setswitchinterval(chance.choice([1e-5, 1e-3, before, 2e-2]))
    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        return case(rank, folder)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("seed", range(_SOME))
def test_a_right_program_is_left_alone(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    run, cases = chance.choice([(guarded, _CLOSE), (soon, BRIEF)])
    case = chance.choice(cases)
    results = run_processes(2, run, 2, str(tmp_path), partial(disturbed, case=case, seed=seed), connect=False)
    assert [said for said, _ in results] == ["", ""], case
