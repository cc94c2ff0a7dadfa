"""Slurm's notations for hosts and task counts, and a port that all tasks of a step compute alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_PORTS = range(16000, 32000)  # below the range from which Linux hands out ports by itself


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm list: `n[01-03,7],m2` is n01 n02 n03 n7 m2. Raises ValueError where it is none."""
    hosts: list[str] = []
    for item in _split_outside_brackets(text):
        parts = re.split(r"\[([^\[\]]*)\]", item)
        if any(c in "[]" for part in parts[::2] for c in part) or not item:
            raise ValueError(f"unbalanced brackets or an empty name in {item!r}")
        choices = [list(_expand_range(part)) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(words) for words in itertools.product(*choices)]
    return hosts


def expand_tasks(text: str) -> list[int]:
    """The numbers of a Slurm count list: `2(x3),1` is 2 2 2 1. Raises ValueError where it is none."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(f"{item!r} is no count")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slurm_port(job_id: int, step_id: int) -> int:
    """A port that every task of a step computes alike, and neighbouring jobs and steps do not share."""
    return _PORTS[(job_id * 31 + step_id) % len(_PORTS)]


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _expand_range(text: str) -> Iterator[str]:
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{item!r} is no number or range")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
