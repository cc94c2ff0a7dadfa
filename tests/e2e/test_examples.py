"""The examples that README shows print what README says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_runs import Run, wait_for

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def printed(*words: str) -> list[str]:
    """Standard output of a Python that is given `words`; its errors go into the failure."""
    command, environ = [sys.executable, *words], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shown(command: str) -> list[str]:
    """What README shows below `command`."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == f"$ {command}")
    block = lines[start + 1 :]
    return [line.strip() for line in block[: block.index("")]]


@pytest.mark.limit_s(120)
def test_meet() -> None:
    assert printed("examples/meet.py") == shown(".venv/bin/python examples/meet.py")


@pytest.mark.limit_s(120)
def test_swapped_import() -> None:
    found = sorted(printed(*TORCHRUN, "examples/swapped_import.py"))  # the ranks end in any order
    check_figures(found, sorted(shown(".venv/bin/torchrun --nproc-per-node=2 examples/swapped_import.py")))


@pytest.mark.limit_s(120)
@pytest.mark.parametrize("words", [(*TORCHRUN, "examples/sharded.py", "hybrid"), ("examples/sharded.py",)], ids=len)
def test_sharded(words: tuple[str, ...]) -> None:
    check_figures(printed(*words), shown(".venv/bin/torchrun --nproc-per-node=2 examples/sharded.py full"))


@pytest.mark.limit_s(120)
def test_resume(tmp_path: Path) -> None:
    """Loses a rank, is stopped and goes on under another launcher: the weights are those of a run left alone."""
    script, out = str(ROOT / "examples" / "resume.py"), tmp_path / "out"
    words = ("run", "--nproc-per-node", "2", "--max-restarts", "3", script)
    said = Run(tmp_path, *words, str(tmp_path / "alone"), warm=True).end(0)
    alone = re.findall("^10 of 10 epochs had every sample; weights [0-9a-f]{16}$", said, re.MULTILINE)
    run = Run(tmp_path, *words, str(out), warm=True)
    try:
        wait_for(lambda: newest_in(out) > 0, "a checkpoint", run.text)
        os.kill(run.pid_of(1), signal.SIGKILL)
        run.await_text("restart 1 ")
        saved = newest_in(out)
        wait_for(lambda: newest_in(out) > saved, "progress after the restart", run.text)
        run.process.send_signal(signal.SIGUSR1)
        run.end(75)
    finally:
        run.close()
    assert newest_in(out) > saved
    assert printed(*TORCHRUN, script, str(out))[-1:] == alone


@pytest.mark.limit_s(120)
def test_skipped_collective(tmp_path: Path) -> None:
    """What README shows of `lockstep demo` is what the guard says, but for the machine and the process."""
    script = ROOT / "src" / "lockstep" / "demos" / "skipped_collective.py"
    said = Run(tmp_path, "run", "--nproc-per-node", "2", str(script), warm=True, LOCKSTEP_EVIDENCE="").end(1)
    nameless = re.sub(r"\(host [\w.-]+, pid \d+\)", "(host vm, pid 16932)", said)
    expected = " ".join(shown(".venv/bin/lockstep demo skipped_collective"))
    found = " ".join(nameless.split()).replace(" so far", "")  # a guard may look before the step has ended
    assert " ".join(expected.split()) in found


def newest_in(out: Path) -> int:
    return max((int(path.name[5:13]) for path in out.glob("step-*")), default=0)


def check_figures(found: list[str], expected: list[str]) -> None:
    """The same words, and figures of which the last digits depend on the processor."""
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("#", line) for line in found] == [number.sub("#", line) for line in expected]
    values = [[float(text) for line in lines for text in number.findall(line)] for lines in (found, expected)]
    assert values[0] == pytest.approx(values[1], rel=0.01)
