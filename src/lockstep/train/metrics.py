"""Numbers of a run: one JSON line per logged step, and how fast it goes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from lockstep.durable import write_whole
from lockstep.errors import TrainingError
from lockstep.observe.loggers import Loggers, logger_names, open_loggers
from lockstep.train.config import ModelConfig, RunConfig, to_json


@dataclass(frozen=True)
class StepMetrics:
    """What is logged about one optimizer step."""

    step: int  # optimizer steps done, this one included
    loss: float  # mean over the tokens of the global batch, before the step
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # trained on so far, over all ranks
    tokens_per_s: float  # over all ranks, since the last logged step
    eta_s: float


class Meter:
    """Tokens per second since the last reading, and the time that is left. The clock is passed in."""

    def __init__(self, step: int, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = steps
        self._start_step = step
        self._start_s = self._last_s = clock()
        self._tokens = 0
        self._paused_s = 0.0

    def count(self, tokens: int) -> None:
        """`tokens` more were trained on."""
        self._tokens += tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what happens inside out of both figures: validation and checkpoints are not training."""
        begin_s = self._clock()
        yield
        seconds = self._clock() - begin_s
        self._last_s += seconds
        self._paused_s += seconds

    def read(self, step: int) -> tuple[float, float]:
        """(tokens per second since the last call, seconds left after `step` steps)."""
        now_s = self._clock()
        rate = self._tokens / max(1e-9, now_s - self._last_s)
        per_step_s = (now_s - self._start_s - self._paused_s) / max(1, step - self._start_step)
        self._last_s, self._tokens = now_s, 0
        return rate, per_step_s * (self._steps - step)


@final
class StepLog:
    """A file of JSON objects, one per line, each about one step, in the order of the steps.

    What is written before the checkpoint of a step is saved is there after any kill, and once: a run that goes on from
    that checkpoint cuts off what was written later, and does that work again.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Continue `path` after `resumed_step`."""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if resumed_step and _step_of(line) <= resumed_step]
        self.validated = {_step_of(line) for line in kept if "val_loss" in json.loads(line)}
        write_whole(path, "".join(line + "\n" for line in kept))
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; it has left this process on return.  Raises: TrainingError where there is no room."""
        rest = json.dumps(record).encode() + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise TrainingError(f"cannot write {self._file.name}: {error.strerror}") from error
        if "val_loss" in record:
            self.validated.add(record["step"])

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Give back the file."""
        self._file.close()


@dataclass(frozen=True)
class Logs:
    """What rank 0 writes down about steps."""

    metrics: StepLog
    samples: StepLog
    loggers: Loggers  # that the user has asked for

    @classmethod
    def open(cls, run: RunConfig, step: int) -> Logs:
        """Those of a run that goes on after `step`."""
        metrics, samples = (StepLog(run.out / name, step) for name in ("metrics.jsonl", "samples.jsonl"))
        return cls(metrics, samples, open_loggers(logger_names(run.log), run.out, to_json(run), step))

    def write(self, record: dict[str, Any]) -> None:
        """One line of metrics; its numbers are for the loggers too."""
        self.metrics.write(record)
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        self.loggers.log(record["step"], numbers)

    def sync(self) -> None:
        """Make what was written durable."""
        self.metrics.sync()
        self.samples.sync()

    def close(self) -> None:
        """Give back the files."""
        self.metrics.close()
        self.samples.close()
        self.loggers.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line cut off by a crash
        return float("inf")


def flops_per_token(model: nn.Module, config: ModelConfig) -> float:
    """Arithmetic of forward and backward per token.

    Source: PaLM (arXiv 2204.02311), appendix B: 6 for each parameter, and 12 x layers x width x context of attention.
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return 6.0 * parameters + 12.0 * config.layers * config.width * config.context


def duration(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
