"""Watching a run: the progress on rank 0, metrics.jsonl, TensorBoard, and the stop when a value is not finite."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mappings.errors import Problem, Refused
from train.config import TrainConfig
from train.loader import Batch
from train.metrics import MetricsFile, StepMetrics
from train.progress import Display, display


class Watch:
    """Made on every rank; rank 0 writes and shows, and each rank stops when a value is not finite.

    Use: `step` after every step on every rank, `validation` and `note` on every rank, and `close` in the end, also after an error.
    """

    def __init__(self, config: TrainConfig, rank: int, ranks: int, first_step: int = 0) -> None:
        """`first_step`: the first step of this process, more than 0 when it goes on from a checkpoint."""
        self._config, self._rank, self._ranks = config, rank, ranks
        self._folder = Path(config.watch.folder)
        shown = rank == 0
        self._display: Display = display(config.train.steps, first_step, config.watch.log_every, quiet=not shown)
        self._metrics = MetricsFile(self._folder, first_step) if shown else None
        self._board = _tensorboard(self._folder / "tensorboard", first_step) if shown and config.watch.tensorboard else None

    def step(self, metrics: StepMetrics, batch: Batch | None = None) -> None:
        """Note a step. Raises Refused when its loss or gradient is not finite, after this rank's batch was saved."""
        self._display.step(metrics)
        self._write(metrics.facts(), metrics.step)
        if not metrics.is_finite:
            raise self._not_finite(metrics, batch)

    def validation(self, step: int, loss: float) -> None:
        """Note the validation loss after `step` steps: of the weights that step `step` begins with."""
        self._display.note(f"validation after {step} steps: loss {loss:.5f}")
        self._write({"step": step, "validation_loss": loss if math.isfinite(loss) else None}, step)

    def note(self, text: str) -> None:
        """Tell a person; rank 0 does."""
        self._display.note(text)

    def close(self) -> None:
        """Finish the files and leave the terminal clean. May be called twice."""
        self._display.close()
        for writer in (self._metrics, self._board):
            if writer is not None:
                writer.close()
        self._metrics = self._board = None

    def _write(self, facts: dict[str, Any], step: int) -> None:
        if self._metrics is not None:
            self._metrics.write(facts)
        if self._board is not None:
            for name, value in facts.items():
                if isinstance(value, float):
                    self._board.add_scalar(name, value, step)

    def _not_finite(self, metrics: StepMetrics, batch: Batch | None) -> Refused:
        values = f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"
        origin = f"; not finite on rank {', '.join(map(str, metrics.culprits))} of {self._ranks}" if metrics.culprits else ""
        saved = "" if batch is None else f"this rank's batch is in {self._save(metrics, batch)}; "
        mend = f"{saved}look at that text, use a lower learning rate or a longer warm-up, or go on from an earlier checkpoint with --resume"
        title = f"training stopped at step {metrics.step}: a value is not finite"
        return Refused(title, [Problem(values + origin, f"rank {self._rank}", mend)])

    def _save(self, metrics: StepMetrics, batch: Batch) -> Path:
        folder = self._folder / f"failed_step_{metrics.step}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{self._rank}.npz"
        partial = path.with_name(f".{path.name}.partial")
        with open(partial, "wb") as file:
            arrays = {"ids": batch.ids} if batch.mask is None else {"ids": batch.ids, "mask": batch.mask}
            np.savez(file, step=metrics.step, offset=batch.offset, loss=metrics.loss, grad_norm=metrics.grad_norm, **arrays)
        os.replace(partial, path)
        return path


def _tensorboard(folder: Path, first_step: int) -> Any:
    """A writer of TensorBoard's files, or None when no library for it is installed."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            return None
    return SummaryWriter(str(folder), purge_step=first_step)


@contextmanager
def profiled(config: TrainConfig, rank: int) -> Iterator[None]:
    """Wraps what is inside in mindspore.Profiler, if the config says so; each rank writes into a folder of its own."""
    if not config.watch.profile:
        yield
        return
    import mindspore

    profiler = mindspore.Profiler(output_path=str(Path(config.watch.folder) / "profile" / f"rank_{rank}"))
    try:
        yield
    finally:
        profiler.analyse()
