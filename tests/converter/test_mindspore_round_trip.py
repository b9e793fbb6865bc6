"""There and back with MindSpore in between: our rank tree, recut or unified by its tools, gives the Hugging Face folder again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TinyFolder
from tests.converter.command_line import done
from tests.converter.test_mindspore_reads import Layout, convert, merged

TREE: Layout = (2, (2, 2))
TP_4: Layout = (4, (4,))
PP_4: Layout = (1, (1, 1, 1, 1))
ONE_FILE: Layout = (1, (4,))


def assert_it_comes_back(made: Path, target: Path, source: Path, folder: Path) -> None:
    """MindSpore's rank files in the place of ours below our manifest, which knows every tensor's checksum."""
    shutil.copytree(target, folder / "recut")
    for path in made.glob("rank_*/checkpoint_*.ckpt"):
        shutil.copyfile(path, folder / "recut" / path.relative_to(made))
    assert len(list(made.glob("rank_*/checkpoint_*.ckpt"))) == len(list(target.glob("rank_*/*.ckpt")))
    done("ms2hf", folder / "recut", "-o", folder / "back")
    there, back = load_file(source / "model.safetensors"), load_file(folder / "back/model.safetensors")
    assert there.keys() == back.keys()
    for name, tensor in there.items():
        assert back[name].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(back[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize(("variant", "target"), [("llama-gqa", TP_4), ("gpt2", TP_4), ("llama-gqa", ONE_FILE), ("gpt2", ONE_FILE)])
def test_what_mindspore_recut_comes_back(variant: str, target: Layout, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant, dtype=torch.bfloat16)
    tree = convert(source, tmp_path / "tree", TREE, "--format", "ckpt")
    wanted = convert(source, tmp_path / "wanted", target, "--format", "ckpt")
    made = tmp_path / "made"
    ms.transform_checkpoints(str(tree), str(made), "checkpoint_", merged(tree), merged(wanted), output_format="ckpt")
    assert_it_comes_back(made, wanted, source, tmp_path)


@pytest.mark.parametrize("target", [TP_4, PP_4])
def test_what_mindspore_unified_and_distributed_comes_back(target: Layout, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The way to more stages than the tree has ranks in a stage: there MindSpore's `transform_checkpoints` gives up."""
    source = tiny_folder("llama-gqa", dtype=torch.bfloat16)
    tree = convert(source, tmp_path / "tree", TREE)
    wanted = convert(source, tmp_path / "wanted", target, "--format", "ckpt")
    ms.unified_safetensors(str(tree), merged(tree), str(tmp_path / "unified"))
    options: dict[str, Any] = {"format": "safetensors", "output_format": "ckpt"}
    ms.load_distributed_checkpoint(
        None, predict_strategy=merged(wanted), unified_safetensors_dir=str(tmp_path / "unified"),
        dst_safetensors_dir=str(tmp_path / "made"), **options,
    )  # fmt: skip
    made = tmp_path / "made"
    for path in list(made.glob("rank_*/*.ckpt")):
        path.rename(path.with_name(f"checkpoint_{path.parent.name.removeprefix('rank_')}.ckpt"))
    assert_it_comes_back(made, wanted, source, tmp_path)
