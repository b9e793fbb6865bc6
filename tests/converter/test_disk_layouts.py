"""Unified safetensors and MindFormers 2.x folders: MindSpore cuts what we wrote, and everything comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from safetensors import safe_open

from converter.chunked import ForeignCheckpoint
from converter.execute import fill
from converter.mindformers2_folder import read_mindformers2
from converter.unified_folder import read_unified
from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, done, files_of, refused, same_bits
from tests.converter.interrupted import changes, killed

VARIANTS = ("llama-gqa", "gpt2", "qwen3", "bert-mlm")
CUTS = [("llama-gqa", 2, 2), ("gpt2", 2, 2), ("llama-uneven-vocab", 4, 2), ("llama-gqa-2", 8, 1)]


def convert(source: Path, out: Path, disk: str, *options: object) -> Path:
    done("hf2ms", source, "-o", out, "--layout", disk, *options)
    return out


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of all safetensors files below a folder, which must be there once."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def rank_tensors(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    return tensors_in(folder / f"rank_{rank}")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


def put_together(checkpoint: ForeignCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors that a reader without a manifest found, as torch has them."""
    types = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
    found = {}
    for name, tensor in checkpoint.tensors.items():
        words: Any = np.empty(tensor.shape, np.uint16 if tensor.dtype in ("BF16", "F16") else np.uint32)
        fill(tensor.target(), words)
        found[name] = torch.from_numpy(words.view(np.int16 if words.itemsize == 2 else np.int32)).view(types[tensor.dtype])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("variant", "tp", "pp"), CUTS)
