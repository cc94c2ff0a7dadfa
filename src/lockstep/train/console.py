"""What a run shows: rank 0 speaks, with a progress bar in a terminal and plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import final

from rich.console import Console as Terminal
from rich.progress import BarColumn, Progress, TextColumn

from lockstep.launch.words import printing
from lockstep.train.metrics import StepMetrics, duration


@final
class Console:
    """Where the lines of a run go. The bar of a terminal appears with the first logged step."""

    def __init__(self, rank: int, steps: int) -> None:
        self._is_silent, self._steps = rank != 0, steps
        self._bar = None if rank or not sys.stdout.isatty() or Terminal().is_dumb_terminal else _bar()
        self._task = None if self._bar is None else self._bar.add_task("", total=steps)

    def say(self, text: str) -> None:
        """One line (or several) that stays."""
        with printing():
            if self._bar is not None:
                self._bar.console.print(text, markup=False)
            elif not self._is_silent:
                print(text)

    def step(self, metrics: StepMetrics) -> None:
        """The figures of a logged step."""
        line = (
            f"step {metrics.step}/{self._steps} loss {metrics.loss:.4f} lr {metrics.lr:.2e} grad_norm "
            f"{metrics.grad_norm:.2f} {metrics.tokens_per_s:,.0f} tok/s eta {duration(metrics.eta_s)}"
        )
        if self._bar is None or self._task is None:
            self.say(line)
        else:
            with printing():
                self._bar.start()
                self._bar.update(self._task, completed=metrics.step, description=line, refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was. A second call does nothing."""
        if self._bar is not None:
            with printing():
                self._bar.stop()


def _bar() -> Progress:
    return Progress(
        BarColumn(bar_width=20),  # in a narrow terminal it goes first, then the end of the line
        TextColumn("{task.description}"),
        console=Terminal(highlight=False, soft_wrap=True),
        auto_refresh=False,  # no thread beside training: it is drawn when there is something new
    )
