"""Which of the user's lines a process was in when a signal of C++'s ended it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lockstep.launch.crash import place_in, stacks_of
from lockstep.launch.ended import Ended, describe

_GUARDS = f'Thread 0x00a1 (most recent call first):\n  File "{threading.__file__}", line 331 in wait\n'
_MAIN = """Thread 0x00c3 (most recent call first):
  File "/user/a.py", line 5 in train
  File "/user/a.py", line 9 in <module>
  File "<string>", line 6 in <module>
"""
_LOADER = 'Current thread 0x00b2 (most recent call first):\n  File "/user/b.py", line 7 in load\n'
_SIGSEGV = "was killed by SIGSEGV"


@pytest.mark.parametrize(
    ("threads", "place"),
    [
        ((), ""),
        ((_GUARDS, _MAIN.replace("/user", threading.__file__.rpartition("/")[0])), ""),
        ((_GUARDS, _MAIN, "Extension modules: numpy (total: 1)\n"), "/user/a.py:5"),  # a thread of C++'s
        ((_GUARDS, _LOADER, _MAIN), "/user/b.py:7"),
        ((_GUARDS.replace("Thread", "Current thread"), _MAIN), "/user/a.py:5"),
    ],
)
def test_it_is_the_innermost_of_the_users_in_the_thread_that_was_hit(threads: tuple[str, ...], place: str) -> None:
    assert place_in("\n".join(["Fatal Python error: Aborted\n", *threads])) == place


@pytest.mark.parametrize(("where", "words"), [("", _SIGSEGV), ("a.py:5", f"{_SIGSEGV} at a.py:5")])
def test_it_is_told_with_the_signal(where: str, words: str) -> None:
    ended = Ended(1, 99, -11, False, None, "", where=where)
    assert describe(ended) == words
    assert ended.fate == (words if where else "failed too")


def test_who_has_left_nothing_was_nowhere(tmp_path: Path) -> None:
    assert stacks_of(tmp_path, 3) == ""
