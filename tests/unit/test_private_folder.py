"""The folder of a launcher: gone when it ends, gone soon where it was killed, never another's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.launch import private_folder as module
from lockstep.launch.private_folder import PREFIX, private_folder

_HOLDER = """
import sys
from lockstep.launch.private_folder import private_folder
with private_folder() as folder:
    (folder / "log").write_text("words")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def launcher() -> subprocess.Popen[str]:
    """Another process that has a folder, until its standard input ends."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=pipe, stdout=pipe, text=True)


def test_folder_is_private_and_gone_at_the_end(top: Path) -> None:
    with private_folder() as folder, private_folder() as other:
        assert folder != other
        assert folder.parent == top
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    assert list(top.iterdir()) == []
    with pytest.raises(KeyError), private_folder():
        raise KeyError
    assert list(top.iterdir()) == []


def test_next_launcher_removes_what_a_killed_one_left_and_spares_who_lives(top: Path) -> None:
    with launcher() as killed, launcher() as living:
        assert killed.stdout is not None
        assert living.stdout is not None
        left, kept = (Path(output.readline().strip()) for output in (killed.stdout, living.stdout))
        killed.kill()
        killed.wait()
        assert (left / "log").exists()
        with private_folder():
            assert not left.exists()
            assert (kept / "log").read_text() == "words"
        living.communicate("")
    assert living.returncode == 0
    assert list(top.iterdir()) == []


def test_nothing_else_is_touched(top: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("target")
    (target / "precious").write_text("x")
    (top / f"{PREFIX}link").symlink_to(target)
    (top / f"{PREFIX}dangling").symlink_to(top / "nowhere")
    (top / f"{PREFIX}file").write_text("x")
    (top / "lockstep-chaos-1").mkdir()
    (top / f"{PREFIX}left").mkdir()
    (top / f"{PREFIX}left" / "link").symlink_to(target)
    before = {path.name for path in top.iterdir()}
    with private_folder():
        pass
    assert {path.name for path in top.iterdir()} == before - {f"{PREFIX}left"}
    assert (target / "precious").read_text() == "x"


def test_folder_of_another_user_stays(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (top / f"{PREFIX}theirs").mkdir()
    me = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: me + 1)
        assert module._lock(top / f"{PREFIX}theirs", 0) is None
    lock = module._lock(top / f"{PREFIX}theirs", 0)
    assert lock is not None
    os.close(lock)


def test_new_folder_that_a_sweep_took_is_replaced(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[..., str] = tempfile.mkdtemp
    made: list[str] = []

    def swept_once(*args: str, **kwargs: str) -> str:
        made.append(make(*args, **kwargs))
        if len(made) == 1:
            shutil.rmtree(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_once)
    with private_folder() as folder:
        assert [str(folder)] == made[1:]
        assert folder.is_dir()


def test_filesystem_without_locks_has_folders_too(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, how: int) -> None:
        raise OSError("no locks here")

    (top / f"{PREFIX}left").mkdir()
    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with private_folder() as folder:
        assert folder.is_dir()
    assert {path.name for path in top.iterdir()} == {f"{PREFIX}left"}
