"""What a run shows: rank 0 speaks, with a progress bar in a terminal and plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import final

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lockstep.train.metrics import StepMetrics, duration


@final
class Console:
    """Where the lines of a run go. The bar of a terminal appears with the first logged step."""

    def __init__(self, rank: int, steps: int) -> None:
        self._is_silent, self._steps = rank != 0, steps
        self._bar = None if self._is_silent or not sys.stdout.isatty() else _bar()
        self._task = None if self._bar is None else self._bar.add_task("train", total=steps, figures="")

    def say(self, text: str) -> None:
        """One line (or several) that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False)
        elif not self._is_silent:
            print(text, flush=True)

    def step(self, metrics: StepMetrics) -> None:
        """The figures of a logged step."""
        if self._bar is None or self._task is None:
            self.say(f"step {metrics.step}/{self._steps} {_figures(metrics)}")
        else:
            self._bar.start()
            self._bar.update(self._task, completed=metrics.step, figures=_figures(metrics), refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was. A second call does nothing."""
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Progress:
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[figures]}"),
        console=Terminal(highlight=False, soft_wrap=True),
        auto_refresh=False,  # no thread beside training: it is drawn when there is something new
    )


def _figures(metrics: StepMetrics) -> str:
    return (
        f"loss {metrics.loss:.4f} lr {metrics.lr:.2e} grad_norm {metrics.grad_norm:.2f} "
        f"{metrics.tokens_per_s:,.0f} tok/s eta {duration(metrics.eta_s)}"
    )
