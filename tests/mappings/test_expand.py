"""The names that a table expects of a model, against the state dict of a real Transformers model of every variant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from converter.hf_folder import read_hf_folder
from converter.source_model import find_table, understand
from mappings.errors import Refused
from mappings.expand import Expansion, expand, expert_stride, restore_prefix
from mappings.tables import FamilyTable, bundled_table
from tests.conftest import TinyFolder
from tests.converter.planned import config_of, rule, table_of
from tests.tiny_models import VARIANTS, tiny_model

UP = "layers.{layer}.mlp.up_proj.weight"
EXPERTS_UP = "layers.{layer}.mlp.experts.up_proj"


def expansion_of(entries: str | FamilyTable, present: Any = (), hf_config: dict[str, Any] | None = None, **sizes: Any) -> Expansion:
    return expand(table_of(entries) if isinstance(entries, str) else entries, config_of(**sizes), hf_config or {}, present)


def refusal(entries: str | FamilyTable, hf_config: dict[str, Any] | None = None, **sizes: Any) -> str:
    with pytest.raises(Refused) as caught:
        expansion_of(entries, hf_config=hf_config, **sizes)
    assert all("mine.toml" in problem.where or "llama.toml" in problem.where for problem in caught.value.problems)
    assert all(problem.mend for problem in caught.value.problems)
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_expected_names_and_shapes_are_those_of_the_transformers_model(variant: str, tiny_folder: TinyFolder) -> None:
    folder = read_hf_folder(tiny_folder(variant))
    state = {name: tuple(tensor.shape) for name, tensor in tiny_model(variant).state_dict().items()}
    table = find_table(folder.config, "config.json")
    whole = restore_prefix(table, state)
    assert len(set(whole.values())) == len(state)
    expansion = understand(folder).expansion
    shapes = expansion.hf_shapes | {name: expansion.hf_shapes[of] for name, of in expansion.duplicates.items()}
    assert shapes == {whole[name]: shape for name, shape in state.items()}


@pytest.mark.parametrize(
    "variant", [name for name, chosen in VARIANTS.items() if chosen.model_class.endswith(("LMHeadModel", "ForCausalLM"))]
)
def test_a_tied_head_repeats_the_embedding_exactly_where_transformers_ties_it(variant: str, tiny_folder: TinyFolder) -> None:
    model = tiny_model(variant)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    expansion = understand(read_hf_folder(tiny_folder(variant))).expansion
    assert ("lm_head.weight" in expansion.duplicates) == tied == ("lm_head.weight" not in expansion.hf_shapes)
    if tied:
        embedding = next(name for name, parameter in model.named_parameters() if parameter is model.get_input_embeddings().weight)
        assert expansion.duplicates["lm_head.weight"] == embedding


@pytest.mark.parametrize(("variant", "prefix"), [("gpt2-no-head", "transformer."), ("llama-no-head", "model."), ("bert", "bert.")])
def test_a_base_model_lacks_the_prefix_and_gets_it_once(variant: str, prefix: str, tiny_folder: TinyFolder) -> None:
    folder = read_hf_folder(tiny_folder(variant))
    table = find_table(folder.config, "config.json")
    names = restore_prefix(table, folder.tensors)
    assert all(whole == prefix + name for name, whole in names.items())
    assert restore_prefix(table, names.values()) == {whole: whole for whole in names.values()}
    assert restore_prefix(table, ["foreign.weight", f"{prefix}foreign.weight"]).items() == {
        ("foreign.weight", "foreign.weight"), (f"{prefix}foreign.weight", f"{prefix}foreign.weight"),
    }  # fmt: skip


def test_a_name_that_the_table_knows_as_it_stands_gets_no_prefix() -> None:
    table = table_of(
        rule("norm.w", "final_norm.gamma") + rule("model.norm.w", "embedding.norm.gamma") + rule("model.wte", "lm_head.weight")
    )
    assert table.prefix == "model."
    assert restore_prefix(table, ["norm.w", "wte"]) == {"norm.w": "norm.w", "wte": "model.wte"}


@pytest.mark.parametrize("spelling", ["weight", "gamma"])
def test_bert_is_read_with_the_norms_of_tensorflow_and_with_those_of_torch(spelling: str, tiny_folder: TinyFolder) -> None:
    folder = read_hf_folder(tiny_folder("bert-mlm"))
    present = {
        name.removesuffix("weight") + "gamma" if spelling == "gamma" and name.endswith("LayerNorm.weight") else name
        for name in folder.tensors
    }
    source = understand(folder)
    expansion = expand(source.table, source.config, folder.config, present)
    assert set(expansion.hf_shapes) <= present | set(expansion.duplicates)
    norms = {pairing.hf: pairing.ms for pairing in expansion.pairings if pairing.ms.endswith("gamma")}
    assert norms
    assert all(name.endswith(f"LayerNorm.{spelling}") for name in norms)


def test_buffers_that_derive_from_the_config_are_known_for_every_layer() -> None:
    gpt2 = expansion_of(bundled_table("gpt2"), layers=3, heads=2)
    assert "transformer.h.2.attn.bias" in gpt2.drops
    assert "transformer.h.2.attn.c_attn.bias" in gpt2.hf_shapes
    assert "transformer.h.3.attn.bias" not in set(gpt2.hf_names)
    assert set(gpt2.drops).isdisjoint(gpt2.hf_shapes)
    assert {name.split(".")[2] for name in gpt2.drops} == {"0", "1", "2"}


def test_experts_of_every_layer_pair_with_their_place_in_the_stack() -> None:
    entries = rule("h.{layer}.e.{expert}.up", EXPERTS_UP, from_layer="dense_layers") + rule("h.{layer}.up", UP, to_layer="dense_layers")
    expansion = expansion_of(entries, hf_config={"dense_layers": 1}, layers=3, experts=2, expert_ffn=5)
    assert expansion.hf_shapes == {"h.0.up": (8, 3)} | {f"h.{layer}.e.{expert}.up": (5, 3) for layer in (1, 2) for expert in (0, 1)}
    assert {name: item.shape for name, item in expansion.parameters.items()} == {
        "layers.0.mlp.up_proj.weight": (8, 3), "layers.1.mlp.experts.up_proj": (2, 5, 3), "layers.2.mlp.experts.up_proj": (2, 5, 3),
    }  # fmt: skip
    assert [(pairing.hf, pairing.expert) for pairing in expansion.pairings if pairing.ms.startswith("layers.2.")] == [
        ("h.2.e.0.up", 0), ("h.2.e.1.up", 1),
    ]  # fmt: skip
    assert expert_stride(next(p for p in expansion.pairings if p.expert == 1), expansion, (15, 3, 1)) == 15
    assert {item.layer for item in expansion.parameters.values()} == {0, 1, 2}


def test_drops_and_duplicates_of_experts_are_known_for_each() -> None:
    entries = rule("h.{layer}.e.{expert}.up", EXPERTS_UP)
    entries += '[[drop]]\nhf = "h.{layer}.e.{expert}.mask"\nwhy = "a mask"\n'
    entries += '[[duplicate]]\nhf = "h.{layer}.f.{expert}.up"\nof = "h.{layer}.e.{expert}.up"\n'
    expansion = expansion_of(entries, layers=2, experts=2, expert_ffn=5)
    assert set(expansion.drops) == {f"h.{layer}.e.{expert}.mask" for layer in (0, 1) for expert in (0, 1)}
    assert expansion.duplicates == {f"h.{layer}.f.{expert}.up": f"h.{layer}.e.{expert}.up" for layer in (0, 1) for expert in (0, 1)}


def test_a_tensor_that_a_rule_names_is_not_dropped_by_a_pattern() -> None:
    entries = rule("h.1.mask", "final_norm.gamma") + '[[drop]]\nhf = "h.{layer}.mask"\nwhy = "a mask"\n'
    expansion = expansion_of(entries, layers=3)
    assert set(expansion.drops) == {"h.0.mask", "h.2.mask"}
    assert set(expansion.hf_shapes) == {"h.1.mask"}


def test_a_duplicate_repeats_the_spelling_that_is_in_the_file() -> None:
    entries = '[[rule]]\nhf = ["wte.w", "embed.w"]\nms = "embedding.tokens.embedding_table"\n' + rule(
        "head.w", "lm_head.weight", when="head"
    )
    for present, original in (({"embed.w"}, "embed.w"), ({"wte.w"}, "wte.w"), (set(), "wte.w"), ({"embed.w", "wte.w"}, "wte.w")):
        expansion = expansion_of(entries, present, tied=True)
        assert expansion.duplicates == {"head.w": original}
        assert set(expansion.hf_shapes) == {original}


@pytest.mark.parametrize(
    ("entries", "hf_config", "words"),
    [
        ("[axes]\nown = { key = 'own_size' }", {}, "axis 'own' takes its size from 'own_size', which is null"),
        ("[axes]\nown = { key = 'own_size' }", {"own_size": True}, "which is true"),
        ("[axes]\nown = { key = 'own_size' }", {"own_size": "8" * 500}, "which is '888"),
        ("[axes]\nown = { key = 'own_size' }", {"own_size": 2**60}, "which is a huge integer"),
        (rule("x.{layer}", UP, to_layer="dense"), {}, "'dense' is null: the model has 2 layers"),
        (rule("x.{layer}", UP, to_layer="dense"), {"dense": 3}, "'dense' is 3: the model has 2 layers"),
        (rule("x.{layer}", UP, from_layer=5), {}, "layer 5: the model has 2 layers"),
        (rule("x.{layer}", UP, to_layer=2) + rule("y.{layer}", UP, from_layer=1), {}, "is written from 'x.1' and from 'y.1'"),
        (rule("x.{layer}.w", UP) + rule("x.0.w", "final_norm.gamma"), {}, "'x.0.w' is named by two rules"),
        (rule("x.{layer}.q", "layers.{layer}.attention.q_proj.bias", "(heads half_dim pair)"), {}, "head_dim is 3, which is not pair"),
        (rule("x.{layer}.q", "layers.{layer}.attention.q_proj.bias", "(group kv_heads head_dim)"), {}, "heads is 5, which is not kv_heads"),
        (rule("x", "embedding.token_types.embedding_table"), {}, "the axis token_types has the size 0"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(entries: str, hf_config: dict[str, Any], words: str) -> None:
    message = refusal(entries, hf_config, layers=2, heads=5, kv_heads=2, head_dim=3)
    assert words in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    "entries",
    [
        rule("x.{layer}.{expert}", EXPERTS_UP),
        rule("x.{layer}", UP) + '[[drop]]\nhf = "y.{layer}.{expert}"\nwhy = "z"\n',
        rule("x.{layer}.{expert}", EXPERTS_UP) + '[[duplicate]]\nhf = "y.{layer}.{expert}"\nof = "x.{layer}.{expert}"\n',
    ],
)
def test_more_names_than_any_model_has_are_refused_before_they_are_made(entries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mappings.expand.MAX_NAMES", 1000)
    assert "more than 1000 names" in refusal(entries, layers=10_000, experts=100_000, expert_ffn=1)


def test_many_clashes_are_told_shortly() -> None:
    entries = rule("x.{layer}", UP, to_layer=400) + rule("y.{layer}", UP, from_layer=0, to_layer=399)
    assert refusal(entries, layers=500).count("is written from") == 20


def test_every_table_serves_the_architectures_of_the_tiny_models(tiny_folder: TinyFolder) -> None:
    for variant, chosen in VARIANTS.items():
        config = json.loads((tiny_folder(variant) / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == [chosen.model_class]
        assert chosen.model_class in find_table(config, "config.json").architectures
