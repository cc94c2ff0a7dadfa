"""What a rank that ends tells the others, whatever its program makes of the error itself."""

from __future__ import annotations

import builtins
import os
import sys
import sysconfig
import threading
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import PeerFailed
from lockstep.launch.worker import ERROR_FILE, describe_failure, report_failure
from lockstep.observe import process_guard
from lockstep.observe.facts import Facts
from lockstep.observe.last_words import end_in_users_code, handled, last_words
from lockstep.observe.status import in_words
from lockstep.observe.wording import BEFORE


class Told:
    """A guard's place."""

    rank = 3
    words: Any = None
    finding = None

    def __init__(self) -> None:
        self.facts = Facts()
        self.step = 0
        self.recorder = SimpleNamespace(started=0)

    def end(self, error: BaseException | None = None) -> None:
        self.words = None if error is None else last_words(error)

    def rest(self, patience_s: float) -> None:
        """It has no thread."""

    def cause_of(self, error: BaseException) -> BaseException:
        return error

    def as_shown(self, error: BaseException, found: None) -> BaseException:
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


def test_of_a_gpu_without_room_it_is_quoted_how_much_was_asked_for_and_is_free() -> None:
    told = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB of which 1 GiB is free."
    others = " Process 991 has 1.22 GiB memory in use. Including non-PyTorch memory, this process has 1.18 GiB in use."
    for more in (others, others.partition("use.")[2], ""):
        assert last_words(RuntimeError(f"{told}{more}")).message == told


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
        (call, ("RuntimeError", "[Stage 0] failed to run forward: (from OSError: disk)")),
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


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "AssertionError"),
        ("AssertionError", "AssertionError"),  # as `last_words` has it
        ("AssertionError (of batch 3)", "AssertionError (of batch 3)"),
        ("AssertionError of batch 3", "AssertionError: AssertionError of batch 3"),
        ("of batch 3", "AssertionError: of batch 3"),
    ],
)
def test_an_error_that_says_no_more_than_its_class_is_named_once(message: str, said: str) -> None:
    assert in_words("AssertionError", message) == said


def test_what_a_rank_met_before_it_saw_another_fail_is_shown_and_told() -> None:
    """As in a `finally`, in which it waits for the others."""

    def wait() -> None:
        try:
            raise KeyError("x")
        finally:
            try:
                raise RuntimeError("Connection closed by peer")
            except RuntimeError as seen:
                raise PeerFailed("rank 1 has gone", 1) from seen

    with pytest.raises(PeerFailed) as met:
        wait()
    error, line = met.value, wait.__code__.co_firstlineno + 2
    assert handled(error) == f"KeyError: 'x', at {os.path.relpath(__file__)}:{line}"
    assert handled(PeerFailed("rank 1 has gone", 1)) == handled(None) == ""
    with pytest.raises(StopIteration) as end:
        next(iter(()))
    assert handled(end.value) == ""
    end_in_users_code(error)
    shown = "".join(traceback.format_exception(error))
    assert "KeyError: 'x'" in shown
    assert "During handling" in shown
    assert "Connection closed" not in shown


def test_an_error_that_was_raised_from_itself_is_quoted() -> None:
    error = ValueError("label 7")
    error.__cause__ = error
    assert last_words(error).message == "label 7"


def with_notes(error: BaseException, notes: Any) -> BaseException:
    error.__notes__ = notes  # type: ignore[attr-defined]
    return error


def from_(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def a_circle() -> BaseException:
    return from_(ValueError("a"), from_(ValueError("b"), ValueError("a")))


class Mute(RuntimeError):
    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (with_notes(ValueError("label 7"), ["in shard 17\nof 20", "b" * 200]), f"label 7 (in shard 17; {'b' * 118}..)"),
        (with_notes(ValueError("label 7"), "none"), "label 7"),
        (with_notes(ValueError("label 7"), [8]), "label 7 (8)"),
        (from_(RuntimeError("no config"), ValueError("bad 'x'\nhere")), "no config (from ValueError: bad 'x')"),
        (from_(RuntimeError("no config: bad 'x'"), ValueError("bad 'x'")), "no config: bad 'x'"),
        (from_(RuntimeError(), ValueError("bad 'x'")), "RuntimeError (from ValueError: bad 'x')"),
        (from_(PeerFailed("rank 1 is lost", 1), ValueError("of torch")), "rank 1 is lost"),
        (a_circle(), "a (from ValueError: b)"),
        (ValueError("a\0b\x1b[31mc\x9bd\te\rover"), r"a\x00b\x1b[31mc\x9bd" + "\te"),
        (ValueError("caf\u00e9 \udcff \u202e"), r"café \udcff \u202e"),
        (Mute(), "<exception str() failed>"),
        (from_(ValueError("a"), Mute()), "a (from Mute: <exception str() failed>)"),
    ],
)
def test_what_stands_beside_an_error_is_quoted_in_a_few_words_for_a_terminal(error: BaseException, said: str) -> None:
    words = last_words(error)
    assert words.message == said
    failure = describe_failure(error, 0, 1, is_expected=False, is_consequence=False)
    assert failure.message.split("\n")[0] == said


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="Python has groups of exceptions from 3.11 on")
def test_a_group_of_errors_is_quoted_with_its_first_members_and_where_they_came_up() -> None:
    group: Any = getattr(builtins, "ExceptionGroup")  # noqa: B009 (unknown to older Pythons)
    inner = group("inner", [KeyError("c"), raised(OSError("b"))])
    line = raised.__code__.co_firstlineno + 2
    said = last_words(group("two", [ValueError("a"), inner])).message
    assert said.startswith(
        "two (2 sub-exceptions) (ValueError: a; ExceptionGroup: inner (2 sub-exceptions) (KeyError: 'c'; "
    )
    assert last_words(group("one", [raised(OSError("b"))])).message.endswith(f"test_last_words.py:{line})")
    many = last_words(group("many", [ValueError(f"label {n}" + "x" * 500) for n in range(50)])).message
    assert "label 2" in many
    assert "label 3" not in many
    assert len(many) == 400
    few = last_words(group("many", [ValueError(f"label {n}") for n in range(50)])).message
    assert few.endswith("; ValueError: label 2; and 47 more)")


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


