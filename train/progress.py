"""Training as a person watches it: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
from typing import Any

from converter.display import console, duration, printable
from train.metrics import Pace, StepMetrics

STEP = "step "
"""How the line of a step begins."""


def step_line(metrics: StepMetrics, steps: int, seconds_left: float) -> str:
    """A step in one line."""
    scale = "" if metrics.loss_scale is None else f"  loss scale {metrics.loss_scale:g}"
    norm = "overflow, skipped" if metrics.skipped else f"grad norm {metrics.grad_norm:.4g}"
    return (
        f"{STEP}{metrics.step}/{steps}  loss {metrics.loss:.5f}  lr {metrics.learning_rate:.3e}  {norm}{scale}  "
        f"{metrics.tokens_per_second:,.0f} tokens/s  {duration(seconds_left)} left"
    )


class Display:
    """Shows steps `first_step` to `steps` - 1; the base class shows nothing. `every`: steps between two lines."""

    def __init__(self, steps: int, first_step: int = 0, every: int = 1) -> None:
        self.steps, self.every = steps, every
        self.pace = Pace()

    def step(self, metrics: StepMetrics) -> None:
        """A step is done."""
        self.pace.add(metrics.seconds)

    def note(self, text: str) -> None:
        """Something else happened."""

    def close(self) -> None:
        """Leave the terminal clean."""


class Lines(Display):
    """A line every few steps, and for the last one."""

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        if metrics.step % self.every == 0 or metrics.step == self.steps - 1:
            self.note(step_line(metrics, self.steps, self.pace.left(self.steps - 1 - metrics.step)))

    def note(self, text: str) -> None:
        print(text, flush=True)


class Bar(Display):
    """One line that is always up to date, and notes above it."""

    def __init__(self, steps: int, first_step: int = 0, every: int = 1) -> None:
        super().__init__(steps, first_step, every)
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as RichProgress

        columns: tuple[Any, ...] = (BarColumn(20), TaskProgressColumn(), TextColumn("{task.description}"))
        self._bar = RichProgress(*columns, console=console())
        self._task = self._bar.add_task("starting", total=steps, completed=first_step)
        self._bar.start()

    def step(self, metrics: StepMetrics) -> None:
        super().step(metrics)
        line = step_line(metrics, self.steps, self.pace.left(self.steps - 1 - metrics.step))
        self._bar.update(self._task, completed=metrics.step + 1, description=line)

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text))

    def close(self) -> None:
        self._bar.stop()


def display(steps: int, first_step: int = 0, every: int = 1, quiet: bool = False) -> Display:
    """What suits standard output: a bar on a terminal, lines elsewhere, nothing when quiet."""
    kind = Display if quiet else Bar if sys.stdout.isatty() else Lines
    return kind(steps, first_step, every)
