"""What `lockstep run` will probably start, seen before torch, whose parser knows for sure, is loaded.

A wrong guess costs a fork server that is thrown away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.launch.program import Program

_PROCESSES = ("-n", "--nproc", "--nproc-per-node", "--nproc_per_node")


def guess_program(words: Sequence[str]) -> Program | None:
    """The script or module among the words after `lockstep run`; None where nothing looks like one."""
    if "fresh" in words or "--start=fresh" in words:
        return None
    is_module = "-m" in words or "--module" in words
    for number, word in enumerate(words):
        rest = tuple(words[number + 1 :])
        if is_module and number and words[number - 1] in ("-m", "--module"):
            return Program("module", word, rest)
        if not is_module and word.endswith(".py") and os.path.isfile(word):
            return Program("script", word, rest)
    return None


def guess_threads(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that torchrun sets for several processes of a machine."""
    number = environ.get("PET_NPROC_PER_NODE", "1")
    for before, word in zip(["", *words], words, strict=False):
        name, _, value = word.partition("=")
        if name in _PROCESSES and value:
            number = value
        elif before in _PROCESSES:
            number = word
    return {} if number == "1" or "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}


def new_record(program: str) -> str:
    """The folder for the record of a run of `program`, where none is given."""
    return os.path.join("runs", f"{Path(program).stem}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
