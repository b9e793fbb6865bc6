"""The demo's own comparison must see every difference, or its verdict is worth nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.demo import DemoFailed, compare, say_something
from tests.tiny_models import add_derived_buffers, as_pytorch_bin, save_tiny

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "source", "llama-gqa", dtype=torch.bfloat16, tokenizer=True)


def copy_with(source: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the folder whose tensors were changed in place."""
    back = source.parent / "back"
    shutil.copytree(source, back)
    tensors = load_file(back / "model.safetensors")
    change(tensors)
    save_file(tensors, back / "model.safetensors", metadata={"format": "pt"})
    return back


def test_an_unchanged_folder_passes_and_runs(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back = copy_with(source, lambda tensors: None)
    compare(source, back)
    say_something(back)
    assert "39 tensors" in capsys.readouterr().out


def test_one_flipped_bit_is_seen(source: Path) -> None:
    def flip(tensors: Tensors) -> None:
        tensors["model.layers.3.mlp.down_proj.weight"].view(torch.int16)[63, 95] ^= 1

    with pytest.raises(DemoFailed, match=r"layers\.3\.mlp\.down_proj.*differ"):
        compare(source, copy_with(source, flip))


def test_a_zero_that_changed_its_sign_is_seen(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama-gqa")
    copy_with(source, lambda tensors: tensors["model.norm.weight"].zero_()).rename(tmp_path / "zero")
    negative = copy_with(source, lambda tensors: tensors["model.norm.weight"].zero_().neg_())
    with pytest.raises(DemoFailed, match=r"model\.norm\.weight.*differ"):
        compare(tmp_path / "zero", negative)


def test_a_changed_dtype_or_shape_is_seen(source: Path) -> None:
    with pytest.raises(DemoFailed, match=r"bfloat16.*float32"):
        compare(source, copy_with(source, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].float()})))


def test_a_missing_weight_is_seen(source: Path) -> None:
    with pytest.raises(DemoFailed, match=r"up_proj"):
        compare(source, copy_with(source, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")))


def test_an_extra_tensor_is_seen(source: Path) -> None:
    with pytest.raises(DemoFailed, match="padding"):
        compare(source, copy_with(source, lambda tensors: tensors.update({"padding": torch.ones(3)})))


def test_a_derived_buffer_may_be_missing_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_tiny(tmp_path / "source", "bert-mlm")
    (name,) = add_derived_buffers(source)
    compare(source, copy_with(source, lambda tensors: tensors.pop(name)))
    assert f"not needed by Transformers: {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "tokenizer.json", "generation_config.json"])
def test_a_changed_or_lost_side_file_is_seen(name: str, source: Path) -> None:
    back = copy_with(source, lambda tensors: None)
    (back / name).write_text((source / name).read_text() + " ")
    with pytest.raises(DemoFailed, match=f"changed.*{name}"):
        compare(source, back)
    (back / name).unlink()
    with pytest.raises(DemoFailed, match=f"went.*{name}"):
        compare(source, back)


def test_pytorch_files_are_compared_with_the_safetensors_files_that_come_back(source: Path) -> None:
    back = copy_with(source, lambda tensors: None)
    as_pytorch_bin(source)
    compare(source, back)


def test_a_model_without_a_tokenizer_runs_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_something(save_tiny(tmp_path / "model", "bert"))
    assert "output of shape (1, 8, 64)" in capsys.readouterr().out


def test_a_tensor_in_another_shard_is_seen(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "source", "llama-gqa", max_shard_size="300KB")
    back = tmp_path / "back"
    shutil.copytree(source, back)
    first, second = sorted(back.glob("*.safetensors"))[:2]
    moved, kept = load_file(second), load_file(first)
    name, tensor = moved.popitem()
    save_file(moved, second)
    save_file(kept | {name: tensor}, first)
    with pytest.raises(DemoFailed, match="changed their file"):
        compare(source, back)
