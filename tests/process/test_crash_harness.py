"""What crash_points and lost_writes say is so: faults are where they were asked for, a careless save is found out."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crash_points import (
    EIO,
    KILL,
    SHORT,
    at_once,
    calls_of,
    forking_workers,
    in_first_thread,
    run_traced,
    run_with_fault,
    stopped_after,
    strace_works,
)
from lost_writes import OPTIONS, Disk, Tree

pytestmark = pytest.mark.skipif(not strace_works(), reason="strace is not installed, or may not trace here")
OLD, NEW = b"old state", b"new state"


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[..., list[Any]]]:
    with forking_workers(1) as run:
        yield run


def _make_three(folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / name).mkdir()


def _look_at_faults(worker: int, root: Path) -> None:
    def names(folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    folders = [root / str(number) for number in range(5)]
    for folder in folders:
        folder.mkdir()
    calls = calls_of(at_once(lambda: _make_three(folders[0])))
    assert [(call.name, call.nth) for call in calls] == [("mkdir", 1), ("mkdir", 2), ("mkdir", 3)]
    killed = run_with_fault(at_once(lambda: _make_three(folders[1])), calls[1], KILL)
    assert (killed.code, killed.fired, names(folders[1])) == (-9, True, ["a"])
    failed = run_with_fault(at_once(lambda: _make_three(folders[2])), calls[1], EIO)
    assert (failed.code, failed.fired, names(folders[2])) == (1, True, ["a"])
    assert failed.said.startswith("OSError: [Errno 5]")
    with stopped_after(at_once(lambda: _make_three(folders[3])), calls[1]) as child:
        assert names(folders[3]) == ["a", "b"]
        child.go_on()
        assert child.outcome().code == 0
    assert names(folders[3]) == ["a", "b", "c"]
    short = run_with_fault(
        at_once(lambda: os.write(os.open(root, os.O_RDONLY), b"four")), calls[0]._replace(name="write"), SHORT
    )
    assert (short.code, short.said) == (0, "1")

    def in_thread() -> None:
        (folders[4] / "d").mkdir()
        thread = threading.Thread(target=_make_three, args=(folders[4],))
        thread.start()
        thread.join()

    killed = run_with_fault(in_first_thread(in_thread), calls[0], KILL)
    assert (killed.code, names(folders[4])) == (-9, ["d"])


def test_faults_are_where_they_were_asked_for(workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    workers(_look_at_faults, tmp_path)


def _in_place(path: Path) -> None:
    path.write_bytes(NEW)


def _by_rename(path: Path, *, synced: str) -> None:
    """A save as it should be, but for what is not in `synced`: the file, the folder."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(NEW)
        file.flush()
        if "file" in synced:
            os.fsync(file.fileno())
    part.replace(path)
    if "folder" in synced:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def _kill_everywhere(worker: int, root: Path, save: Callable[[Path], None]) -> set[bytes]:
    path = root / "state"
    path.write_bytes(OLD)
    left = set()
    for call in calls_of(at_once(lambda: save(path))):
        path.write_bytes(OLD)
        run_with_fault(at_once(lambda: save(path)), call, KILL)
        left.add(path.read_bytes())
    return left


def test_save_in_place_is_found_out(workers: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert workers(_kill_everywhere, tmp_path, _in_place) == [{OLD, b"", NEW}]


def _lose_power(worker: int, root: Path, synced: str) -> tuple[set[bytes | None], set[bytes | None]]:
    """What is found after a power failure during the save, and after it."""
    path = root / "state"
    path.write_bytes(OLD)
    before: Tree = {"state": OLD}
    lines = run_traced(at_once(lambda: _by_rename(path, synced=synced)), OPTIONS).lines
    disk, during, rng = Disk(root, before), set(), random.Random(0)
    for line in lines:
        if disk.apply(line):
            during |= {tree.get("state") for tree in disk.after_failure(rng)}
    return during, {tree.get("state") for tree in disk.after_failure(rng)}


@pytest.mark.parametrize(
    ("synced", "during", "after"),
    [
        ("file folder", {OLD, NEW}, {NEW}),
        ("file", {OLD, NEW}, {OLD, NEW}),
        ("folder", {OLD, NEW, b"", bytes(9), NEW[:4]}, {NEW, b"", bytes(9), NEW[:4]}),
    ],
)
def test_what_a_power_failure_may_leave_of_a_rename(
    workers: Callable[..., list[Any]], tmp_path: Path, synced: str, during: set[bytes], after: set[bytes]
) -> None:
    assert workers(_lose_power, tmp_path, synced) == [(during, after)]


def test_disk_does_not_pass_over_calls_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="linkat is not modelled"):
        Disk(tmp_path, {}).apply('linkat(AT_FDCWD, "\\x61", AT_FDCWD, "\\x62", 0) = 0')
