"""The control groups of this process, in which Linux limits and counts what it takes together with its children."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

ROOT = Path("/")


def group_folders(controller: str, root: Path = ROOT) -> list[Path]:
    """Folders in which the kernel may say something of `controller`, "cpu" or "memory": the group's own, those above.

    Of version 2 and of version 1; some are not there, as inside a container, which sees its own group as the topmost.
    root: of the file system. [] where there are no control groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    folders: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = top / path.strip("/")
            folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return folders


def core_quota(root: Path = ROOT) -> float:
    """The CPU time limit of this process's control groups, in cores; infinite where there is none."""
    quotas = [quota for folder in group_folders("cpu", root) for quota in _quota_of(folder)]
    return min(quotas, default=float("inf"))


def _quota_of(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{word}_us").read_text().strip() for word in ("quota", "period"))
    except OSError:
        return []
    return [] if limit in ("max", "-1") else [int(limit) / int(period)]


def memory_limit(root: Path = ROOT) -> float:
    """The memory limit of this process's control groups, in bytes; infinite where there is none."""
    found = [2.0**60]  # version 1 writes a larger number for none
    for folder in group_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                found.append(float(int((folder / name).read_text())))
    return min(found) if min(found) < 2**60 else float("inf")


def out_of_memory_kills(root: Path = ROOT) -> int:
    """How many processes the kernel has killed for their memory so far, among those it counts together with this one.

    They are this process's control group, which its children share, or else the whole machine. Two looks tell whether
    there was one in between. 0 where the kernel does not count. root: of the file system.
    """
    names = ("memory.events", "memory.oom_control")
    for path in (*[folder / name for folder in group_folders("memory", root) for name in names], root / "proc/vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:  # not this version, or not for this user to see
            continue
        if found:
            return int(found.group(1))
    return 0
