"""`lockstep demo`: what it lists, and that the catalog and the programs fit together. No process is started."""

from __future__ import annotations

import builtins
import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import lockstep.cli.demo as command
from lockstep import cli, demos
from lockstep.cli import demo_begin
from lockstep.cli.demo_side import Line
from lockstep.demos.catalog import DEMOS, Demo, Place

_AT = re.compile(r"\\b(\w+)\\\.py:(\d+)\\b")


def test_list_has_every_demo_with_what_torch_does_as_wide_as_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert cli.main(["demo"]) == 0
    *lines, _, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70
    assert last.startswith("`lockstep demo skipped_collective` runs one")
    words = " ".join(" ".join(lines).split())
    assert all(f"{one.name} {one.title} stock torch: {one.stock}" in words for one in DEMOS.values())


def test_source_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "killed", "--source"]) == 0
    assert "signal.SIGKILL" in capsys.readouterr().out


@pytest.mark.parametrize("name", DEMOS)
def test_source_has_what_starts_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a launcher the fault is in the environment of the processes, and nowhere else to be seen."""
    demo = DEMOS[name]
    assert cli.main(["demo", name, "--source"]) == 0
    comments = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# ")]
    assert comments[0] == f"# {demo.script}"
    assert comments[1:] == [f"# {line}" for line in demo.command(stock=False).splitlines()]
    if demo.places:
        assert [re.findall(r"\bRANK=(\d)", line) for line in comments[2:]] == [[place.rank] for place in demo.places]
        assert len({*re.findall(r"WORLD_SIZE=(\d)", " ".join(comments))}) == len(
            {p.world_size for p in demo.places} - {None}
        )
    else:
        assert all(f" {variable}={value}" in comments[1] for variable, value in demo.variables.items())
    assert not any("LOCKSTEP" in line for line in demo.command(stock=True).splitlines())


def test_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "kiled"]) == 2
    assert "did you mean `lockstep demo killed`" in capsys.readouterr().err


def test_a_signal_is_raised_where_a_demo_runs_so_that_its_processes_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(command, "_show", lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    assert command.demo(["killed"]) == 0
    with pytest.raises(SystemExit):
        seen[0](signal.SIGTERM, None)


class _Said:
    """A Side without processes."""

    exit_code, limit_s = 1, 0.0
    heading = "lockstep.errors.EnvironmentProblems: no place (1 problem(s)):"
    said: ClassVar = ["Traceback (most recent call last):", heading, "  1. RANK is 2", heading, "  1. RANK is 2"]

    def __init__(self, demo: Demo, who: str, *_: Any) -> None:
        self._said = self.said

    def __enter__(self) -> _Said:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def lines(self, seconds: float) -> list[Line]:
        return [Line(0.5, text) for text in self._said]


def test_what_helps_stands_below_a_heading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "Side", _Said)
    assert command.demo(["rank_too_large"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "lockstep, after 0.5 s: 1. RANK is 2"


def test_what_helps_is_no_line_across(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As torchrun draws one below its heading."""
    monkeypatch.setattr(_Said, "said", ["torch.errors.ChildFailedError:", "=" * 40, "", "killed.py FAILED"])
    monkeypatch.setattr(command, "Side", _Said)
    assert command.demo(["killed"]) == 0
    assert "stock torch, after 0.5 s: killed.py FAILED (" in capsys.readouterr().out