def label(future: Any) -> int:
    """What a hook of DistributedDataParallel gives to `then`, say."""
    raise KeyError(f"label {future.value()}\nof two lines")


def nothing(future: Any) -> int:
    raise LookupError


@pytest.mark.parametrize(
    ("callback", "kind", "said"), [(label, "KeyError", "label 7"), (nothing, "LookupError", "(in a")]
)
@pytest.mark.parametrize("more", [0, 2])
def test_an_error_in_a_callback_of_a_future_is_of_the_line_there(
    callback: Any, kind: str, said: str, more: int
) -> None:
    """torch makes a RuntimeError of it, raised where it is waited for; also through callbacks that stand behind it."""
    first: Any = torch.futures.Future()
    last = first.then(callback)
    for _ in range(more):
        last = last.then(lambda future: future.value())
    first.set_result(7)
    with pytest.raises(RuntimeError, match="when running the callback") as caught:
        last.wait()
    words = last_words(caught.value)
    assert (words.kind, words.is_consequence) == (kind, False)
    assert said in words.message
    assert words.message.count("Error") == words.message.count("At:") == 0
    line = callback.__code__.co_firstlineno + (2 if callback is label else 1)
    assert words.where.endswith(f"test_last_words.py:{line}")


def test_an_error_that_another_excepthook_has_shown_is_told_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Told()
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setattr(sys, "last_value", ValueError("label 7"), raising=False)
    process_guard._end()
    assert guard.words.kind == "ValueError"


def test_a_thread_that_an_error_ends_is_told_of_and_its_trace_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[weakref.ref[Any]] = []

    def work() -> None:
        model = Told()
        held.append(weakref.ref(model))
        raise ValueError("label 7")

    guard = Told()
    monkeypatch.setattr(process_guard, "_died", [])
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
    assert held[0]() is None  # the error is kept, not what its frames held


@pytest.mark.parametrize(
    ("before", "after", "is_training"),
    [
        ((5, 9), (5, 11), True),
        ((5, 9), (6, 12), False),
        ((0, 9), (0, 9), True),
        ((0, 9), (0, 10), False),
        ((0, 0), (0, 0), False),
    ],
    ids=["steps", "goes on", "operations", "goes on without steps", "nothing"],
)
def test_a_thread_after_whose_end_the_rank_does_nothing_was_its_training(
    before: tuple[int, int], after: tuple[int, int], is_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What C++ has started may be entered later, so steps count where there are any."""
    guard, shown = Told(), list[Any]()
    monkeypatch.setattr(process_guard, "_died", [])
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setitem(process_guard._before, process_guard._thread_ended, shown.append)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    guard.recorder.step, guard.recorder.started = before
    error = ValueError("label 7")
    process_guard._thread_ended(threading.ExceptHookArgs((ValueError, error, None, None)))
    guard.recorder.step, guard.recorder.started = after
    process_guard._end()
    assert [one.exc_value for one in shown] == [error]
    assert process_guard.thread_error() is (error if is_training else None)
    assert (guard.words and guard.words.kind) == ("ValueError" if is_training else None)


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


def test_a_ctrl_c_at_the_very_end_of_a_rank_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python would print where in our handlers and torch's it came up."""
    guard, printed = Told(), list[Any]()
    monkeypatch.delenv("LOCKSTEP_DEBUG", raising=False)
    monkeypatch.setattr(process_guard, "_listening", {guard})
    monkeypatch.setitem(process_guard._before, process_guard._ignored, printed.append)
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # so that it is as before in the end
    monkeypatch.delattr(sys, "last_value")
    args: Any = SimpleNamespace(exc_value=KeyboardInterrupt(), err_msg="Exception ignored in atexit callback")
    process_guard._ignored(args)
    process_guard._end()
    assert printed == []
    assert capsys.readouterr().err == "lockstep: rank 3 was interrupted as it ended\n"
    assert (guard.words and guard.words.kind) == "KeyboardInterrupt"
