"""The way back: every element of every Hugging Face tensor once, and every slice that is not what it should be refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from converter.hf2ms import RankTreeOptions, convert, plan_conversion
from converter.ms2hf import HFOptions, plan_restoration, restore
from converter.plan_ms2hf import plan_hf_folder, replicas_of
from converter.rank_tree import RankTree, read_rank_tree
from converter.strided import check_cover
from mappings.errors import Refused
from tests.conftest import TinyFolder
from tests.tiny_models import VARIANTS, add_derived_buffers, as_pytorch_bin, save_tiny

LAYOUTS = ((1, 1), (2, 3), (4, 2), (4, 3), (8, 1), (1, 4))
STAGES = {1: (4,), 2: (3, 1), 3: (1, 2, 1), 4: (1, 1, 1, 1)}


def tree_of(source: Path, target: Path, **options: Any) -> Path:
    convert(plan_conversion(source, RankTreeOptions(**options)), target)
    return target


@pytest.fixture(scope="module")
def shared(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank tree of a tied model with replicated KV heads, padding, two data-parallel copies: to be copied before it is changed."""
    source = tiny_folder("llama-uneven-vocab-tied", num_key_value_heads=2, head_dim=16, num_hidden_layers=2)
    return tree_of(source, tmp_path_factory.mktemp("tree") / "slices", tp=4, pp=2, dp=2)


@pytest.fixture
def tree(shared: Path, tmp_path: Path) -> Path:
    shutil.copytree(shared, tmp_path / "slices")
    return tmp_path / "slices"


def with_manifest(tree: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = tree / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    return tree


def refusal(tree: Path) -> str:
    with pytest.raises(Refused) as caught:
        plan_restoration(tree, HFOptions())
    assert caught.value.problems
    return str(caught.value)


def rank_file(tree: Path, rank: int) -> Path:
    return tree / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"


# An untied MLM head has two biases, of which Transformers reads one; where they differ, as in this tiny model, the folder is refused.
RESTORABLE = [variant for variant in VARIANTS if variant != "bert-mlm-untied"]


@pytest.mark.parametrize(("number", "variant"), list(enumerate(RESTORABLE)))
def test_every_element_of_every_tensor_comes_from_the_slices_once(
    number: int, variant: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    tp, pp = LAYOUTS[number % len(LAYOUTS)]
    source = tiny_folder(variant)
    layers = 5 if variant == "llama-five-layers" else 4
    tree = read_rank_tree(tree_of(source, tmp_path / "slices", tp=tp, pp=pp, layers_per_stage=STAGES[pp] if layers == 4 else None))
    planned = plan_hf_folder(tree)
    (file,) = planned.plan.files
    assert [problem for tensor in file.tensors for problem in check_cover(tensor)] == []
    assert {tensor.name: tensor.shape for tensor in file.tensors} == {
        name: tensor.shape for name, tensor in load_file(source / "model.safetensors").items()
    }
    assert not any(tensor.padding for tensor in file.tensors)


def holders(tree: RankTree) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for replicas in replicas_of(tree):
        found.setdefault(replicas.name, []).append([rank for rank, _ in replicas.tensors])
    return found


def test_the_replicas_to_compare_are_those_that_stand_in_different_files(shared: Path, tree: Path) -> None:
    """tp 4, 2 KV heads, dp 2 by hard links: stage 0 has the ranks 0-3 (and 4-7), stage 1 the ranks 8-11 (and 12-15)."""
    linked = holders(read_rank_tree(shared))
    assert linked["layers.0.attention.k_proj.weight"] == [[0, 1], [2, 3]]
    assert linked["layers.1.mlp_norm.gamma"] == [[8, 9, 10, 11]]
    assert linked["embedding.tokens.embedding_table"] == [[0, 8], [1, 9], [2, 10], [3, 11]]
    assert "layers.0.attention.q_proj.weight" not in linked
    copied = holders(read_rank_tree(tree))
    assert copied["layers.0.attention.k_proj.weight"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert copied["layers.0.attention.q_proj.weight"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(0), "embedding.tokens.embedding_table is missing from rank 3"),
        (
            lambda tensors: tensors[0].update(shape=[64, 32]),
            "embedding.tokens.embedding_table has a shape on rank 3 that is not its slice's",
        ),
        (lambda tensors: tensors[0].update(dtype="BF16"), "embedding.tokens.embedding_table has the dtypes BF16, F32"),
        (lambda tensors: tensors[0].update(name="wte"), "embedding.tokens.embedding_table is missing from rank 3"),
    ],
)
def test_a_rank_that_is_not_recorded_with_its_slices_is_refused(change: Callable[[Any], object], words: str, tree: Path) -> None:
    assert words in refusal(with_manifest(tree, lambda data: change(data["files"][3]["tensors"])))


def test_what_many_ranks_and_layers_lack_is_told_at_once(tree: Path) -> None:
    def drop_norms(data: dict[str, Any]) -> None:
        for file in data["files"]:
            file["tensors"] = [tensor for tensor in file["tensors"] if "mlp_norm" not in tensor["name"]]

    message = refusal(with_manifest(tree, drop_norms))
    assert all(f"layers.{rank // 8}.mlp_norm.gamma is missing from rank {rank}" in message for rank in range(16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: tensor.update(shape=tensor["shape"][::-1]), "is recorded with the shape"),
        (lambda tensor: tensor.update(shape=[1, *tensor["shape"]]), "is recorded with the shape"),
        (lambda tensor: tensor.update(shape=[2**40, 2**9]), "is recorded with the shape"),
        (lambda tensor: tensor.update(dtype="I64"), "is recorded as I64, its slices are F32"),
        (lambda tensor: tensor.update(name="model.other.weight"), "model.other.weight is of no rule"),
    ],
)
def test_a_recorded_tensor_that_the_rules_do_not_make_is_refused(change: Callable[[Any], object], words: str, tree: Path) -> None:
    def change_up(data: dict[str, Any]) -> None:
        change(next(tensor for tensor in data["source"]["files"][0]["tensors"] if tensor["name"].endswith("0.mlp.up_proj.weight")))

    assert words in refusal(with_manifest(tree, change_up))


