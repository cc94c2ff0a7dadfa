"""`lockstep demo`: what it lists, and that the catalog and the programs fit together. No process is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep import cli, demos
from lockstep.cli.demo_side import environment
from lockstep.demos.catalog import DEMOS, Place

_AT = re.compile(r"\\b(\w+)\\\.py:(\d+)\\b")


def test_list_has_every_demo_with_what_torch_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown and demo.title in shown and demo.stock in shown for name, demo in DEMOS.items())


def test_source_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "killed", "--source"]) == 0
    assert "signal.SIGKILL" in capsys.readouterr().out


def test_unknown_name_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "kiled"]) == 2
    assert "did you mean `lockstep demo killed`" in capsys.readouterr().err


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
    assert environment(Place("1", None, None, "other"), ports) == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "29501",
    }


def test_page_has_every_demo_with_its_row_and_the_lines_that_are_named() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()
    for name, demo in DEMOS.items():
        found = re.search(rf"^\| {demo.row} \| {name} \| {re.escape(demo.title)} \| (.*) \|$", page, re.MULTILINE)
        assert found is not None, f"docs/diagnosis.md has no row for {name}"
        named = {f"{program}.py:{line}" for pattern in demo.says for program, line in _AT.findall(pattern)}
        shown = set(re.findall(rf"\b{name}\.py:\d+", found[1]))
        assert shown <= named or demo.places or name == "no_sync_on_one_rank", (name, shown, named)
