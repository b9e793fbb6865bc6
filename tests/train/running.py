"""ms-train as processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.train.corpora import write_jsonl

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20


def prepare(folder: Path, texts: Sequence[str]) -> None:
    """A data set `data` of sequences of 16 tokens, by the tokenizer in `tokenizer`."""
    source = write_jsonl(folder / "texts.jsonl", list(texts))
    options = ["--tokenizer", folder / "tokenizer", "--input", source, "--seq-length", 16, "--workers", 1, "-o", folder / "data"]
    words = [sys.executable, "-m", "train.cli", "prepare-data", *map(str, options)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)


def settings(folder: Path, name: str, **changes: Any) -> list[str]:
    """`--set` options of a run with its own folders below `folder`/`name`.

    It has dropout, divided optimizer state, two micro-batches, and checkpoints after half of the steps and at the end.
    """
    values = {
        "model.path": folder / "model", "data.path": folder / "data", "train.steps": STEPS, "train.global_batch": 8, "train.dropout": 0.1,
        "train.seed": 7, "parallel.micro_batches": 2, "parallel.optimizer_sharding": True, "optimizer.warmup_steps": 3,
        "optimizer.learning_rate": 1e-3, "checkpoint.folder": folder / name / "checkpoints", "checkpoint.every": STEPS // 2,
        "checkpoint.keep": 0, "watch.folder": folder / name / "watch", "watch.tensorboard": False,
        "launch.log_folder": folder / name / "logs",
    } | {key.replace("__", "."): value for key, value in changes.items()}  # fmt: skip
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value, default=str)}")]


def start(command: str, options: list[str], folder: Path, *flags: str) -> subprocess.Popen[str]:
    """ms-train in a process group of its own."""
    (folder / "empty.toml").write_text("", encoding="utf-8")
    words = [sys.executable, "-m", "train.cli", command, *flags, *options, str(folder / "empty.toml")]
    return subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end. Raises AssertionError for another exit code."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output[-4000:]
    return output


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run has noted of each step."""
    return [json.loads(line) for line in (folder / "watch" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    """The loss of each step of a run."""
    return [facts["loss"] for facts in metrics(folder)]
