"""The command line without torch: what it understands, what it refuses, and with which words."""

from __future__ import annotations

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
        (["train", "-n", "0"], "at least one process"),
        (["train", "-n", "-1"], "at least one process"),
        (["train", "-n", "3", "--train.batch", "8"], "cannot be divided among 3 processes"),
        (["train", "-n", "1", "--data.path", "no/such"], "--data.path no/such does not exist"),
        (["train", "-n", "1", "--optim.lr", "inf"], "not a finite number"),
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


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["--version"]])
def test_help_and_version_are_no_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "lockstep" in capsys.readouterr().out
