"""`lockstep train` as users run it: real processes, real signals, and the words they get.

The runs of the first test share one directory on purpose: one is stopped by Ctrl-C, goes on, loses a rank to SIGKILL,
goes on again, and must then hold, bit for bit, the weights of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from chaos import TINY
from command_runs import Run, wait_for
from observer import Observer

pytestmark = pytest.mark.limit_s(120)

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
# small enough that starting is all it costs; a constant learning rate, so that the number of steps changes no number
_SMALL = (
    *TINY,
    "--train.log_every=5",
    "--train.eval_every=0",
    "--train.sample_tokens=8",
    "--optim.lr=0.01",
    "--optim.min_lr=0.01",
    "--optim.warmup_steps=0",
    "--checkpoint.every=20",
    "--checkpoint.keep=2",
)


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

    def one(*words: str, launcher: tuple[str, ...] = (), warm: bool = False) -> Run:
        runs.append(Run(folder, "train", *words, launcher=launcher, warm=warm))
        return runs[-1]

    yield one
    for run in runs:
        run.close()


def steps_in(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints in a directory, oldest first."""
    return sorted(int(path.name[5:13]) for path in checkpoints.glob("step-*"))


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
    said = run.end(75)
    stopped = int(re.findall(r"stopped after step (\d+) of 100000", said)[0])
    assert "stopping; once more" in said
    assert "--resume auto" in said
    assert steps_in(checkpoints)[-1] == stopped

    run = start("-n", "2", *here, "--train.steps=100000", "--resume=auto", warm=True)
    run.await_text(rf"resumed from .*step-{stopped:08}.* made by 2 ranks")
    run.await_text(rf"step {stopped + 25 - stopped % 5}/100000 ")
    victim = run.pid_of(1)
    os.kill(victim, signal.SIGKILL)
    run.await_text(r"(?s)restart 1 of 3 after SIGKILL.*resumed from .* made by 2 ranks")
    again = int(re.findall(r"restart 1 of 3 after SIGKILL, from step (\d+) with 2 processes", run.text())[0])
    assert stopped < again
    assert again % 20 == 0
    run.await_text(rf"step {again + 5}/100000 (?s:.*)step {again + 5}/100000 |step {again + 25}/100000 ")
    os.kill(run.pid_of(1), signal.SIGUSR1)  # a batch system that warns one process of each machine
    said = run.end(75)
    other = "rank 0 (was ended by the launcher|left because of it)"  # whichever is quicker
    assert re.fullmatch(rf"rank 1 \(pid {victim}\) was killed by SIGKILL; {other}", run.said()[1])
    assert "Traceback" not in said
    saved = steps_in(checkpoints)[-1]
    assert saved > again
    launched = [json.loads(line) for line in (folder / "out" / "profile" / "launch.jsonl").read_text().splitlines()]
    left = next(one["ranks"] for one, then in pairwise(launched) if "left" in one and then.get("code") == -9)
    assert all(steps >= stopped + 20 for _, steps, *_ in left), "guards do not count the steps of earlier starts"

    steps = f"--train.steps={saved + 10}"
    said = start("-n", "2", *here, steps, "--resume=auto", warm=True).end(0)
    assert "train.steps: 100000 -> " in said
    logged = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in logged if "loss" in record]
    assert trained == sorted(set(trained)), "a step was logged twice"
    assert steps_in(checkpoints)[-1] == saved + 10
    assert len(steps_in(checkpoints)) == 2

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
    said = start("-n", "2", *here, "--train.sharding=full", "--train.steps=25", warm=True).end(0)
    assert "parameters, sharding full" in said
    assert "sample of what the model writes" in said
    before = float(re.findall(r"validation after step 25: loss (\S+)", said)[0])
    (saved,) = (folder / "cut" / "checkpoints").glob("step-00000025*")
    assert {path.name for path in saved.iterdir()} == {
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }
    for world_size, sharding, change in (("1", "optimizer", "full -> optimizer"), ("2", "none", "full -> none")):
        words = ("-n", world_size, *here, f"--train.sharding={sharding}", "--train.steps=25")
        said = start(*words, warm=True).end(0)
        assert re.search(r"resumed from .*step-00000025\S* \(step 25, made by \d ranks\)", said)
        assert f"train.sharding: {change}" in said
        assert float(re.findall(r"validation after step 25: loss (\S+)", said)[0]) == pytest.approx(before, abs=2e-4)


