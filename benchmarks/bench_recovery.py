"""How soon training goes on after `kill -9` of one of two ranks: from the kill until every rank has done a step again.

    python benchmarks/bench_recovery.py [--kills 24] [--record]

The same plain script (recovery_script) is started by `lockstep run` and by torchrun, which needs
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 to recover every time; `lockstep train` trains a tiny model and saves as often.
They take turns: each turn starts one of them, kills one rank after another at random moments, and ends it. A step's
time is the one its process wrote down, on the clock that all processes of a machine share. A kill after which nothing
goes on for PATIENCE_S counts as that long.
"""

from __future__ import annotations

import abc
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, final

from harness import Result, arguments, compare, report
from machine import ROOT
from recovery_script import CHECKPOINT_EVERY

sys.path.insert(0, str(ROOT / "tests"))
from observer import Observer  # pyright: ignore[reportMissingImports]

RANKS = 2
TURNS = 4
GOAL_P95_S = 1.0
PATIENCE_S = 90.0
SETTLED_S = (0.1, 0.6)  # steps are done for so long before the next kill
SCRIPT = Path(__file__).with_name("recovery_script.py")
TORCHRUN = "torchrun"
STARTS = {
    "lockstep run": ["-m", "lockstep", "run", "--nproc-per-node=2", "--max-restarts=1000"],
    TORCHRUN: ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1000"],
    "lockstep train": [
        *("-m", "lockstep", "train", "-n", "2", "--restarts=1000", "--train.steps=1000000", "--train.log_every=1000"),
        *("--model.layers=1", "--model.heads=1", "--model.width=64", "--model.context=16", "--model.dropout=0.1"),
        *("--train.batch=16", "--train.eval_every=0", f"--checkpoint.every={CHECKPOINT_EVERY}"),
    ],
}


class Step(NamedTuple):
    """A step that one rank has finished."""

    pid: int
    number: int
    time_s: float


class Steps:
    """The steps of one rank, as its processes write them down one after another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.newest: Step | None = None

    def of_another_process(self, pid: int) -> Step | None:
        """The first step after what was read before that `pid` did not do."""
        found = None
        for step in self._read():
            self.newest = step
            if step.pid != pid and found is None:
                found = step
        return found

    def _read(self) -> Iterator[Step]:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._offset)
            for line in file.read().split("\n")[:-1]:
                self._offset += len(line) + 1
                pid, number, time_s = line.split()
                yield Step(int(pid), int(number), float(time_s))


class NeverWentOn(Exception):
    """No rank has done a step for PATIENCE_S."""


class Job(abc.ABC):
    """A launcher with its ranks, and the steps they do."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env |= {"TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.folder = folder
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words], env=env, stdout=output, stderr=output, start_new_session=True, cwd=folder
            )

    @abc.abstractmethod
    def pids(self) -> list[int]:
        """Of the ranks, in their order."""

    @abc.abstractmethod
    def went_on(self, pids: Sequence[int]) -> float | None:
        """When the last of the ranks had done its first step by a process that is not in `pids`; None before that."""

    @abc.abstractmethod
    def end(self) -> None:
        """Let it end by itself; end it where it does not."""

    def await_next(self, pids: Sequence[int]) -> float:
        """When the last of the ranks had done its first step by a process that is not in `pids`."""
        deadline = time.monotonic() + PATIENCE_S
        while (moment_s := self.went_on(pids)) is None:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise NeverWentOn((self.folder / "output").read_text()[-2000:])
            time.sleep(0.002)
        return moment_s

    def kill(self, rank: int) -> float:
        """Seconds from `kill -9` of `rank` until every rank has done a step again."""
        pids = self.pids()
        killed_s = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        return self.await_next(pids) - killed_s

    def wait(self) -> None:
        """Until it has ended; not for ever."""
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun's ranks are in sessions of their own: it ends them
            self.process.wait(60)


