"""The directory of a run is made ready again and again, killed at every change, and nothing is mixed up."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.errors import CheckpointMissing, ConfigError
from lockstep.train.checkpoints import Origin, find_origin
from lockstep.train.config import RunConfig
from lockstep.train.run_dir import Launch, Start, _begin_at, _prepare, goes_on, make_ready, token_cache

OLD = {
    "checkpoints/step-00000007-g1/manifest.json": "manifest",
    "config.json": "old config",
    "tokenizer.json": "old tokenizer",
    "metrics.jsonl": "old metrics",
    "samples.jsonl": "old samples",
    "sample.txt": "old sample",
    ".launch": "old launch\n",
}
FRESH = Start(None, False, {}, ())


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Before the change number `number` of the file system."""
    left = itertools.count(number, -1)

    def counted(original: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return original(*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "mkdir"), (Path, "rmdir"), (os, "fsync")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield


def old_run(folder: Path) -> RunConfig:
    for name, text in OLD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return RunConfig(out=folder)


def checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("not read here")


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def start_of(run: RunConfig, resume: str, launch: Launch) -> Start:
    """As `find_start`, without reading a checkpoint."""
    return Start(*_begin_at(run, resume, launch), {}, ())


@pytest.mark.parametrize("after", ["fresh", "restarted", "auto", "auto by a launcher"])
def test_killed_anywhere_while_an_older_run_is_moved_aside(after: str, tmp_path: Path) -> None:
    launch, resume = Launch("this", 0), ""
    if after != "fresh":
        launch, resume = {
            "restarted": (Launch("this", 1), ""),
            "auto": (Launch(), "auto"),
            "auto by a launcher": (Launch("next", 0), "auto"),
        }[after]
    gone_on, number = 0, 0
    for number in itertools.count():
        run = old_run(tmp_path / str(number))
        try:
            with killed_at(number):
                _prepare(run, FRESH, Launch("this", 0), "new tokenizer")
            break
        except Killed:
            start = start_of(run, resume, launch)
        _prepare(run, start, launch, "new tokenizer")
        files = files_in(run.out)
        if start.origin is not None:
            gone_on += 1
            assert files.keys() == OLD.keys()
            assert {name for name in OLD if files[name] != OLD[name]} <= {"config.json", "tokenizer.json", ".launch"}
        else:
            assert {name: files[f"older-1/{name}"] for name in OLD} == OLD, "whole, and in one place"
            own = {name for name in files if not name.startswith("older-1/")}
            assert files["tokenizer.json"] == "new tokenizer"
            assert own == {"config.json", "tokenizer.json", *([".launch"] if launch.name or ".launch" in own else [])}
            assert (run.out / "checkpoints").is_dir()
        assert not list(run.out.glob(".*.partial"))
        assert not (run.out / "older-2").exists()
    assert number > 12
    assert (gone_on > 0) == ("auto" in after), "before the checkpoints were moved"


def test_a_run_that_its_launcher_starts_again_is_never_moved_aside(tmp_path: Path) -> None:
    run = RunConfig(out=tmp_path / "out")
    _prepare(run, FRESH, Launch("this", 0), "new tokenizer")
    (run.out / "metrics.jsonl").write_text("mine")
    again = start_of(run, "", Launch("this", 1))
    assert again == Start(None, True, {}, ())  # nothing was saved
    assert _prepare(run, again, Launch("this", 1), "new tokenizer") == ""
    checkpoint(run.out / "checkpoints" / "step-00000003-g1")
    again = start_of(run, "", Launch("this", 2))
    assert again.origin == Origin(run.out / "checkpoints")
    assert goes_on(run, again)
    assert _prepare(run, again, Launch("this", 2), "new tokenizer") == ""
    assert (run.out / "metrics.jsonl").read_text() == "mine"
    assert start_of(run, "", Launch("other", 1)) == FRESH, "another launch, killed before it came here"
    assert start_of(run, "", Launch("this", 0)) == FRESH
    assert _prepare(run, FRESH, Launch("other", 1), "new tokenizer") == str(run.out / "older-1")


@pytest.fixture
def read_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run's directory whose folder of checkpoints nobody can write, not even root."""
    out = tmp_path_factory.mktemp("out")
    own = out / "checkpoints"
    own.mkdir()
    mounts = [["mount", "--bind", own, own], ["mount", "-o", "remount,bind,ro", own]]
    made = [subprocess.run(mount, capture_output=True, text=True, check=False) for mount in mounts]
    if any(one.returncode for one in made):
        pytest.skip(f"nothing can be mounted: {made[0].stderr.strip()}")
    yield out
    subprocess.run(["umount", own], check=True)


def test_checkpoints_that_cannot_be_written_are_found_before_the_first_step(read_only: Path) -> None:
    comm = Communicator(LocalWorld(1).transports[0])
    with pytest.raises(ConfigError) as caught:
        make_ready(RunConfig(out=read_only), comm, FRESH, Launch(), "tokenizer")
    said = str(caught.value)
    assert said.startswith(f"user {os.getuid()} of {socket.gethostname()} cannot use the run directory: ")
    assert "Read-only file system" in said
    assert f"{read_only}/checkpoints/" in said
    assert said.endswith("make that possible, or choose another with --out")


def test_checkpoints_that_can_be_written_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".probe").mkdir(parents=True)  # it was killed in between
    for _ in range(2):
        _prepare(RunConfig(out=tmp_path), FRESH, Launch(), "tokenizer")
        assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_the_environment_says() -> None:
    assert Launch.of({}) == Launch()
    assert Launch.of({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}) == Launch("x", 2)