def test_summary_says_what_torch_does_also_where_it_complains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A complaint alone may look as good as ours: that another rank waits for 30 minutes is not in it."""
    monkeypatch.setattr(_Said, "said", ["ValueError: label 7 is not one of 0 to 4"])
    monkeypatch.setattr(command, "Side", _Said)
    assert command.demo(["exception_kept_alive"]) == 0
    said = " ".join(capsys.readouterr().out.split())  # as wide as the terminal is
    assert "stock torch, after 0.5 s: ValueError: label 7 is not one of 0 to 4 (rank 0 waits 30 minutes" in said


def test_nothing_that_helps_is_cut_and_no_frame_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes without a prefix raise at once, one is aborted; a line is longer than the terminal."""
    begin, frame = "Traceback (most recent call last):", '  File "a.py", line 1, in main'
    abort = [
        "Fatal Python error: Aborted",
        "",
        "Thread 0x7f15 (most recent call first):",
        frame,
        "",
        "Extension modules: x",
    ]
    last = "  the last of it " + "word " * 50 + "END"
    said = [begin, begin, frame, "ValueError: one", frame, "ValueError: two", *abort, "lockstep: MISMATCH", last] * 3
    monkeypatch.setattr(_Said, "said", said)
    monkeypatch.setattr(command, "Side", _Said)
    monkeypatch.setenv("COLUMNS", "70")
    assert command.demo(["killed"]) == 0
    shown = capsys.readouterr().out
    ours = shown.partition("--- lockstep run")[2]
    assert not re.search("File|Thread|Extension", shown)
    assert shown.count("Aborted") == 6
    assert ours.count("END\n") == 3
    assert max(map(len, ours.splitlines())) <= 70
    assert ours.count("\n   0.5 s    the last of it word") == 3  # indented as it was said
    assert "\n              word" in ours


def test_a_program_begins_when_what_takes_long_is_there_and_ends_when_torchs_threads_have_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrapper takes seconds to load; a thread of Gloo's that drops a tensor while the interpreter ends aborts."""
    script = tmp_path / "script.py"
    script.write_text("print('optimizes')")
    load = builtins.__import__

    def loading(name: str, *rest: Any) -> Any:
        if name != "torch._dynamo":
            return load(name, *rest)
        print("loads")
        return None

    monkeypatch.setattr(builtins, "__import__", loading)
    monkeypatch.setattr(demo_begin, "time", SimpleNamespace(time=time.time, sleep=lambda _: print("rests")))
    monkeypatch.setattr(sys, "argv", ["demo_begin.py", "MARK", str(script)])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    demo_begin.main()
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == [
        "loads", "MARK", "optimizes", "rests",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_seconds_are_above_0(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "killed", "--seconds", seconds]) == 2
    assert "--seconds" in capsys.readouterr().err


def test_every_program_has_an_entry_and_every_entry_a_program() -> None:
    programs = {path.stem for path in Path(demos.__path__[0]).glob("*.py")} - {"__init__", "catalog"}
    used = {path.stem for demo in DEMOS.values() for path in (demo.script, demo.stock_script)}
    assert programs == used


def test_programs_are_short_and_know_nothing_of_lockstep() -> None:
    for demo in DEMOS.values():
        text = demo.stock_script.read_text()
        assert "lockstep" not in text, demo.name
        assert len([line for line in text.splitlines() if line.strip()]) <= 25, demo.name


@pytest.mark.parametrize("name", DEMOS)
def test_lines_that_are_to_be_named_hold_a_statement(name: str) -> None:
    demo = DEMOS[name]
    lines = demo.script.read_text().splitlines()
    for pattern in demo.says:
        for program, number in _AT.findall(pattern):
            line = lines[int(number) - 1].strip()
            assert program == name
            assert line.endswith((")", "in loader:")), (number, line)
    assert demo.quiet == (not demo.says)


def test_environment_says_what_the_place_says_and_no_more() -> None:
    ports = {"own": "29500", "other": "29501"}
    assert Place("1", None, None, "other").variables(ports) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "29501",
    }


def test_page_has_every_demo_with_its_row_and_the_lines_that_are_named() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()
    for name, demo in DEMOS.items():
        found = re.search(rf"^\| {demo.row} \| {name} \| {re.escape(demo.title)} \| (.*) \|$", page, re.MULTILINE)
        assert found is not None, f"docs/diagnosis.md has no row for {name}"
        named = re.findall(rf"{name}\\\.py:[\d\[\]]+", " ".join(demo.says))  # such as name\.py:1[56]
        shown = re.findall(rf"\b{name}\.py:\d+", found[1])
        assert bool(shown) == bool(named), (name, shown, named)
        assert all(any(re.fullmatch(place, line) for place in named) for line in shown), (name, shown, named)
