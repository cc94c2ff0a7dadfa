"""Numbers for TensorBoard, Weights & Biases and trackio: what they are given, and what their failures do to a run."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
import threading
import types
from asyncio import CancelledError
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.observe.loggers import Loggers, logger_names, open_loggers
from lockstep.observe.profile.session import Profile
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.window import Window
from lockstep.observe.profile.writer import RunWriter
from lockstep.recipes import gpt2
from lockstep.train.config import check
from lockstep.train.metrics import Logs, StepLog, StepMetrics
from whole_records import read_run

CONFIG = {"seed": 1, "out": "runs/tiny"}
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


class FakeRun:
    """What wandb.init and trackio.init give back."""

    fails_at = -1  # at that step; -2: at its end
    error: BaseException = ConnectionError("the network is gone")

    def __init__(self, **about: Any) -> None:
        self.fails_at = about.pop("fails_at", self.fails_at)
        self.about = about
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise self.error
        self.logged.append((step, values))

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code
        if self.fails_at == -2:
            raise OSError("No space left on device")
        self.is_finished = True


Runs = dict[str, list[FakeRun]]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """wandb and trackio, as far as they are used."""
    made: Runs = {}
    for name in ("wandb", "trackio"):
        made[name] = []
        module = types.ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)

        vars(module)["init"] = partial(_begin, made[name])
        monkeypatch.setitem(sys.modules, name, module)
    for variable in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return made


def _begin(runs: list[FakeRun], /, **about: Any) -> FakeRun:
    runs.append(FakeRun(**about))
    return runs[-1]


@pytest.mark.parametrize(("text", "names"), [("", ()), (" wandb ,trackio,wandb,", ("wandb", "trackio"))])
def test_names_are_taken_once_each(runs: Runs, text: str, names: tuple[str, ...]) -> None:
    assert logger_names(text) == names


def test_a_name_that_is_none_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no logger 'wandbb', but tensorboard, wandb, trackio"):
        logger_names("wandbb")


def test_a_logger_that_is_not_installed_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"trackio is not installed: pip install trackio"):
        check(replace(gpt2.tiny(), log="trackio"), world_size=1)


def test_both_are_given_the_run_and_its_numbers(runs: Runs, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    loggers = open_loggers(("wandb", "trackio"), folder, CONFIG)
    loggers.log(3, {"loss": 0.5, "lr": 0.1})
    loggers.close()
    loggers.close()

    [wandb], [trackio] = runs["wandb"], runs["trackio"]
    assert wandb.logged == trackio.logged == [(3, {"loss": 0.5, "lr": 0.1})]
    assert wandb.is_finished
    assert trackio.is_finished
    run_id = wandb.about["id"]
    assert wandb.about == {
        "project": "lockstep",
        "name": "tiny",
        "id": run_id,
        "resume": "allow",
        "config": CONFIG,
        "dir": str(folder),
        "mode": "offline",
    }
    assert trackio.about == {
        "project": "lockstep",
        "name": f"tiny-{run_id}",
        "config": CONFIG,
        "resume": "allow",
    }


def test_a_run_that_goes_on_is_the_same_run(runs: Runs, tmp_path: Path) -> None:
    for step in (0, 250, 0):
        open_loggers(("trackio", "wandb"), tmp_path, CONFIG, step).close()

    first, again, anew = (run.about["id"] for run in runs["wandb"])
    assert first == again != anew
    assert [run.about["name"][-8:] for run in runs["trackio"]] == [first, again, anew]


def test_the_environment_says_whether_wandb_uploads(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    open_loggers(("wandb",), tmp_path, CONFIG).close()

    assert (runs["wandb"][0].about["mode"], runs["wandb"][0].about["project"]) == ("online", "mine")


@pytest.mark.parametrize("error", [ConnectionError("no network"), SystemExit("no login"), CancelledError("no answer")])
def test_one_that_fails_is_said_once_and_left_out(
    runs: Runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
) -> None:
    monkeypatch.setattr(FakeRun, "fails_at", 2)
    monkeypatch.setattr(FakeRun, "error", error)
    monkeypatch.setattr(sys.modules["trackio"], "init", partial(_begin, runs["trackio"], fails_at=-1))
    loggers = open_loggers(("wandb", "trackio"), tmp_path, CONFIG)
    for step in range(1, 5):
        loggers.log(step, {"loss": 1.0})
    loggers.close()

    assert [step for step, _ in runs["wandb"][0].logged] == [1]
    assert [step for step, _ in runs["trackio"][0].logged] == [1, 2, 3, 4]
    assert capsys.readouterr().err == (
        f"lockstep: nothing is logged to wandb any more, from step 2 on: {type(error).__name__}: {error}\n"
    )


def test_one_that_cannot_end_does_not_fail_the_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["trackio"], "init", partial(_begin, runs["trackio"], fails_at=-2))
    open_loggers(("wandb", "trackio"), tmp_path, CONFIG).close()

    assert runs["wandb"][0].is_finished
    assert "may be missing in trackio: OSError: No space left on device" in capsys.readouterr().err


def test_one_that_cannot_begin_is_said_and_the_others_go_on(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[int] = []

    def init(**about: Any) -> FakeRun:
        tries.append(1)
        raise RuntimeError("no API key")

    monkeypatch.setattr(sys.modules["trackio"], "init", init)
    writer = RunWriter(tmp_path, StepClock(), rank=0, world_size=1, attempt="a/0")
    profile = Profile(writer, Window(range(0), tmp_path, 0), None)
    profile.open_loggers = partial(open_loggers, ("trackio", "wandb"), tmp_path, CONFIG)
    for step in (1, 2):
        profile.log(step, {"loss": 0.5})
    profile.close()

    assert len(tries) == 1
    assert capsys.readouterr().err == "lockstep: nothing is logged to trackio: RuntimeError: no API key\n"
    assert runs["wandb"][0].logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    assert runs["wandb"][0].is_finished
    values = [note.fields for note in read_run(tmp_path).ranks[0].notes if note.kind == "values"]
    assert values == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}]


def test_one_that_does_not_answer_holds_up_neither_the_steps_nor_the_end(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr("lockstep.observe.loggers._PATIENCE_S", 0.05)
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **about: answers.wait() and FakeRun(**about))
    loggers = open_loggers(("wandb",), tmp_path, CONFIG)
    try:
        loggers.log(1, {"loss": 0.5})
        loggers.close()
        loggers.close()
        said = "lockstep: wandb does not end: what was logged last may be missing there\n"
        assert capsys.readouterr().err == said
    finally:
        answers.set()


def test_a_number_on_a_device_is_given_on_once_it_is_there(runs: Runs, tmp_path: Path) -> None:
    known = iter([None, None, {"loss": 0.25}])
    loggers = open_loggers(("wandb",), tmp_path, CONFIG)
    loggers.log(1, {"lr": 0.1}, lambda: next(known))
    loggers.close()

    assert runs["wandb"][0].logged == [(1, {"lr": 0.1, "loss": 0.25})]


_FOLLOWED = "while not loggers._logged.empty(): pass\n"
_BEGUN = "while not loggers._busy: pass\nwhile 'wandb' not in __import__('sys').modules: pass\n"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (_FOLLOWED, None),
        (_FOLLOWED + "raise ValueError('no')\n", 1),
        ("", None),
        (_BEGUN + "raise SystemExit(3)\n", None),
    ],
)
def test_logging_is_ended_before_what_the_libraries_do_at_the_end_of_the_process(
    tmp_path: Path, end: str, code: int | None
) -> None:
    (tmp_path / "wandb.py").write_text(
        "import atexit, time\n"
        "class Run:\n"
        "    def log(self, values, step): print('logged', step)\n"
        "    def finish(self, exit_code): print('finished', exit_code)\n"
        "def init(**about):\n"
        "    atexit.register(print, 'connection lost')\n"
        "    time.sleep(0.5)\n"  # the program may be at its end meanwhile
        "    return Run()\n"
    )
    program = (
        "from pathlib import Path\n"
        "from lockstep.observe.loggers import open_loggers\n"
        f"loggers = open_loggers(('wandb',), Path({str(tmp_path)!r}), {{}})\n"
        "loggers.log(7, {'loss': 1.0})\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "WANDB_MODE": ""}
    ran = subprocess.run([sys.executable, "-c", program + end], env=environ, capture_output=True, text=True, timeout=60)

    assert ran.stdout == f"logged 7\nfinished {code}\nconnection lost\n"
    assert "lockstep:" not in ran.stderr


def test_a_forked_process_does_not_end_the_logging_of_its_parent(runs: Runs, tmp_path: Path) -> None:
    loggers = open_loggers(("wandb",), tmp_path, CONFIG)
    loggers.log(1, {"loss": 0.5})
    worker = multiprocessing.get_context("fork").Process(target=int)  # its end calls what is registered with threading
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    loggers.log(2, {"loss": 0.25})
    loggers.close()
    assert runs["wandb"][0].logged == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]


def test_nobody_is_asked_for_a_key_on_the_terminal_of_the_program(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    vars(sys.modules["wandb"])["login"] = lambda *, prompt: prompt
    open_loggers(("wandb",), tmp_path, CONFIG).close()

    assert not runs["wandb"]
    assert "nothing is logged to wandb: ConfigError: no API key is configured" in capsys.readouterr().err


def test_training_hands_its_numbers_on(tmp_path: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.logged: list[tuple[int, Mapping[str, float]]] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.logged.append((step, values))

        def close(self, has_failed: bool) -> None:
            pass

    kept = Kept()
    logs = Logs(
        StepLog(tmp_path / "metrics.jsonl"), StepLog(tmp_path / "samples.jsonl"), Loggers({"kept": lambda: kept})
    )
    logs.write(asdict(StepMetrics(1, 2.5, 0.1, 0.7, 480, 100.0, 9.0)))
    logs.write({"step": 2, "epoch": 0, "coverage": "exact"})
    logs.close()

    figures = {"loss": 2.5, "lr": 0.1, "grad_norm": 0.7, "tokens": 480, "tokens_per_s": 100.0, "eta_s": 9.0}
    assert kept.logged == [(1, figures), (2, {"epoch": 0})]


@pytest.mark.skipif(not HAS_TENSORBOARD, reason="tensorboard is not installed: pip install tensorboard")
def test_tensorboard_has_each_step_once_after_a_restart(tmp_path: Path) -> None:
    for first, last, offset in ((0, 5, 0.0), (3, 7, 10.0)):
        loggers = open_loggers(("tensorboard",), tmp_path, {**CONFIG, "path": Path("text")}, first)
        for step in range(first + 1, last + 1):
            loggers.log(step, {"loss": offset + step})
        loggers.close()

    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        *((step, float(step)) for step in (1, 2, 3)),
        *((step, 10.0 + step) for step in (4, 5, 6, 7)),
    ]
