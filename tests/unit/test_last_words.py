"""What a rank that ends tells the others, whatever its program makes of the error itself."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.errors import PeerFailed
from lockstep.launch.worker import ERROR_FILE, describe_failure, report_failure
from lockstep.observe import process_guard
from lockstep.observe.facts import Facts
from lockstep.observe.last_words import last_words
from lockstep.observe.wording import BEFORE


class Told:
    """A guard's place."""

    rank = 3
    words: Any = None

    def __init__(self) -> None:
        self.facts = Facts()

    def end(self, error: BaseException | None = None) -> None:
        self.words = None if error is None else last_words(error)

    def rest(self, patience_s: float) -> None:
        """It has no thread."""

    def cause_of(self, error: BaseException) -> BaseException:
        return error


def a_package(source: str, **names: Any) -> Any:
    """The function `call` of an installed package of this text."""
    exec(compile(source, f"{sysconfig.get_paths()['purelib']}/stages/stage.py", "exec"), names)
    return names["call"]


CALLS = """
def call(forward):
    try:
        forward()
    except Exception as error:
        raise RuntimeError("[Stage 0] failed to run forward:\\nargs: ...") from error
"""


def test_an_error_of_the_users_is_quoted_and_not_what_a_package_has_made_of_it() -> None:
    def forward() -> None:
        raise ValueError("label 7")  # here

    with pytest.raises(RuntimeError) as left:
        a_package(CALLS)(lambda: a_package(CALLS)(forward))
    words = last_words(left.value)
    here = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# here"))
    assert (words.kind, words.message) == ("ValueError", "label 7")
    assert words.where.endswith(f"test_last_words.py:{here}")
    failure = describe_failure(left.value, 0, 1, is_expected=False, is_consequence=False)
    assert (failure.kind, failure.message, failure.where) == words[:3]
    assert "[Stage 0] failed" in failure.trace


def test_what_the_user_has_said_of_an_error_is_quoted_and_so_is_a_package_of_what_it_met_itself() -> None:
    def load() -> None:
        try:
            raise KeyError(7)
        except KeyError as error:
            raise ValueError("no label 7") from error

    def call() -> None:
        a_package(CALLS)(a_package("def call():\n    raise OSError('disk')"))

    for program, said in (
        (load, ("ValueError", "no label 7")),
        (call, ("RuntimeError", "[Stage 0] failed to run forward:")),
    ):
        with pytest.raises(Exception) as left:
            program()
        words = last_words(left.value)
        assert (words.kind, words.message) == said


@pytest.mark.parametrize("seen", [PeerFailed("rank 1 is lost", 1), RuntimeError("Connection reset by peer")])
def test_who_saw_another_fail_says_so_whatever_that_was_raised_from(seen: Exception) -> None:
    def forward() -> None:
        raise ValueError("of torch")

    with pytest.raises(type(seen)) as left:
        a_package(CALLS.replace('RuntimeError("[Stage 0] failed to run forward:\\nargs: ...")', "seen"), seen=seen)(
            forward
        )
    words = last_words(left.value)
    assert (words.message, words.is_consequence) == (str(seen), True)


def test_an_error_is_not_hidden_by_a_launcher_that_cannot_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may be full, or no file can be opened: which may be the error itself."""
    failure = describe_failure(ValueError("label 7"), 2, 1, is_expected=False, is_consequence=False)
    report_failure(failure, {ERROR_FILE: f"{tmp_path}/gone/error.json", "WORLD_SIZE": "3"})
    said, *rest = capsys.readouterr().err.splitlines()
    assert said == "lockstep: rank 2: its launcher cannot be told of that: No such file or directory"
    assert rest[-1] == "lockstep: rank 2: label 7"


def test_an_error_that_was_raised_from_itself_is_quoted() -> None:
    error = ValueError("label 7")
    error.__cause__ = error
    assert last_words(error).message == "label 7"


def test_who_leaves_because_of_an_error_is_quoted_with_that() -> None:
    def program() -> None:
        try:
            raise ValueError("label 7")
        except ValueError:
            sys.exit(1)

    with pytest.raises(SystemExit) as left:
        program()
    words = last_words(left.value)
    assert (words.kind, words.message) == ("ValueError", "label 7")
    assert "test_last_words.py:" in words.where


def test_who_leaves_for_no_error_is_quoted_with_its_code() -> None:
    assert last_words(SystemExit(3)).message == "3"


def test_an_error_that_another_excepthook_has_shown_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Told()
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setattr(sys, "last_value", ValueError("label 7"), raising=False)
    process_guard._end()
    assert guard.words.kind == "ValueError"


def test_a_thread_that_an_error_ends_is_told_of_and_its_trace_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise ValueError("label 7")

    guard = Told()
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setitem(process_guard._before, process_guard._thread_ended, threading.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", process_guard._thread_ended)
    for end in (work, sys.exit):
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
    (text,) = guard.facts.said()[BEFORE].values()
    assert text.startswith("one of its threads had ended: ValueError: label 7, at ")
    assert "test_last_words.py:" in text
    assert capsys.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize(("of", "has_ended"), [("atexit callback", False), ("atexit callback", True), ("", False)])
def test_an_error_of_a_handler_at_the_exit_ends_the_rank_unless_one_has_before(
    of: str, has_ended: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python prints it, and goes on; so it does with what `__del__` raises, which ends nothing."""
    guard, printed = Told(), list[Any]()
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setitem(process_guard._before, process_guard._ignored, printed.append)
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # so that it is as before in the end
    monkeypatch.delattr(sys, "last_value")
    if has_ended:
        sys.last_value = KeyError(7)
    args: Any = SimpleNamespace(exc_value=ValueError("disk 7 is full"), err_msg=f"Exception ignored in {of}" * bool(of))
    process_guard._ignored(args)
    process_guard._end()
    assert printed == [args]
    said = "lockstep: rank 3 raised at its exit: ValueError: disk 7 is full; no exit code tells of it\n"
    is_its = bool(of) and not has_ended
    assert capsys.readouterr().err == said * is_its
    assert getattr(guard.words, "kind", "") == ("KeyError" if has_ended else "ValueError" * is_its)
