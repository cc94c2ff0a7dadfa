"""`lockstep train` as users run it: real processes, real signals, and the words they get.

The runs of the first test share one directory on purpose: one is stopped by Ctrl-C, goes on, loses a rank to SIGKILL,
goes on again, and must then hold, bit for bit, the weights of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint.store import latest, load, step_of
from lockstep.train.checkpoints import latest as latest_of_any_kind

pytestmark = pytest.mark.limit_s(120)

_DEADLINE_S = 90.0
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# small enough that starting is all it costs; a constant learning rate, so that the number of steps changes no number
_SMALL = (
    "--model.layers=1",
    "--model.heads=1",
    "--model.width=16",
    "--model.context=16",
    "--model.dropout=0.1",
    "--data.val_fraction=0.1",
    "--train.batch=8",
    "--train.microbatch=2",
    "--train.log_every=5",
    "--train.eval_every=0",
    "--train.sample_tokens=8",
    "--optim.lr=0.01",
    "--optim.min_lr=0.01",
    "--optim.warmup_steps=0",
    "--checkpoint.every=20",
    "--checkpoint.keep=2",
)


class Run:
    """One `lockstep train` process with all of its output."""

    def __init__(self, folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> None:
        self.output = folder / f"output-{time.monotonic_ns()}"
        environ = {
            **os.environ,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "",
        }
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "lockstep", "train", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environ,
                cwd=folder,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"rank \d of \d is up: pid (\d+)", self.text())]

    def pid_of(self, rank: int) -> int:
        return int(re.findall(rf"rank {rank} of \d is up: pid (\d+)", self.text())[0])

    def await_text(self, pattern: str) -> None:
        wait_until(
            lambda: re.search(pattern, self.text()) or self.process.poll() is not None, f"{pattern!r}", self.text
        )
        assert re.search(pattern, self.text()), f"it ended without {pattern!r}:\n{self.text()}"

    def end(self, exit_code: int) -> str:
        """The output, once the run has ended with `exit_code` and left no process."""
        wait_until(lambda: self.process.poll() is not None, "the run ended", self.text)
        assert self.process.returncode == exit_code, self.text()
        wait_until(lambda: not any(map(is_alive, self.pids())), "all ranks were gone", self.text)
        return self.text()

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)


def wait_until(condition: Callable[[], object], what: str, context: Callable[[], str] = str) -> None:
    deadline, pause = time.monotonic() + _DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"never saw that {what}:\n{context()}"
        pause.wait(0.02)


def is_alive(pid: int) -> bool:
    """False for zombies too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    (folder / "text").mkdir()
    for name in ("a.txt", "b.py"):
        (folder / "text" / name).write_text("".join(f"line {i} of {name}: {i * i % 97} bottles\n" for i in range(400)))
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def one(*words: str, launcher: tuple[str, ...] = ()) -> Run:
        runs.append(Run(folder, *words, launcher=launcher))
        return runs[-1]

    yield one
    for run in runs:
        for pid in [run.process.pid, *run.pids()]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def digest_in(text: str) -> str:
    return re.findall(r"2 of 2 ranks hold the same weights: sha256 ([0-9a-f]{64})", text)[0]


def test_stopped_killed_and_resumed_run_equals_one_that_nothing_happened_to(
    folder: Path, start: Callable[..., Run]
) -> None:
    checkpoints = folder / "out" / "checkpoints"
    here = ("--data.path=text", "--out=out", *_SMALL)

    run = start("-n", "2", *here, "--train.steps=100000")
    run.await_text(r"step 25/100000 ")
    run.signal(signal.SIGINT)
    said = run.end(130)
    stopped = int(re.findall(r"stopped after step (\d+) of 100000", said)[0])
    assert "stopping; once more" in said
    assert "--resume auto" in said
    assert step_of(latest(checkpoints) or Path()) == stopped

    run = start("-n", "2", *here, "--train.steps=100000", "--resume=auto")
    run.await_text(rf"resumed from .*step-{stopped:08}.* made by 2 ranks")
    run.await_text(rf"step {stopped + 25 - stopped % 5}/100000 ")
    victim = run.pid_of(1)
    os.kill(victim, signal.SIGKILL)
    said = run.end(1)
    assert [line for line in said.splitlines() if line.startswith("lockstep: ")][1:] == [
        f"lockstep: rank 1 (pid {victim}) was killed by SIGKILL; the other ranks were ended"
    ]
    assert "Traceback" not in said
    saved = step_of(latest(checkpoints) or Path())
    assert saved > stopped
    assert saved % 20 == 0

    steps = f"--train.steps={saved + 10}"
    said = start("-n", "2", *here, steps, "--resume=auto").end(0)
    assert "train.steps: 100000 -> " in said
    logged = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in logged if "loss" in record]
    assert trained == sorted(set(trained)), "a step was logged twice"
    assert step_of(latest(checkpoints) or Path()) == saved + 10
    assert len(list(checkpoints.iterdir())) == 2

    plain = start("--data.path=text", "--out=plain", *_SMALL, steps, launcher=_TORCHRUN).end(0)
    assert digest_in(said) == digest_in(plain)
    first, last = (float(re.findall(rf"step {n}/\d+ loss (\S+)", plain)[0]) for n in (1, saved + 10))
    assert last < first - 1
    assert len(re.findall(r"validation after step \d+: loss \d", plain)) == 1
    assert "sample of what the model writes" in plain
    config = json.loads((folder / "plain" / "config.json").read_text())
    assert config["optim.lr"] == 0.01