def test_a_tensor_of_the_model_is_neither_forgotten_nor_passed_off_as_dropped(tree: Path, tmp_path: Path) -> None:
    def forget(data: dict[str, Any]) -> None:
        tensors = data["source"]["files"][0]["tensors"]
        data["source"]["files"][0]["tensors"] = [tensor for tensor in tensors if tensor["name"] != "model.norm.weight"]

    shutil.copytree(tree, tmp_path / "other")
    assert "model.norm.weight is of the model, and is not recorded" in refusal(with_manifest(tree, forget))
    dropped = with_manifest(tmp_path / "other", lambda data: data["source"]["dropped"].update({"model.norm.weight": "not needed"}))
    assert "model.norm.weight is recorded as dropped, and no rule drops it" in refusal(dropped)


def test_a_layout_that_cannot_cut_the_model_is_refused(tree: Path) -> None:
    def tp_16(data: dict[str, Any]) -> None:
        data["layout"].update(tp=16, dp=1, pp=1, layers_per_stage=[2])
        for file in data["files"]:
            file.update(stage=0, data=0, tensor=file["rank"], layers=[0, 1])

    assert "8 attention heads cannot be divided among 16 tensor-parallel ranks" in refusal(with_manifest(tree, tp_16))


def test_rank_files_that_are_missing_cut_or_foreign_are_named_together(tree: Path, shared: Path) -> None:
    rank_file(tree, 2).unlink()
    os.truncate(rank_file(tree, 5), 1000)
    tensors = load_file(rank_file(tree, 9))
    save_file(tensors, rank_file(tree, 9), {"format": "ms", "ms_convert_run": "0" * 32, "rank": "1", "remove_redundancy": "False"})
    os.truncate(rank_file(tree, 9), rank_file(shared, 9).stat().st_size)
    message = refusal(tree)
    assert "rank_2/checkpoint_2.safetensors: missing" in message
    assert "rank_5/checkpoint_5.safetensors: 1000 bytes, the manifest says" in message
    assert "rank_9/checkpoint_9.safetensors: a file from another run" in message


