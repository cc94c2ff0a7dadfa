"""What a run shows: rank 0 speaks, with a progress bar in a terminal and plain lines elsewhere."""

from __future__ import annotations

import abc
import sys
from typing import final

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.train.metrics import StepMetrics, duration


class Console(abc.ABC):
    """Where the lines of a run go."""

    @abc.abstractmethod
    def say(self, text: str) -> None:
        """One line (or several) that stays."""

    @abc.abstractmethod
    def step(self, metrics: StepMetrics) -> None:
        """The figures of a logged step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was. A second call does nothing."""


@final
class SilentConsole(Console):
    """Every rank but 0."""

    def say(self, text: str) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def close(self) -> None:
        pass


@final
class PlainConsole(Console):
    """Lines for files and pipes."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def say(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def step(self, metrics: StepMetrics) -> None:
        self.say(f"step {metrics.step}/{self._steps} {_figures(metrics)}")

    def close(self) -> None:
        pass


@final
class BarConsole(Console):
    """A progress bar at the bottom of the terminal, lines above it. The bar appears with the first logged step."""

    def __init__(self, steps: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            console=Terminal(highlight=False, soft_wrap=True),
            auto_refresh=False,  # no thread beside training: it is drawn when there is something new
        )
        self._task = self._progress.add_task("train", total=steps, figures="")
        self._is_started = False

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def step(self, metrics: StepMetrics) -> None:
        if not self._is_started:
            self._is_started = True
            self._progress.start()
        self._progress.update(self._task, completed=metrics.step, figures=_figures(metrics), refresh=True)

    def close(self) -> None:
        self._progress.stop()


def open_console(rank: int, steps: int) -> Console:
    """The console of `rank`: a bar if standard output is a terminal."""
    if rank != 0:
        return SilentConsole()
    return BarConsole(steps) if sys.stdout.isatty() else PlainConsole(steps)


def _figures(metrics: StepMetrics) -> str:
    return (
        f"loss {metrics.loss:.4f} lr {metrics.lr:.2e} grad_norm {metrics.grad_norm:.2f} "
        f"{metrics.tokens_per_s:,.0f} tok/s eta {duration(metrics.eta_s)}"
    )
