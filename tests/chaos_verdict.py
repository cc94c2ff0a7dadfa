"""Whether a run that was struck again and again ended as the one that nothing happened to: bits, samples, log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.checkpoint.checkpointer import Checkpointer
from lockstep.checkpoint.reader import open_checkpoint
from lockstep.data.coverage import Coverage
from lockstep.data.sample_log import samples_by_epoch
from sample_differences import differences

_OF_THE_CLOCK = ("tokens_per_s", "eta_s")  # in a line of the log
_SHOWN = 5


class Result(NamedTuple):
    """What a run has left."""

    step: int
    tensors: Mapping[str, Tensor]  # all that the last checkpoint holds, by path
    values: Mapping[str, Any]  # the same of what is no tensor: loader, configuration, ...
    coverage: Mapping[str, Any]  # which samples were used, as digests
    metrics: Sequence[Mapping[str, Any]]  # metrics.jsonl
    samples: Sequence[Mapping[str, Any]]  # samples.jsonl


def read_result(out: Path) -> Result:
    """The result in the directory of a run. Raises: CheckpointError, where the last checkpoint is not good."""
    directory = out / "checkpoints"
    loaded = Checkpointer(directory).load()
    assert loaded is not None
    with open_checkpoint(loaded.path) as reader:
        manifest = reader.manifest
        tensors = {path: reader.read(path) for path in manifest.tensors}
    logs = [_lines(out / name) for name in ("metrics.jsonl", "samples.jsonl")]
    return Result(manifest.step, tensors, manifest.values, loaded.state["data"]["coverage"], *logs)


def differences_between(wanted: Result, found: Result) -> list[str]:
    """Everything in which `found` is not `wanted`, as sentences; [] where no bit of it is."""
    said = [] if found.step == wanted.step else [f"it ended after step {found.step}, not {wanted.step}"]
    said += _some("tensors", _other_tensors(wanted.tensors, found.tensors))
    said += _some("values", _other_values(wanted.values, found.values))
    said += _some("metrics.jsonl", _other_lines(wanted.metrics, found.metrics))
    said += _some("samples.jsonl", _other_lines(wanted.samples, found.samples))
    return said


def faults_of(result: Result) -> list[str]:
    """What is wrong with a result by itself: steps missing from the log, samples used twice or not at all."""
    said = []
    for name, lines in (("metrics.jsonl", result.metrics), ("samples.jsonl", result.samples)):
        steps = [line["step"] for line in lines if "loss" in line or "samples" in line]
        if steps != list(range(1, result.step + 1)):
            said.append(f"{name} has {len(steps)} steps, not each of 1 to {result.step} once and in order")
    length, used = _samples_used(result.samples)
    complete = [epoch for epoch, ids in used.items() if len(ids) >= length]
    for epoch in complete:
        if str(differences(used[epoch], length)) != "every sample exactly once":
            said.append(f"by samples.jsonl, epoch {epoch} has {differences(used[epoch], length)}")
    coverage = Coverage(length)
    coverage.load_state_dict(dict(result.coverage))
    for epoch in used:
        is_exact = coverage.verdict(epoch).is_exact
        if is_exact != (epoch in complete) or coverage.tally(epoch).count != len(used[epoch]):
            said.append(f"the coverage digest says: {coverage.verdict(epoch)}; the file has {len(used[epoch])} samples")
    return said


def size_of(result: Result) -> str:
    """How much was compared, in words."""
    length, used = _samples_used(result.samples)
    megabytes = sum(tensor.nbytes for tensor in result.tensors.values()) / 1e6
    return (
        f"{len(result.tensors)} tensors of {megabytes:.2f} MB, {len(result.values)} values, {result.step} steps, "
        f"{sum(map(len, used.values()))} samples in {len(used)} epochs of {length}"
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _samples_used(lines: Sequence[Mapping[str, Any]]) -> tuple[int, dict[int, list[int]]]:
    """(samples in an epoch, epoch -> ids) by the lines of the steps."""
    used: dict[int, list[int]] = {}
    length = 0
    for line in lines:
        length = line["length"]
        for epoch, ids in samples_by_epoch(line):
            used.setdefault(epoch, []).extend(ids)
    return length, used


def _other_tensors(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for path in sorted({*wanted, *found}):
        if path not in wanted or path not in found:
            yield f"{path} is only in one of them"
        elif wanted[path].dtype != found[path].dtype or wanted[path].shape != found[path].shape:
            yield f"{path} has another dtype or shape"
        else:
            bits = _bytes(wanted[path]) != _bytes(found[path])
            if bits.any():
                yield f"{path} differs in {int(bits.sum())} bytes"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _other_values(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    for path in sorted({*wanted, *found}):
        before, now = (json.dumps(values.get(path)) for values in (wanted, found))
        if before != now or (path in wanted) != (path in found):
            yield f"{path} is {now[:80]}, not {before[:80]}"


def _other_lines(wanted: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    counts = [
        Counter(json.dumps({k: v for k, v in line.items() if k not in _OF_THE_CLOCK}) for line in log)
        for log in (wanted, found)
    ]
    yield from (f"lacks {line}" for line in counts[0] - counts[1])
    yield from (f"has {line}" for line in counts[1] - counts[0])


def _some(what: str, said: Iterator[str]) -> list[str]:
    every = list(said)
    more = [f"and {len(every) - _SHOWN} more {what}"] if len(every) > _SHOWN else []
    return [f"{what}: {one}" for one in every[:_SHOWN]] + more