def test_a_rank_file_that_is_a_link_out_of_the_tree_is_refused(tree: Path, shared: Path) -> None:
    rank_file(tree, 1).unlink()
    rank_file(tree, 1).symlink_to(rank_file(shared, 1))
    assert "a link that leads out of the folder" in refusal(tree)


def test_other_tensors_in_a_rank_file_than_recorded_are_refused(tree: Path) -> None:
    path = rank_file(tree, 8)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"final_norm.gamma", b"final_norm.gamme", 1))
    assert "other tensors than the manifest lists" in refusal(tree)
    path.write_bytes(data.replace(b'"F32"', b'"I32"', 1))
    assert "another dtype or shape than the manifest says" in refusal(tree)


def test_torch_files_come_back_as_safetensors_with_their_shards(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama-gqa", max_shard_size="200KB")
    as_pytorch_bin(source)
    planned = plan_hf_folder(read_rank_tree(tree_of(source, tmp_path / "slices", tp=2)))
    names = sorted(path.name for path in source.glob("pytorch_model-*.bin"))
    assert len(names) > 1
    assert planned.renamed == {name: name.replace("pytorch_model", "model").replace(".bin", ".safetensors") for name in names}
    assert [file.path for file in planned.plan.files] == [planned.renamed[name] for name in names]
    assert {file.metadata for file in planned.plan.files} == {(("format", "pt"),)}


def test_dropped_buffers_are_named_and_not_planned(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")
    buffers = add_derived_buffers(source)
    planned = plan_hf_folder(read_rank_tree(tree_of(source, tmp_path / "slices", tp=2)))
    assert list(planned.dropped) == buffers
    assert {tensor.name for tensor in planned.plan.files[0].tensors}.isdisjoint(buffers)


@pytest.mark.parametrize(("dtype", "expected"), [("original", "F32"), ("bf16", "BF16"), ("fp32", "F32"), ("fp16", "F16")])
def test_a_cast_tree_gives_the_original_dtype_back_or_the_one_asked_for(
    dtype: str, expected: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    tree = read_rank_tree(tree_of(tiny_folder("qwen3-tied"), tmp_path / "slices", tp=2, dtype="bf16"))
    assert {tensor.dtype for slices in tree.slices.values() for tensor in slices.values()} == {"BF16"}
    assert {tensor.dtype for file in plan_hf_folder(tree, dtype).plan.files for tensor in file.tensors} == {expected}


def test_a_slice_whose_bytes_changed_is_refused_by_file_and_name(tree: Path, tmp_path: Path) -> None:
    """One bit of one replica, in a file with the right header and size."""
    stored = read_rank_tree(tree).slices[1]["layers.0.attention.k_proj.weight"]
    with stored.path.open("r+b") as file:
        file.seek(stored.extents[0].offset)
        byte = file.read(1)
        file.seek(stored.extents[0].offset)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(Refused) as caught:
        restore(plan_restoration(tree, HFOptions()), tmp_path / "back")
    assert "layers.0.attention.k_proj.weight" in str(caught.value)
    assert "rank_1/checkpoint_1.safetensors" in str(caught.value)


def test_replicas_that_differ_by_their_recorded_checksums_are_refused(tree: Path, tmp_path: Path) -> None:
    def other_sum(data: dict[str, Any]) -> None:
        tensor = next(tensor for tensor in data["files"][9]["tensors"] if tensor["name"] == "final_norm.gamma")
        tensor["xxh3"] = "0" * 16

    with pytest.raises(Refused) as caught:
        restore(plan_restoration(with_manifest(tree, other_sum), HFOptions()), tmp_path / "back")
    assert "final_norm.gamma differs between its replicas" in str(caught.value)
