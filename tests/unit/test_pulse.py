"""Signs of life that ranks leave in memory which their launcher sees."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.comm.communicator import Communicator
from lockstep.comm.local_transport import LocalWorld
from lockstep.comm.pulse import NONE, PULSE, Beat, create_pulses, open_pulse, read_pulses
from lockstep.comm.waiting import wait_until
from lockstep.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_pulses(tmp_path / "pulses", 5)
    return tmp_path / "pulses"


def environ(path: Path, local_rank: int, rank: int | None = None) -> dict[str, str]:
    names = {PULSE: str(path), "LOCAL_RANK": str(local_rank)}
    return names if rank is None else {**names, "RANK": str(rank)}


def python(script: str, path: Path, local_rank: int) -> subprocess.Popen[str]:
    """A process that runs `script` as this local rank."""
    start = "import os, signal\nfrom lockstep.comm.pulse import open_pulse\npulse = open_pulse(os.environ)\n"
    here = {**os.environ, **environ(path, local_rank)}
    return subprocess.Popen([sys.executable, "-c", start + script], env=here, stdout=subprocess.PIPE, text=True)


def test_what_a_rank_tells_is_read_and_others_slots_stay(path: Path) -> None:
    assert read_pulses(path) == []
    pulse = open_pulse(environ(path, 3, rank=11))
    assert read_pulses(path) == [Beat(11, os.getpid(), NONE, NONE, 0, 0)]
    pulse.step(0)
    pulse.step(7)
    pulse.committed(5)
    pulse.beat()
    (beat,) = read_pulses(path)
    assert (beat.rank, beat.step, beat.committed, beat.count) == (11, 7, 5, 4)
    assert beat.time_ns > 0
    again = open_pulse(environ(path, 3, rank=11))
    assert again is pulse, "a second one would map the file again"
    pulse.close()
    pulse.close()
    pulse.step(9)
    assert read_pulses(path) == [beat]
    after = open_pulse(environ(path, 3, rank=11))
    after.step(8)
    assert read_pulses(path)[0].count == 5, "the same process goes on in its slot"
    after.close()


def test_file_is_private_and_made_once(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 5 * 64
    with pytest.raises(FileExistsError):
        create_pulses(path, 5)


def test_without_a_launcher_nothing_is_written(tmp_path: Path) -> None:
    for names in ({}, {PULSE: ""}, {PULSE: str(tmp_path / "gone"), "LOCAL_RANK": "0"}):
        pulse = open_pulse(names)
        pulse.step(3)
        pulse.committed(2)
        pulse.beat()
        assert pulse.path == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("local_rank", ["5", "-1", "one", "0x1", ""])
def test_slot_that_does_not_exist_is_an_error(path: Path, local_rank: str) -> None:
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        open_pulse({PULSE: str(path), "LOCAL_RANK": local_rank})


def test_what_was_written_survives_sigkill(path: Path) -> None:
    with python("pulse.step(41)\npulse.committed(40)\nos.kill(os.getpid(), signal.SIGKILL)", path, 2) as process:
        assert process.wait(30) == -signal.SIGKILL
    (beat,) = read_pulses(path)
    assert (beat.rank, beat.pid, beat.step, beat.committed) == (2, process.pid, 41, 40)


def test_forked_child_and_started_program_write_nothing(path: Path) -> None:
    script = """
import subprocess, sys
pulse.step(1)
if os.fork() == 0:
    pulse.step(100)
    pulse.committed(100)
    pulse.beat()
    open_pulse(os.environ).step(200)
    os._exit(0)
os.wait()
again = "import os; from lockstep.comm.pulse import open_pulse; open_pulse(os.environ).step(300)"
subprocess.run([sys.executable, "-c", again], check=True)
pulse.step(2)
"""
    with python(script, path, 0) as process:
        assert process.wait(30) == 0
    (beat,) = read_pulses(path)
    assert (beat.pid, beat.step, beat.committed, beat.count) == (process.pid, 2, NONE, 2)


def test_no_half_written_number_is_ever_read(path: Path) -> None:
    """Each byte of a number differs from the other's, so that any mixture of the two would show."""
    numbers = (0x11223344_55667788, 0x7FEEDDCC_BBAA9900)
    script = f"""
while True:
    for number in {numbers}:
        pulse.step(number)
        pulse.committed(number)
"""
    seen: set[int] = set()
    counts = [0]
    with python(script, path, 1) as process:
        try:
            assert wait_until(lambda: any(beat.count for beat in read_pulses(path)), 30)
            while len(seen) < 2 or counts[-1] < counts[0] + 20_000 or len(counts) < 5_000:
                (beat,) = read_pulses(path)
                seen |= {beat.step, beat.committed} - {NONE}
                counts.append(beat.count)
        finally:
            process.kill()
    assert seen == set(numbers)
    assert counts == sorted(counts)


def test_operations_between_ranks_are_signs_of_life(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ(path, 4).items():
        monkeypatch.setenv(name, value)
    world = LocalWorld(1, 10.0)
    with Communicator(world.transports[0]) as comm:
        comm.barrier()
        comm.barrier()
    comm._pulse.close()
    assert [(beat.rank, beat.count) for beat in read_pulses(path)] == [(4, 2)]
