"""Processes seen and struck from outside: the right ones, and only those."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.comm.waiting import wait_until
from lockstep.launch.processes import reap_strangers
from process_tree import age_s, descendants, look, mapped_files, strike, words_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()", "the child"], stdin=0)
print(child.pid, flush=True)
sys.exit(child.wait())
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A child of this process and its child, both of which wait for standard input."""
    command = [sys.executable, "-S", "-c", _PARENT, "a name with ) Z 1 in it"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        parent.kill()


def test_descendants_are_found_parents_first(family: tuple[int, int]) -> None:
    parent, child = family
    found = [process for process in descendants(os.getpid()) if process.pid in family]
    assert [(process.pid, process.parent) for process in found] == [(parent, os.getpid()), (child, parent)]
    assert not any(process.is_zombie for process in found)
    assert 0 <= age_s(found[0]) < 60
    assert age_s(found[1]) <= age_s(found[0])
    # not at once: its parent goes on once exec has closed what is to be closed, and that is before it has its new words
    assert wait_until(lambda: words_of(child).split()[-2:] == ["the", "child"], 10)
    assert sys.executable in words_of(parent)


def test_strike_hits_the_process_and_what_has_ended_is_gone(family: tuple[int, int]) -> None:
    _, child = family
    victim = look(child)
    assert victim is not None
    assert strike(victim, signal.SIGKILL)
    assert wait_until(lambda: look(child) is None, 10)
    assert not strike(victim, signal.SIGKILL)
    assert descendants(child) == []
    assert words_of(child) == ""
    assert mapped_files(child) == []


def test_another_process_with_the_same_number_is_spared(family: tuple[int, int]) -> None:
    _, child = family
    now = look(child)
    assert now is not None
    assert not strike(now._replace(started=now.started - 1), signal.SIGKILL)
    assert look(child) == now


def test_zombies_are_seen_as_such_and_let_go() -> None:
    processes = [subprocess.Popen([sys.executable, "-S", "-c", ""]) for _ in range(2)]

    def is_zombie(pid: int) -> bool:
        process = look(pid)
        return process is not None and process.is_zombie

    assert wait_until(lambda: all(is_zombie(process.pid) for process in processes), 10)
    victim = look(processes[0].pid)
    assert victim is not None
    assert not strike(victim, signal.SIGKILL)
    reap_strangers([processes[0].pid, *(p.pid for p in descendants(os.getpid()) if p.pid != processes[1].pid)])
    assert look(processes[1].pid) is None
    assert is_zombie(processes[0].pid)
    assert processes[0].wait() == 0
    processes[1].returncode = 0  # it was waited for


def test_mapped_files_are_those_of_the_process() -> None:
    files = mapped_files(os.getpid())
    assert any("libc" in Path(file).name for file in files)
    assert len(files) == len(set(files))
