"""A signal that asks one rank to stop stops the run, whatever becomes of the others; a failure does not."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import launched_runs
from lockstep.launch.worker import INTERRUPTED, REQUEUE

_LIMIT_S = 100.0
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")

pytestmark = pytest.mark.limit_s(_LIMIT_S + 10)

# name of the run -> (exit code, what is said of it, in order)
EXPECTED = {
    **{f"ended by {name}": (INTERRUPTED, rf"rank 1 was ended by {name}: stopping\nstopped") for name in _SIGNALS},
    "ended by SIGTERM after a checkpoint of an earlier run": (
        REQUEUE, r"rank 1 was ended by SIGTERM: stopping\nstopped; the newest checkpoint is that of step 3"
    ),
    "interrupted": (INTERRUPTED, r"rank 1 ended with exit code 130: stopping\nstopped"),
    "interrupted, and the other lost it": (INTERRUPTED, r"(rank 1 ended with exit code 130: stopping\n)?stopped"),
    "saved, and the other lost it": (REQUEUE, r""),
    "told by the supervisor": (REQUEUE, r"rank 1 was ended by SIGHUP: stopping"),
    "asked while the other is killed": (
        REQUEUE,
        r"(rank 1 got SIGUSR1: stopping\n)?"
        r"rank 0 \(pid \d+\) was killed by SIGKILL; rank 1 (was ended by the launcher|left because of it)\n"
        r"finished: step 7; lost: 2 steps since the checkpoint of step 5\n"
        r"no restart: the run was asked to stop\n"
        r"stopped; the newest checkpoint is that of step 5",
    ),
    "asked while the other is killed, no restarts": (
        1,
        r"(rank 1 got SIGUSR1: stopping\n)?"
        r"rank 0 \(pid \d+\) was killed by SIGKILL; rank 1 (was ended by the launcher|left because of it)\n"
        r"finished: step 7; lost: 2 steps since the checkpoint of step 5\n"
        r"no restart: none is allowed \(--max-restarts 0\)",
    ),
    "asked, and slower than the one that lost it": (INTERRUPTED, r"rank 1 got SIGUSR1: stopping\nstopped"),
    **dict.fromkeys(
        ("killed", "killed, and the other is asked to end", "killed, and the other ends as asked"),
        (
            0,
            r"rank 1 \(pid \d+\) ended with exit code 3, by sys\.exit at \S+launched_runs\.py:\d+; "
            r"rank 0 was ended by the launcher\n"
            r"restart 1 of 3 after exit code 3, from the beginning with 2 processes",
        ),
    ),
}  # fmt: skip


def test_each_way_to_end() -> None:
    assert EXPECTED.keys() == launched_runs.RUNS.keys()
    command = [sys.executable, launched_runs.__file__, *EXPECTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    ended = {name: (code, said) for name, code, said in map(json.loads, done.stdout.splitlines())}
    assert ended.keys() == EXPECTED.keys()
    wrong = {}
    for name, (code, pattern) in EXPECTED.items():
        said = "\n".join(re.findall("^lockstep: (.*)$", ended[name][1], re.MULTILINE))
        if ended[name][0] != code or not re.fullmatch(pattern, said):
            wrong[name] = ended[name]
    assert not wrong, "\n".join(f"{name}: exit code {code}\n{said}" for name, (code, said) in wrong.items())
