"""Which of several ended processes was the cause, and how that is said."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from lockstep.errors import ConfigError
from lockstep.launch.ended import Ended, describe, first_failure, signal_name, with_aborts
from lockstep.launch.worker import (
    ERROR_FILE,
    INTERRUPTED,
    REQUEUE,
    Failure,
    describe_failure,
    read_failure,
    report_failure,
)
from lockstep.observe.status import LastWords
from lockstep.train.config import check


def failure(rank: int, time_s: float = 1.0, **fields: Any) -> Failure:
    values: dict[str, Any] = {"kind": "ValueError", "message": "bad", "exit_code": 1, "is_expected": False}
    return Failure(rank=rank, trace="", time_s=time_s, **{**values, "is_consequence": False, **fields})


def ended(
    rank: int, exit_code: int, said: Failure | None = None, was_ended: bool = False, last: str = "", **fields: Any
) -> Ended:
    return Ended(rank, 100 + rank, exit_code, was_ended, said, last, **fields)


def words(kind: str = "ValueError", message: str = "label 7", is_consequence: bool = False) -> LastWords:
    return LastWords(kind, message, "train.py:31", is_consequence)


@pytest.mark.parametrize(
    ("processes", "cause"),
    [
        ([ended(0, 0), ended(1, 0)], None),
        ([ended(0, INTERRUPTED), ended(1, INTERRUPTED)], None),
        ([ended(0, REQUEUE), ended(1, REQUEUE)], None),
        ([ended(0, -signal.SIGTERM), ended(1, -signal.SIGUSR1)], None),
        ([ended(0, -signal.SIGTERM), ended(1, 1, failure(1, is_consequence=True))], 1),
        ([ended(0, -signal.SIGUSR2, told=signal.SIGUSR2), ended(1, -signal.SIGUSR2)], 1),
        ([ended(0, -signal.SIGTERM, was_ended=True, at_s=1.0), ended(1, 1, failure(1, 9.0), at_s=0.5)], 1),
        ([ended(0, 1, failure(0, 1.0, is_consequence=True)), ended(1, -signal.SIGKILL)], 1),
        ([ended(0, 1, failure(0, 1.0, is_consequence=True)), ended(1, 1, failure(1, 2.0))], 1),
        ([ended(0, 1, failure(0, 2.0)), ended(1, 1, failure(1, 1.0))], 1),
        ([ended(0, -signal.SIGKILL, was_ended=True), ended(1, 1, failure(1, 5.0))], 1),
        ([ended(0, 0), ended(1, 3)], 1),
        ([ended(0, 1, words=words(is_consequence=True)), ended(1, 1, failure(1, 9.0))], 1),
        ([ended(0, 1, words=words(is_consequence=True), at_s=1.0), ended(1, 1, words=words(), at_s=2.0)], 1),
        ([ended(0, 1, failure(0, is_consequence=True)), ended(1, -9, was_ended=True, words=words())], 1),
        ([ended(0, 1, failure(0, is_consequence=True)), ended(1, -9, None, True, words=words("SystemExit"))], 0),
        ([ended(0, 0), ended(1, -9, was_ended=True, words=words())], None),
        ([ended(0, -signal.SIGABRT, at_s=7.5), ended(1, -signal.SIGKILL, at_s=7.4)], 1),
        ([ended(0, -signal.SIGKILL, at_s=7.5), ended(1, -signal.SIGKILL, at_s=7.5)], 0),
        ([ended(0, -signal.SIGABRT, at_s=1.0), ended(1, -signal.SIGKILL, stuck="stopped", at_s=2.0)], 1),
        ([ended(0, 1, failure(0, 1.0)), ended(1, -signal.SIGKILL, was_ended=True, stuck="no progress for 5 s")], 1),
        ([ended(0, -9), ended(1, 1, failure(1, 1.0, is_consequence=True), stuck="no progress for 5 s")], 0),
        ([ended(0, 1, failure(0, 9.0, is_consequence=True)), ended(1, 1, failure(1, 8.0, is_consequence=True))], 1),
    ],
)
def test_the_cause_is_found(processes: list[Ended], cause: int | None) -> None:
    found = first_failure(processes)
    assert (None if found is None else found.rank) == cause


@pytest.mark.parametrize(
    ("process", "was_stopped"),
    [
        (ended(0, 0), False),
        (ended(0, 1), False),
        (ended(0, -signal.SIGKILL), False),
        *((ended(0, code), True) for code in (REQUEUE, INTERRUPTED, -1, -2, -10, -15)),
        (ended(0, -signal.SIGUSR2), False),
        (ended(0, -signal.SIGUSR2, told=signal.SIGUSR2), True),
        (ended(0, -signal.SIGUSR2, told=signal.SIGTERM), False),
        (ended(0, 1, told=signal.SIGINT), True),
        (ended(0, 1, failure(0), told=signal.SIGINT), False),
        (ended(0, -signal.SIGTERM, was_ended=True), False),
        (ended(0, INTERRUPTED, was_ended=True), False),
        (ended(0, -signal.SIGTERM, stuck="stopped"), False),
    ],
)
def test_who_was_asked_to_stop(process: Ended, was_stopped: bool) -> None:
    assert process.was_stopped == was_stopped
    assert not (process.failed and was_stopped)


def test_how_a_process_ended_is_said() -> None:
    assert describe(ended(1, -9)) == "was killed by SIGKILL"
    assert describe(ended(1, -11, last="oh no")) == "was killed by SIGSEGV; its last words: oh no"
    assert describe(ended(1, 3)) == "ended with exit code 3"
    raised = "ended with exit code 3, after it raised at train.py:31: ValueError: label 7"
    assert describe(ended(1, 3, words=words(), last="giving up")) == raised
    slow = ended(1, -9, was_ended=True, words=words())
    assert describe(slow) == "was ended by its launcher, after it raised at train.py:31: ValueError: label 7"
    by_hand = ended(1, 3, words=words("SystemExit", "3"))
    assert describe(by_hand) == "ended with exit code 3, by sys.exit at train.py:31"
    assert describe(ended(1, 3, words=LastWords("", "", "train.py:31"))) == "ended with exit code 3"
    assert describe(ended(1, 1, failure(1), words=words())) == "failed: ValueError: bad"
    assert describe(ended(1, 1, failure(1, is_expected=True))) == "gave up: bad", "the end of a sentence"
    assert describe(ended(1, 1, failure(1, where="train.py:31"))) == "failed at train.py:31: ValueError: bad"
    assert describe(ended(1, -9, out_of_memory=True)) == "was killed by the kernel: out of memory"
    drift = failure(1, kind="ReplicaDrift", message="REPLICAS differ.\n  'weight' is ..")
    assert describe(ended(1, 1, drift)) == "failed: ReplicaDrift: REPLICAS differ. (all of it is above)"
    text = "RAISED in step 4.  Culprit: rank 0\n  rank 0 raised at train.py:31:\n    ValueError: label 7\n  rank 1 .."
    seen = failure(1, kind="PeerFailed", message=text, is_consequence=True)
    said = "RAISED in step 4.  Culprit: rank 0: rank 0 raised at train.py:31: ValueError: label 7 (all of it is above)"
    assert describe(ended(1, 1, seen)) == f"failed: PeerFailed: {said}", "all of it may be on another terminal"
    stopped = ended(1, -9, was_ended=True, stuck="stopped (SIGSTOP) for 10 s")
    assert describe(stopped) == "was ended by its launcher: stopped (SIGSTOP) for 10 s"
    assert describe(ended(1, -40)) == "was killed by signal 40"
    assert [signal_name(number) for number in (9, 10, 15)] == ["SIGKILL", "SIGUSR1", "SIGTERM"]


def test_report_travels_by_file_and_torchrun_finds_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    assert read_failure(path) is None
    try:
        raise KeyError("lost")
    except KeyError as error:
        said = describe_failure(error, 3, 1, is_expected=False, is_consequence=False)
    report_failure(said, {ERROR_FILE: str(path), "LOCKSTEP_AGENT_PID": "1"})
    assert read_failure(path) == said
    assert "test_report_travels" in said.trace
    assert json.loads(path.read_text())["message"]["message"] == "KeyError: 'lost'"
    assert capsys.readouterr().err == ""  # the agent says it once for all ranks
    report_failure(said, {"WORLD_SIZE": "4"})
    assert capsys.readouterr().err == f"{said.trace}lockstep: rank 3: 'lost'\n"


# ------------------------------------------------------------------ where in the user's code


def raised_by(action: Callable[[], object]) -> Failure:
    try:
        action()
    except Exception as error:  # noqa: BLE001 (any of them)
        return describe_failure(error, 0, 1, is_expected=False, is_consequence=False)
    raise AssertionError("it did not raise")


def line_of(text: str) -> str:
    """This file and the number of its only line with `text`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.strip() == text)
    return f"{Path(__file__)}:{number}"