def test_which_checkpoint_is_meant(tmp_path: Path) -> None:
    own = tmp_path / "out" / "checkpoints"
    for name in ("step-00000002-g1", "step-00000004-g1", "step-00000004-g2"):
        checkpoint(own / name)
    out = tmp_path / "out"
    cases: dict[str, Origin | None] = {
        "": None,
        "auto": Origin(own),
        str(out): Origin(own),
        str(own): Origin(own),
        f"{out}:2": Origin(own, 2),
        f"{own}:4": Origin(own, 4),
        str(own / "step-00000002-g1"): Origin(own, 2),
        str(own / "step-00000004-g2"): Origin(own, 4),
    }
    for resume, origin in cases.items():
        assert find_origin(resume, own) == origin, resume
    assert find_origin("auto", tmp_path / "other") is None
    wrong = {
        str(tmp_path / "nowhere"): "does not exist",
        f"{tmp_path / 'nowhere'}:3": "does not exist",
        str(tmp_path): "holds no checkpoint",
        f"{out}:3": "holds no checkpoint of step 3",
        str(own / "step-00000004-g1"): "saved that step as step-00000004-g2",
    }
    for resume, words in wrong.items():
        with pytest.raises((ConfigError, CheckpointMissing), match=words):
            find_origin(resume, own)
    for origin, is_own in ((Origin(own), True), (Origin(own, 4), True), (Origin(own, 2), False)):
        assert goes_on(RunConfig(out=out), Start(origin, False, {}, ())) == is_own


@pytest.mark.parametrize("home", ["a file", "~", "not there"])
def test_without_a_home_the_tokens_are_kept_in_a_temporary_folder(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "~" is what is left of it where no home is known."""
    (tmp_path / "a file").touch()
    monkeypatch.setenv("HOME", home if home == "~" else str(tmp_path / home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = token_cache()
    if home == "not there":
        assert folder is None, "it can be made"
        return
    assert folder is not None
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o077 == 0
    assert token_cache() == folder

    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    assert token_cache() is None, "what the user asks for is not replaced"


def test_a_temporary_folder_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "~")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    uid = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: uid)
    assert token_cache() is None
