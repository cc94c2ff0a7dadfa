"""Speed without the pauses, whole lines in the file, and what a terminal or a pipe shows."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from lockstep.errors import TrainingError
from lockstep.train import console as console_module
from lockstep.train.console import Console
from lockstep.train.metrics import Meter, StepLog, StepMetrics, duration

RECORD = StepMetrics(step=20, loss=2.5, lr=1e-3, grad_norm=0.5, tokens=2000, tokens_per_s=12345.6, eta_s=75)


def test_meter_leaves_pauses_out() -> None:
    now = [100.0]
    meter = Meter(step=10, steps=50, clock=lambda: now[0])
    meter.count(600)
    now[0] += 2
    with meter.pause():
        now[0] += 1000
    meter.count(400)
    now[0] += 2
    assert meter.read(20) == pytest.approx((250.0, 12.0))  # 1000 tokens in 4 s; 10 steps took 4 s, 30 are left
    meter.count(100)
    now[0] += 1
    assert meter.read(30) == pytest.approx((100.0, 5.0))


def test_file_drops_what_a_resumed_run_does_again_and_lines_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = StepLog(path)
    for record in ({"step": 10, "val_loss": 1.5}, {"step": 20}, {"step": 30, "val_loss": 1.0}):
        file.write(record)
    assert file.validated == {10, 30}
    file.sync()
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 2')
    resumed = StepLog(path, resumed_step=20)
    resumed.write(asdict(RECORD))
    assert len(path.read_text().splitlines()) == 3, "written at once"
    resumed.close()
    assert resumed.validated == {10}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 20]
    assert lines[2]["tokens_per_s"] == 12345.6
    StepLog(path).close()
    assert path.read_text() == ""


def test_a_log_that_cannot_be_cut_off_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        StepLog(path, resumed_step=1)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_is_an_error_that_names_the_file_and_does_not_come_again_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = StepLog(path)
    log.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115 - closed by the log
    with pytest.raises(TrainingError, match=r"^cannot write /dev/full: No space left on device$"):
        log.write({"step": 1, "val_loss": 1.5})
    assert not log.validated
    log.close()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.7, "1:00"), (75, "1:15"), (3675, "1:01:15")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


FIGURES = "loss 2.5000 lr 1.00e-03 grad_norm 0.50 12,346 tok/s eta 1:15"


def test_pipe_gets_plain_lines_and_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        console = Console(rank, 100)
        console.say("[bold]hello[/bold]")
        console.step(RECORD)
        console.close()
    assert capsys.readouterr().out == f"[bold]hello[/bold]\nstep 20/100 {FIGURES}\n"


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Terminal:
    """Standard output from now on."""
    screen = Terminal()
    monkeypatch.setattr(console_module.sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    return screen


def test_terminal_gets_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, 120)
    console = Console(0, 100)
    console.step(RECORD)
    console.say("[bold]hello[/bold]")
    console.close()
    console.close()
    shown = screen.getvalue()
    assert FIGURES in shown
    assert "20/100" in shown
    assert "[bold]hello[/bold]" in shown


def test_narrow_terminal_loses_the_bar_and_the_end_of_the_line_first(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, 40)
    console = Console(0, 100)
    console.step(RECORD)
    console.close()
    assert "step 20/100 loss 2.5000 lr 1.00e-03 gra" in screen.getvalue()


def test_terminal_that_can_move_no_cursor_gets_plain_lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(console_module.sys, "stdout", screen)
    monkeypatch.setenv("TERM", "dumb")
    console = Console(0, 100)
    console.step(RECORD)
    assert screen.getvalue() == f"step 20/100 {FIGURES}\n"
    console.close()