def test_place_of_a_failure_is_the_users_own_innermost_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # elsewhere, so paths are whole

    def in_standard_library() -> None:
        json.loads("{")

    def in_lockstep() -> None:
        check(None, 0)  # pyright: ignore[reportArgumentType]

    assert raised_by(in_standard_library).where == line_of('json.loads("{")')
    assert raised_by(in_lockstep).where == line_of("check(None, 0)  # pyright: ignore[reportArgumentType]")
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    assert raised_by(lambda: compile(Path("broken.py").read_text(), "broken.py", "exec")).where == "broken.py:2"
    unnamed = compile("1 / 0", "<made>", "exec")
    said = raised_by(lambda: exec(unnamed))
    assert said.where == line_of("said = raised_by(lambda: exec(unnamed))")
    bare = describe_failure(ConfigError("no frame at all"), 0, 1, is_expected=True, is_consequence=False)
    assert bare.where == ""


def test_path_within_the_current_folder_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part").mkdir()
    script = tmp_path / "part" / "train.py"
    code = compile("def f():\n    raise OSError('gone')\nf()\n", str(script), "exec")
    assert raised_by(lambda: exec(code)).where == "part/train.py:2"


def test_what_torchs_record_leaves_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    try:
        raise OSError("the disk: is gone")
    except OSError as error:
        ErrorHandler().record_exception(error)
    said = read_failure(path, rank=3)
    assert said is not None
    assert (said.rank, said.kind, said.message, said.exit_code) == (3, "OSError", "the disk: is gone", 1)
    assert (said.is_expected, said.is_consequence) == (False, False)
    assert said.where.endswith(line_of('raise OSError("the disk: is gone")').rpartition("/")[2])
    assert said.time_s > 1e9


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"message": "Signal 11 (SIGSEGV) received by PID 7"}', "Signal 11 (SIGSEGV) received by PID 7", None),
        ('{"message": {"message": "KeyError: 1", "extraInfo": {}}}', "KeyError", "1"),
    ],
)
def test_other_forms_of_torchs_error_file(tmp_path: Path, text: str, kind: str, message: str | None) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    said = read_failure(path)
    assert said is not None
    assert (said.kind, said.message) == (kind, message or kind)


