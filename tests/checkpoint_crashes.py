"""What is done to a directory of checkpoints while a process is killed or fails, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from crash_points import (
    EINTR,
    EIO,
    ENOSPC,
    KILL,
    NOTHING,
    SHORT,
    Action,
    Begin,
    Call,
    Fault,
    Outcome,
    at_once,
    in_first_thread,
)
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.flatten import flatten
from lockstep.checkpoint.generation import CommitMode
from lockstep.checkpoint.state import FlatState, State

_TYPED = ("CheckpointError", "CheckpointDamaged", "CheckpointMissing", "StaleGeneration")
_LOOKING = {"newfstatat", "fstat", "statx", "access", "faccessat2", "readlink", "lseek", "ioctl", "fcntl", "fadvise64"}
_LOOKING |= {"getdents64", "read", "pread64", "preadv", "preadv2", "close", "dup", "flock"}
_MOVING = {"read", "pread64", "preadv", "preadv2", "write", "pwrite64"}


def state(number: int) -> State:
    """A small state of several dtypes, with tied and empty tensors; no two numbers have a tensor in common."""
    rng = torch.Generator().manual_seed(number)
    weight = torch.randn(7, 5, generator=rng)
    return {
        "model": {"embed": weight, "head": weight, "norm": torch.randn(3, generator=rng).bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(float(number)), "sum": torch.randn(35, generator=rng)}}},
        "rng": torch.randint(256, (11,), dtype=torch.uint8, generator=rng),
        "empty": torch.empty(0, 4),
        "number": number,
        "loader": {"epoch": number, "seen": [number, number + 1]},
    }


def number_of(found: State) -> int:
    """Which state it is. Raises: AssertionError where it is none exactly."""
    number = found["number"]
    expected, got = flatten(state(number)), flatten(found)
    assert (got.values, got.kinds) == (expected.values, expected.kinds)
    tensors, others = _all_tensors(got), _all_tensors(expected)
    assert tensors.keys() == others.keys()
    for path, tensor in tensors.items():
        same = tensor.dtype == others[path].dtype and torch.equal(tensor, others[path])
        assert same, f"{path} is not that of state {number}"
    return number


def _all_tensors(flat: FlatState) -> dict[str, torch.Tensor]:
    return flat.tensors | {path: flat.tensors[target] for path, target in flat.aliases.items()}


class Place(NamedTuple):
    """A directory of checkpoints."""

    folder: Path
    mode: CommitMode

    def open(self, keep: int = 1) -> Checkpointer:
        """A new process's view of it, as far as it goes in one process."""
        return Checkpointer(self.folder, keep=keep, commit=self.mode)

    def save(self, step: int, number: int, keep: int = 1) -> None:
        """As a new run."""
        with self.open(keep) as checkpointer:
            checkpointer.save(step, state(number))

    def newest(self, *, may_pass_over: bool = False) -> int | None:
        """Which state a new process loads. Where a disk does not lie, nothing damaged is in its way."""
        with warnings.catch_warnings(), self.open() as checkpointer:
            warnings.simplefilter("ignore" if may_pass_over else "error")
            loaded = checkpointer.load()
            return None if loaded is None else number_of(loaded.state)

    def verify(self) -> None:
        """Raises: CheckpointError where one of those that count as checkpoints is damaged."""
        with self.open() as checkpointer:
            for step in checkpointer.steps():
                checkpointer.verify(step)

    def files(self) -> dict[str, bytes | None]:
        """All that is in it."""
        found = sorted(self.folder.rglob("*")) if self.folder.exists() else []
        return {str(path.relative_to(self.folder)): None if path.is_dir() else path.read_bytes() for path in found}


class Scenario(NamedTuple):
    """An action on a directory that holds state 1 as step 10, or on none."""

    action: Callable[[Place], Action]
    old: int | None
    new: int
    is_there: bool = True


def _save(place: Place) -> Action:
    return at_once(lambda: place.save(20, 2))


def _save_again(place: Place) -> Action:
    def action(begin: Begin) -> None:
        with place.open() as checkpointer:
            checkpointer.save(20, state(2))
            begin()
            checkpointer.save(30, state(3))

    return action


def _save_same_step(place: Place) -> Action:
    return at_once(lambda: place.save(10, 2))


def _save_in_background(place: Place) -> Action:
    def act() -> None:
        with place.open() as checkpointer:
            changing = state(2)
            pending = checkpointer.save_async(20, changing)
            changing["model"]["embed"].zero_()
            pending.wait()

    return in_first_thread(act)


SCENARIOS = {
    "first": Scenario(lambda place: at_once(lambda: place.save(10, 1)), None, 1, is_there=False),
    "save": Scenario(_save, 1, 2),  # takes the directory over, commits, prunes
    "again": Scenario(_save_again, 2, 3),  # commits, prunes
    "same step": Scenario(_save_same_step, 1, 2),
    "background": Scenario(_save_in_background, 1, 2),
}


def _load(place: Place) -> Action:
    def act() -> int:
        into = state(5)
        with place.open() as checkpointer:
            loaded = checkpointer.load(into)
        assert loaded is not None, "load finds nothing"
        assert loaded.state["model"]["embed"] is into["model"]["embed"]
        return number_of(loaded.state)

    return at_once(act)


LOAD = Scenario(_load, 1, 2)


def changes(call: Call) -> bool:
    """Whether a call may change what is on the disk."""
    return call.name not in _LOOKING and (call.name != "openat" or "O_CREAT" in call.text)


