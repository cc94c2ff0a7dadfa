"""A run that is killed again and again ends in the same bits: two strikes here, a thousand with `make chaos`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

import chaos

_LIMIT_S = 150
_KILLS = 2
_SEED = 50  # of the plan: two ranks

pytestmark = [
    pytest.mark.limit_s(_LIMIT_S + 10),
    pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes through /proc"),
]


def test_killed_run_ends_in_the_same_bits() -> None:
    command = [sys.executable, chaos.__file__, f"--kills={_KILLS}", f"--seed={_SEED}", "--steps=60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            said, _ = run.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)  # it ends what it has started
            said, _ = run.communicate()
    assert run.returncode == 0, said
    assert said.startswith(f"seed {_SEED}; to see the same plan again: make chaos KILLS={_KILLS} SEED={_SEED}\n")
    rows = {row[0]: row[1:] for row in (re.split(r"  +", line) for line in said.splitlines())}
    assert rows["all"][-1] == str(_KILLS), said
    assert "bits changed: 0" in said.splitlines()
