"""The command line without torch: what it understands, what it refuses, and with which words."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.cli.train import parse_train
from lockstep.errors import ConfigError
from lockstep.recipes import gpt2


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "LOCKSTEP_AGENT_PID"):
        monkeypatch.delenv(name, raising=False)


def test_default_recipe_options_and_sections() -> None:
    command = parse_train(["-n", "3", "--optim.lr", "0.5", "--data.path", "x", "--resume", "auto", "--seed", "9"])
    assert (command.processes, command.resume) == ("3", "auto")
    assert (command.run.optim.lr, command.run.data.path, command.run.seed) == (0.5, Path("x"), 9)
    assert command.run.model == gpt2.tiny().model


@pytest.mark.parametrize("name", ["gpt2-124m", "gpt2_124m"])
def test_recipe_by_name_keeps_its_other_values(name: str) -> None:
    command = parse_train([name, "--model.layers", "3", "--train.log-every", "7", "--train.microbatch", "None"])
    assert (command.run.model.layers, command.run.model.width) == (3, 768)
    assert (command.run.train.log_every, command.run.train.microbatch) == (7, None)
    assert parse_train(["gpt2-124m"]).run == gpt2.gpt2_124m()


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--optim.lrr", "3"], "did you mean --optim.lr?"),
        (["--lr", "3"], "did you mean --optim.lr?"),
        (["--trian.steps", "3"], "did you mean --train.steps?"),
        (["--model.layer", "3"], "did you mean --model.layers?"),
        (["--process", "3"], "did you mean --processes?"),
        (["--wacth"], "did you mean --watch?"),
        (["gpt2-tny"], "did you mean gpt2-tiny?"),
        (["gpt2-125m"], "did you mean gpt2-124m?"),
        (["gpt2-tiny", "more"], "the recipe comes first"),
    ],
)
def test_unknown_word_is_answered_with_the_nearest_name(words: list[str], answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_train(words)
    assert answer in str(caught.value)


@pytest.mark.parametrize("words", [["--optim.lr", "fast"], ["--data.tokens", "words"], ["--train.steps"]])
def test_value_of_the_wrong_type_ends_with_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_train(words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["tran"], "unknown command 'tran'"),
        (["zzz"], "unknown command 'zzz': `lockstep --help` lists all"),
        (["help"], "did you mean `lockstep --help`?"),
        (["--versio"], "did you mean `lockstep --version`?"),
        (["train", "-n", "0"], "a number of processes from 1"),
        (["train", "-n", "-1"], "a number of processes from 1"),
        (["train", "-n", "3", "--train.batch", "8"], "cannot be divided among 3 processes"),
        (["train", "-n", "1", "--data.path", "no/such"], "--data.path no/such does not exist"),
        (["train", "-n", "1", "--optim.lr", "inf"], "not a finite number"),
        (["train", "-n", "9999"], "so many would only kill it"),
        (["run"], "run what? `lockstep run -n 2 train.py`"),
        (["watch", "--prt", "3"], "unknown option --prt: did you mean --port? `lockstep watch --help` explains"),
        (["watch", "--no-termnal"], "did you mean --no-terminal?"),
        (["watch", "--xq"], "unknown option --xq. `lockstep watch --help` explains"),
        (["train", "llama4"], "unknown recipe 'llama4'"),
        (["demo", "hang"], "there is no demo 'hang': `lockstep demo` lists all"),
        (["demo", "skip"], "did you mean `lockstep demo skipped_"),
        (["profile", "--peak_tflop=3"], "did you mean --peak-tflops?"),
        (["report", "runs/one", "runs/two"], "unexpected 'runs/two'"),
        (["samples", "--fnd", "3"], "did you mean --find?"),
        (["samples"], "missing: RUN. "),
        (["samples", "runs/one", "x"], "STEP takes a whole number, not 'x'"),
        (["profile", "--peak_tflops", "x"], "--peak-tflops takes a number, not 'x'"),
        (["watch", "--port"], "--port needs a value"),
        (["learn", "all_reduce", "broadcast"], "unexpected 'broadcast'"),
        (["learn", "--source"], "lockstep learn NAME --source"),
        (["demo", "--source"], "lockstep demo NAME --source"),
        (["demo", "killed", "--secnds", "3"], "did you mean --seconds?"),
        (["puzzle", "--hint"], "of which puzzle? `lockstep puzzle 1 --hint`"),
        (["puzzle", "x"], "takes a whole number, not 'x'"),
    ],
)
def test_impossible_request_is_one_sentence_and_code_2(
    words: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert answer in said.err
    assert said.err.startswith("lockstep: ")
    assert said.err.count("\n") == 1


def test_training_refuses_a_checkpoint_that_is_not_there_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "-n", "2", "--resume", "foo"]) == 2
    assert capsys.readouterr().err.startswith("lockstep: --resume foo does not exist; `--resume auto` finds")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["LOCKSTEP_GUARD=onn", "LOCKSTEP_HANG_S=-1", "LOCKSTEP_REPLICA_EVERY=x",
                                      "LOCKSTEP_PROFILE=10"])  # fmt: skip
def test_training_refuses_what_a_variable_cannot_be_before_it_starts(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(*variable.split("="))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "-n", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(("lockstep: LOCKSTEP_", "lockstep: --profile 10"))
    assert not list(tmp_path.iterdir())


def test_under_a_launcher_n_must_be_left_out_and_only_rank_0_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", "-n", "4"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == lines
        assert "leave -n out" in said or rank == "1"


def test_a_rank_in_the_environment_of_a_shell_silences_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "5")
    assert cli.main(["demo", "kiled"]) == 2
    assert "did you mean `lockstep demo killed`" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "name"), [(["puzzle", "1"], "puzzles"), (["learn", "send_receive"], "runs")])
def test_a_place_that_cannot_be_written_is_named(
    words: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("a file where a folder has to be")
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"lockstep: {name}")
    assert said.count("\n") == 1


def test_the_source_of_a_program_that_is_no_text_is_shown_as_far_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_bytes(b"x = '\xe4'\n")
    assert cli.main(["learn", str(path), "--source"]) == 0
    assert capsys.readouterr().out == f"# {path}\nx = '\ufffd'\n"


def test_two_runs_do_not_train_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        assert cli.main(["train", "--out", str(tmp_path)]) == 2
    finally:
        os.close(held)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"lockstep: another run trains in {tmp_path}: let it end, or choose another --out\n"


def test_a_letter_that_the_terminal_lacks_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, terminal = tmp_path / "mine.py", io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    path.write_text("x = '\ufffd'\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["learn", str(path), "--source"]) == 0
    terminal.seek(0)
    assert terminal.read() == f"# {path}\nx = '\\ufffd'\n"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"]])
def test_help_and_version_are_no_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "lockstep" in capsys.readouterr().out


@pytest.mark.parametrize("unwanted", ["1", ""])
def test_help_of_training_has_colours_unless_the_user_says_so(unwanted: str) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": unwanted}
    with subprocess.Popen([sys.executable, "-m", "lockstep", "train", "--help"], stdout=theirs, env=environ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # its end
            while chunk := os.read(ours, 65536):
                said += chunk
    os.close(ours)
    assert process.returncode == 0
    assert b"--optim.lr" in said
    assert (b"\x1b[" in said) == (not unwanted)


@pytest.mark.parametrize("is_stdout", [True, False])
def test_broken_pipe_is_forgiven_where_it_is_standard_output(is_stdout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(name: str, words: Sequence[str]) -> int:
        if is_stdout:
            os.close(reading)
            print("somebody", flush=True)
        raise BrokenPipeError("of another file")

    monkeypatch.setattr(cli, "_command", breaks)
    reading, writing = os.pipe()
    with open(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        if is_stdout:
            assert cli.main(["demo"]) == 1
        else:
            with pytest.raises(BrokenPipeError, match="of another file"):
                cli.main(["demo"])
            os.close(reading)
