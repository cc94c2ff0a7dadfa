"""A function is called when a module has been imported, and the module does not notice."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.observe.torch_import import when_imported

NAME = "module_of_this_test"


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that can be imported and has not been."""
    file = tmp_path / f"{NAME}.py"
    file.write_text("def f() -> int:\n    return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield file
    sys.modules.pop(NAME, None)
    assert sys.meta_path == finders


def test_called_at_the_end_of_the_import(module_file: Path) -> None:
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(sys.modules[NAME].f()))
    assert not seen
    module = importlib.import_module(NAME)
    assert seen == [5]
    assert inspect.getsource(module) == module_file.read_text()
    assert type(module.__loader__).__module__ != when_imported.__module__
    importlib.reload(module)
    assert seen == [5]


def test_called_now_where_the_module_is_there(module_file: Path) -> None:
    importlib.import_module(NAME)
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))()
    assert seen == [1]


def test_called_off(module_file: Path) -> None:
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))()
    importlib.import_module(NAME)
    assert not seen


def test_an_import_that_fails_is_the_programs_own_affair(module_file: Path) -> None:
    module_file.write_text("raise OSError('broken')\n")
    seen: list[int] = []
    when_imported(NAME, lambda: seen.append(1))
    with pytest.raises(OSError, match="broken"):
        importlib.import_module(NAME)
    assert not seen


def test_a_module_that_does_not_exist_still_does_not(tmp_path: Path) -> None:
    when_imported("no_such_module_anywhere", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        importlib.import_module("no_such_module_anywhere")
