"""A run that was killed goes on as if it had not been, bit for bit, and what is not whole or does not fit is refused by name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mappings.errors import Refused
from tests.tiny_models import save_tiny
from tests.train.corpora import random_texts, save_tokenizer
from tests.train.running import STEPS, finish, losses, prepare, settings, start

pytestmark = pytest.mark.slow

HALF = STEPS // 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("resume")
    save_tiny(folder / "model", "gpt2", n_layer=2, vocab_size=512)
    save_tokenizer(folder / "tokenizer")
    prepare(folder, random_texts(200))
    return folder


def tensors(checkpoint: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of weights and optimizer on every rank."""
    return {
        f"{path.relative_to(checkpoint)} {name}": value
        for path in checkpoint.rglob("*.safetensors")
        for name, value in load_file(path).items()
    }


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a file is there. Raises AssertionError when the process ends before."""
    while not path.exists():
        assert process.poll() is None, process.communicate()[0][-4000:]
        time.sleep(0.05)


@pytest.fixture(scope="module")
def straight(prepared: Path) -> Path:
    """Twenty steps on two data-parallel ranks without a break."""
    finish(start("launch", settings(prepared, "straight", parallel__dp=2), prepared))
    return prepared / "straight"


def killed_in_the_middle_and_resumed(prepared: Path, name: str, **layout: int) -> Path:
    """Twenty steps, every process of them killed after ten."""
    options = settings(prepared, name, **{f"parallel__{key}": value for key, value in layout.items()})
    process = start("launch", options, prepared)
    wait_for(prepared / name / "checkpoints" / f"step_{HALF:08}" / "manifest.json", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finish(start("launch", options, prepared, "--resume"))
    return prepared / name


def assert_equal_runs(straight: Path, broken: Path) -> None:
    """Weights, optimizer state and losses are the same bit for bit."""
    name = f"checkpoints/step_{STEPS:08}"
    wanted, got = tensors(straight / name), tensors(broken / name)
    assert wanted.keys() == got.keys() and wanted
    different = [key for key in wanted if wanted[key].tobytes() != got[key].tobytes()]
    assert not different
    assert losses(broken) == losses(straight)


def test_ten_steps_a_kill_and_ten_steps_are_twenty_steps_bit_for_bit(prepared: Path, straight: Path) -> None:
    assert_equal_runs(straight, killed_in_the_middle_and_resumed(prepared, "broken", dp=2))


def test_so_they_are_with_tensor_and_pipeline_parallel_ranks_and_a_tied_embedding_on_two_stages(prepared: Path) -> None:
    finish(start("launch", settings(prepared, "straight-four", parallel__tp=2, parallel__pp=2), prepared))
    assert_equal_runs(prepared / "straight-four", killed_in_the_middle_and_resumed(prepared, "broken-four", tp=2, pp=2))


def test_sigterm_saves_and_the_run_goes_on_from_there(prepared: Path) -> None:
    options = settings(prepared, "asked", checkpoint__every=0)
    process = start("run", options, prepared)
    metrics = prepared / "asked" / "watch" / "metrics.jsonl"
    wait_for(metrics, process)
    while not metrics.read_text(encoding="utf-8"):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    finish(process, 143)
    (saved,) = (prepared / "asked" / "checkpoints").glob("step_*")
    assert saved.name < f"step_{STEPS:08}"
    finish(start("run", options, prepared, "--resume"))
    finish(start("run", settings(prepared, "unasked", checkpoint__every=0), prepared))
    name = f"checkpoints/step_{STEPS:08}"
    wanted, got = tensors(prepared / "unasked" / name), tensors(prepared / "asked" / name)
    assert {key: value.tobytes() for key, value in wanted.items()} == {key: value.tobytes() for key, value in got.items()}


def damaged(straight: Path, folder: Path) -> Path:
    """A copy of the checkpoints, to be changed."""
    shutil.copytree(straight / "checkpoints", folder)
    return folder


def resume_from(checkpoints: Path, prepared: Path, **changes: Any) -> str:
    """What --resume says to a checkpoint that it must refuse."""
    chosen = {"checkpoint__folder": checkpoints} | changes
    return finish(start("run", settings(prepared, "refused", **chosen), prepared, "--resume"), 1)


def test_a_checkpoint_of_another_layout_is_refused_with_the_command_that_cuts_it_anew(straight: Path, tmp_path: Path) -> None:
    from train.config import ModelSettings, ParallelSettings
    from train.model_source import read_model_source
    from train.start import read_start

    source = read_model_source(ModelSettings(str(straight / "checkpoints" / f"step_{STEPS:08}")))
    with pytest.raises(Refused, match=r"ms-convert ms2hf .* && ms-convert hf2ms .* --tp 2 --pp 1"):
        read_start(source, ParallelSettings(tp=2))


def test_a_half_written_checkpoint_is_refused_by_name(straight: Path, prepared: Path, tmp_path: Path) -> None:
    checkpoints = damaged(straight, tmp_path / "checkpoints")
    (checkpoints / f"step_{STEPS:08}" / "manifest.json").unlink()
    said = resume_from(checkpoints, prepared)
    assert f"step_{STEPS:08}" in said and "manifest.json" in said


def test_a_missing_rank_file_is_refused_by_name(straight: Path, prepared: Path, tmp_path: Path) -> None:
    checkpoints = damaged(straight, tmp_path / "checkpoints")
    (checkpoints / f"step_{STEPS:08}" / "rank_1" / "checkpoint_1.safetensors").unlink()
    assert "rank_1/checkpoint_1.safetensors" in resume_from(checkpoints, prepared)


@pytest.mark.parametrize("file", ["rank_0/checkpoint_0.safetensors", "training.json"])
def test_a_checkpoint_mixed_from_two_is_refused(straight: Path, prepared: Path, tmp_path: Path, file: str) -> None:
    checkpoints = damaged(straight, tmp_path / "checkpoints")
    shutil.copyfile(checkpoints / f"step_{HALF:08}" / file, checkpoints / f"step_{STEPS:08}" / file)
    assert Path(file).name in resume_from(checkpoints, prepared)


def test_another_seed_or_dp_than_the_checkpoints_is_refused(straight: Path, prepared: Path, tmp_path: Path) -> None:
    checkpoints = damaged(straight, tmp_path / "checkpoints")
    assert "dp 2" in resume_from(checkpoints, prepared)
