"""What `ms-train launch` shows: rank 0's log, and on a terminal a bar below it, drawn from the metrics that rank 0 writes."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.metrics import METRICS, StepMetrics
from train.progress import STEP, Display, display
from train.rank_logs import LogTail

INFORMATION = re.compile(r"\[(INFO|DEBUG)\] ")
"""MindSpore prints some whatever GLOG_v says, when a process ends."""


class LaunchDisplay:
    """`line` takes rank 0's log, `poll` looks for new metrics."""

    def __init__(self, config: TrainConfig) -> None:
        self._started = time.time()
        self._has_bar = sys.stdout.isatty()
        self._display: Display = display(config.train.steps)
        self._metrics = LogTail(Path(config.watch.folder) / METRICS)

    def line(self, text: str) -> None:
        """A line of the log. Those of steps are left out where the bar shows them, MindSpore's own information is everywhere."""
        if INFORMATION.match(text):
            return
        if not self._has_bar:
            print(text, flush=True)
        elif not text.startswith(STEP):
            self._display.note(text)

    def poll(self) -> None:
        """Bring the bar up to date."""
        if self._has_bar:
            for line in self._metrics.lines():
                metrics = step_of(json.loads(line), since=self._started)
                if metrics is not None:
                    self._display.step(metrics)

    def close(self) -> None:
        self._display.close()


def step_of(facts: dict[str, Any], since: float) -> StepMetrics | None:
    """The step that a line of the metrics file describes; None for a validation, and for one before `since` (seconds of the epoch)."""
    if "loss" not in facts or facts["time"] < since:
        return None
    value = {key: math.nan if facts[key] is None else facts[key] for key in ("loss", "grad_norm")}
    return StepMetrics(
        step=facts["step"],
        loss=value["loss"],
        grad_norm=value["grad_norm"],
        learning_rate=facts["learning_rate"],
        tokens=facts["tokens"],
        seconds=facts["seconds"],
        offset=facts["offset"],
        loss_scale=facts.get("loss_scale"),
        skipped=facts.get("skipped", False),
    )
