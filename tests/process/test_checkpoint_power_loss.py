"""The power fails at any moment of a save, and what was not synchronised may be lost: the old or new state is there."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from checkpoint_crashes import SCENARIOS, Copies, Place, Scenario, problems_of_next, tried
from crash_points import forking_workers, started, strace_works
from lockstep.checkpoint.generation import CommitMode
from lost_writes import OPTIONS, Disk, Tree, opened_path, write_tree

pytestmark = [
    pytest.mark.skipif(not strace_works(), reason="strace is not installed, or may not trace here"),
    pytest.mark.limit_s(300),
]
Case = tuple[str, CommitMode]
CASES: tuple[Case, ...] = (("save", "rename"), ("again", "marker"), ("save", "marker"), ("again", "rename"))
NEEDED = {  # what a save has to make durable, and how often; "" is the directory
    "rename": Counter({"rank-00000.safetensors": 1, "manifest.json": 1, "step": 1, "": 2}),  # both renames
    "marker": Counter({"rank-00000.safetensors": 1, "manifest.json": 1, "step": 2, "": 1}),  # there, and finished
}
SEED = int(os.environ.get("LOCKSTEP_SEED") or 1)
_SYNC = re.compile(r"f(data)?sync\(")


class Recorded(NamedTuple):
    """All that a save did to the disk."""

    scenario: Scenario
    place: Place
    before: Tree
    lines: tuple[str, ...]  # strace's

    @property
    def syncs(self) -> list[int]:
        """The numbers of the lines that make something durable."""
        return [number for number, line in enumerate(self.lines) if _SYNC.match(line)]

    def states(self, seed: int, without: int | None = None) -> Iterator[tuple[Tree, bool]]:
        """What may be there after a power failure, each once, and whether the save had returned.

        `without`: as if the line of this number had done nothing.
        """
        rng, seen = random.Random(seed), set()
        disk = Disk(self.place.folder, self.before)
        for number, line in enumerate((*self.lines, None)):
            if line is None or (number != without and disk.apply(line)):
                for tree in disk.after_failure(rng):
                    key = (hash(tuple(tree.items())), line is None)
                    if key not in seen:
                        seen.add(key)
                        yield tree, line is None

    def problems(self, root: Path, seed: int, without: int | None = None) -> Iterator[str | None]:
        """For each state what is wrong with it, None where all is well."""
        for tree, is_over in self.states(seed, without):
            found: list[str] = []
            write_tree(tree, root)
            place = Place(root, self.place.mode)
            number = tried(place.newest, found)
            tried(place.verify, found)
            right = (self.scenario.new,) if is_over else (self.scenario.old, self.scenario.new)
            if not found and number not in right:
                found.append(f"loads state {number}, the save {'had returned' if is_over else 'went on'}")
            if without is None:
                found += problems_of_next(place)
            shutil.rmtree(root)
            yield f"{found} with {sorted(tree)}" if found else None


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    with forking_workers(2) as run:
        yield run


def _record(root: Path, name: str, mode: CommitMode) -> Recorded:
    scenario = SCENARIOS[name]
    with Copies(root, mode).new() as place, started(scenario.action(place)) as child, child.traced(OPTIONS) as strace:
        before = place.files()
        child.release()
        assert strace.stdout is not None
        outcome = child.outcome(strace.stdout.read())
        assert outcome.code == 0, outcome.said
        return Recorded(scenario, place, before, outcome.lines)


def _lose_power(worker: int, root: Path, cases: Sequence[Case], seed: int) -> list[tuple[Case, int, list[str]]]:
    reports = []
    for case in cases[worker::2]:
        recorded = _record(root / "-".join(case), *case)
        results = list(recorded.problems(root / f"case{worker}", seed))
        reports.append((case, len(results), [problem for problem in results if problem]))
    return reports


def test_a_power_failure_leaves_the_old_state_or_the_new_one(workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    for case, count, problems in itertools.chain(*workers(_lose_power, tmp_path, CASES, SEED)):
        assert not problems, f"{case}: {len(problems)} of {count} states are wrong, as\n{problems[0]}"
        assert count > 20, f"{case}: only {count} states were looked at"


def _lose_a_sync(worker: int, root: Path, cases: Sequence[Case], seed: int) -> list[tuple[Case, list[str]]]:
    reports = []
    for case in cases[worker::2]:
        recorded = _record(root / "-".join(case), *case)
        needed = [
            opened_path(recorded.lines[sync]).removeprefix(f"{recorded.place.folder}").split("/")[-1]
            for sync in recorded.syncs
            if any(recorded.problems(root / f"case{worker}", seed, without=sync))
        ]
        reports.append((case, needed))
    return reports


def test_a_save_without_one_of_its_syncs_would_be_found(workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    for (name, mode), needed in itertools.chain(*workers(_lose_a_sync, tmp_path, CASES, SEED)):
        found = Counter("step" if path.startswith("step-") else path for path in needed)
        assert found >= NEEDED[mode], f"{name}, {mode}: the loss of these was found: {found}"
