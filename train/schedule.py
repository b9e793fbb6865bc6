"""The learning rate of every step: pure functions of the config."""

from __future__ import annotations

import math

from train.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0.

    Warm-up is linear from 0, so step 0 of a run with warm-up changes no weight; then half a cosine wave or a line leads to
    `min_learning_rate` at step `steps`, one beyond the last, and stays there. Formulas: Transformers' `get_cosine_schedule_with_warmup`,
    `get_cosine_with_min_lr_schedule_with_warmup`, `get_linear_schedule_with_warmup` and `get_constant_schedule_with_warmup`.
    """
    optimizer = config.optimizer
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        rate = peak * step / optimizer.warmup_steps
    elif optimizer.schedule == "constant":
        rate = peak
    else:
        progress = (step - optimizer.warmup_steps) / max(1, config.train.steps - optimizer.warmup_steps)
        rate = optimizer.min_learning_rate + (peak - optimizer.min_learning_rate) * _remaining(optimizer.schedule, min(progress, 1.0))
    return rate * math.sqrt(config.parallel.dp) if optimizer.scale_by_sqrt_dp else rate


def _remaining(schedule: str, progress: float) -> float:
    """How much of the way down is left, from 1 at progress 0 to 0 at progress 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
