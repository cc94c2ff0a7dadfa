"""What a rank notes of a run beside its steps: written, thinned out, read again, and never a secret."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from profiled_worlds import read_rank

import lockstep
from lockstep.errors import ConfigError
from lockstep.observe.profile.notes import Later, log_values, note, take_notes, takes_notes
from lockstep.observe.profile.phases import OTHER, Step, worked_out
from lockstep.observe.profile.run_facts import ORIGINS, commit_of, run_facts, variables_of, without_secrets
from lockstep.observe.profile.run_record import file_of, steps_per_line
from lockstep.observe.profile.step_clock import StepClock
from lockstep.observe.profile.writer import RunWriter
from whole_records import read_run

KINDS: Mapping[str, dict[str, Any]] = {
    "facts": {"command": ["train.py"], "variables": {"RANK": ["0", "launcher"]}},
    "values": {"step": 3, "loss": 0.5, "lr": 1},
    "layout": {"step": 1, "units": [["weight", 6, "float32", 24, 12]], "memory": {"parameters": 12}},
    "coverage": {"epoch": 0, "samples": 5, "bins": [2, 3]},
    "replicas": {"step": 2, "equal": False, "digest": "ab"},
    "finding": {"kind": "hang", "culprits": [1], "text": "rank 1\nis late"},
}


def writer_in(folder: Path, attempt: str = "a/0") -> RunWriter:
    return RunWriter(folder, StepClock(), rank=0, world_size=1, attempt=attempt)


def end_step(writer: RunWriter, step: int) -> None:
    writer.clock.steps.append(worked_out(Step(step, 10**18, 10**18 + 6, 0, 0, (0, 0), [], [(OTHER, 10**18)])))


def test_every_kind_is_read_as_it_was_noted_wherever_the_file_is_cut(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    for kind, fields in KINDS.items():
        writer.note(kind, **fields)
        end_step(writer, len(writer.clock.steps) + 1)
    writer.look()
    writer.close()
    text = file_of(tmp_path, 0).read_text()
    notes = read_run(tmp_path).ranks[0].notes
    assert [(one.kind, dict(one.fields)) for one in notes] == list(KINDS.items())
    assert all(0 <= one.at_us < 60_000_000 and one.attempt == "a/0" for one in notes)
    for end in range(text.index("\n") + 1, len(text)):
        record = read_rank(text[:end].splitlines(True))
        assert record is not None
        assert record.notes == notes[: len(record.notes)]
        again = read_rank((text[:end] + text).splitlines(True))
        assert again is not None
        assert again.notes[-len(notes) :] == notes


@pytest.mark.parametrize("line", ['{"unknown":1,"at_us":2}', '{"values":1,"loss":2}', "{}", '{"facts":{}}'])
def test_line_that_is_no_note_is_refused(tmp_path: Path, line: str) -> None:
    writer = writer_in(tmp_path)
    writer.note("values", step=1, loss=1.0)
    writer.close()
    with pytest.raises(ConfigError, match="line 3"):
        read_rank([*file_of(tmp_path, 0).read_text().splitlines(True), line + "\n"])


def test_later_attempt_voids_the_notes_of_steps_that_it_does_again(tmp_path: Path) -> None:
    for attempt, steps in (("a/0", range(1, 8)), ("a/1", range(5, 7)), ("a/2", range(6, 9))):
        writer = writer_in(tmp_path, attempt)
        writer.note("facts", attempt=attempt)
        for step in steps:
            writer.note("values", step=step, loss=float(step))
            writer.note("replicas", step=step, equal=True)
        writer.note("coverage", epoch=0, samples=len(steps))
        writer.close()
    notes = read_run(tmp_path).ranks[0].notes
    for kind in ("values", "replicas"):
        of_kind = [(one.step, one.attempt) for one in notes if one.kind == kind]
        assert of_kind == [*((s, "a/0") for s in range(1, 5)), (5, "a/1"), *((s, "a/2") for s in range(6, 9))]
    assert [one.fields["attempt"] for one in notes if one.kind == "facts"] == ["a/0", "a/1", "a/2"]
    assert [one.fields["samples"] for one in notes if one.kind == "coverage"] == [7, 2, 3]


def values_of(folder: Path, name: str) -> dict[int, float]:
    notes = read_run(folder).ranks[0].notes
    return {one.fields["step"]: one.fields[name] for one in notes if one.kind == "values" and name in one.fields}


def test_long_run_keeps_as_many_values_as_lines_and_all_of_what_comes_seldom(tmp_path: Path) -> None:
    writer, steps = writer_in(tmp_path), 10_000
    for step in range(1, steps + 1):
        writer.note("values", step=step, loss=1 / step, lr=1e-3)
        if step % 50 == 7:
            writer.note("values", step=step, accuracy=step / steps)
        if step % 777 == 0:
            writer.look()
    writer.close()
    kept = list(values_of(tmp_path, "loss"))
    assert kept[:1023] == list(range(1, 1024))
    assert all(later - step <= steps_per_line(later) for step, later in itertools.pairwise(kept))
    assert kept[-1] > steps - steps_per_line(steps)
    assert list(values_of(tmp_path, "accuracy")) == list(range(7, steps, 50))
    assert file_of(tmp_path, 0).stat().st_size < 200 << 10


def test_value_that_is_not_known_yet_is_waited_for_and_second_one_of_a_step_replaces_it(tmp_path: Path) -> None:
    writer, there = writer_in(tmp_path), [False]
    writer.note("values", lambda: {"loss": 0.123456789, "other": 1.0} if there[0] else None, step=1, loss=None, lr=0.5)
    writer.look()
    assert not file_of(tmp_path, 0).exists()
    there[0] = True
    writer.look()
    writer.note("values", step=1, loss=2.0)
    writer.note("values", step=2)  # nothing
    writer.note("values", dict, step=3, loss=None)
    writer.close()
    written = [dict(one.fields) for one in read_run(tmp_path).ranks[0].notes]
    assert written == [{"step": 1, "loss": 0.1234568, "lr": 0.5}, {"step": 1, "loss": 2.0}, {"step": 3}]


class Taken:
    def __init__(self) -> None:
        self.taken: list[Any] = []

    def note(self, kind: str, later: Later | None = None, /, **fields: Any) -> None:
        self.taken.append((kind, fields))

    def log(self, step: int | None, values: Mapping[str, Any]) -> None:
        self.taken.append((step, values))


def test_notes_go_to_the_record_of_their_thread_else_to_that_of_the_program() -> None:
    mine, threads = Taken(), Taken()

    def rank() -> None:
        note("replicas", step=1)
        end = take_notes(threads)
        note("replicas", step=2)
        end()
        end()
        log_values(3, {"loss": 1.0})

    note("replicas", step=0)
    assert not takes_notes()
    end = take_notes(mine)
    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    end()
    note("replicas", step=4)
    assert mine.taken == [("replicas", {"step": 1}), (3, {"loss": 1.0})]
    assert threads.taken == [("replicas", {"step": 2})]


def test_log_takes_numbers_of_any_make_and_refuses_the_rest() -> None:
    import numpy as np
    import torch

    mine = Taken()
    end = take_notes(mine)
    lockstep.log(7, loss=torch.tensor([[0.5]], requires_grad=True), count=3, mean=np.float32(0.25), is_good=True)
    lockstep.log(loss=float("nan"))
    for wrong in (torch.zeros(2), "much", None, [1]):
        with pytest.raises(ConfigError, match=r"lockstep.log\(loss=...\)"):
            lockstep.log(loss=wrong)
    with pytest.raises(ConfigError, match="at_us"):
        lockstep.log(at_us=1)
    for no_step in ({"loss": 0.5}, 3.5, "7"):  # as other loggers are called; it ended the log at the program's exit
        with pytest.raises(
            ConfigError, match=r"that is no step; its numbers have names: lockstep.log\(step, loss=loss\)"
        ):
            lockstep.log(no_step)  # type: ignore[arg-type]
    lockstep.log(np.int64(8), loss=1)  # type: ignore[arg-type]
    end()
    assert mine.taken[0] == (7, {"loss": 0.5, "count": 3.0, "mean": 0.25, "is_good": 1.0})
    assert mine.taken[1][0] is None
    assert mine.taken[2:] == [(8, {"loss": 1.0})]


# ------------------------------------------------------------------ facts


def test_facts_have_no_secrets_and_say_where_variables_came_from(tmp_path: Path) -> None:
    environ = {
        "RANK": "1",
        "LOCKSTEP_GUARD": "on",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "17",
        "HOME": "/root",
        "HF_TOKEN": "hf_x",
        "TORCH_API_KEY": "sk-x",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_EMPTY": "",
        "TORCHELASTIC_RUN_ID": "x",
        ORIGINS: json.dumps({"LOCKSTEP_GUARD": "--guard"}),
    }
    config = {"lr": 0.1, "wandb_api_key": "sk-x"}
    command = ["train.py", "--api-key", "sk-x", "--hub_token=sk-x", "--lr", "3", "--keys"]
    facts = run_facts(environ, command, config=config, data="d1")
    assert "sk-x" not in json.dumps(facts)
    assert "hf_x" not in json.dumps(facts)
    assert facts["variables"] == {
        "HF_TOKEN": ["(not written down)", "environment"],
        "LOCKSTEP_GUARD": ["on", "--guard"],
        "NCCL_DEBUG": ["INFO", "environment"],
        "RANK": ["1", "launcher"],
        "SLURM_JOB_ID": ["17", "Slurm"],
        "TOKENIZERS_PARALLELISM": ["false", "environment"],
        "TORCHELASTIC_RUN_ID": ["x", "launcher"],
        "TORCH_API_KEY": ["(not written down)", "environment"],
    }
    assert facts["command"] == [
        *("train.py", "--api-key", "(not written down)", "--hub_token=(not written down)", "--lr", "3", "--keys")
    ]
    assert (facts["config"]["lr"], facts["data"], len(facts["config_sha256"])) == (0.1, "d1", 64)
    other = run_facts(environ, command, config={**config, "lr": 0.2})
    assert other["config_sha256"] != facts["config_sha256"]


def test_variables_of_torchrun_are_told_from_the_users_own() -> None:
    environ = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"}
    assert variables_of(environ)["WORLD_SIZE"][1] == "environment"
    assert variables_of({**environ, "TORCHELASTIC_RUN_ID": "x"})["WORLD_SIZE"][1] == "torchrun"
    assert variables_of({**environ, "TORCHELASTIC_RUN_ID": "x"})["OMP_NUM_THREADS"][1] == "environment"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], []),
        (["--token"], ["--token"]),
        (["--token", "--lr"], ["--token", "--lr"]),
        (["PASSWORD=x", "tokens", "y"], ["PASSWORD=(not written down)", "tokens", "y"]),
        (["-key", "x", "x"], ["-key", "(not written down)", "x"]),
        (
            ["--max_tokens", "5", "--tokenizer=x", "--TOKENS", "7"],
            ["--max_tokens", "5", "--tokenizer=x", "--TOKENS", "7"],
        ),
        (
            ["--tokens_key", "5", "--tokensecret=x"],
            ["--tokens_key", "(not written down)", "--tokensecret=(not written down)"],
        ),
    ],
)
def test_command_without_secrets(words: list[str], told: list[str]) -> None:
    assert without_secrets(words) == told


def test_commit_is_found_as_git_keeps_it(tmp_path: Path) -> None:
    git, inside = tmp_path / "repo" / ".git", tmp_path / "repo" / "a" / "b"
    inside.mkdir(parents=True)
    assert commit_of(inside) in ("", commit_of(tmp_path))  # what is above is somebody else's
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert commit_of(inside) == ""  # no commit yet
    (git / "packed-refs").write_text("# pack-refs\nc1 refs/heads/other\nc2 refs/heads/main\n")
    assert commit_of(inside) == "c2"
    (git / "refs" / "heads" / "main").write_text("c3\n")
    assert commit_of(inside) == "c3"
    tree = git / "worktrees" / "w"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/other\n")
    (tree / "commondir").write_text("../..\n")
    work = tmp_path / "work"
    work.mkdir()
    (work / ".git").write_text(f"gitdir: {tree}\n")
    assert commit_of(work) == "c1"
    (git / "HEAD").write_text("c4\n")
    assert commit_of(inside) == "c4"
