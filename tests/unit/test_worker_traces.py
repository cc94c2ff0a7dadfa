"""What a worker prints of an error: of another rank's failure, how the user's own code met it, and no more."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
import torch

from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.errors import CommError
from lockstep.launch.program import Program, run_program
from lockstep.observe.torch_start import Worlds

_SCRIPT = """
import builtins

def talk(comm, tensor):
    comm.recv(tensor, 1)

talk(*builtins.given)
"""


def test_trace_of_another_ranks_failure_ends_in_the_users_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    world = LocalWorld(2)
    world.transports[1].close()
    given = (Communicator(world.transports[0]), torch.zeros(3))
    with pytest.raises(CommError) as caught:
        given[0].recv(given[1], 1)
    assert "local_transport.py" in "".join(traceback.format_exception(caught.value)), "it is ours that raises"
    monkeypatch.setattr("builtins.given", given, raising=False)
    monkeypatch.setattr(Worlds, "attach", lambda self: None)  # that stays to the end of a process
    monkeypatch.setattr(sys, "argv", [])  # what a program changes is put back
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shown = []
    for debug in ("", "1"):
        if debug:
            monkeypatch.setenv("LOCKSTEP_DEBUG", debug)
        with pytest.raises(SystemExit):
            run_program(Program("script", str(script)))
        shown.append(capsys.readouterr().err)
    files = [
        line.split('"')[1] for line in shown[0].splitlines() if '  File "' in line
    ]  # torch may write a rank before it
    assert set(files) == {str(script)}
    assert shown[0].count("  File ") == 2
    assert "rank 1 has closed this communicator, and will not come" in shown[0]
    assert "local_transport.py" in shown[1]
