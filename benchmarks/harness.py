"""Measures variants of the same thing against each other: interleaved, in the same processes, in one run.

A machine drifts (clock, neighbours, temperature), so a figure of its own says little. Here every round runs every
variant once, in an order that changes from round to round, and what is reported is a ratio to the baseline of the same
run. A benchmark is a script with a worker function (what one rank measures) and a `main` (which worlds to start).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import ROOT, command, commit, hardware, versions
from mpi_world import mpi_environment, mpi_rank, mpiexec

RESULTS = ROOT / "benchmarks" / "results"
WORLD_TIMEOUT_S = 1800.0
_FAREWELL_S = 10.0
_RESAMPLES = 1000

Samples = dict[str, list[float]]  # variant -> one figure per round


# ------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class Rank:
    """What a worker function is told: its place, the folder it shares with the other ranks, its settings."""

    rank: int
    world_size: int
    folder: Path
    settings: Mapping[str, Any]

    @property
    def rendezvous(self) -> str:
        """`init_method` for torch.distributed: a file, so that no port is fixed."""
        return f"file://{self.folder}/rendezvous"


def threads_per_rank(world_size: int) -> int:
    """Cores divided by ranks, so that ranks do not fight for them."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def run_ranks(
    worker: Callable[[Rank], Any], world_size: int, settings: Mapping[str, Any], *, mpi: bool = False
) -> list[Any]:
    """What `worker` returns (JSON) on each of `world_size` processes, in rank order. Raises if one of them fails.

    mpi: mpiexec starts them, so that they can also be an MPI world.
    """
    script = Path(worker.__code__.co_filename).resolve()
    env = os.environ | {"OMP_NUM_THREADS": str(threads_per_rank(world_size)), "TOKENIZERS_PARALLELISM": "false"}
    env |= mpi_environment() if mpi else {}
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the same for every variant, and no name service in the way
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        folder = Path(name)
        (folder / "settings.json").write_text(json.dumps(dict(settings)))
        start = [sys.executable, __file__, str(script), worker.__name__, name, str(world_size)]
        if mpi:
            commands = [[*mpiexec(world_size), *start]]
        else:
            commands = [[*start, str(rank)] for rank in range(world_size)]
        processes = [subprocess.Popen(each, env=env) for each in commands]
        try:
            _wait_for_all(processes)
        finally:
            _end(processes)
        return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(world_size)]


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + WORLD_TIMEOUT_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks did not end within {WORLD_TIMEOUT_S:.0f} s")
        if any(process.poll() for process in processes):
            break  # the others would wait for it for ever
        time.sleep(0.05)
    failed = {rank: process.poll() for rank, process in enumerate(processes) if process.poll()}
    if failed:
        raise RuntimeError(f"benchmark failed: exit code by rank {failed}, see above")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs. Asked, not killed, at first: mpiexec then ends its ranks too."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _be_a_rank(script: str, worker: str, folder: str, world_size: str, rank: str = "") -> None:
    """The whole life of one rank. Without `rank`, mpiexec has started it and given it one."""
    spec = importlib.util.spec_from_file_location("benchmark", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module
    spec.loader.exec_module(module)
    settings = json.loads((Path(folder) / "settings.json").read_text())
    place = Rank(int(rank) if rank else mpi_rank(), int(world_size), Path(folder), settings)
    try:
        result = getattr(module, worker)(place)
        (place.folder / f"result{place.rank}.json").write_text(json.dumps(result))
        code = 0
    except Exception:  # noqa: BLE001 (printed, and the exit code tells)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Gloo aborts, and MPI waits for the others, when Python is taken down under an open group


# ------------------------------------------------------------------ measuring


def interleaved(
    variants: Mapping[str, Callable[[int], Mapping[str, float]]],
    rounds: int,
    warmup: int,
    together: Callable[[], object] = lambda: None,
) -> dict[str, Samples]:
    """Metric -> variant -> one figure per round. `variants[name](round)` returns its figures, one per metric.

    `together` (a barrier) runs before each variant, so that every rank starts it at the same moment.
    """
    figures: dict[str, Samples] = {}
    names = list(variants)
    for number in range(-warmup, rounds):
        for name in _order(names, number):
            together()
            measured = variants[name](number)
            if number >= 0:
                for metric, figure in measured.items():
                    figures.setdefault(metric, {}).setdefault(name, []).append(figure)
    return figures


def _order(names: Sequence[str], number: int) -> list[str]:
    """A B C, C B A, B C A, A C B, ...: every variant comes equally often early and late, and after every other."""
    turn = (number // 2) % len(names)
    order = [*names[turn:], *names[:turn]]
    return order if number % 2 == 0 else order[::-1]


def slowest_rank(by_rank: Sequence[dict[str, Samples]]) -> dict[str, Samples]:
    """For every metric, variant and round the largest figure among the ranks: a step ends when its last rank ends."""
    return {
        metric: {
            name: [max(figures) for figures in zip(*(r[metric][name] for r in by_rank), strict=True)]
            for name in samples
        }
        for metric, samples in by_rank[0].items()
    }


# ------------------------------------------------------------------ results


@dataclass(frozen=True)
class Result:
    """One measured claim: a value, the baseline's value in the same run, and their ratio. One JSON line."""

    name: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None  # of the medians
    ratio_interval_95: tuple[float, float] | None  # of that ratio, by resampling rounds
    ratio_quartiles: tuple[float, float] | None  # of the rounds' own ratios
    ratio_undisturbed: float | None  # of the lower quartiles, which a busy neighbour touches least
    better: str  # "less" or "more"
    goal: str
    world_size: int
    rounds: int
    hardware: str = field(default_factory=hardware)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    command: str = field(default_factory=command)
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_value(
        cls, name: str, value: float, *, unit: str, better: str, world_size: int, rounds: int, goal: str, **extra: Any
    ) -> Result:
        """A value that has no baseline."""
        none = (None, None, None, None, None)
        return cls(name, round(value, 4), unit, *none, better, goal, world_size, rounds, extra=extra)


def compare(
    name: str,
    ours: Sequence[float],
    baseline: Sequence[float] | None,
    *,
    unit: str,
    world_size: int,
    goal: str = "",
    **extra: Any,
) -> Result:
    """`ours` against `baseline`, from the same rounds; less is better. Without a baseline: the median alone."""
    value = statistics.median(ours)
    if baseline is None:
        rounds = len(ours)
        return Result.of_value(
            name, value, unit=unit, better="less", world_size=world_size, rounds=rounds, goal=goal, **extra
        )
    low, _, high = statistics.quantiles([a / b for a, b in zip(ours, baseline, strict=True)], n=4)
    return Result(
        name=name,
        value=round(value, 4),
        unit=unit,
        baseline=round(statistics.median(baseline), 4),
        ratio=round(value / statistics.median(baseline), 4),
        ratio_interval_95=interval_95(operator.truediv, ours, baseline),
        ratio_quartiles=(round(low, 4), round(high, 4)),
        ratio_undisturbed=round(statistics.quantiles(ours, n=4)[0] / statistics.quantiles(baseline, n=4)[0], 4),
        better="less",
        goal=goal,
        world_size=world_size,
        rounds=len(ours),
        extra=extra,
    )


def paired(ours: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """More of a comparison, for `extra`: the median of the rounds' own ratios, on which drift has no hold."""
    ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
    return {"paired_ratio": round(statistics.median(ratios), 4), "paired_95": interval_95(float, ratios)}


def interval_95(statistic: Callable[..., float], *samples: Sequence[float]) -> tuple[float, float]:
    """95 % of what `statistic` of the samples' medians would have been, had the same rounds been drawn anew."""
    draw = random.Random(0)
    found = []
    for _ in range(_RESAMPLES):
        rounds = [draw.randrange(len(samples[0])) for _ in samples[0]]
        found.append(statistic(*(statistics.median(figures[i] for i in rounds) for figures in samples)))
    found.sort()
    return round(found[int(0.025 * _RESAMPLES)], 4), round(found[int(0.975 * _RESAMPLES)], 4)


def report(topic: str, results: Sequence[Result], *, record: bool) -> None:
    """Print one JSON line per result; with `record` append them to `results/<topic>_<hardware>_<yyyymm>.md`."""
    lines = [json.dumps({k: v for k, v in asdict(result).items() if v not in ("", {})}) for result in results]
    print("\n".join(lines), flush=True)
    print("\n".join(_table(results)), file=sys.stderr)
    if not record:
        return
    now = datetime.datetime.now(datetime.timezone.utc)
    path = RESULTS / f"{topic}_{hardware()}_{now:%Y%m}.md"
    RESULTS.mkdir(exist_ok=True)
    text = "" if path.exists() else f"# {topic} on {hardware()}, {now:%Y-%m}\n"
    text += f"\n## {now:%Y-%m-%d %H:%M} UTC, commit {commit()}, load average {os.getloadavg()[0]:.1f}\n\n"
    text += f"    {command()}\n\n"
    details = ["<details><summary>JSON</summary>", "", "```json", *lines, "```", "", "</details>"]
    text += "\n".join([*_table(results), "", *details, ""])
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    print(f"appended to {path.relative_to(ROOT)}", file=sys.stderr)


def _table(results: Sequence[Result]) -> list[str]:
    heads = ("what", "ranks", "value", "baseline", "ratio", "95 %", "quartiles", "undisturbed", "also", "goal")
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for r in results:
        value = f"{r.value:.0f}" if r.value >= 1000 else f"{r.value:.3g}"
        cells = [r.name, str(r.world_size), f"{value} {r.unit}", _number(r.baseline), _number(r.ratio)]
        cells += [_span(r.ratio_interval_95), _span(r.ratio_quartiles), _number(r.ratio_undisturbed)]
        also = ", ".join(f"{key} {value}" for key, value in r.extra.items() if value is not None)
        rows.append("| " + " | ".join([*cells, also, r.goal]) + " |")
    return rows


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value >= 10 else f"{value:.3f}"


def _span(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{pair[0]:.3f} to {pair[1]:.3f}"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a few rounds only: does it run, not how fast is it")
    return parser


if __name__ == "__main__":
    _be_a_rank(*sys.argv[1:])
