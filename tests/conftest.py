"""For every test: nothing is left behind, and nothing hangs. For the session: no process stays."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType

import pytest

from leaks import Snapshot, child_processes, process_stacks
from lockstep.testing.failures import thread_stacks

_LIMIT_S = 60.0
_BACKSTOP_S = 20.0  # after the limit, for a main thread that hears no signal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also the tests that tests/slow_tests.txt names")
    parser.addoption("--rewrite-golden", action="store_true", help="write tests/golden/*.txt anew; look at the diff")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit_s(seconds): how long the test may take, {_LIMIT_S:g} unless given")
    helpers = {path.stem for path in Path(__file__).parent.rglob("*.py")} - {*sys.modules}
    pytest.register_assert_rewrite(*helpers)  # an assertion that fails in one of them shows its values too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lines = (Path(__file__).parent / "slow_tests.txt").read_text().splitlines()
    slow = {line for line in lines if not line.startswith("#")}
    if config.getoption("collectonly") and config.args == config.getini("testpaths"):  # as `make check` calls it
        unknown = sorted(slow - {item.nodeid for item in items})
        if unknown:
            raise pytest.UsageError(f"tests/slow_tests.txt names tests that are not there: {unknown}")
    if config.getoption("--slow"):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in slow])
    items[:] = [item for item in items if item.nodeid not in slow]


def pytest_collection_finish() -> None:
    """What has been imported and collected stays to the end: a search for garbage need not go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test at its limit, with the stacks of all threads and of all rank processes."""
    marker = item.get_closest_marker("limit_s")
    limit_s = float(marker.args[0]) if marker else _LIMIT_S

    def give_up(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test ran longer than {limit_s:g} s\n{_all_stacks()}", pytrace=False)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + _BACKSTOP_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _all_stacks() -> str:
    return thread_stacks(threading.enumerate()) + process_stacks()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread, process, file, socket, variable or setting behind."""
    before = Snapshot()
    yield
    leaks = before.leaks()
    if leaks:
        also = " (a file may be that of a test in the other worker)" if "PYTEST_XDIST_WORKER" in os.environ else ""
        pytest.fail(f"the test left behind{also}:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def _no_process_stays() -> Iterator[None]:
    yield
    worlds = sys.modules.get("lockstep.testing.worlds")
    if worlds is not None:
        worlds.close_pools()
    forkserver._forkserver._stop()
    left = child_processes()
    if left:
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
        pytest.fail(f"processes left at the end of the session: {left}", pytrace=False)
