"""Where a benchmark ran and with what: the words that stand beside every figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def hardware() -> str:
    """Processor and number of usable cores as one word, for file names: `amd-epyc-2core`."""
    model = platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|@.*|\b(processor|cpu)\b", " ", model.lower()))
    return "-".join([*words[:5], f"{len(os.sched_getaffinity(0))}core"])


def versions() -> dict[str, str]:
    """Versions of what was measured and measured against."""
    found = {"python": platform.python_version()}
    for name, distribution in (("torch", "torch"), ("lockstep", "lockstep-train"), ("transformers", "transformers")):
        found[name] = importlib.metadata.version(distribution)
    return found


def commit() -> str:
    """The commit measured, with `+` where files differ from it."""
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "--", "src", "benchmarks/*.py"], cwd=ROOT)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def command() -> str:
    """What to type to get these figures again."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(shown), *sys.argv[1:]])