def test_mindspore_cuts_our_unified_folder_by_our_merged_strategy(
    variant: str, tp: int, pp: int, dtype: torch.dtype, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    """0 wrong: each rank gets the very slices that hf2ms writes for it."""
    source = tiny_folder(variant, dtype=dtype)
    cut = ("--tp", tp, "--pp", pp)
    unified = convert(source, tmp_path / "unified", "unified", *cut, "--max-file-size", "20KB")
    assert len(list(unified.glob("part*.safetensors"))) > 2
    ms.load_distributed_checkpoint(
        None, predict_strategy=str(unified / "merged_strategy/merged_ckpt_strategy.ckpt"), unified_safetensors_dir=str(unified),
        dst_safetensors_dir=str(tmp_path / "theirs"), format="safetensors",
    )  # fmt: skip
    ours = convert(source, tmp_path / "ours", "rank", *cut)
    for rank in range(tp * pp):
        assert_equal(rank_tensors(tmp_path / "theirs", rank), rank_tensors(ours, rank))


def test_the_strategies_beside_the_parts_are_those_of_the_rank_tree_and_merge_to_ours(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    unified = convert(source, tmp_path / "unified", "unified", "--tp", 2, "--pp", 2, "--dp", 2)
    tree = convert(source, tmp_path / "tree", "rank", "--tp", 2, "--pp", 2, "--dp", 2)
    assert_same_folder(unified / "strategy", tree / "strategy")
    facts = done("inspect", unified / "merged_strategy/merged_ckpt_strategy.ckpt", "--json").facts
    assert facts["merged"] and facts["stages"] == [0, 1]


def test_mindspore_unifies_our_ranks_to_the_same_tensors(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    unified = convert(source, tmp_path / "unified", "unified", "--tp", 2, "--pp", 2)
    tree = convert(source, tmp_path / "tree", "rank", "--tp", 2, "--pp", 2)
    merged = unified / "merged_strategy/merged_ckpt_strategy.ckpt"
    ms.unified_safetensors(str(tree), str(merged), str(tmp_path / "theirs"))
    assert_equal(tensors_in(unified), tensors_in(tmp_path / "theirs"))
    theirs = json.loads((tmp_path / "theirs/param_name_map.json").read_text())
    ours = json.loads((unified / "param_name_map.json").read_text())
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()


@pytest.mark.parametrize("disk", ["unified", "mindformers2"])
@pytest.mark.parametrize("options", [(), ("--tp", 2, "--pp", 2), ("--tp", 4, "--pp", 2, "--dp", 2)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_trip_gives_the_folder_back_byte_for_byte(
    variant: str, options: tuple[object, ...], disk: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant)
    out = convert(source, tmp_path / "out", disk, *options)
    done("verify", source, out)
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_parts_hold_what_was_asked_for_and_no_tensor_twice(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa", dtype=torch.bfloat16)
    small = convert(source, tmp_path / "small", "unified", "--max-file-size", "30KB")
    one = convert(source, tmp_path / "one", "unified")
    assert [path.name for path in one.glob("part*")] == ["part0.safetensors"]
    assert_equal(tensors_in(small), tensors_in(one))
    for path in small.glob("part*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= 30_000


@pytest.mark.parametrize("options", [(), ("--tp", 2, "--pp", 2, "--max-file-size", "20KB")])
def test_a_unified_folder_is_read_without_its_manifest(options: tuple[object, ...], tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = convert(tiny_folder("llama-uneven-vocab", dtype=torch.bfloat16), tmp_path / "out", "unified", *options)
    (out / "manifest.json").unlink()
    assert_equal(put_together(read_unified(out)), tensors_in(out))


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("llama-uneven-vocab", ()),
        ("llama-uneven-vocab", ("--tp", 2, "--pp", 2)),
        ("llama-uneven-vocab", ("--tp", 4, "--pp", 2, "--dp", 2)),
        ("gpt2", ("--tp", 4, "--pp", 2)),
        ("llama-gqa-2", ("--tp", 8)),
        ("llama-gqa-2", ("--tp", 4, "--dp", 3)),
    ],
)
def test_a_mindformers2_folder_is_read_by_its_index_alone(
    variant: str, options: tuple[object, ...], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant)
    out = convert(source, tmp_path / "out", "mindformers2", *options)
    multiple = ("--vocab-multiple", json.loads((out / "manifest.json").read_text())["layout"]["padded_vocab"])
    whole = convert(source, tmp_path / "whole", "unified", *multiple)
    (out / "manifest.json").unlink()
    assert_equal(put_together(read_mindformers2(out)), tensors_in(whole))
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "0"
    (iteration,) = out.glob("iteration_*")
    assert_equal(put_together(read_mindformers2(iteration)), tensors_in(whole))


def test_an_unsharded_mindformers2_folder_is_read_without_an_index_too(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    out = convert(tiny_folder("qwen3", dtype=torch.bfloat16), tmp_path / "out", "mindformers2")
    assert [path for path in files_of(out) if "huggingface" not in path] == [
        "iteration_00000000/common.json", "iteration_00000000/metadata.json", "iteration_00000000/model-0000000-0000001.safetensors",
        "latest_checkpointed_iteration.txt", "manifest.json",
    ]  # fmt: skip
    expected = tensors_in(out)
    (out / "iteration_00000000/metadata.json").unlink()
    assert_equal(put_together(read_mindformers2(out)), expected)


@pytest.mark.parametrize("disk", ["unified", "mindformers2"])
def test_a_run_that_is_killed_looks_unfinished_and_is_continued(disk: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    command = ["hf2ms", source, "--layout", disk, "--tp", 2, "--workers", 1, "-o"]
    all_changes = changes(*command, tmp_path / "fresh")
    for share in (0.3, 0.7):
        out = tmp_path / f"out-{share}"
        assert killed(int(all_changes * share), *command, out)
        assert "manifest.json" not in files_of(out) and "latest_checkpointed_iteration.txt" not in files_of(out)
        assert "unfinished run" in done("inspect", out).out
        done(*command, out)
        assert_same_folder(out, tmp_path / "fresh")


def test_overwrite_replaces_another_layouts_files_and_nothing_else(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-gqa"), tmp_path / "out"
    for disk in ("rank", "unified", "mindformers2", "unified", "rank"):
        convert(source, out, disk, "--tp", 2, "--overwrite")
        (out / "mine.txt").write_text("mine")
        fresh = convert(source, tmp_path / f"fresh-{disk}", disk, "--tp", 2, "--overwrite")
        assert_same_folder(out, fresh, ignore=frozenset({"mine.txt"}))


def test_a_checkpoint_of_somebody_else_is_not_touched(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    (tmp_path / "out/iteration_00000500").mkdir(parents=True)
    (tmp_path / "out/iteration_00000500/model-0000000-0000001.safetensors").write_bytes(b"theirs")
    message = refused("hf2ms", source, "-o", tmp_path / "out", "--layout", "mindformers2", "--overwrite")
    assert "iteration_00000500/model-0000000-0000001.safetensors" in message and "not written by ms-convert" in message


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--layout", "unified", "--format", "ckpt"), "is of safetensors files"),
        (("--layout", "mindformers2", "--format", "ckpt"), "is of safetensors files"),
        (("--layout", "unified", "--tp", 2, "--ranks", "0"), "--ranks has no meaning"),
        (("--max-file-size", "1GB"), "--max-file-size has no meaning"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: tuple[object, ...], fault: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    assert fault in refused("hf2ms", tiny_folder("llama-gqa"), "-o", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_ranks_of_a_mindformers2_folder_may_be_written_by_several_hosts(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    options = ("--tp", 2, "--pp", 2)
    convert(source, tmp_path / "out", "mindformers2", *options, "--ranks", "0-1")
    assert not (tmp_path / "out/latest_checkpointed_iteration.txt").exists()
    convert(source, tmp_path / "out", "mindformers2", *options, "--ranks", "2-3")
    assert_same_folder(tmp_path / "out", convert(source, tmp_path / "fresh", "mindformers2", *options))
