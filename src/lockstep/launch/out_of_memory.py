"""Whether the kernel has killed processes for want of memory: a SIGKILL does not say who sent it."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path("/")


def out_of_memory_kills(root: Path = _ROOT) -> int:
    """How many processes the kernel has killed for their memory so far, among those it counts together with this one.

    They are this process's control group, which its children share, or else the whole machine. Two looks tell whether
    there was one in between. 0 where the kernel does not count. root: of the file system.
    """
    for path in (*_group_files(root), root / "proc/vmstat"):
        found = re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)
        if found:
            return int(found.group(1))
    return 0


def _group_files(root: Path) -> list[Path]:
    """Where version 2 and version 1 of control groups count, as seen from a host and from inside a container."""
    paths: list[Path] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        group = group.strip("/")
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        paths += [top / group / name, top / name]
    return paths


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # not this version, or not for this user to see
        return ""
