"""Numbers for TensorBoard, Weights & Biases and trackio: what they are given, and what their failures do to a run."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.observe.loggers import Loggers, logger_names, open_loggers
from lockstep.recipes import gpt2
from lockstep.train.config import check
from lockstep.train.metrics import Logs, StepLog, StepMetrics

CONFIG = {"seed": 1, "out": "runs/tiny"}
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None


class FakeRun:
    """What wandb.init and trackio.init give back."""

    def __init__(self, **about: Any) -> None:
        self.about = about
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False
        self.fails_at = -1

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("the network is gone")
        self.logged.append((step, values))

    def finish(self) -> None:
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


def test_one_that_fails_is_said_once_and_left_out(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers = open_loggers(("wandb", "trackio"), tmp_path, CONFIG)
    runs["wandb"][0].fails_at = 2
    for step in range(1, 5):
        loggers.log(step, {"loss": 1.0})
    loggers.close()

    assert [step for step, _ in runs["wandb"][0].logged] == [1]
    assert [step for step, _ in runs["trackio"][0].logged] == [1, 2, 3, 4]
    assert capsys.readouterr().err == (
        "lockstep: nothing is logged to wandb any more, from step 2 on: ConnectionError: the network is gone\n"
    )


def test_one_that_cannot_end_does_not_fail_the_run(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers = open_loggers(("wandb", "trackio"), tmp_path, CONFIG)
    runs["trackio"][0].fails_at = -2
    loggers.close()

    assert runs["wandb"][0].is_finished
    assert "may be missing in trackio: OSError: No space left on device" in capsys.readouterr().err


def test_one_that_cannot_begin_is_an_error_and_ends_the_others(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**about: Any) -> FakeRun:
        raise RuntimeError("no API key")

    monkeypatch.setattr(sys.modules["trackio"], "init", init)

    with pytest.raises(ConfigError, match=r"trackio cannot log: RuntimeError: no API key"):
        open_loggers(("wandb", "trackio"), tmp_path, CONFIG)
    assert runs["wandb"][0].is_finished


def test_training_hands_its_numbers_on(tmp_path: Path) -> None:
    class Kept:
        def __init__(self) -> None:
            self.logged: list[tuple[int, Mapping[str, float]]] = []

        def log(self, step: int, values: Mapping[str, float]) -> None:
            self.logged.append((step, values))

        def close(self) -> None:
            pass

    kept = Kept()
    logs = Logs(StepLog(tmp_path / "metrics.jsonl"), StepLog(tmp_path / "samples.jsonl"), Loggers({"kept": kept}))
    logs.write(StepMetrics(1, 2.5, 0.1, 0.7, 480, 100.0, 9.0))
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