def test_cut_run_goes_on_with_another_sharding_on_another_number_of_ranks(
    folder: Path, start: Callable[..., Run]
) -> None:
    here = ("--data.path=text", "--out=cut", *_SMALL, "--resume=auto")
    said = start("-n", "2", *here, "--train.sharding=full", "--train.steps=25").end(0)
    assert "parameters, sharding full" in said
    assert "sample of what the model writes" in said
    before = float(re.findall(r"validation after step 25: loss (\S+)", said)[0])
    saved = latest_of_any_kind(folder / "cut" / "checkpoints")
    assert saved is not None
    assert {path.name for path in saved.iterdir()} == {
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }
    for world_size, sharding, change in (("1", "optimizer", "full -> optimizer"), ("2", "none", "optimizer -> none")):
        said = start("-n", world_size, *here, f"--train.sharding={sharding}", "--train.steps=25").end(0)
        assert re.search(r"resumed from .*step-00000025(\.safetensors)? \(step 25, made by \d ranks\)", said)
        assert f"train.sharding: {change}" in said
        assert float(re.findall(r"validation after step 25: loss (\S+)", said)[0]) == pytest.approx(before, abs=2e-4)


def test_other_ranks_end_with_the_launcher(start: Callable[..., Run]) -> None:
    run = start("-n", "2", "--data.path=text/a.txt", "--out=orphans", *_SMALL, "--train.steps=100000")
    run.await_text(r"step 5/100000 ")
    run.process.kill()
    run.end(-signal.SIGKILL)


def test_second_interrupt_ends_what_cannot_stop(start: Callable[..., Run]) -> None:
    run = start("-n", "2", "--data.path=text", "--out=stuck", *_SMALL, "--train.steps=100000")
    run.await_text(r"step 5/100000 ")
    os.kill(run.pid_of(1), signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    run.await_text("stopping; once more")
    run.signal(signal.SIGINT)
    said = run.end(130)
    assert "Traceback" not in said


def test_loss_that_is_not_finite_stops_all_before_the_weights_change(folder: Path, start: Callable[..., Run]) -> None:
    run = start("-n", "3", "--data.path=text", "--out=nan", *_SMALL, "--train.batch=6", "--optim.lr=1e36")
    said = run.end(1)
    assert re.search(r"^lockstep: the loss became (nan|inf) at step \d+, first on rank \d", said, re.MULTILINE), said
    assert len(re.findall("^lockstep: ", said, re.MULTILINE)) == 2
    assert "Traceback" not in said
    assert latest(folder / "nan" / "checkpoints") is None


def test_text_that_cannot_be_used_is_one_sentence(folder: Path, start: Callable[..., Run]) -> None:
    (folder / "short.txt").write_text("too short\n" * 10)
    said = start("-n", "2", "--data.path=short.txt", "--out=short", *_SMALL).end(2)
    sentences = [line for line in said.splitlines() if line.startswith("lockstep: ")]
    assert len(sentences) == 2
    assert "short.txt is too short" in sentences[1]
    assert "Traceback" not in said
    assert not (folder / "short").exists()


_FAIL_ON_RANK_1 = """
import gc, os

def boom():
    raise ZeroDivisionError("a bug on one rank")

if os.environ.get("RANK") == "1":
    gc.freeze = boom  # the loop calls it before the first step
"""


def test_unexpected_error_shows_the_traceback_of_the_rank_that_had_it(
    folder: Path, start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bug").mkdir()
    (folder / "bug" / "sitecustomize.py").write_text(_FAIL_ON_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(folder / "bug"))
    run = start("-n", "2", "--data.path=text", "--out=bugged", *_SMALL)
    said = run.end(1)
    assert said.count("Traceback") == 1
    assert "in boom" in said
    cause = f"rank 1 (pid {run.pid_of(1)}) failed: ZeroDivisionError: a bug on one rank"
    assert said.rstrip().splitlines()[-1] == f"lockstep: {cause}; the other ranks were ended"


_SAVE_AND_HANG = """
import os, sys
from pathlib import Path
import torch
from lockstep.checkpoint import store
from lockstep.testing.worlds import run_threads

def save(step):
    state = {"step": step, "model": {"w": torch.full((1000,), float(step))}}
    run_threads(1, lambda comm: store.save(comm, Path(sys.argv[1]), step, state, keep=1))

def hang(descriptor):
    print("saving", flush=True)
    sys.stdin.read()

save(1)
os.fsync = hang
save(2)
"""


def test_killed_while_saving_the_checkpoint_before_is_whole(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _SAVE_AND_HANG, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "saving\n"
        child.kill()
    assert {path.name for path in tmp_path.iterdir()} == {".step-00000002.tmp", "step-00000001.safetensors"}
    newest = latest(tmp_path)
    assert newest is not None
    assert load(newest)["step"] == 1
