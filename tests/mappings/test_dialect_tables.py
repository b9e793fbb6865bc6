"""Dialect tables: the bundled ones are whole, and a mistake in one is named with its mend."""

from __future__ import annotations

import pytest

from mappings.composition import RANK_AXIS, Cutting, compose
from mappings.dialect_table import Dialect, bundled_dialect, bundled_dialects, dialect_of, parse_dialect, place_of_cut, target_named
from mappings.errors import Refused
from mappings.expand import Expansion, expand
from mappings.tables import bundled_table
from model.config import ModelConfig

HEAD = """
dialect = "mine"
default = "1"
pads_vocabulary = false
shares_kv_heads = false
[versions]
"1" = "the first"
"2" = "the second"
"""
NETWORK = '\n[[network]]\nfamilies = ["llama"]\nsource = "my code"\n'
PARTS = 'axes = "[q: heads head_dim | k: kv_heads head_dim | v: kv_heads head_dim] hidden"'
TWO_PARTS = 'axes = "[q: heads head_dim | k: kv_heads head_dim] hidden"'
QKV = (
    'ms = { q = "layers.{layer}.attention.q_proj.weight", k = "layers.{layer}.attention.k_proj.weight",'
    ' v = "layers.{layer}.attention.v_proj.weight" }\n'
)


def tensor(*lines: str) -> str:
    return "\n[[network.tensor]]\n" + "\n".join(lines) + "\n"


def config(family: str, **fields: object) -> ModelConfig:
    values: dict[str, object] = {
        "family": family, "kind": "decoder", "layers": 2, "hidden": 12, "heads": 6, "kv_heads": 3, "head_dim": 4, "ffn": 12, "vocab": 24,
        "padded_vocab": 24, "max_positions": 8, "norm": "rms_norm", "norm_eps": 1e-5, "activation": "silu", "gated_mlp": True, "head": True,
    }  # fmt: skip
    return ModelConfig(**values | fields)  # type: ignore[arg-type]


def llama(**fields: object) -> Expansion:
    return expand(bundled_table("llama"), config("llama", **fields), {}, ())


@pytest.mark.parametrize("name", bundled_dialects())
def test_every_family_of_every_bundled_version_has_tensors_with_a_place_to_cut(name: str) -> None:
    table = bundled_dialect(name)
    for version in table.versions:
        dialect = dialect_of(table, version)
        assert dialect.families
        for family in dialect.families:
            tensors = dialect.tensors(family)
            assert len(tensors) > 8
            assert all(place_of_cut(item) is not None or item.replicated for item in tensors)


def test_a_name_without_a_version_means_the_default() -> None:
    assert str(target_named("mindformers")) == "mindformers@2.0"
    assert str(target_named("mindformers-legacy@1.3-fused")) == "mindformers-legacy@1.3-fused"
    assert target_named("ms-convert") is None
    for wrong in ("", "mindformers@", "mindformers@2", "MindFormers", "ms-convert@1", "../mindformers"):
        with pytest.raises(Refused):
            target_named(wrong)


def test_versions_that_files_cannot_tell_apart_are_known() -> None:
    assert Dialect(bundled_dialect("mindformers-legacy"), "1.3-fused").alike("llama") == ("1.8-fused",)
    assert Dialect(bundled_dialect("mindformers-legacy"), "1.3").alike("llama") == ()
    assert len(Dialect(bundled_dialect("mindformers"), "2.0").alike("qwen3")) == 3


def test_parts_that_each_begin_with_their_cut_lie_together_in_each_rank() -> None:
    composed = compose(llama(hidden=24), target_named("mindformers-legacy@1.3-fused"), Cutting(3), "llama")
    qkv = composed.parameters["model.layers.1.attention.w_qkv.weight"]
    assert (qkv.shape, qkv.parameter.cut, qkv.parameter.cut_axis, qkv.layer) == ((48, 24), RANK_AXIS, 0, 1)
    assert str(qkv.parameter.axes.items[0]).startswith("(@rank [q: heads@rank head_dim | k: kv_heads@rank head_dim |")
    assert composed.sizes["heads@rank"] == 2 and composed.sizes["kv_heads@rank"] == 1
    assert composed.hf_shapes == llama(hidden=24).hf_shapes
    interleaved = compose(llama(hidden=24), target_named("mindformers-legacy@1.8-fused"), Cutting(3), "llama")
    assert interleaved.parameters["model.layers.1.attention.w_qkv.weight"].parameter.cut == "kv_heads"


