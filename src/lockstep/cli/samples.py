"""`lockstep samples RUN [STEP ...] [--find ID ...]`: which samples a run was trained on, and when."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, DataError
from lockstep.launch.words import Words

_LOG = "samples.jsonl"


def samples(words: Sequence[str]) -> int:
    """`lockstep samples ...`; the exit code. Raises: ConfigError for a run or step that is not there."""
    parser = Words(prog="lockstep samples", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help=f"the run's directory, or its {_LOG}")
    listed = "steps whose samples are listed, one line each; without any, one line that sums the log up"
    parser.add_argument("steps", nargs="*", type=int, default=(), metavar="STEP", help=listed)
    parser.add_argument("--find", nargs="*", type=int, default=(), metavar="ID", help="samples whose steps are listed")
    args = parser.read(words)
    path = args.run / _LOG if args.run.is_dir() else args.run
    if not path.is_file():
        fix = "give the directory of a run, as `lockstep samples runs/gpt2-tiny 10`"
        raise ConfigError(f"{path} does not exist: {fix}")
    try:
        lines = list(_answers(args, path))
        sys.stdout.write("".join(line + "\n" for line in lines))
    except DataError as error:
        raise ConfigError(f"{path}: {error}") from error
    return 0


def _answers(asked: Namespace, path: Path) -> Iterator[str]:
    from lockstep.data.sample_log import samples_by_epoch  # loads torch, which --help need not

    wanted, found = dict.fromkeys(asked.steps), {sample: list[str]() for sample in asked.find}
    seen: set[int] = set()
    first = last = uses = 0
    for record in _records(path):
        step = record["step"]
        first, last = (first or step), step
        if not wanted and not found:
            uses += sum(stop - start for _, start, stop in record["samples"])
            continue
        if step not in wanted and not found:
            continue
        for epoch, ids in samples_by_epoch(record):
            if step in wanted:
                seen.add(step)
                yield f"step {step}, epoch {epoch}, {len(ids)} samples: {' '.join(map(str, ids))}"
            for sample in found.keys() & set(ids):
                found[sample].append(f"step {step} (epoch {epoch})")
    missing = [step for step in wanted if step not in seen]
    if missing:
        raise ConfigError(f"{path} has no step {', '.join(map(str, missing))}: it has steps {first} to {last}")
    for sample, steps in found.items():
        yield f"sample {sample}: {', '.join(steps) or 'not used'}"
    if not wanted and not found:
        yield f"steps {first} to {last}, {uses} samples; to list those of a step: lockstep samples {asked.run} {last}"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                if type(record["step"]) is not int:
                    raise TypeError(record["step"])
                yield record
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"line {number} of {path} is no line of a run's log: {error!r}") from error
