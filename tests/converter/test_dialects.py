"""Trees in MindFormers' names: what each rank holds is cut and fused by hand with numpy, and every tree comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from converter.strategy_format import read_strategy
from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, done, ms_convert, refused, round_trip
from tests.converter.dialects_by_hand import CASES

LAYERS = 4


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("variant", "target"), CASES)
def test_each_rank_holds_what_numpy_slices_and_then_fuses(
    variant: str, target: str, tp: int, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source, out = tiny_folder(variant), tmp_path / "slices"
    done("hf2ms", source, "-o", out, "--tp", tp, "--target", target)
    hf = load_file(source / "model.safetensors")
    for rank in range(tp):
        found = load_file(out / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        expected = CASES[variant, target](hf, LAYERS, rank, tp, target.partition("@")[2])
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name


@pytest.mark.parametrize(("tp", "pp", "file_format"), [(1, 1, "safetensors"), (2, 1, "ckpt"), (2, 2, "safetensors"), (4, 2, "ckpt")])
@pytest.mark.parametrize(("variant", "target"), CASES)
def test_every_family_comes_back_from_every_dialect_and_version(
    variant: str, target: str, tp: int, pp: int, file_format: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant, tokenizer=True)
    back = round_trip(source, tmp_path, "--tp", tp, "--pp", pp, "--format", file_format, "--target", target)
    assert_same_folder(source, back)


@pytest.mark.parametrize("target", ["mindformers", "mindformers-legacy@1.3-fused", "mindformers-legacy@1.8"])
def test_a_pipeline_stage_holds_its_layers_under_their_global_numbers(target: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-gqa"), tmp_path / "slices"
    done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, "--layers-per-stage", "3,1", "--target", target)
    whole = [set(load_file(out / f"rank_{rank}/checkpoint_{rank}.safetensors")) for rank in range(4)]
    assert whole[0] == whole[1] and whole[2] == whole[3] and not whole[0] & whole[2]
    assert {name.split(".")[2] for name in whole[0] if ".layers." in name} == {"0", "1", "2"}
    assert {name.split(".")[2] for name in whole[2] if ".layers." in name} == {"3"}


def test_the_strategy_file_tells_how_each_fused_tensor_is_cut(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("qwen3"), tmp_path / "slices"
    done("hf2ms", source, "-o", out, "--tp", 2, "--target", "mindformers@2.0-contiguous")
    _, layouts = read_strategy((out / "strategy/ckpt_strategy_rank_0.ckpt").read_bytes())
    cut = {layout.name: layout.tensor_map for layout in layouts}
    assert cut.keys() == load_file(out / "rank_0/checkpoint_0.safetensors").keys()
    assert cut["decoder.layers.1.self_attention.linear_qkv.weight"] == (0, -1)
    assert cut["decoder.layers.1.mlp.linear_fc1.weight"] == (0, -1)
    assert cut["decoder.layers.1.mlp.linear_fc2.weight"] == (-1, 0)
    assert cut["decoder.layers.1.input_layernorm.weight"] == (-1,)


@pytest.mark.parametrize("target", ["mindformers", "mindformers-legacy"])
def test_a_vocabulary_that_tp_does_not_divide_is_not_padded(target: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """The networks keep such an embedding whole on every rank, and the legacy one its head as well."""
    source, out = tiny_folder("llama-uneven-vocab-tied"), tmp_path / "slices"
    assert_same_folder(source, round_trip(source, tmp_path, "--tp", 2, "--target", target))
    name = "embedding.word_embeddings.weight" if target == "mindformers" else "model.tok_embeddings.embedding_weight"
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    for rank in range(2):
        assert np.array_equal(load_file(out / f"rank_{rank}/checkpoint_{rank}.safetensors")[name], table)


def test_an_untied_head_that_cannot_be_cut_is_refused_and_padded_when_asked(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-uneven-vocab")
    message = refused("hf2ms", source, "-o", tmp_path / "out", "--tp", 2, "--target", "mindformers")
    assert "output_layer.weight: a vocabulary of 199 cannot be divided among 2" in message and "--vocab-multiple 2" in message
    back = round_trip(source, tmp_path, "--tp", 2, "--target", "mindformers", "--vocab-multiple", 2)
    assert_same_folder(source, back)
    slices = load_file(tmp_path / "slices/rank_1/checkpoint_1.safetensors")
    assert slices["output_layer.weight"].shape == slices["embedding.word_embeddings.weight"].shape == (100, 64)


REFUSALS = {
    "family": ("gpt2", "mindformers", 1, ("mindformers@2.0 has no network for the family gpt2", "it has qwen3, llama, qwen2")),
    "family of another version": ("gpt2", "mindformers-legacy", 1, ("no network for the family gpt2", "in the versions 1.3")),
    "dialect": ("llama-gqa", "megatron", 1, ("no dialect is named 'megatron'", "ms-convert, mindformers, mindformers-legacy")),
    "version": ("llama-gqa", "mindformers@1.9", 1, ("no layout version '1.9'", "2.0, 2.0-contiguous")),
    "parameters": ("llama-bias", "mindformers", 1, ("layers.{0..3}.attention.o_proj.bias has no place in mindformers@2.0",)),
    "untied gpt2": ("gpt2-untied", "mindformers-legacy@1.3", 1, ("lm_head.weight has no place",)),
    "head size": ("llama-head-dim", "mindformers-legacy", 1, ("hidden = heads (8) x head_dim (16), this model has hidden 64",)),
    "KV heads": ("llama-gqa-2", "mindformers-legacy", 4, ("2 KV heads cannot be divided among 4", "work for this model: 1, 2")),
    "vocabulary": ("gpt2-uneven-vocab", "mindformers-legacy@1.3", 2, ("embedding_table: a vocabulary of 199 cannot be divided",)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_dialect_has_no_place_for_is_refused(case: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    variant, target, tp, words = REFUSALS[case]
    source = tiny_folder("gpt2", tie_word_embeddings=False) if variant == "gpt2-untied" else tiny_folder(variant)
    message = refused("hf2ms", source, "-o", tmp_path / "out", "--tp", tp, "--target", target)
    assert not (tmp_path / "out").exists()
    for text in words:
        assert text in message


def test_the_layout_version_of_a_tree_decides_what_its_tensors_hold(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Two versions have equal names and shapes: read as the other one, the tensors would come back shuffled."""
    source = tiny_folder("llama-gqa")
    trees = [tmp_path / version for version in ("1.3-fused", "1.8-fused")]
    for tree in trees:
        done("hf2ms", source, "-o", tree, "--tp", 2, "--target", f"mindformers-legacy@{tree.name}")
    first, second = (load_file(tree / "rank_1/checkpoint_1.safetensors") for tree in trees)
    assert {name: array.shape for name, array in first.items()} == {name: array.shape for name, array in second.items()}
    assert not np.array_equal(first["model.layers.2.attention.w_qkv.weight"], second["model.layers.2.attention.w_qkv.weight"])
    manifest = json.loads((trees[0] / "manifest.json").read_text())
    assert (manifest["target"]["dialect"], manifest["target"]["version"]) == ("mindformers-legacy", "1.3-fused")


