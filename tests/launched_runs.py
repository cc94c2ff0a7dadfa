"""Runs of tiny programs under the supervisor, one after the other in this process: how each ends, and what is said.

    python launched_runs.py NAME ...

prints one line of JSON for each name of `RUNS`: [name, exit code, what was said].
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lockstep.comm.pulse import open_pulse
from lockstep.comm.waiting import wait_until
from lockstep.errors import PeerLost
from lockstep.launch.worker import INTERRUPTED, REQUEUE, StopRequest

_LIMIT_S = 30.0


class Ranks(NamedTuple):
    """What two ranks do, and how they are supervised."""

    first: Callable[[Path], None]
    second: Callable[[Path], None]
    committed: int | None = None  # that is known of before they start
    asks_first: bool = False
    restarts: int = 3


def sleep(folder: Path) -> None:
    """Do as one that is blocked, and does not handle signals."""
    (folder / "sleeps").touch()
    signal.pause()


def end_by(number: int) -> Callable[[Path], None]:
    """Die by a signal, once the other one sleeps."""

    def act(folder: Path) -> None:
        signal.signal(number, signal.SIG_DFL)
        assert wait_until((folder / "sleeps").exists, _LIMIT_S)
        os.kill(os.getpid(), number)

    return act


def leave(code: int) -> Callable[[Path], None]:
    """End with this exit code, once the other one sleeps."""

    def act(folder: Path) -> None:
        assert wait_until((folder / "sleeps").exists, _LIMIT_S)
        sys.exit(code)

    return act


def lose_peer(folder: Path) -> None:
    """See the other one go."""
    (folder / "sleeps").touch()
    raise PeerLost("the connection to rank 1 was closed", rank=1)


def hear(folder: Path) -> None:
    """Get a signal as one that looks at it between two steps, of which there will be none."""
    stop = StopRequest(has_launcher=True)
    stop.arm()
    (folder / "sleeps").touch()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.is_set()
    assert wait_until((folder / "gone").exists, _LIMIT_S)
    raise PeerLost("the connection to rank 0 was closed", rank=0)


def be_told(folder: Path) -> None:
    """Save and leave when told to; nobody but the supervisor tells."""
    stop = StopRequest(has_launcher=True)
    stop.arm()
    (folder / "sleeps").touch()
    assert wait_until(stop.is_set, _LIMIT_S)
    sys.exit(REQUEUE)


def save_and_be_killed(folder: Path) -> None:
    """Go after a checkpoint, by no fault of its own."""
    pulse = open_pulse(os.environ)
    pulse.step(7)
    pulse.committed(5)
    assert wait_until((folder / "sleeps").exists, _LIMIT_S)
    (folder / "gone").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def lose_peer_first(folder: Path) -> None:
    """Fail because of one that was asked to stop, and is not gone yet."""
    assert wait_until((folder / "sleeps").exists, _LIMIT_S)
    (folder / "gone").touch()
    raise PeerLost("the connection to rank 1 was closed", rank=1)


def hear_and_end_slowly(folder: Path) -> None:
    """Be asked to stop, and need longer for it than a failure is waited for."""
    with contextlib.suppress(PeerLost):
        hear(folder)
    assert wait_until((folder / "told").exists, 2.5) is False
    sys.exit(INTERRUPTED)


def fail_once(folder: Path) -> None:
    """Fail by itself in the first start."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        assert wait_until((folder / "sleeps").exists, _LIMIT_S)
        sys.exit(3)


def sleep_once(folder: Path) -> None:
    """Have to be ended in the first start."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sleep(folder)


def be_told_once(folder: Path) -> None:
    """End as told in the first start."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        be_told(folder)


RUNS = {
    **{f"ended by {number.name}": Ranks(sleep, end_by(number)) for number in
       (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)},
    "ended by SIGTERM after a checkpoint of an earlier run": Ranks(sleep, end_by(signal.SIGTERM), committed=3),
    "interrupted": Ranks(sleep, leave(INTERRUPTED)),
    "interrupted, and the other lost it": Ranks(lose_peer, leave(INTERRUPTED)),
    "saved, and the other lost it": Ranks(lose_peer, leave(REQUEUE)),
    "told by the supervisor": Ranks(be_told, end_by(signal.SIGHUP)),
    "asked while the other is killed": Ranks(save_and_be_killed, hear),
    "asked while the other is killed, no restarts": Ranks(save_and_be_killed, hear, restarts=0),
    "asked, and slower than the one that lost it": Ranks(lose_peer_first, hear_and_end_slowly),
    "killed": Ranks(sleep_once, fail_once),
    "killed, and the other is asked to end": Ranks(sleep_once, fail_once, asks_first=True),
    "killed, and the other ends as asked": Ranks(be_told_once, fail_once, asks_first=True),
}  # fmt: skip


def run(name: str) -> tuple[int, str]:
    """(exit code, what the supervisor said)."""
    from dataclasses import replace

    from lockstep.comm.pulse import NONE
    from lockstep.launch.job import Launch, Supervision
    from lockstep.launch.launcher import launch, local_config
    from lockstep.launch.program import Program
    from lockstep.launch.recovery import RestartPolicy

    ranks = RUNS[name]
    supervision = Supervision(
        RestartPolicy(ranks.restarts),
        grace_s=20.0,
        failure_grace_s=5.0 if ranks.asks_first else 0.2,
        asks_first=ranks.asks_first,
        newest=lambda: NONE if ranks.committed is None else ranks.committed,
    )
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        config = replace(local_config(2, Path(folder)))
        program = Program("script", __file__, ("--rank", name, folder))
        code = launch(Launch(program, config, supervision, Path(folder), modules=("lockstep.comm.waiting",)))
    return code, said.getvalue()


def main(words: list[str]) -> None:
    """Run each, or be a rank of one."""
    if words[0] == "--rank":
        ranks = RUNS[words[1]]
        act = ranks.second if os.environ["RANK"] == "1" else ranks.first
        act(Path(words[2]))
        return
    for name in words:
        print(json.dumps([name, *run(name)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
