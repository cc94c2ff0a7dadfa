"""What launchers put into a process's environment: torchrun's and Slurm's variables, and Slurm's notations in them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

Launcher = Literal["arguments", "torchrun", "environment", "slurm", "one process", "process group"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_PORTS = range(16000, 32000)  # below the range from which Linux hands out ports by itself


class Variables(NamedTuple):
    """The names under which a launcher gives each field of a Place, and the values it gives in another form."""

    launcher: Launcher = "one process"
    rank: tuple[str, ...] = ()
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    restart_count: tuple[str, ...] = ()
    run_id: str = ""
    address: str = ""  # what the launcher implies, where MASTER_ADDR and MASTER_PORT are not set
    port: int = 0
    tasks_per_node: tuple[int, ...] = ()
    note: str = ""  # what the user may not expect, in one clause


def find_variables(environ: Mapping[str, str], explicit: bool, problem: Callable[[str, str], None]) -> Variables:
    """Those of the launcher that has started this process.

    explicit: the user's arguments say which rank this is. problem(field, text): told what cannot be.
    """
    if any(name in environ for name in _TORCHRUN):
        return Variables(
            "arguments" if explicit else "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
            ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("GROUP_RANK", "NODE_RANK"),
            ("TORCHELASTIC_RESTART_COUNT",), environ.get("TORCHELASTIC_RUN_ID", ""),
        )  # fmt: skip
    # Slurm's, inside a step of several tasks; an `sbatch` script or an `salloc` shell is one process.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if not ("SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ) or tasks == "1":
        note = ""
        if environ.get("SLURM_NTASKS", "1") != "1":
            note = f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but this process is no task of a step: srun starts all"
        elif "MASTER_ADDR" in environ:
            note = "MASTER_ADDR is set, but neither RANK nor WORLD_SIZE"
        return Variables("arguments") if explicit else Variables(note=note)
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    job, step = environ.get("SLURM_JOB_ID", environ.get("SLURM_JOBID", "")), environ["SLURM_STEP_ID"]
    are_numbers = job.isdecimal() and step.isdecimal()
    if not are_numbers:
        problem("port", f"SLURM_JOB_ID={job!r} and SLURM_STEP_ID={step!r} are not both numbers")
    return Variables(
        "arguments" if explicit else "slurm",
        ("SLURM_PROCID",), (size,), ("SLURM_LOCALID",), (), ("SLURM_NODEID",), ("SLURM_RESTART_COUNT",),
        run_id=f"slurm-{job}.{step}",
        address=_slurm_address(environ, problem),
        port=slurm_port(int(job), int(step)) if are_numbers else 0,
        tasks_per_node=_slurm_tasks(environ, problem),
    )  # fmt: skip


def _slurm_address(environ: Mapping[str, str], problem: Callable[[str, str], None]) -> str:
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in environ), "")
    if "MASTER_ADDR" in environ or not name:
        return ""
    try:
        hosts = expand_hosts(environ[name])
    except ValueError as error:
        problem("address", f"{name}={environ[name]!r} is no list of hosts: {error}")
        return ""
    return "127.0.0.1" if len(hosts) == 1 else hosts[0]


def _slurm_tasks(environ: Mapping[str, str], problem: Callable[[str, str], None]) -> tuple[int, ...]:
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in environ), "")
    try:
        return tuple(expand_tasks(environ[name])) if name else ()
    except ValueError:
        problem("local_world_size", f"{name}={environ[name]!r} is no list of task counts like 2(x3),1")
        return ()


def expand_hosts(text: str) -> list[str]:
    """The hosts of a Slurm list: `n[01-03,7],m2` is n01 n02 n03 n7 m2. Raises ValueError where it is none."""
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text):  # at the commas outside of brackets
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


def _expand_range(text: str) -> Iterator[str]:
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{item!r} is no number or range")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
