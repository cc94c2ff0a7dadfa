"""One side of a demo: how long it is listened to, and that nothing of it outlives who listens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lockstep.cli import demo_side
from lockstep.cli.demo_side import Side
from lockstep.demos.catalog import DEMOS, Demo

_BEGUN = f"{demo_side._MARK} 1.5"  # long ago
_ENDS_WITH_PARENT = """
import ctypes
found = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)  # PR_GET_PDEATHSIG
print("signal", found.value)
"""


def _heard(folder: Path, patch: pytest.MonkeyPatch, command: list[str], limit_s: float) -> list[str]:
    """What is heard of a launcher of two ranks, which is `command`."""
    patch.setattr(Side, "_commands", lambda self: [(command, dict(os.environ))])
    with Side(DEMOS["killed"], "torch", folder) as side:
        return [line.text for line in side.lines(limit_s) if line.text]


def test_seconds_count_from_when_the_last_rank_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank takes long to load: the other one's time is over by then. What is said after it is heard."""
    words = f"echo {_BEGUN}; sleep 0.5; echo {demo_side._MARK} $(date +%s.%N); echo late"
    assert _heard(tmp_path, monkeypatch, ["sh", "-c", words], 60.0) == ["late"]


def test_a_launcher_whose_ranks_have_ended_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about to say how they ended."""
    code = f"import time; print('{_BEGUN}\\n' * 2, flush=True); time.sleep(0.5); print('both failed')"
    assert _heard(tmp_path, monkeypatch, [sys.executable, "-c", code], 0.0) == ["both failed"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread watches the parent")
def test_a_launcher_is_killed_with_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _heard(tmp_path, monkeypatch, [sys.executable, "-c", _ENDS_WITH_PARENT], 60.0) == ["signal 9"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_a_stock_process_is_killed_with_its_parent_and_has_nothing_of_lockstep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    modules = "print('modules', 'torch' in sys.modules, *(name for name in sys.modules if 'lockstep' in name))"
    script.write_text(f"{_ENDS_WITH_PARENT}import sys\n{modules}\n")
    monkeypatch.setattr(Demo, "stock_script", script)
    with Side(DEMOS["absent_rank"], "torch", tmp_path) as side:
        assert sorted(line.text for line in side.lines(60.0)) == ["modules True"] * 2 + ["signal 9"] * 2
