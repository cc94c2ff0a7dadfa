"""`lockstep checkpoint` at work: what it prints, what it writes, which faults it names, and with which code it ends."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import cli
from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.cli.checkpoint_listing import size_text
from lockstep.errors import CheckpointError

COMMANDS = ("ls", "verify", "show", "export", "import")


def state(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    weight = torch.randn(30, 7)
    return {
        "model": {"wte.weight": weight, "head.weight": weight, "bias": torch.ones(7, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "step": step,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints."""
    with Checkpointer(tmp_path / "out" / "checkpoints", keep=None) as checkpointer:
        for step in (50, 100):
            checkpointer.save(step, state(step), shards={0: {"rng": torch.get_rng_state()}})
    return tmp_path / "out"


def folder_of(run: Path, step: int) -> Path:
    return next((run / "checkpoints").glob(f"step-{step:08}-*"))


def flip(path: Path, index: int) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 0x10
    path.write_bytes(data)


class Said:
    """What a command has printed, and its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object) -> None:
        capsys.readouterr()
        self.code = cli.main(["checkpoint", *map(str, words)])
        self.out, self.err = capsys.readouterr()
        self.lines = self.out.splitlines()


# ------------------------------------------------------------------ ls


def test_ls_has_one_line_for_each(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in (run, run / "checkpoints"):
        said = Said(capsys, "ls", directory)
        assert said.code == 0
        assert said.lines[0].split() == ["step", "written", "size", "ranks", "generation", "state"]
        assert [line.split()[0] for line in said.lines[1:]] == ["100", "50"]
        assert all(line.split()[-3:] == ["1", "1", "complete"] for line in said.lines[1:])
    assert Said(capsys, "ls", folder_of(run, 50)).lines[1].startswith("50 ")


def test_ls_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(Said(capsys, "ls", run, "--json", "--verify").out)
    assert [line["step"] for line in found] == [100, 50]
    folder = folder_of(run, 100)
    assert found[0]["path"] == str(folder)
    assert found[0]["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (found[0]["ranks"], found[0]["generation"], found[0]["state"], found[0]["why"]) == (1, 1, "good", "")


def test_ls_tells_damaged_and_unfinished_ones(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder_of(run, 50) / "rank-00000.safetensors", -1)
    data = folder_of(run, 100) / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    unfinished = run / "checkpoints" / ".generation-1" / "step-00000150-g1"
    unfinished.mkdir(parents=True)
    (run / "checkpoints" / "step-00000160-g1").mkdir()  # as where folders are not renamed
    said = Said(capsys, "ls", run)
    assert said.code == 1
    assert "damaged: " in said.lines[1]
    assert "were written" in said.lines[1]
    assert said.lines[2].endswith("complete"), "a flipped bit is seen with --verify"
    assert said.lines[3].split()[0] == "150"
    assert said.lines[3].split()[-3:] == ["?", "1", "unfinished"]
    assert said.lines[4].split()[0] == "160"
    assert said.lines[4].endswith("unfinished")
    said = Said(capsys, "ls", run, "--verify")
    assert all("damaged: " in line for line in said.lines[1:3])
    flip(folder_of(run, 100) / "manifest.json", 200)
    assert "manifest.json" in Said(capsys, "ls", run).lines[1]


def test_another_version_is_no_damage_and_is_not_passed_over(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder_of(run, 100) / "manifest.json"
    body = json.dumps({**json.loads(path.read_text())["manifest"], "more": 0}, separators=(",", ":"))
    digest = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f'{{"format":"lockstep-checkpoint-3","sha256":"{digest}","manifest":{body}}}\n')
    named = "is of the format lockstep-checkpoint-3, this version of lockstep reads lockstep-checkpoint-2: go on with"
    for command, first in (("ls", 1), ("verify", 0)):
        said = Said(capsys, command, run)
        assert said.code == 1
        assert named in said.lines[first]
        assert "unreadable: " in said.lines[first]
        assert "damaged" not in said.out
        assert len(said.lines) == first + 2
    assert named in Said(capsys, "show", run).err
    with Checkpointer(run / "checkpoints", keep=None) as checkpointer:
        with pytest.raises(CheckpointError, match=named):
            checkpointer.load()
        found = checkpointer.load(step=50)
        assert found is not None
        assert found.step == 50


# ------------------------------------------------------------------ verify


def test_verify_names_what_is_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "verify", run)
    assert said.code == 0
    assert said.lines[0].startswith(f"{folder_of(run, 100)}: good, 4 tensors, ")
    assert len(said.lines) == 2
    flip(folder_of(run, 50) / "rank-00000.safetensors", -1)
    said = Said(capsys, "verify", run)
    assert said.code == 1
    assert ": good" in said.lines[0]
    assert "rank-00000.safetensors is damaged" in said.lines[1]
    assert "shards/0/rng" in said.lines[1]
    assert Said(capsys, "verify", run, "--step", 100).code == 0
    assert Said(capsys, "verify", run, "--step", 50).code == 1
    said = Said(capsys, "verify", run, "--step", 75)
    assert said.code == 2
    assert "it has [50, 100]" in said.err


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_verify_sees_a_file_that_is_gone_or_a_link(run: Path, tmp_path: Path, name: str, capsys: Any) -> None:
    path = folder_of(run, 100) / name
    path.rename(tmp_path / "moved")
    said = Said(capsys, "verify", run)
    assert said.code == 1
    assert name in said.lines[0]
    path.symlink_to(tmp_path / "moved")
    said = Said(capsys, "verify", run)
    assert said.code == 1
    assert "link" in said.lines[0]


def test_progress_is_for_someone_who_looks(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.cli.checkpoint_listing._LARGE_BYTES", 0)
    assert Said(capsys, "verify", run).err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said = Said(capsys, "verify", run)
    assert "rank-00000.safetensors, 0 B of " in said.err
    assert said.err.endswith("\r\x1b[K")


# ------------------------------------------------------------------ show


def test_show_lists_tensors_and_values(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "show", run)
    assert said.code == 0
    assert said.lines[0].startswith(f"{folder_of(run, 100)}: step 100, generation 1, written by 1 rank")
    rows = {line.split()[0]: line.split()[1:] for line in said.lines[2:-1]}
    assert rows["model/wte.weight"] == ["float32", "[30,", "7]", "840", "B", "rank-00000"]
    assert rows["model/head.weight"] == ["is", "model/wte.weight"]
    assert rows["model/bias"][0] == "bfloat16"
    assert said.lines[-1].startswith("4 tensors, ")
    assert "3 values, seen with --values" in said.lines[-1]
    said = Said(capsys, "show", run, "--values", "--step", 50)
    assert [line.split() for line in said.lines if line.startswith("step ")] == [["step", "50"]]
    assert "optimizer/param_groups/0/params  [0]" in said.out


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("model", 3),
        ("model/", 3),
        ("model/*.weight", 2),
        ("*bias", 1),
        ("model/bias", 1),
        ("shards/0", 1),
        ("mode", None),
    ],
)
def test_show_chooses_by_pattern(run: Path, pattern: str, expected: int | None, capsys: Any) -> None:
    said = Said(capsys, "show", run, pattern)
    assert said.code == (1 if expected is None else 0)
    assert len(said.lines) - 3 == (-3 if expected is None else expected)
    assert said.err == "" or "'mode'" in said.err


def test_show_prints_no_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, {"\x1b[31mred": torch.ones(1), "[bold]é": "\x07", "x" * 300: torch.ones(2)})
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda answer=is_terminal: answer)
        said = Said(capsys, "show", tmp_path / "c", "--values")
        assert r"\x1b[31mred" in said.out
        assert "[bold]é" in said.out
        assert "\x1b[31m" not in said.out
        assert "\x07" not in said.out
        assert "".join(said.out.split()).count("x" * 300) == 1 or is_terminal


# ------------------------------------------------------------------ export, import


def test_export_and_import(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, "export", run, tmp_path / "hf", "--step", 50)
    assert said.code == 0
    assert said.out == f"{tmp_path / 'hf'}: 2 tensors of step 50, 1.02 kB in model.safetensors\n"
    lacks = "no tokenizer is in it, as the run has left none: copy tokenizer.json and tokenizer_config.json into"
    assert said.err == f"{lacks} {tmp_path / 'hf'}\n"
    held = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(held["wte.weight"], state(50)["model"]["wte.weight"])
    said = Said(capsys, "export", run, tmp_path / "all.pt", "--format", "torch", "--key", "")
    assert said.code == 0
    assert torch.load(tmp_path / "all.pt", weights_only=True)["step"] == 100
    (tmp_path / "config.json").write_text("{}")
    words = ("--shard-size", "500", "--config", tmp_path / "config.json")
    assert Said(capsys, "export", run, tmp_path / "parts", *words).code == 0
    assert len(list((tmp_path / "parts").iterdir())) == 4
    said = Said(capsys, "export", run, tmp_path / "o.safetensors", "--format", "safetensors", "--key", "optimizer")
    assert "optimizer/param_groups/0/lr" in said.err
    assert Said(capsys, "export", run, tmp_path / "hf").code == 1

    said = Said(capsys, "import", tmp_path / "all.pt", tmp_path / "new")
    assert said.code == 0
    assert Path(said.out.strip()).parent == tmp_path / "new"
    with Checkpointer(tmp_path / "new") as checkpointer:
        found = checkpointer.load(shards=[0])
    assert found is not None
    assert found.shards[0]["rng"].dtype == torch.uint8
    assert found.step == 100
    assert torch.equal(found.state["model"]["head.weight"], state(100)["model"]["head.weight"])
    assert Said(capsys, "import", tmp_path / "hf", tmp_path / "two", "--key", "model", "--step", 3).code == 0
    assert Said(capsys, "verify", tmp_path / "two").code == 0
    said = Said(capsys, "import", tmp_path / "hf", tmp_path / "two")
    assert said.code == 1
    assert "has checkpoints of a run" in said.err
    save_file({"a": torch.ones(1)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    said = Said(capsys, "import", tmp_path / "cut.safetensors", tmp_path / "three")
    assert said.code == 1
    assert "no whole safetensors file" in said.err
    assert not (tmp_path / "three").exists()


# ------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["lss"], "did you mean `lockstep checkpoint ls`?"),
        (["verfy", "x"], "did you mean `lockstep checkpoint verify`?"),
        (["ls", "x", "--verfy"], "did you mean --verify?"),
        (["show", "x", "--value"], "did you mean --values?"),
        (["export", "x", "y", "--shard_size", "3"], "did you mean --shard-size?"),
        (["ls"], "missing: DIR"),
        (["export", "x"], "missing: OUT"),
        (["ls", "x", "y"], "unexpected 'y'"),
        (["show", "x", "--step", "last"], "'last' is no number of a step"),
        (["show", "x", "--step", "-5"], "--step"),
        (["export", "x", "y", "--format", "onnx"], "not 'onnx'"),
        (["export", "x", "y", "--shard-size", "5 apples"], "no size like 5GB"),
        (["export", "x", "y", "--shard-size", "0"], "no size like 5GB"),
        (["ls", "no/such"], "no/such does not exist"),
        (["verify", "."], "has no checkpoints"),
        (["show", "no/such"], "does not exist"),
        *[([word, "file"], "file is no folder") for word in ("ls", "verify", "show")],
        (["import", "no/such", "new"], "does not exist"),
    ],
)
def test_impossible_request_is_one_sentence_and_code_2(
    words: list[str], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    said = Said(capsys, *words)
    assert said.code == 2
    assert said.out == ""
    assert answer in said.err
    assert said.err.startswith("lockstep: ")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = Said(capsys, *words)
    assert said.code == 0
    assert all(f"  {name} " in said.out for name in COMMANDS)


def test_explaining_and_refusing_load_no_torch() -> None:
    program = (
        "import sys\nfrom lockstep.cli import main\nfrom contextlib import suppress\n"
        f"for name in {COMMANDS}:\n"
        "    with suppress(SystemExit):\n        main(['checkpoint', name, '--help'])\n"
        "    assert main(['checkpoint', name, '--nonsense', 'a', 'b', 'c']) == 2\n"
        "heavy = {'torch', 'numpy', 'safetensors', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"usage: lockstep checkpoint {name}" in done.stdout for name in COMMANDS)


def test_sizes_are_for_people() -> None:
    sizes = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        1234: "1.23 kB",
        999_999: "1 MB",
        10**9: "1 GB",
        3 * 10**15: "3e+03 TB",
    }
    assert {count: size_text(count) for count in sizes} == sizes
