"""Configs for tests: a small one that is complete, with values put in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.config import TrainConfig, load_config

MINIMAL = {"model.path": "model", "data.path": "data", "train.steps": 100, "train.global_batch": 8}


def write_config(path: Path, **values: Any) -> Path:
    """Writes a config with the given values, named `table__key`, beside the ones that every config needs."""
    given = MINIMAL | {name.replace("__", "."): value for name, value in values.items()}
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items()), encoding="utf-8")
    return path


def config_with(folder: Path, **values: Any) -> TrainConfig:
    """The config with the given values, as the trainer reads it."""
    return load_config(write_config(folder / "config.toml", **values))
