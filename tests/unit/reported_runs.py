"""Folders of runs that never happened, with everything that a report can show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiled_worlds import World

from lockstep.observe.profile.notes import note_line
from lockstep.observe.tally import bins_of, coverage_fields, tally_of

SECOND = 1_000_000  # microseconds


def add_notes(folder: Path, rank: int, *notes: tuple[str, int, dict[str, Any]]) -> None:
    """Append (kind, at_us, fields) to the record of a rank."""
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.writelines(note_line(*note) for note in notes)


def append_attempt(folder: Path, rank: int, later: Path, attempt: str, cut: str = "") -> None:
    """Let the rank begin again, a while after, with what it has in `later`. cut: half a line that was there before."""
    lines = [json.loads(line) for line in (later / f"rank-{rank}.jsonl").read_text().splitlines()]
    for line in lines:
        if "start" in line:
            line |= {"attempt": attempt, "time_ns": line["time_ns"] + 10**12}
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(cut + "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def add_launch(folder: Path, *lines: dict[str, Any]) -> None:
    """Append to what the launcher has written."""
    with (folder / "launch.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def began_ns(folder: Path, rank: int = 0) -> int:
    """When a rank began."""
    return json.loads((folder / f"rank-{rank}.jsonl").read_text().splitlines()[0])["time_ns"]


def coverage_note(epoch: int, ids: Sequence[int], length: int, **about: Any) -> tuple[str, int, dict[str, Any]]:
    """As a rank says which samples it used."""
    fields = coverage_fields(length, tally_of(list(ids)), bins_of(list(ids), length))
    return "coverage", SECOND, {"epoch": epoch, **fields, **about}


def full_run(folder: Path, *, world_size: int = 2, steps: int = 120, collectives: int = 4, units: int = 12) -> Path:
    """A run in which everything has happened that a page has a place for."""
    late = world_size - 1
    World(
        work_us=lambda rank, step: 1500 + 40 * (step * 7 % 11) + (900 if rank == late and step % 5 == 0 else 0),
        data_us=lambda rank, step: 3000 if rank == late and step % 3 == 0 else 250,
        world_size=world_size,
        collectives=collectives,
        steps=steps,
        tokens=4096,
    ).run(folder)
    for rank in range(world_size):
        _with_all_phases(folder / f"rank-{rank}.jsonl")
    length = 97 * world_size
    for rank in range(world_size):
        add_notes(folder, rank, *_notes(rank, world_size, steps, length, units))
    began = began_ns(folder)
    add_launch(
        folder,
        {"launch": "a", "command": ["lockstep", "run", "train.py"], "time_ns": began - 10**9, "pid": 1, "host": "h"},
        {"attempt": "a/0", "world_size": world_size, "time_ns": began - 5 * 10**8},
        {
            "ended": "a/0",
            "code": 1,
            "causes": ["rank 1 failed at train.py:88: ValueError: no"],
            "time_ns": began + 10**12,
        },
        {"over": "a", "code": 1, "time_ns": began + 10**12 + 10**9},
    )
    return folder


def _with_all_phases(path: Path) -> None:
    """Part of the work is forward, part the optimizer; every other collective begins 0.7 ms before it is waited for."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if "phases_us" in line:
            data, _, work, exposed, _, other = line["phases_us"]
            forward, optimizer = work * 35 // 100, work // 10
            line["phases_us"] = [data, forward, work - forward - optimizer, exposed, optimizer, other]
            for row in line.get("ops", ())[::2]:
                row[2] = max(0, row[4] - 700)
            line["hidden_us"] = sum(row[4] - row[2] for row in line.get("ops", ()))
            if not line.get("ops"):
                del line["hidden_us"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _notes(rank: int, world_size: int, steps: int, length: int, units: int) -> list[tuple[str, int, dict[str, Any]]]:
    facts = {
        "command": ["train.py", "--lr", "0.1"],
        "cwd": "somewhere",
        "python": "3.11.2",
        "torch": "2.13.0",
        "lockstep": "0.1.0",
        "commit": "a" * 40,
        "host": "h",
        "cores": 2,
        "variables": {
            "RANK": [str(rank), "launcher"],
            "OMP_NUM_THREADS": ["1", "launcher"],
            "HF_HOME": ["x", "environment"],
        },
        "config": {"train.steps": steps, "optim.lr": 0.1},
        "config_sha256": "b" * 64,
    }
    sizes = [4096 * (unit % 5 + 1) for unit in range(units)]
    layout = {
        "step": 1,
        "strategy": "fully_shard",
        "units": [
            [f"layer{n}.weight", size, "float32", 4 * size, 4 * size // world_size] for n, size in enumerate(sizes)
        ],
        "memory": {
            "parameters": 4 * sum(sizes) // world_size,
            "gradients": sum(sizes),
            "optimizer": 999,
            "buffers": 64,
        },
    }
    values = [
        ("values", SECOND, {"step": s, "loss": 4 * math.exp(-s / 60) + 0.05 * (s * 13 % 7), "lr": 0.1 / s})
        for s in range(1, steps + 1)
        if rank == 0
    ]
    mine = range(rank, length, world_size)
    finding = {
        "kind": "waiting",
        "culprits": [world_size - 1],
        "text": f"lockstep: rank {world_size - 1} is late, step 60\n  the others wait in all_reduce float32 [65536]\n"
        "Likely fix: give it less to do\nEvidence: runs/x/evidence",
        "is_certain": False,
        "key": "late",
    }
    return [
        ("facts", 0, facts),
        ("layout", SECOND, layout),
        *values,
        coverage_note(0, mine, length),
        coverage_note(1, [*mine[:-1], mine[0]] if rank else mine, length),
        *(
            (
                "replicas",
                SECOND,
                {"step": s, "equal": True, "digest": "c" * 16, "what": "parameters, buffers, optimizer"},
            )
            for s in range(10, steps + 1, 10)
        ),
        ("finding", 60 * 8000, finding),
    ]
