"""What launchers of several machines tell each other: several of them, in one process."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from torch.distributed import HashStore

from lockstep.comm.waiting import wait_until
from lockstep.launch.machines import Machines
from lockstep.launch.stop_signals import StopSignals


def test_who_was_told_to_stop_does_not_take_the_place_of_who_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third machine may hear it after the second has."""
    store = HashStore()
    machines = [Machines(store, StopSignals([]), here, 3) for here in range(3)]
    for here, host in ((1, "asked"), (2, "told")):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        machines[here].tell_stop(signal.SIGINT)
    request = machines[0].told_stop()
    assert request is not None
    assert request.words == "asked was asked to stop by SIGINT: stopping"


def test_who_holds_the_store_stays_until_all_have_heard_by_what_the_run_has_failed() -> None:
    """The first cause stays: what follows of it elsewhere is none."""
    store = HashStore()
    with StopSignals([]) as signals, ThreadPoolExecutor(1) as pool:
        holder, failing, last = (Machines(store, signals, here, 3, is_holder=not here) for here in range(3))
        assert [one.given_up() for one in (holder, failing, last)] == ["", "", ""]
        failing.give_up("rank 1 failed")
        assert failing.meet(7, 60.0, has_failed=True) == 7
        last.give_up("rank 2 failed, as it has lost rank 1")
        assert [one.given_up() for one in (holder, last)] == ["rank 1 failed"] * 2
        holds = pool.submit(holder.meet, 3, 60.0, has_failed=True)
        wait_until(lambda: holds.running(), 5)
        assert not wait([holds], 0.5).done
        last.meet(5, 60.0, has_failed=True)
        assert holds.result(10) == 7


def test_who_has_done_all_waits_no_longer_where_another_machine_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with StopSignals([]) as signals:
        done, failed = (Machines(store, signals, here, 3) for store in (HashStore(),) for here in range(2))
        failed.give_up("rank 1 failed")
        assert done.meet(7, 600.0) == 7
    assert capsys.readouterr().err == "lockstep: all was done here; elsewhere rank 1 failed\n"


def test_a_machine_that_the_others_can_spare_fails_alone() -> None:
    store = HashStore()
    other, spared = (Machines(store, StopSignals([]), here, 2, can_spare_one=True) for here in range(2))
    spared.give_up("rank 1 failed")
    assert other.given_up() == ""
