"""Guards that leave out looks while all is well: what begins to differ then is named as soon as ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from backend_groups import default_group

from lockstep.comm.communicator import Communicator
from lockstep.comm.torch_transport import TorchTransport
from lockstep.errors import LockstepError
from lockstep.observe import lookout
from lockstep.observe.flight import VERSION
from lockstep.observe.glance import Glance
from lockstep.observe.guard import Guard
from lockstep.observe.init import meet
from lockstep.observe.lookout import Lookout
from lockstep.observe.recording import GuardLayer
from lockstep.observe.settings import GuardSettings
from lockstep.testing.worlds import run_processes

_REST = 4  # looks that were left out, before anything happens
_WAITS = 7  # the same of what can wait: until both have told it, one maybe after the other has looked
_FEW = 50  # operations
_SOON = 2  # glances and looks of the rank that raises first, until then
_PACE_S = 0.004

Act = Callable[[Communicator, torch.Tensor, Guard], object]


class Counted:
    """What the thread of a guard does."""

    def __init__(self, guard: Guard, patch: pytest.MonkeyPatch) -> None:
        self.acts = self.left_out = self.kept_up = 0
        act, is_enough, keep_up = guard.act, Glance.is_enough, Lookout.keep_up

        def acts() -> None:
            self.acts += 1
            act()

        def enough(of: Glance, *, is_due: bool = False, has_time: bool = False) -> bool:
            left_out = is_enough(of, is_due=is_due, has_time=has_time)
            self.left_out += left_out
            return left_out

        def keeps_up(of: Lookout) -> None:
            keep_up(of)
            self.kept_up += 1

        patch.setattr(guard, "act", acts)
        patch.setattr(Glance, "is_enough", enough)
        patch.setattr(Lookout, "keep_up", keeps_up)


@contextlib.contextmanager
def calm_rank(rank: int, world_size: int, folder: str) -> Iterator[tuple[Communicator, Guard, Counted]]:
    """A rank whose guard leaves out looks from its second one on."""
    with pytest.MonkeyPatch.context() as patch, default_group("gloo", folder, rank, world_size):
        patch.setattr(lookout, "_YOUNG", 1)
        transport = TorchTransport.over()
        guard = meet(GuardSettings(evidence=""), transport, ["here"] * world_size, None)
        assert guard is not None
        try:
            yield Communicator(GuardLayer(transport, guard)), guard, Counted(guard, patch)
        finally:
            guard.end(None)
            guard.close()


def found_after(rank: int, world_size: int, folder: str, act: Act) -> tuple[str, int]:
    """Steps until all have left out looks; then `act` in one of them. What is raised, how many acts later."""
    pace, tensor = threading.Event(), torch.ones(8)
    rest, error, since = torch.zeros(8), "", 0
    with calm_rank(rank, world_size, folder) as (comm, guard, counted):
        while not error:
            pace.wait(_PACE_S)
            try:
                comm.all_reduce(rest.fill_(counted.left_out), "min")
                if not since and rest[0] >= _REST:
                    since = counted.acts
                    act(comm, tensor, guard)
                else:
                    comm.all_reduce(tensor)
                guard.step_done()
            except LockstepError as raised:  # by its own guard, or the other one's, who has left
                error = str(raised)
        return error, counted.acts - since


def unread_by(rank: int, world_size: int, folder: str) -> list[int]:
    """How many of its operations the rank had not read, each time that it was to read them, until all have done so
    twice without telling how they are in between.
    """
    pace, tensor = threading.Event(), torch.zeros(8)
    unread, told = list[int](), list[int]()
    with calm_rank(rank, world_size, folder) as (comm, guard, counted):
        while not tensor[0]:
            pace.wait(_PACE_S)
            comm.all_reduce(tensor.fill_(len(told) > len({*told})), "min")
            guard.step_done()
            if counted.kept_up > len(told):
                unread.append(guard.recorder.started - guard._account._read)
                told.append(guard.recorder._words[VERSION])
        return unread


def test_between_looks_a_rank_reads_its_record_and_tells_nothing(tmp_path: Path) -> None:
    for unread in run_processes(2, unread_by, 2, str(tmp_path), connect=False):
        assert max(unread) < _FEW, unread


def another_reduction(comm: Communicator, tensor: torch.Tensor, guard: Guard) -> None:
    """Gloo goes on with garbage."""
    comm.all_reduce(tensor, "max" if guard.rank else "sum")


def one_more(comm: Communicator, tensor: torch.Tensor, guard: Guard) -> None:
    """And from there on each of the other's is matched with the one after it."""
    for _ in range(1 + guard.rank):
        comm.all_reduce(tensor)


@pytest.mark.parametrize("act", [another_reduction, one_more])
def test_what_differs_is_named_at_once(tmp_path: Path, act: Act) -> None:
    """Of more than two ranks some would stand in Gloo, which does not let them go, once another has raised it."""
    found = run_processes(2, found_after, 2, str(tmp_path), act, connect=False)
    for error, _ in found:
        assert "MISMATCH" in error, error
        assert act.__name__ in error, error
    assert min(acts for _, acts in found) <= _SOON, found


def train_less(comm: Communicator, tensor: torch.Tensor, guard: Guard) -> None:
    """One rank trains less than the other, and both tell it as what can wait."""
    value = [["head.bias"] * guard.rank, True, "train.py:9"]
    guard.facts.tell(f"trained world/{comm.world_size}", 4, value, can_wait=True)
    comm.all_reduce(tensor)


def test_what_can_wait_is_seen_when_the_record_is_written(tmp_path: Path) -> None:
    found = run_processes(2, found_after, 2, str(tmp_path), train_less, connect=False)
    for error, _ in found:
        assert "FROZEN on some ranks only" in error, error
    assert min(acts for _, acts in found) <= _WAITS, found