@pytest.mark.parametrize(("field", "value"), [("version", "9"), ("dialect", "mindformers"), ("table", "x = ["), ("table", "")])
def test_a_manifest_with_another_dialect_or_version_than_its_table_is_refused(
    field: str, value: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    done("hf2ms", tiny_folder("llama-gqa"), "-o", tree, "--target", "mindformers-legacy")
    manifest = json.loads((tree / "manifest.json").read_text())
    manifest["target"][field] = value
    (tree / "manifest.json").write_text(json.dumps(manifest))
    refused("ms2hf", tree, "-o", tmp_path / "back")


@pytest.mark.parametrize("target", ["mindformers", "mindformers-legacy@1.3-fused"])
def test_verify_and_inspect_read_such_a_tree_without_flags(target: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, tree = tiny_folder("qwen2"), tmp_path / "tree"
    done("hf2ms", source, "-o", tree, "--tp", 2, "--pp", 2, "--target", target)
    done("verify", source, tree)
    facts = done("inspect", tree, "--json").facts
    assert facts["target"]["dialect"] == target.partition("@")[0]
    other = tiny_folder("qwen2", seed=1)
    assert ms_convert("verify", other, tree).code == 1


def test_families_by_analogy_are_marked(tiny_folder: TinyFolder) -> None:
    facts = done("hf2ms", tiny_folder("llama-gqa"), "--target", "mindformers", "--dry-run", "--json").facts
    assert facts["target"] == {"dialect": "mindformers", "version": "2.0", "by_analogy": True}
    assert any("by analogy with qwen3" in note for note in facts["notes"])
    assert not done("hf2ms", tiny_folder("qwen3"), "--target", "mindformers", "--dry-run", "--json").facts["target"]["by_analogy"]
    listed = done("dialects").out
    assert "llama*" in listed and "qwen3*" not in listed and "by analogy" in listed
