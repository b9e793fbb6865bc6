"""Checkpoints in one process: what a kill leaves, what takes the place of what, and weights that are not the recorded ones."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from converter.manifest import read_manifest
from mappings.errors import Refused
from tests.conftest import TinyFolder
from train import checkpoint
from train.checkpoint import resume, save_checkpoint
from train.communication import Group, make_groups
from train.config import ModelSettings, ParallelSettings
from train.loss_scale import LossScale
from train.model_source import read_model_source
from train.start import read_start
from train.step import StepSettings, Trainer, base_4096
from train.training_state import Progress, latest_checkpoint, read_state


def trainer_from(folder: Path) -> Trainer:
    start = read_start(read_model_source(ModelSettings(str(folder))), ParallelSettings())
    return Trainer(start, make_groups(start.layout, 0, start.model.kv_heads), StepSettings())


def saved(trainer: Trainer, folder: Path, step: int, **options: Any) -> Path:
    return save_checkpoint(trainer, folder, Progress(step, 8 * step, 0), **{"keep": 0} | options)


def moved(trainer: Trainer) -> Trainer:
    """The trainer, its weights no longer what they were."""
    for weight in trainer.weights().values():
        weight.set_data(Tensor(weight.asnumpy() * 1.5 + 0.1))
    return trainer


@pytest.fixture
def trainer(tiny_folder: TinyFolder) -> Trainer:
    return trainer_from(tiny_folder("llama-gqa"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny_folder: TinyFolder) -> Path:
    """A checkpoint of step 1, to be copied."""
    return saved(trainer_from(tiny_folder("llama-gqa")), tmp_path_factory.mktemp("first"), 1)


def test_a_run_saves_on_when_the_checkpoint_that_it_came_from_has_made_room(
    trainer: Trainer, tmp_path: Path, tiny_folder: TinyFolder
) -> None:
    first = saved(trainer, tmp_path, 1)
    resumed = trainer_from(first)
    resume(resumed, first)
    for step in (2, 3, 4):
        newest = saved(moved(resumed), tmp_path, step, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000004", "latest"} and latest_checkpoint(tmp_path) == newest
    for name in ("config.json", "generation_config.json"):
        assert (newest / "huggingface" / name).read_bytes() == (tiny_folder("llama-gqa") / name).read_bytes()


@pytest.mark.parametrize("killed_at", ["the old one is aside", "the new one is there"])
def test_a_kill_while_a_step_is_saved_again_loses_neither_checkpoint(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    final = saved(trainer, tmp_path, 1)
    weights = "rank_0/checkpoint_0.safetensors"
    before = (final / weights).read_bytes()
    real = os.replace

    def killed(source: Path, target: Path) -> None:
        if Path(source).suffix == checkpoint.PARTIAL and Path(target) == final:
            if killed_at == "the new one is there":
                real(source, target)
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(moved(trainer), tmp_path, 1)
    monkeypatch.undo()
    if killed_at == "the old one is aside":
        with pytest.raises(Refused, match=r"rename step_00000001\.replaced to step_00000001"):
            latest_checkpoint(tmp_path)
        shutil.move(tmp_path / "step_00000001.replaced", final)
    assert ((latest_checkpoint(tmp_path) / weights).read_bytes() == before) == (killed_at == "the old one is aside")
    trainer_from(final)
    saved(trainer, tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000002", "latest"}


@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
def test_weights_of_another_step_of_the_same_run_are_refused_by_the_name_of_their_file(
    trainer: Trainer, tmp_path: Path, file_format: str
) -> None:
    first = saved(trainer, tmp_path, 1, file_format=file_format)
    second = saved(moved(trainer), tmp_path, 2, file_format=file_format)
    trainer_from(second)
    name = f"rank_0/checkpoint_0.{file_format}"
    shutil.copyfile(first / name, second / name)
    with pytest.raises(Refused, match=name):
        trainer_from(second)


def test_a_weight_of_which_one_bit_has_changed_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    path = saved(trainer, tmp_path, 1) / "rank_0" / "checkpoint_0.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(Refused, match="not what the manifest recorded"):
        trainer_from(tmp_path / "step_00000001")


@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
def test_optimizer_state_of_another_step_is_refused(trainer: Trainer, tmp_path: Path, file_format: str) -> None:
    first = saved(trainer, tmp_path, 1, file_format=file_format)
    for state in trainer.optimizer.states():
        state.set_data(Tensor(state.asnumpy() + 0.5))
    second = saved(trainer, tmp_path, 2, file_format=file_format)
    resume(trainer_from(second), second)
    shutil.copyfile(first / f"optimizer/rank_0.{file_format}", second / f"optimizer/rank_0.{file_format}")
    with pytest.raises(Refused, match=f"rank_0.{file_format}"):
        resume(trainer_from(second), second)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("progress", "sample_offset"), -8, "out of range"),
        (("updates",), 2, "updates"),
        (("loss_scale",), 0.0, "loss scale"),
        (("dp",), 2, "layout"),
        (("files",), [], "layout"),
        (("files", 0, "tensor"), 1, "layout"),
    ],
)
def test_a_training_state_that_no_run_writes_is_refused(
    first: Path, tmp_path: Path, place: tuple[str | int, ...], value: Any, words: str
) -> None:
    shutil.copytree(first, tmp_path / first.name)
    state = json.loads((first / "training.json").read_text(encoding="utf-8"))
    inner: Any = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / first.name / "training.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(Refused, match=words):
        read_state(tmp_path / first.name, read_manifest(first))


def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(trainer, tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_state", full)
    with pytest.raises(OSError, match="No space left"):
        saved(moved(trainer), tmp_path, 2)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    resume(trainer_from(latest_checkpoint(tmp_path)), latest_checkpoint(tmp_path))


@given(mine=st.integers(0, 1 << 40), other=st.integers(0, 1 << 40))
@example(mine=10, other=12)
@example(mine=4096, other=1)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_that_begin_at_different_steps_notice(trainer: Trainer, mine: int, other: int) -> None:
    """Two ranks, of which the collective is a sum of what both give."""
    trainer.groups = replace(trainer.groups, world=Group((0, 1)))

    def seen_by(here: int, there: int) -> bool:
        vars(trainer)["_sum_world"] = lambda x: x + Tensor(np.array(base_4096(there), np.float32))
        return trainer.agree(here)

    assert (seen_by(mine, other) and seen_by(other, mine)) == (mine == other)
    assert seen_by(mine, mine)


def test_an_overflow_is_the_loss_scales_fault_only_while_it_can_fall(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_synchronize", lambda own, correction: (own, Tensor(np.float32(np.inf))))
    ids = np.random.default_rng(3).integers(0, 199, (2, 9)).astype(np.int32)
    trainer.scale = LossScale(2.0, dynamic=True)
    first, second = (trainer.step(ids[:, :-1], ids[:, 1:], 1e-3) for _ in range(2))
    assert (first.overflow, first.finite) == (True, True) and trainer.scale.scale == 1.0
    assert (second.overflow, second.finite) == (False, False) and trainer.updates == 0
