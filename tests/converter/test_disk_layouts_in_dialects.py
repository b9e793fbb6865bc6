"""Each disk layout in MindFormers' names: there and back with the manifest and without it, and cut by MindSpore."""

from __future__ import annotations

import shutil
from pathlib import Path

import mindspore as ms
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, assert_same_tensors, done, refused
from tests.converter.test_disk_layouts import assert_equal, convert, rank_tensors

TARGETS = [
    ("qwen3", "mindformers@2.0"),
    ("llama-gqa", "mindformers@2.0-contiguous"),
    ("llama-gqa", "mindformers-legacy@1.3-fused"),
    ("qwen2", "mindformers-legacy@1.8"),
]
FUSED_PER_RANK = ("mindformers@2.0-contiguous", "mindformers-legacy@1.3-fused")
CUT = ("--tp", 2, "--pp", 2)


@pytest.mark.parametrize("disk", ["rank", "unified", "mindformers2"])
@pytest.mark.parametrize(("variant", "target"), TARGETS)
def test_every_dialect_comes_back_from_every_layout(variant: str, target: str, disk: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant, dtype=torch.bfloat16)
    out = convert(source, tmp_path / "out", disk, *CUT, "--target", target)
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")
    shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("manifest.json", "huggingface"))
    per_rank = ("--source-tp", 2) if target in FUSED_PER_RANK and disk != "rank" else ()
    done("ms2hf", tmp_path / "bare", "-o", tmp_path / "again", "--from", target, "--config", source, *per_rank)
    assert_same_tensors(source, tmp_path / "again")


@pytest.mark.parametrize(("variant", "target"), TARGETS)
def test_mindspore_cuts_a_unified_folder_of_mindformers_names(variant: str, target: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """0 wrong: what is fused per rank is fused so in the whole tensors too."""
    source = tiny_folder(variant, dtype=torch.bfloat16)
    unified = convert(source, tmp_path / "unified", "unified", *CUT, "--target", target)
    ms.load_distributed_checkpoint(
        None, predict_strategy=str(unified / "merged_strategy/merged_ckpt_strategy.ckpt"), unified_safetensors_dir=str(unified),
        dst_safetensors_dir=str(tmp_path / "theirs"), format="safetensors",
    )  # fmt: skip
    ours = convert(source, tmp_path / "ours", "rank", *CUT, "--target", target)
    for rank in range(4):
        assert_equal(rank_tensors(tmp_path / "theirs", rank), rank_tensors(ours, rank))


@pytest.mark.parametrize(("target", "told"), [("mindformers@2.0", False), ("mindformers@2.0-contiguous", True)])
def test_a_plan_says_what_no_other_number_of_ranks_may_cut(target: str, told: bool, tiny_folder: TinyFolder) -> None:
    command = ("hf2ms", tiny_folder("qwen3"), "--dry-run", "--json", "--target", target, "--layout", "unified")
    notes = done(*command, "--tp", 2).facts["notes"]
    assert any("not to be cut for another tp" in note and "linear_qkv" in note for note in notes) is told
    assert not any("another tp" in note for note in done(*command).facts["notes"])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("target", FUSED_PER_RANK)
def test_verify_knows_for_which_ranks_whole_tensors_are_fused(target: str, tp: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    done("verify", source, convert(source, tmp_path / "out", "unified", "--tp", tp, "--target", target))


def test_replicas_that_differ_in_a_mindformers2_folder_are_not_merged(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen3")
    out = convert(source, tmp_path / "out", "mindformers2", "--tp", 2, "--dp", 2, "--target", "mindformers")
    (out / "manifest.json").unlink()
    command = ("ms2hf", out, "--from", "mindformers", "--config", source, "-o")
    path = out / "iteration_00000000/model-0000003-0000004.safetensors"
    tensors = load_file(path)
    path.unlink()  # a hard link to the file of rank 1
    save_file(tensors, path)
    done(*command, tmp_path / "back")
    tensors["decoder.layers.1.mlp.linear_fc2.weight"][5, 7] += 1
    save_file(tensors, path)
    message = refused(*command, tmp_path / "no")
    assert "decoder.layers.1.mlp.linear_fc2.weight differs between its replicas" in message
    assert not (tmp_path / "no/config.json").exists()
    path.unlink()
    done(*command, tmp_path / "of-the-others")
    assert_same_tensors(source, tmp_path / "of-the-others")


def test_pieces_that_the_ranks_said_cannot_have_saved_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    out = convert(source, tmp_path / "out", "mindformers2", "--tp", 2, "--target", "mindformers@2.0-contiguous")
    (out / "manifest.json").unlink()
    command = ("ms2hf", out, "-o", tmp_path / "back", "--from", "mindformers@2.0-contiguous", "--config", source, "--source-tp")
    assert "lies in 2 pieces, which cannot be of 4 tensor-parallel ranks" in refused(*command, 4)
    done(*command, 2)
    assert_same_tensors(source, tmp_path / "back")
