"""The guard over what is made for torch's process groups: over which of them, by which name, and until when."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.comm.process_group import layered, layers
from lockstep.comm.transport import LentTransport
from lockstep.errors import PeerLost
from lockstep.observe.checking import CheckLayer
from lockstep.observe.group_layers import is_watched, watch_groups
from lockstep.testing.worlds import run_threads


class Seen:
    """What is used of a guard."""

    def __init__(self, rank: int, world_size: int, mode: str = "on") -> None:
        self.rank, self.world_size = rank, world_size
        self.settings = SimpleNamespace(mode=mode)
        self.recorder = None
        self.aborts: list[Any] = []
        self.groups: dict[str, Sequence[int]] = {}

    def group(self, name: str, ranks: Sequence[int]) -> None:
        self.groups[name] = ranks


def test_each_is_watched_by_a_name_of_its_own_until_the_guard_ends() -> None:
    plain: Any = run_threads(2, lambda comm: comm.transport)[1]
    guard: Any = Seen(1, 2)
    end = watch_groups(guard)
    first, again = layered(plain, "0"), layered(plain, "0")
    end()
    assert layered(plain, "0") is plain
    assert not layers
    assert guard.groups == {"lockstep 0": (0, 1), "lockstep 0'2": (0, 1)}
    assert first is not again
    assert is_watched(first)
    assert is_watched(LentTransport(first, guard))
    assert not is_watched(plain)
    assert not is_watched(LentTransport(plain, guard))
    assert len(guard.aborts) == 2


def test_what_cannot_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = run_threads(2, lambda comm: comm.transport)[0]
    aborted: list[Exception] = []
    monkeypatch.setattr(type(plain), "abort", lambda self, error: aborted.append(error))
    guard: Any = Seen(0, 2)
    end = watch_groups(guard)
    layer = layered(plain, "0")
    end()
    error = PeerLost("rank 1 is gone")
    guard.aborts[0](error)
    assert aborted == [error]
    del layer, plain
    gc.collect()
    guard.aborts[0](error)  # as the group is gone
    assert aborted == [error]


def test_mode_check_looks_at_what_is_sent() -> None:
    plain: Any = run_threads(2, lambda comm: comm.transport)[0]
    guard: Any = Seen(0, 2, "check")
    end = watch_groups(guard)
    layer: Any = layered(plain, "0")
    end()
    assert isinstance(layer.inner, CheckLayer)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 2), (0, 1)])  # of the guard, where the group has rank 0 of 2
def test_world_of_its_own_is_left_alone(rank: int, world_size: int) -> None:
    plain: Any = run_threads(2, lambda comm: comm.transport)[0]
    guard: Any = Seen(rank, world_size)
    end = watch_groups(guard)
    assert layered(plain, "0") is plain
    end()


def test_fork_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = run_threads(2, lambda comm: comm.transport)[0]
    guard: Any = Seen(0, 2)
    end = watch_groups(guard)
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert layered(plain, "0") is plain
    end()
