"""MindSpore itself loads what we write, and its own tools rebuild and recut it by our strategy files without a wrong tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from tests.conftest import TinyFolder
from tests.converter.command_line import done
from tests.converter.cut_by_hand import Arrays, rank_slices

FORMATS = ("safetensors", "ckpt")
Layout = tuple[int, tuple[int, ...]]
"""tp, and the layers of each stage."""


def convert(source: Path, out: Path, layout: Layout, *options: object) -> Path:
    """The vocabulary is padded to a multiple of 128 whatever tp is, so that the tools can go from any layout to any other."""
    tp, stages = layout
    counts = ",".join(map(str, stages))
    done("hf2ms", source, "-o", out, "--tp", tp, "--pp", len(stages), "--layers-per-stage", counts, "--vocab-multiple", 128, *options)
    return out


def loaded(path: Path) -> Arrays:
    """What `mindspore.load_checkpoint` makes of a file."""
    parameters = ms.load_checkpoint(str(path), format=path.suffix[1:])
    return {name: parameter.asnumpy() for name, parameter in parameters.items()}


def rank_path(folder: Path, rank: int) -> Path:
    (path,) = (path for path in (folder / f"rank_{rank}").iterdir() if path.suffix in (".ckpt", ".safetensors"))
    return path


def padded(arrays: Arrays) -> Arrays:
    """Vocabularies that numpy left unpadded for tp 1."""
    return {
        name: np.concatenate([array, np.zeros((-len(array) % 128, *array.shape[1:]), array.dtype)])
        if name.endswith(("tokens.embedding_table", "lm_head.weight", "lm_head.bias"))
        else array
        for name, array in arrays.items()
    }


def wrong(found: Arrays, expected: Arrays) -> list[str]:
    """Names that are not in both, or whose arrays differ."""
    differ = [name for name in found.keys() & expected.keys() if not np.array_equal(found[name], expected[name])]
    differ += [name for name in found.keys() & expected.keys() if found[name].dtype != expected[name].dtype]
    return sorted([*differ, *(found.keys() ^ expected.keys())])


def expected_of(variant: str, source: Path, rank: int, layout: Layout) -> Arrays:
    tp, stages = layout
    slices = rank_slices(variant, load_file(source / "model.safetensors"), rank, tp, stages)
    return padded(slices) if tp == 1 else slices


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("variant", ["gpt2", "llama-gqa", "bert-mlm"])
def test_mindspore_loads_every_rank_file(variant: str, file_format: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, layout = tiny_folder(variant), (2, (3, 1))
    out = convert(source, tmp_path / "out", layout, "--format", file_format)
    for rank in range(4):
        assert wrong(loaded(rank_path(out, rank)), expected_of(variant, source, rank, layout)) == []


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mindspore_loads_half_precision_as_what_it_is(
    dtype: torch.dtype, file_format: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder("qwen3", dtype=dtype)
    out = convert(source, tmp_path / "out", (1, (4,)), "--format", file_format)
    hf = load_torch(source / "model.safetensors")
    parameters = ms.load_checkpoint(str(rank_path(out, 0)), format=file_format)
    assert {parameter.dtype for parameter in parameters.values()} == {ms.bfloat16 if dtype == torch.bfloat16 else ms.float16}
    for name, hf_name in (
        ("embedding.tokens.embedding_table", "model.embed_tokens.weight"),
        ("layers.2.attention.q_proj.weight", "model.layers.2.self_attn.q_proj.weight"),
        ("layers.3.attention.k_norm.gamma", "model.layers.3.self_attn.k_norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert np.array_equal(parameters[name].astype(ms.float32).asnumpy(), hf[hf_name].float().numpy())
    assert len(parameters) == len(hf)


@pytest.mark.parametrize("file_format", FORMATS)
def test_mindspore_loads_them_into_parameters_strictly(file_format: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    out = convert(source, tmp_path / "out", (2, (4,)), "--format", file_format)
    expected = expected_of("llama-gqa", source, 1, (2, (4,)))
    cell = ms.nn.Cell()
    for name, array in expected.items():
        cell.insert_param_to_cell(name.replace(".", "_"), ms.Parameter(ms.Tensor(np.zeros_like(array)), name=name))
    found = ms.load_checkpoint(str(rank_path(out, 1)), format=file_format)
    assert ms.load_param_into_net(cell, found, strict_load=True) == ([], [])
    assert wrong({parameter.name: parameter.asnumpy() for parameter in cell.get_parameters()}, expected) == []


def merged(out: Path) -> str:
    """Our strategy files, merged by MindSpore."""
    path = out.parent / f"{out.name}-strategy.ckpt"
    ms.merge_pipeline_strategys(str(out / "strategy"), str(path))
    return str(path)


CASES: dict[str, tuple[str, Layout, Layout]] = {
    "to one file": ("llama-gqa", (2, (2, 2)), (1, (4,))),
    "to more tensor ranks": ("llama-gqa", (2, (3, 1)), (4, (4,))),
    "to fewer tensor ranks": ("llama-gqa", (4, (4,)), (2, (4,))),
    "from one file": ("llama-gqa", (1, (4,)), (4, (4,))),
    "an uneven vocabulary": ("llama-uneven-vocab", (4, (1, 1, 2)), (1, (4,))),
    "an uneven vocabulary recut": ("llama-uneven-vocab", (2, (4,)), (4, (4,))),
    "tied": ("gpt2", (4, (4,)), (2, (4,))),
    "tied over two stages": ("gpt2", (2, (3, 1)), (1, (4,))),
    "tied over three stages": ("gpt2-uneven-vocab", (2, (1, 1, 2)), (4, (4,))),
    "BERT": ("bert-mlm", (4, (2, 2)), (2, (4,))),
    "KV heads replicated": ("llama-gqa-2", (8, (4,)), (1, (4,))),
    "KV heads replicated on several stages": ("llama-gqa-2", (4, (1, 3)), (1, (4,))),
    "one KV head": ("llama-mqa", (4, (2, 2)), (2, (4,))),
    "towards replicated KV heads": ("llama-gqa-2", (1, (4,)), (8, (4,))),
    "from replicated to replicated KV heads": ("llama-gqa-2", (4, (4,)), (8, (4,))),
}


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_mindspore_recuts_our_tree_by_our_strategies(case: str, file_format: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """To .ckpt in both cases: safetensors 0.8 writes wrong bytes for the strided slices that MindSpore hands to it."""
    variant, source_layout, target_layout = CASES[case]
    source = tiny_folder(variant)
    tree = convert(source, tmp_path / "tree", source_layout, "--format", file_format)
    target = convert(source, tmp_path / "target", target_layout)
    out = tmp_path / "out"
    ms.transform_checkpoints(str(tree), str(out), "made", merged(tree), merged(target), output_format="ckpt")
    ranks = target_layout[0] * len(target_layout[1])
    assert len(list(out.glob("rank_*"))) == ranks
    for rank in range(ranks):
        assert wrong(loaded(rank_path(out, rank)), expected_of(variant, source, rank, target_layout)) == []


def read_unified(folder: Path) -> Arrays:
    return {name: array for path in folder.glob("*.safetensors") for name, array in load_file(path).items()}


@pytest.mark.parametrize(("variant", "layout"), [("llama-gqa", (2, (3, 1))), ("gpt2", (4, (2, 2))), ("llama-gqa-2", (8, (4,)))])
def test_mindspore_unifies_our_tree_and_cuts_it_again(variant: str, layout: Layout, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant)
    tree = convert(source, tmp_path / "tree", layout)
    unified = tmp_path / "unified"
    ms.unified_safetensors(str(tree), merged(tree), str(unified))
    assert wrong(read_unified(unified), expected_of(variant, source, 0, (1, (4,)))) == []
    arguments: dict[str, Any] = {"format": "safetensors", "output_format": "ckpt"}
    ms.load_distributed_checkpoint(
        None, predict_strategy=merged(tree), unified_safetensors_dir=str(unified), dst_safetensors_dir=str(tmp_path / "again"), **arguments
    )
    tp, stages = layout
    for rank in range(tp * len(stages)):
        assert wrong(loaded(rank_path(tmp_path / "again", rank)), expected_of(variant, source, rank, layout)) == []


def test_data_parallel_ranks_are_read_like_others(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    tree = convert(source, tmp_path / "tree", (2, (3, 1)), "--dp", 2)
    target = convert(source, tmp_path / "target", (1, (4,)))
    ms.transform_checkpoints(str(tree), str(tmp_path / "out"), "made", merged(tree), merged(target), output_format="ckpt")
    assert wrong(loaded(rank_path(tmp_path / "out", 0)), expected_of("llama-gqa", source, 0, (1, (4,)))) == []


def test_mindspore_rebuilds_bfloat16_from_our_slices(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa", dtype=torch.bfloat16)
    tree = convert(source, tmp_path / "tree", (4, (2, 2)), "--format", "ckpt")
    target = convert(source, tmp_path / "target", (1, (4,)))
    ms.transform_checkpoints(str(tree), str(tmp_path / "out"), "made", merged(tree), merged(target), output_format="ckpt")
    parameters = ms.load_checkpoint(str(rank_path(tmp_path / "out", 0)))
    assert {parameter.dtype for parameter in parameters.values()} == {ms.bfloat16}
    hf = {name: tensor.float().numpy() for name, tensor in load_torch(source / "model.safetensors").items()}
    found = {name: parameter.astype(ms.float32).asnumpy() for name, parameter in parameters.items()}
    assert wrong(found, padded(rank_slices("llama-gqa", hf, 0, 1, (4,)))) == []
