"""The control groups of this process, in which Linux limits and counts what it takes together with its children."""

from __future__ import annotations

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
