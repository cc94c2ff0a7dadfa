"""What launchers of several machines tell each other: several of them, in one process."""

from __future__ import annotations

import signal

import pytest
from torch.distributed import HashStore

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
