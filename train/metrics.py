"""What is measured at each step, and the file that keeps it."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One step, the same on every rank.

    `step` counts from 0. `loss` is the mean over the predicted tokens of the global batch, `grad_norm` the global norm before clipping.
    `tokens` is the number of tokens that all ranks predicted, `seconds` the time of the step, `offset` the global sample offset after it.
    `skipped`: a float16 gradient overflowed, so the weights were left alone and grad_norm says nothing. `culprits`: where loss or grad_norm
    is not finite, the ranks whose own part of it was not.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    offset: int
    loss_scale: float | None = None
    skipped: bool = False
    culprits: tuple[int, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def is_finite(self) -> bool:
        """Whether training may go on."""
        return self.skipped or (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def facts(self) -> dict[str, Any]:
        """What the metrics file keeps: JSON has no NaN, so a value that is not finite is null."""
        facts: dict[str, Any] = {
            "step": self.step, "loss": self.loss, "grad_norm": self.grad_norm, "learning_rate": self.learning_rate, "tokens": self.tokens,
            "tokens_per_second": round(self.tokens_per_second, 3), "seconds": round(self.seconds, 6), "offset": self.offset,
        }  # fmt: skip
        if self.loss_scale is not None:
            facts |= {"loss_scale": self.loss_scale, "skipped": self.skipped}
        return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()}


class Pace:
    """How long steps take: an average that forgets, of every step but the first, which compiles."""

    def __init__(self) -> None:
        self._steps = 0
        self._average = 0.0

    def add(self, seconds: float) -> None:
        self._steps += 1
        if self._steps <= 2:
            self._average = seconds
        else:
            self._average += 0.1 * (seconds - self._average)

    def left(self, steps: int) -> float:
        """Seconds that this many steps will take."""
        return self._average * steps


class MetricsFile:
    """`metrics.jsonl`: one JSON object for each step ("loss" and more) and each validation ("validation_loss"), each step once.

    A run that goes on from `first_step` takes the place of what was written from there on; one that begins anew puts an older file aside.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        if path.exists():
            if first_step:
                _keep_before(path, first_step)
            else:
                os.replace(path, _unused(path))
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (it is open as long as the run)

    def write(self, facts: dict[str, Any]) -> None:
        """Add a line; a reader sees it at once."""
        self._file.write(json.dumps(facts | {"time": round(time.time(), 3)}, allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _keep_before(path: Path, first_step: int) -> None:
    """Drop the lines of later steps, and a last line that a killed run left unfinished."""
    kept = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if -1 < _steps_before(line) <= first_step]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


def _steps_before(line: str) -> int:
    """How many steps a run has done when it writes this line; -1 for what is no line of ours. A validation counts the steps before it."""
    try:
        facts = json.loads(line)
    except ValueError:
        return -1
    step = facts.get("step") if isinstance(facts, dict) else None
    if not isinstance(step, int) or step < 0:
        return -1
    return step if "validation_loss" in facts else step + 1


def _unused(path: Path) -> Path:
    """metrics.1.jsonl, or the first number that is free."""
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free
