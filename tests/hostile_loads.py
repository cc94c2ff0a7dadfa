"""Run as a program: load checkpoints that are not to be trusted, and say what came of it, and what it touched.

    python hostile_loads.py FOLDER     of which every folder in it holds one checkpoint

An audit hook stays for the life of a process, so this is one of its own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.reader import open_checkpoint
from lockstep.checkpoint.state import FlatState, unflatten
from lockstep.errors import CheckpointError

_HARMLESS = ("os.scandir", "object.__getattr__", "object.__setattr__", "sys._getframe", "time.sleep")


class Touched:
    """Whatever the interpreter reports while `folder` is set, unless it is a plain file of that folder."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.events: list[str] = []

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None or event in _HARMLESS:
            return
        if event == "open":
            name = os.fspath(args[0]) if not isinstance(args[0], int) else ""
            if name == str(self.folder) or (name and "/" not in name and name not in ("..", ".")):
                return
        self.events.append(f"{event} {str(args)[:300]}")


def load(folder: Path) -> str:
    """Everything in the checkpoint; the error, where there is one."""
    try:
        with open_checkpoint(folder) as reader:
            reader.verify()
            held = reader.manifest
            tensors = {path: reader.read(path) for path in held.tensors}
            unflatten(FlatState(tensors, held.values, held.kinds, held.aliases))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(parent: Path) -> None:
    touched = Touched()
    good = parent / "good"
    assert load(next(good.iterdir())) == ""  # what is imported when it is first used is imported now
    assert load(parent).startswith("CheckpointDamaged")
    torch.empty(0).sum()
    sys.addaudithook(touched.hook)
    results = {}
    for case in sorted(parent.iterdir()):
        folder = next(path for path in case.iterdir() if path.name.startswith("step-"))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        touched.events = []
        touched.folder = folder
        try:
            said = load(folder)
        except Exception as error:  # noqa: BLE001 - judged by the test
            said = f"{type(error).__name__}: {error}"
        finally:
            touched.folder = None
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        results[case.name] = {"said": said[:2000], "touched": touched.events[:20], "grown_kib": grown}
    touched.folder = parent  # the hook sees what it is to see
    touched.events = []
    with open(os.devnull):
        __import__("tabnanny")
    touched.folder = None
    results["hook"] = {"touched": touched.events}
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
