"""What is written as a whole or not at all. What a crash leaves: tests/process/test_checkpoint_crash_points.py."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lockstep.durable import new_file, partial_of, write_whole


def test_whole_text_replaces_what_was_there_and_what_a_killed_process_left(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("first, and longer", "sécond"):
        partial_of(path).write_text("cut o")
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert list(tmp_path.iterdir()) == [path]


def test_text_that_cannot_be_made_durable_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_whole(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"


def test_new_file_takes_no_place_that_is_taken_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError), new_file(tmp_path / name) as file:
            file.write(b"x")
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