def faults_of(call: Call, scenario: Scenario) -> list[Fault]:
    """What may go wrong at a call."""
    faults = [KILL, EIO]
    if changes(call):
        faults.append(ENOSPC)
    if call.name in _MOVING:
        faults.append(EINTR)
        if scenario.old is not None:  # a disk that lies leaves nothing good of a first checkpoint
            faults.append(SHORT)
    return faults


class Sample(NamedTuple):
    """Which cases are taken."""

    changing: float  # share of the calls that change something
    looking: float  # of the others
    seed: int

    def takes(self, call: Call, fault: Fault, where: str = "") -> bool:
        """Whether `fault` at `call` is a case. where: what else tells it from others."""
        drawn = random.Random(f"{self.seed} {where} {call.name} {call.nth} {fault.name}").random()
        if changes(call):
            return drawn < self.changing
        return drawn < self.looking and (self.looking == 1 or fault is not KILL)


def sample_of(changing: float, looking: float, *, most: float = 1) -> Sample:
    """These shares, or with LOCKSTEP_CRASH_POINTS=all 1 and `most`; drawn by LOCKSTEP_SEED, or by chance."""
    seed = int(os.environ.get("LOCKSTEP_SEED") or secrets.randbits(32))
    everything = os.environ.get("LOCKSTEP_CRASH_POINTS") == "all"
    return Sample(1, most, seed) if everything else Sample(changing, looking, seed)


class Copies:
    """Directories with state 1, one for each case."""

    def __init__(self, root: Path, mode: CommitMode) -> None:
        self._root = root
        self._mode: CommitMode = mode
        self._numbers = itertools.count()
        self._first = Place(root / "first", mode)
        root.mkdir(parents=True)
        self._first.save(10, 1)

    @contextlib.contextmanager
    def new(self, *, is_there: bool = True) -> Iterator[Place]:
        """A directory of its own; it is gone at the end."""
        folder = self._root / f"case{next(self._numbers):06}"
        if is_there:
            shutil.copytree(self._first.folder, folder)
        try:
            yield Place(folder, self._mode)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------ what must be true


def problems_after_save(place: Place, scenario: Scenario, outcome: Outcome, fault: Fault) -> list[str]:
    """What is wrong with the directory, or with how the save ended."""
    problems = []
    if outcome.code not in ((-9,) if fault is KILL else (0, 1)) or outcome.fired != (fault is not NOTHING):
        problems.append(f"the process ended with {outcome.code} {outcome.said}")
    if outcome.code == 1 and not outcome.said.startswith(_TYPED):
        problems.append(f"raised {outcome.said}")
    if fault is EINTR and outcome.code != 0:
        problems.append(f"an interruption is no error: {outcome.said}")
    number = tried(lambda: place.newest(may_pass_over=fault is SHORT), problems)
    if fault is not SHORT:
        tried(place.verify, problems)
    if not problems and number not in (scenario.old, scenario.new):
        problems.append(f"loads state {number}")
    if outcome.code == 0 and number != scenario.new:
        problems.append(f"save returned, and state {number} is what loads")
    return problems + problems_of_next(place)


def problems_after_load(outcome: Outcome, fault: Fault) -> list[str]:
    """What is wrong with how a load of state 1 or 2 ended."""
    if fault is KILL:
        return [] if outcome.code == -9 else [f"not killed: {outcome.code} {outcome.said}"]
    if outcome.code == 1 and outcome.said.startswith(_TYPED):
        return [f"an interruption is no error: {outcome.said}"] if fault is EINTR else []
    return [] if outcome.code == 0 and outcome.said in ("1", "2") else [f"{outcome.code} {outcome.said}"]


def problems_of_leftover(place: Place, scenario: Scenario, outcome: Outcome, calls: Sequence[Call]) -> list[str]:
    """What is wrong after a process has gone on that had stopped after `calls`, while another one saved state 5."""
    made = any("mkdir" in call.name and "/.generation-" in call.text for call in calls)
    is_later = outcome.code == 0 and scenario.old == 1 and not made  # then it has taken the directory from the other
    published = any(call.name == "rename" and "/step-" in call.text.split(", ")[1] for call in calls)
    problems = []
    if outcome.code == 0 and not is_later and not published and place.mode == "rename":
        problems.append("the process that was left over has saved")
    if outcome.code != 0 and not outcome.said.startswith("StaleGeneration"):
        problems.append(f"the process that was left over ended with {outcome.code} {outcome.said}")
    number = tried(place.newest, problems)
    if number != (scenario.new if is_later else 5):
        problems.append(f"loads state {number}")
    return problems + problems_of_next(place)


def problems_of_next(place: Place) -> list[str]:
    """What is wrong with the next run's save, or left by it."""
    problems: list[str] = []
    tried(lambda: place.save(40, 5), problems)
    if not problems and tried(place.newest, problems) != 5:
        problems.append("the next save is not what loads")
    folders = sorted(path.name for path in place.folder.iterdir())
    own = [path for path in place.folder.glob(".generation-*") if not any(path.iterdir())]
    if len(folders) != 2 or len(own) != 1 or len(list(place.folder.glob("step-*"))) != 1:
        problems.append(f"the next save leaves {sorted(place.files())}")
    return problems


def tried(look: Callable[[], Any], problems: list[str]) -> Any:
    """What `look` gives; where it raises, that is a problem."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - the test reports it with its case
        where = traceback.extract_tb(error.__traceback__)[-1]
        problems.append(f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})")
        return None