def test_report_that_was_cut_off_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    whole = json.dumps({"message": {"message": "KeyError: 1", "extraInfo": {"py_callstack": "x"}}})
    for length in range(len(whole)):
        path.write_text(whole[:length])
        assert read_failure(path) is None


@pytest.mark.parametrize(
    "message", ["x" * 3_000_000, "\n".join(f"line {n}" for n in range(3000))], ids=["wide", "long"]
)
def test_of_a_message_that_nobody_reads_to_its_end_the_beginning_is_said(message: str) -> None:
    """The rank has printed it: it need not stand there twice. What lockstep raises on purpose is said here alone."""
    said = describe(ended(1, 1, failure(1, message=message)))
    assert said.startswith(f"failed: ValueError: {message[:20]}")
    assert said.endswith(" ... (all of it is in that rank's output)")
    assert len(said) < 2000
    assert said.count("\n") < 20
    assert describe(ended(1, 1, failure(1, message=message, is_expected=True))) == f"gave up: {message}"
    killed = describe(ended(1, -9, last=message.replace("\n", " ")))
    assert killed.startswith("was killed by SIGKILL; its last words: ")
    assert len(killed) < 2000


_MISMATCH = "MISMATCH in step 4, group WORLD.  Culprits: ranks 0,1\n  first difference: .."


@pytest.mark.parametrize("aborted_at_s", [1.0, 9.0])
def test_an_abort_in_cpp_is_what_became_of_the_mismatch_that_another_rank_tells_of(aborted_at_s: float) -> None:
    said = failure(0, 5.0, kind="CollectiveMismatch", message=_MISMATCH, where="train.py:31", is_consequence=True)
    aborted = ended(1, -signal.SIGABRT, at_s=aborted_at_s)
    processes = with_aborts([ended(0, 1, said), aborted])
    first = first_failure(processes)
    assert first is not None
    head = _MISMATCH.partition("\n")[0]
    text = f"failed at train.py:31: CollectiveMismatch: {head} (all of it is above)"
    assert (first.rank, describe(first), processes[1].fate) == (0, text, "was aborted for it")
    abort = "was killed by SIGABRT, after it raised: C++ error: torch's transport gave up on that mismatch"
    assert describe(processes[1]) == abort


def test_an_abort_in_cpp_is_told_with_the_mismatch_that_its_launcher_has_found() -> None:
    lost = failure(2, kind="PeerLost", is_consequence=True)
    processes = [ended(0, -9, was_ended=True), ended(1, -signal.SIGABRT), ended(2, 1, lost)]
    told = with_aborts(processes, _MISMATCH)
    assert "on that mismatch" in describe(told[1])
    assert [told[0], told[2]] == [processes[0], processes[2]]


def test_an_abort_is_one_where_nobody_tells_of_a_mismatch() -> None:
    lost = failure(0, kind="PeerLost", is_consequence=True)
    processes = [ended(0, 1, lost), ended(1, -signal.SIGABRT)]
    first = first_failure(with_aborts(processes))
    assert first is not None
    assert (first.rank, describe(first)) == (1, "was killed by SIGABRT")


def test_who_was_killed_after_it_had_raised_is_quoted() -> None:
    at_exit = ended(1, -signal.SIGSEGV, words=words())
    assert describe(at_exit) == "was killed by SIGSEGV, after it raised at train.py:31: ValueError: label 7"