def test_a_model_whose_parts_are_not_all_there_is_refused() -> None:
    with pytest.raises(Refused, match=r"cannot be written as mindformers@2\.0") as caught:
        compose(llama(gated_mlp=False, mlp_bias=True), target_named("mindformers"), Cutting(), "llama")
    assert any("mlp.gate_proj.bias has no place" in problem.what for problem in caught.value.problems)
    partial = parse_dialect(HEAD + NETWORK + tensor('name = "l.{layer}.qkv"', QKV, PARTS), "mine.toml")
    without = llama()
    without.parameters = {name: item for name, item in without.parameters.items() if "k_proj" not in name}
    with pytest.raises(Refused) as caught:
        compose(without, dialect_of(partial, "1"), Cutting(), "llama")
    assert any(
        "is only a part of l.{layer}.qkv, which needs layers.{layer}.attention.k_proj.weight" in item.what for item in caught.value.problems
    )


NORM = 'ms = "layers.{layer}.attention_norm.gamma"'
MISTAKES = {
    "no toml": ("x = [", "not valid TOML"),
    "no versions": ('dialect = "mine"\ndefault = "1"\n', "[versions] is missing"),
    "default": (HEAD.replace('default = "1"', 'default = "3"'), "the default '3' is no version"),
    "flag": (HEAD.replace("pads_vocabulary = false", "pads_vocabulary = 1"), "'pads_vocabulary' is missing"),
    "key": (HEAD.replace("pads_vocabulary", "x = 1\npads_vocabulary"), "unknown key 'x'"),
    "families": (HEAD + '\n[[network]]\nsource = "x"\n', "'families' is missing"),
    "analogy": (HEAD + NETWORK + 'by_analogy = ["gpt2"]\n', "a family that is not among"),
    "source": (HEAD + '\n[[network]]\nfamilies = ["llama"]\n', "'source' is missing"),
    "two networks": (HEAD + NETWORK + NETWORK, "two networks for llama in version 1"),
    "size": (HEAD + NETWORK + 'sizes = { width = "heads head_dim" }\n', "unknown axis 'width'"),
    "size's axes": (HEAD + NETWORK + 'sizes = { hidden = "heads width" }\n', "unknown axis 'width'"),
    "sizes": (HEAD + NETWORK + "sizes = 3\n", "'sizes' is not a table"),
    "version": (HEAD + NETWORK + 'versions = ["9"]\n', "'9' is no version here"),
    "parameter": (HEAD + NETWORK + tensor('name = "x"', 'ms = "nothing"'), "'nothing' is no canonical parameter"),
    "name": (HEAD + NETWORK + tensor('name = "a-b.{layer}"', NORM), "'name' is missing or not a name"),
    "layer": (HEAD + NETWORK + tensor('name = "x"', NORM), "different placeholders"),
    "twice": (HEAD + NETWORK + tensor('name = "x.{layer}"', NORM) + tensor('name = "y.{layer}"', NORM), "is there twice in version 1"),
    "tensor twice": (
        HEAD + NETWORK + tensor('name = "x.{layer}"', NORM) + tensor('name = "x.{layer}"', NORM.replace("gamma", "beta")),
        "the tensor x.{layer} is there twice",
    ),
    "axes": (HEAD + NETWORK + tensor('name = "x.{layer}"', QKV), "'axes' is missing"),
    "axis": (HEAD + NETWORK + tensor('name = "x.{layer}"', NORM, 'axes = "width"'), "unknown axis 'width'"),
    "other axes": (HEAD + NETWORK + tensor('name = "x.{layer}"', NORM, 'axes = "ffn"'), "has the axes ffn"),
    "labels": (HEAD + NETWORK + tensor('name = "x.{layer}"', QKV, TWO_PARTS), "axes has the labels"),
    "no place to cut": (
        HEAD + NETWORK + tensor('name = "x.{layer}"', QKV, 'axes = "hidden (head_dim [q: heads | k: kv_heads | v: kv_heads])"'),
        "begins with what cuts its parameters: heads, kv_heads, kv_heads",
    ),
    "cut": (HEAD + NETWORK + tensor('name = "x.{layer}"', NORM, 'cut = "hidden"'), "can only be"),
    "rank axis": (HEAD + NETWORK + tensor('name = "x.{layer}"', NORM, 'axes = "@rank hidden"'), "unexpected character '@'"),
    "not a weight": (HEAD.replace("[versions]", '[[not_weights]]\nname = "a"\nprefix = "b"\nwhy = "c"\n[versions]'), "a name or a prefix"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_dialect_table_is_named(mistake: str) -> None:
    text, words = MISTAKES[mistake]
    with pytest.raises(Refused) as caught:
        parse_dialect(text, "mine.toml")
    assert any(words in str(item) for item in (caught.value, *(problem.what for problem in caught.value.problems))), caught.value.problems
    assert all((problem.where.startswith("mine.toml") and problem.mend) or "TOML" in words for problem in caught.value.problems)


@pytest.mark.parametrize("name", bundled_dialects())
def test_no_weight_is_named_like_what_lies_beside_weights(name: str) -> None:
    table = bundled_dialect(name)
    weights = {tensor.name for network in table.networks for tensor in network.tensors}
    assert not [(weight, other) for weight in weights for other in table.not_weights if other.names(weight)]