@final
class ScriptJob(Job):
    """The script, by any launcher: it writes its steps into files."""

    def __init__(self, start: Sequence[str], folder: Path) -> None:
        self._steps = [Steps(folder / f"steps-{rank}") for rank in range(RANKS)]
        self._first: dict[int, float] = {}
        super().__init__([*start, str(SCRIPT), str(folder)], folder)

    def pids(self) -> list[int]:
        for steps in self._steps:
            steps.of_another_process(0)
        self._first = {}
        return [steps.newest.pid for steps in self._steps if steps.newest is not None]

    def went_on(self, pids: Sequence[int]) -> float | None:
        for rank, steps in enumerate(self._steps):
            step = steps.of_another_process(pids[rank])
            if step is not None:
                self._first.setdefault(rank, step.time_s)
        return max(self._first.values()) if len(self._first) == RANKS else None

    def end(self) -> None:
        (self.folder / "stop").touch()
        self.wait()


@final
class TrainJob(Job):
    """`lockstep train`: its ranks tell their launcher what they do, and us."""

    def __init__(self, start: Sequence[str], folder: Path) -> None:
        super().__init__([*start, f"--data.path={Path(__file__).parent}", "--out=out"], folder)
        self._observer = Observer(self.process.pid)

    def pids(self) -> list[int]:
        return [beat.pid for beat in sorted(self._observer.beats(), key=lambda beat: beat.rank)]

    def went_on(self, pids: Sequence[int]) -> float | None:
        beats = self._observer.beats()
        if any(beat.pid in pids for beat in beats) or not self._observer.have_done_a_step(beats, RANKS):
            return None
        return max(beat.time_ns for beat in beats) / 1e9

    def end(self) -> None:
        self.process.terminate()
        self.wait()


@contextmanager
def running(name: str) -> Iterator[Job]:
    """A job that trains."""
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as folder:
        job = (TrainJob if name == "lockstep train" else ScriptJob)(STARTS[name], Path(folder))
        try:
            job.await_next([0] * RANKS)
            yield job
        finally:
            job.end()


def turn(name: str, kills: int, draw: random.Random) -> list[float]:
    """Seconds to recover from each of `kills` kills in one run of `name`."""
    seconds: list[float] = []
    with running(name) as job:
        for number in range(kills):
            time.sleep(draw.uniform(*SETTLED_S))
            try:
                seconds.append(job.kill(number % RANKS))
            except NeverWentOn as error:
                print(f"{name} did not go on: {error}", file=sys.stderr)
                return [*seconds, PATIENCE_S]
    return seconds


def p95(seconds: Sequence[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments("kill -9 of a rank: seconds to the next step")
    parser.add_argument("--kills", type=int, default=24, help="of ours; torchrun gets a third")
    options = parser.parse_args(words)
    turns = 2 if options.quick else TURNS
    kills = 2 if options.quick else max(1, options.kills // turns)
    draw = random.Random(0)
    by_turn: dict[str, list[list[float]]] = {name: [] for name in STARTS}
    for number in range(turns):
        for name in list(STARTS)[:: 1 if number % 2 else -1]:
            few = max(1, kills // 3)
            by_turn[name].append(turn(name, few if name == TORCHRUN else kills, draw))
    report("recovery", list(results(by_turn)), record=options.record)


def results(by_turn: dict[str, list[list[float]]]) -> Iterator[Result]:
    """Ours beside torchrun by the medians of the turns; then median, 95th percentile and worst of each."""
    medians = {name: [statistics.median(seconds) for seconds in turns] for name, turns in by_turn.items()}
    for name in (name for name in medians if name != TORCHRUN):
        title = f"kill -9 to the next step: {name} / torchrun"
        yield compare(title, medians[name], medians[TORCHRUN], unit="s", world_size=RANKS)
    for name, turns in by_turn.items():
        seconds = sorted(second for turn in turns for second in turn)
        is_ours = name.startswith("lockstep")
        yield Result.of_value(
            f"kill -9 to the next step, 95th percentile: {name}",
            p95(seconds),
            unit="s",
            better="less",
            world_size=RANKS,
            rounds=len(seconds),
            goal=f"below {GOAL_P95_S:g} s" if is_ours else "",
            median=round(statistics.median(seconds), 3),
            worst=round(seconds[-1], 3),
        )


if __name__ == "__main__":
    main()
