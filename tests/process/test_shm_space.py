"""Too little room for shared memory, or no right to it: an error with the bytes needed, or Gloo and one warning."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from comm_cases import same
from lockstep.comm import shm_transport
from lockstep.comm.choose import fastest
from lockstep.comm.communicator import Communicator
from lockstep.comm.shm.segment import SegmentFile
from lockstep.errors import SharedMemoryUnavailable
from lockstep.testing.worlds import run_processes
from shared_segments import mapped_segments
from shm_ranks import lies_in_segment, share

KIB = 1024
MIB = 1024 * KIB


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system in memory of `request.param` bytes."""
    path = Path(tempfile.mkdtemp(prefix="lockstep-small-"))  # not pytest's own folder: it could not be removed
    options = f"size={request.param},mode=1777"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.skip(f"no file system can be mounted: {made.stderr.strip()}")
        try:
            yield path
        finally:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
    finally:
        path.rmdir()


def of_size(*sizes: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("small", sizes, indirect=True, ids=[f"{size // KIB}KiB" for size in sizes])


def refused(comm: Communicator, directory: str) -> str:
    gc.collect()
    before = mapped_segments()  # what an earlier job of these processes has left is not this one's
    with pytest.raises(SharedMemoryUnavailable) as raised:
        share(comm, directory=directory)
    text = str(raised.value)
    del raised  # its trace holds what it had
    gc.collect()
    assert mapped_segments() == before
    assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))
    return text


@of_size(4 * KIB, 1 * MIB, 2 * MIB)
def test_too_little_room_to_meet(small: Path) -> None:
    """Two ranks need 1 MiB each and one page; every rank has the same sentence."""
    first, second = run_processes(2, refused, str(small))
    assert first == second
    assert f"{small} is too small: {2 * MIB + 4 * KIB} bytes are needed, " in first
    assert "Make it larger (mount -o remount,size=... " in first
    assert list(small.iterdir()) == []


def without_a_directory(comm: Communicator, path: str) -> str:
    return refused(comm, path)


def test_no_such_place(tmp_path: Path) -> None:
    texts = run_processes(2, without_a_directory, str(tmp_path / "missing"))
    assert texts[0] == texts[1]
    assert "missing: No such file or directory" in texts[0]


def without_the_right(comm: Communicator) -> str:
    """One rank that may not look into another's process."""
    if comm.rank == 1:
        path = SegmentFile.open

        def refuse(path: str) -> SegmentFile:
            raise PermissionError(13, "Permission denied", path)

        SegmentFile.open = refuse  # type: ignore[method-assign]
        try:
            return refused(comm, "/dev/shm")
        finally:
            SegmentFile.open = path  # type: ignore[method-assign]
    return refused(comm, "/dev/shm")


def test_a_rank_without_the_right() -> None:
    first, *others = run_processes(3, without_the_right)
    assert others == [first] * 2
    assert "rank 1 cannot map the memory of rank 0" in first
    assert "Permission denied" in first


def with_small_limits(comm: Communicator, limit: int) -> str:
    """A shell's `ulimit -f` or `ulimit -v` on one rank."""
    soft, hard = resource.getrlimit(limit)
    if comm.rank == 0:
        resource.setrlimit(limit, (2**34, hard))
    try:
        return refused(comm, "/dev/shm")
    finally:
        resource.setrlimit(limit, (soft, hard))


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_AS], ids=["file size", "addresses"])
def test_limits_of_the_shell(limit: int) -> None:
    first, second = run_processes(2, with_small_limits, limit)
    assert first == second


# ---------------------------------------------------------------------- room for the group, and for little else


def split_without_room(comm: Communicator, directory: str) -> list[str]:
    ours = share(comm, directory=directory)
    texts = []
    for _ in range(3):  # what the others took for it is given back
        with pytest.raises(SharedMemoryUnavailable) as raised:
            ours.split(0)
        texts.append(str(raised.value))
        assert ours.all_gather_object(ours.rank) == [0, 1]
    ours.close()
    return texts


