"""The learning rate of every step is what Transformers' schedules give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from tests.train.configs import config_with
from train.schedule import learning_rate

PEAK = 0.37


def rates_of_transformers(make: Any, steps: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    schedule = make(optimizer, **arguments)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def rates(tmp_path: Path, steps: int, warmup: int, kind: str, **values: Any) -> list[float]:
    config = config_with(
        tmp_path, train__steps=steps, optimizer__warmup_steps=warmup, optimizer__schedule=kind, optimizer__learning_rate=PEAK, **values
    )  # fmt: skip
    return [learning_rate(step, config) for step in range(steps)]


@pytest.mark.parametrize(("steps", "warmup"), [(50, 0), (50, 7), (50, 49), (1, 0), (3, 1)])
class TestAgainstTransformers:
    def test_cosine(self, tmp_path: Path, steps: int, warmup: int) -> None:
        expected = rates_of_transformers(get_cosine_schedule_with_warmup, steps, num_warmup_steps=warmup, num_training_steps=steps)
        assert rates(tmp_path, steps, warmup, "cosine") == pytest.approx(expected, rel=1e-12, abs=1e-15)

    def test_cosine_to_a_minimum(self, tmp_path: Path, steps: int, warmup: int) -> None:
        make = get_cosine_with_min_lr_schedule_with_warmup
        expected = rates_of_transformers(make, steps, num_warmup_steps=warmup, num_training_steps=steps, min_lr=0.05)
        assert rates(tmp_path, steps, warmup, "cosine", optimizer__min_learning_rate=0.05) == pytest.approx(expected, rel=1e-12, abs=1e-15)

    def test_linear(self, tmp_path: Path, steps: int, warmup: int) -> None:
        expected = rates_of_transformers(get_linear_schedule_with_warmup, steps, num_warmup_steps=warmup, num_training_steps=steps)
        assert rates(tmp_path, steps, warmup, "linear") == pytest.approx(expected, rel=1e-12, abs=1e-15)

    def test_constant(self, tmp_path: Path, steps: int, warmup: int) -> None:
        expected = rates_of_transformers(get_constant_schedule_with_warmup, steps, num_warmup_steps=warmup)
        assert rates(tmp_path, steps, warmup, "constant") == pytest.approx(expected, rel=1e-12)


def test_linear_ends_at_the_minimum_and_stays_there(tmp_path: Path) -> None:
    config = config_with(
        tmp_path, train__steps=10, optimizer__schedule="linear", optimizer__learning_rate=1.0, optimizer__min_learning_rate=0.2
    )
    assert [learning_rate(step, config) for step in (0, 5, 10, 1000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_sqrt_dp_scales_every_rate(tmp_path: Path) -> None:
    values: dict[str, Any] = {"optimizer__min_learning_rate": 0.1, "parallel__dp": 8}
    plain = rates(tmp_path, 20, 3, "cosine", **values)
    scaled = rates(tmp_path, 20, 3, "cosine", optimizer__scale_by_sqrt_dp=True, **values)
    assert scaled == pytest.approx([rate * math.sqrt(8) for rate in plain])
