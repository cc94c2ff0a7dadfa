"""The examples that README shows print what README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def check_figures(found: list[str], expected: list[str]) -> None:
    """The same words, and figures of which the last digits depend on the processor."""
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("#", line) for line in found] == [number.sub("#", line) for line in expected]
    values = [[float(text) for line in lines for text in number.findall(line)] for lines in (found, expected)]
    assert values[0] == pytest.approx(values[1], rel=0.01)