@of_size(3 * MIB + 64 * KIB)
def test_too_little_room_to_split(small: Path) -> None:
    for texts in run_processes(2, split_without_room, str(small)):
        assert all("too little shared memory for a new group, which takes 1048576 bytes" in text for text in texts)


def message_without_room(comm: Communicator, directory: str) -> None:
    ours = share(comm, directory=directory)
    if ours.rank == 0:
        for _ in range(2):
            with pytest.raises(SharedMemoryUnavailable, match="bytes are needed"):
                ours.send(torch.ones(3), 1)
    ours.barrier()
    ours.close()


@of_size(2 * MIB + 64 * KIB)
def test_too_little_room_for_a_message(small: Path) -> None:
    run_processes(2, message_without_room, str(small))


def empty_without_room(comm: Communicator, directory: str) -> list[str]:
    ours = share(comm, directory=directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [ours.empty(MIB).fill_(ours.rank + number) for number in range(4)]
    assert [lies_in_segment(tensor) for tensor in tensors] in ([True, *[False] * 3], [False] * 4)
    for number, tensor in enumerate(tensors):
        ours.all_reduce(tensor)
        same(tensor, torch.full((MIB,), 1.0 + 2 * number))
    ours.barrier()
    del tensors
    ours.barrier()
    if ours.rank == 0:
        assert lies_in_segment(ours.empty(MIB))  # there is room again
    ours.barrier()
    ours.close()
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@of_size(8 * MIB)
def test_tensors_that_find_no_room(small: Path) -> None:
    for texts in run_processes(2, empty_without_room, str(small)):
        (text,) = texts
        assert text.startswith("RuntimeWarning: ")
        assert f"{4 * MIB} bytes are needed" in text
        assert "ordinary memory" in text


# ---------------------------------------------------------------------- Gloo instead


def falls_back(comm: Communicator, directory: str) -> tuple[str, list[str]]:
    place = shm_transport.default_directory
    shm_transport.default_directory = lambda: Path(directory)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = Communicator(fastest(comm.transport))
    finally:
        shm_transport.default_directory = place
    tensor = torch.full((5,), float(chosen.rank))
    chosen.all_reduce(tensor)
    same(tensor, torch.full((5,), 3.0))
    return chosen.transport.name, [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def only_one_warning(answers: list[Any]) -> None:
    assert [name for name, _ in answers] == ["gloo"] * len(answers)
    (text,) = [text for _, texts in answers for text in texts]
    assert text.startswith("RuntimeWarning: ")
    assert "gloo" in text
    assert f"{3 * MIB + 4 * KIB} bytes are needed" in text


@of_size(1 * MIB)
def test_gloo_where_there_is_no_room(small: Path) -> None:
    only_one_warning(run_processes(3, falls_back, str(small)))


def init_falls_back(rank: int, directory: str, meeting: str) -> tuple[str, list[str]]:
    place = shm_transport.default_directory
    shm_transport.default_directory = lambda: Path(directory)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = lockstep.init(rank=rank, world_size=3, file=meeting, device="cpu", verbose=False)
    finally:
        shm_transport.default_directory = place
    with comm:
        assert comm.all_gather_object(rank) == [0, 1, 2]
        return comm.transport.name, [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@of_size(1 * MIB)
def test_init_where_there_is_no_room(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    only_one_warning(run_processes(3, init_falls_back, str(small), str(meeting), connect=False))


def without_unnamed_files(comm: Communicator, directory: str) -> list[str]:
    """A file system that has only files with a name: it has one while the ranks meet, and none afterwards."""
    flag = os.O_TMPFILE
    del os.O_TMPFILE
    try:
        ours = share(comm, directory=directory)
    finally:
        os.O_TMPFILE = flag
    ours.barrier()
    left = os.listdir(directory)
    tensor = ours.empty(1000).fill_(1)
    ours.all_reduce(tensor)
    assert tensor.eq(2).all()
    ours.close()
    return left


@of_size(8 * MIB)
def test_a_file_system_without_unnamed_files(small: Path) -> None:
    assert run_processes(2, without_unnamed_files, str(small)) == [[], []]
