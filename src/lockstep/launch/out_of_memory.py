"""Whether the kernel has killed processes for want of memory: a SIGKILL does not say who sent it."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.comm.control_groups import ROOT, group_folders


def out_of_memory_kills(root: Path = ROOT) -> int:
    """How many processes the kernel has killed for their memory so far, among those it counts together with this one.

    They are this process's control group, which its children share, or else the whole machine. Two looks tell whether
    there was one in between. 0 where the kernel does not count. root: of the file system.
    """
    folders = group_folders("memory", root)
    files = [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]
    for path in (*files, root / "proc/vmstat"):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(errors="replace"), re.MULTILINE)
        except OSError:  # not this version, or not for this user to see
            continue
        if found:
            return int(found.group(1))
    return 0
