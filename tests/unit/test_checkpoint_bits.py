"""Every bit of every byte of a checkpoint, and every other way in which its files can be other ones than were written.

Each case changes the files of one checkpoint in place, looks whether that is found, by name, before a tensor is handed
out, and puts the bytes back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.manifest import NAME, file_name, from_text
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.state import State
from lockstep.checkpoint.tensor_file import Stored, read_header
from lockstep.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from small_checkpoints import small_state, write_checkpoint

FILES = (file_name(0), file_name(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, 100, larger_state(1), world_size=2)


def larger_state(step: int) -> State:
    state = small_state(step)  # sets the seed
    return {**state, "scores": torch.arange(600, dtype=torch.int16) * step, "table": torch.randn(27, 27)}


def fault_in(folder: Path) -> str:
    """What a load would say before it hands out a tensor; "" where it finds nothing wrong."""
    try:
        with open_checkpoint(folder) as reader:
            reader.verify()
    except CheckpointDamaged as fault:
        return str(fault)
    return ""


@contextmanager
def watching(folder: Path, name: str) -> Iterator[Callable[[], str]]:
    """`fault_in(folder)`, as often as is wanted, while no file but `name` changes."""
    if name == NAME:
        yield lambda: fault_in(folder)
        return
    with open_checkpoint(folder) as reader:

        def look() -> str:
            try:
                reader.verify([name])
            except CheckpointDamaged as fault:
                return str(fault)
            return ""

        yield look


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, bytes]]:
    """The file for writing, and its bytes, which it has again afterwards."""
    before = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd, before
    finally:
        os.ftruncate(fd, len(before))
        os.pwrite(fd, before, 0)
        os.close(fd)


def stored_in(path: Path) -> list[Stored]:
    data = path.read_bytes()
    return read_header(lambda offset, count: data[offset : offset + count], len(data), path.name)


def names_at(path: Path) -> list[str]:
    """For every byte of the file, what a fault there is to be called."""
    if path.name == NAME:
        return [str(path)] * path.stat().st_size
    stored = stored_in(path)
    names = ["its header"] * stored[0].offset
    for piece, _ in stored:
        names += [f"tensors {piece.path}"] * piece.nbytes
    return names


@pytest.mark.slow
def test_every_bit_of_every_byte_is_noticed_and_named(folder: Path) -> None:
    assert fault_in(folder) == ""
    cases = 0
    for name in (NAME, *FILES):
        expected = names_at(folder / name)
        with opened(folder / name) as (fd, before), watching(folder, name) as look:
            for offset, value in enumerate(before):
                for bit in range(8):
                    os.pwrite(fd, bytes([value ^ 1 << bit]), offset)
                    fault = look()
                    assert name in fault, (name, offset, bit)
                    assert fault.endswith(expected[offset]) or name == NAME, (name, offset, bit, fault)
                    cases += 1
                os.pwrite(fd, bytes([value]), offset)
    assert fault_in(folder) == ""
    assert cases == 8 * sum(path.stat().st_size for path in folder.iterdir())
    assert cases > 45_000


@pytest.mark.parametrize("name", [NAME, *FILES])
def test_every_truncation_and_every_byte_more_is_noticed_and_named(folder: Path, name: str) -> None:
    stored = [] if name == NAME else stored_in(folder / name)
    with opened(folder / name) as (fd, before), watching(folder, name) as look:
        for value in range(256):
            os.pwrite(fd, bytes([value]), len(before))
            fault = look()
            assert name in fault
            assert name == NAME or fault.endswith("what follows the tensors")
        for size in reversed(range(len(before))):
            os.ftruncate(fd, size)
            fault = look()
            assert name in fault, size
            if stored:
                lost = [piece.path for piece, offset in stored if offset + piece.nbytes > size]
                expected = "its header" if size < stored[0].offset else f"tensors {', '.join(lost)}"
                assert fault.endswith(expected), size


@pytest.mark.parametrize("name", [NAME, *FILES])
@pytest.mark.parametrize("fill", [0, 255])
def test_every_stretch_that_was_never_written_is_noticed(folder: Path, name: str, fill: int) -> None:
    with opened(folder / name) as (fd, before), watching(folder, name) as look:
        for length in (16, 64, 512, 4096):
            for start in range(0, len(before), length):
                was = before[start : start + length]
                os.pwrite(fd, bytes([fill]) * len(was), start)
                assert bool(look()) == (was != bytes([fill]) * len(was)), (start, length)
                os.pwrite(fd, was, start)


def test_files_that_were_swapped_are_noticed(folder: Path) -> None:
    one, other = (folder / name for name in FILES)
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    assert FILES[0] in fault_in(folder)
    assert FILES[1] in fault_in(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_of_the_same_layout_is_noticed(folder: Path, tmp_path: Path, name: str) -> None:
    later = write_checkpoint(tmp_path, 101, larger_state(2), world_size=2)
    assert (later / name).stat().st_size == (folder / name).stat().st_size
    assert stored_in(later / name) == stored_in(folder / name)
    shutil.copyfile(later / name, folder / name)
    same = {"empty", "mask"}
    changed = {piece.path for piece, _ in stored_in(folder / name)} - same
    fault = fault_in(folder)
    assert name in fault
    assert all(path in fault for path in changed)
    assert not any(f" {path}" in fault for path in same)


def test_manifests_of_two_steps_that_were_swapped_are_noticed(folder: Path, tmp_path: Path) -> None:
    later = write_checkpoint(tmp_path, 101, larger_state(1), world_size=2)
    for name in FILES:
        assert (later / name).read_bytes() == (folder / name).read_bytes()  # only the manifests tell them apart
    here, there = ((path / NAME).read_bytes() for path in (folder, later))
    (folder / NAME).write_bytes(there)
    (later / NAME).write_bytes(here)
    assert "step-00000101-g1, not of this folder" in fault_in(folder)
    assert "step-00000100-g1, not of this folder" in fault_in(later)


def test_a_checkpoint_has_the_name_of_its_step_and_generation_or_of_its_step(folder: Path) -> None:
    for name, is_right in (
        ("step-00000100-g1", True),
        ("step-00000100", True),
        ("step-00000100-g2", False),
        ("step-00000100-g01", False),
        ("step-100", False),
        ("step-00000099", False),
        ("step-000000100", False),
        ("copy", False),
    ):
        folder = folder.rename(folder.with_name(name))
        assert bool(fault_in(folder)) != is_right, name


@pytest.mark.parametrize("name", [NAME, *FILES])
def test_a_missing_file_is_noticed(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in fault_in(folder)


def test_a_missing_folder_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointMissing, match="step-00000007 is not there"),
        open_checkpoint(tmp_path / "step-00000007"),
    ):
        pass


@pytest.mark.parametrize("name", [file_name(2), file_name(99999), "model.safetensors", ".hidden", "MANIFEST.JSON", "é"])
@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_file_too_many_is_noticed(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    make(folder / name)
    assert f"unexpected file, {name!r}" in fault_in(folder)
    with open_checkpoint(folder, allowed=[name]) as reader:
        reader.verify()


def test_all_faults_are_said_at_once(folder: Path) -> None:
    for name in FILES:
        with (folder / name).open("r+b") as file:
            file.truncate(20)
    fault = fault_in(folder)
    assert all(name in fault for name in FILES)


def test_ranks_that_verify_a_file_each_have_verified_all(folder: Path) -> None:
    with (folder / FILES[1]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xa5")
    with open_checkpoint(folder) as reader:
        reader.verify([FILES[0]])
        with pytest.raises(CheckpointDamaged, match=FILES[1]):
            reader.verify([FILES[1]])


def test_what_changes_between_the_check_and_the_read_is_noticed_where_whole_pieces_are_read(folder: Path) -> None:
    for name in FILES:
        with open_checkpoint(folder) as reader, opened(folder / name) as (fd, before):
            reader.verify()
            for piece, offset in stored_in(folder / name):
                os.pwrite(fd, bytes([before[offset] ^ 1]), offset)
                with pytest.raises(CheckpointDamaged, match=rf"{name}.* {piece.path} is damaged"):
                    reader.read(piece.path)
                os.pwrite(fd, before[offset : offset + 1], offset)
                reader.read(piece.path)


def test_what_cannot_be_read_for_a_reason_of_this_machine_is_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    with open_checkpoint(folder) as reader:
        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(CheckpointError, match="Cannot allocate") as caught:
            reader.verify()
        assert type(caught.value) is CheckpointError


def test_the_reader_gives_what_was_saved_and_its_manifest(folder: Path) -> None:
    with open_checkpoint(folder) as reader:
        reader.verify()
        assert reader.manifest == from_text((folder / NAME).read_text(), "here")
        state = larger_state(1)
        assert torch.equal(reader.read("model/head.weight"), state["model"]["h.0.weight"])
        assert torch.equal(reader.read("optimizer/state/0/exp_avg"), state["optimizer"]["state"][0]["exp_avg"])
        assert reader.read("empty").shape == (0, 3)
        assert torch.equal(reader.read("mask"), state["mask"])