def test_other_ranks_end_with_the_launcher(start: Callable[..., Run]) -> None:
    run = start("-n", "2", "--data.path=text/a.txt", "--out=orphans", *_SMALL, "--train.steps=100000", warm=True)
    run.await_text(r"step 5/100000 ")
    run.process.kill()
    run.end(-signal.SIGKILL)


def test_signal_at_one_rank_before_the_first_step_stops_all(start: Callable[..., Run]) -> None:
    run = start("-n", "2", "--data.path=text", "--out=early", *_SMALL, "--train.steps=100000")
    launcher = Observer(run.process.pid)
    wait_for(lambda: launcher.present([])["rank"], "a rank was forked", run.text)
    os.kill(launcher.present([])["rank"][0].pid, signal.SIGUSR1)
    said = run.end(130)
    assert run.said()[1:] == ["rank 0 was ended by SIGUSR1: stopping", "stopped"]
    assert "Traceback" not in said


def test_second_interrupt_ends_what_cannot_stop(start: Callable[..., Run]) -> None:
    run = start("-n", "2", "--data.path=text", "--out=stuck", *_SMALL, "--train.steps=100000", warm=True)
    run.await_text(r"step 5/100000 ")
    os.kill(run.pid_of(1), signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    run.await_text("stopping; once more")
    run.signal(signal.SIGINT)
    said = run.end(130)
    assert "Traceback" not in said


def test_loss_that_is_not_finite_stops_all_before_the_weights_change(folder: Path, start: Callable[..., Run]) -> None:
    words = ("-n", "3", "--data.path=text", "--out=nan", *_SMALL, "--train.batch=6", "--optim.lr=1e36", "--restarts=0")
    run = start(*words, warm=True)
    said = run.end(1)
    assert re.fullmatch(
        r"rank 0 \(pid \d+\) gave up: the loss became (nan|inf) at step \d+, first on rank \d: .+\n"
        r"finished: step \d; lost: all of it, as there is no checkpoint\n"
        r"no restart: none is allowed \(--restarts 0\)",
        "\n".join(run.said()[1:]),
    ), said
    assert "Traceback" not in said
    assert steps_in(folder / "nan" / "checkpoints") == []


def test_text_that_cannot_be_used_is_one_sentence(folder: Path, start: Callable[..., Run]) -> None:
    (folder / "short.txt").write_text("too short\n" * 10)
    said = start("-n", "2", "--data.path=short.txt", "--out=short", *_SMALL, warm=True).end(2)
    sentences = [line for line in said.splitlines() if line.startswith("lockstep: ")]
    assert len(sentences) == 2
    assert "short.txt is too short" in sentences[1]
    assert "Traceback" not in said
    assert not (folder / "short").exists()


_FAIL_ON_RANK_1 = """
import gc, os

freeze = gc.freeze

def boom():
    if os.environ.get("RANK") == "1":
        raise ZeroDivisionError("a bug on one rank")
    freeze()

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
    assert said.count("Traceback") == 2
    assert said.count("in boom") == 2
    first, second = (line for line in run.said() if line.startswith("rank 1 "))
    cause = r"rank 1 \(pid \d+\) failed at .*sitecustomize.py:8: ZeroDivisionError: a bug on one rank"
    assert re.match(cause, first)
    assert re.match(cause, second)
    assert any("restart 1 of 3" in line for line in run.said())
    assert "came twice" in run.said()[-1]


def test_what_the_model_writes_fits_any_locale(folder: Path) -> None:
    """One byte at random is often no letter, and what stands for it is none of ASCII's."""
    words = ("-n=1", "--restarts=0", "--data.path=text", "--out=ascii", *_SMALL, "--train.steps=1")
    more = ("--train.sample_tokens=64",)
    run = Run(folder, "train", *words, *more, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    try:
        assert r"\ufffd" in run.end(0)
    finally:
        run.close()
    assert "\ufffd" in (folder / "ascii" / "sample.txt").read_text(encoding="utf-8")
