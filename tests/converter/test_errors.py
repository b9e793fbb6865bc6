"""Models that contradict themselves, and layouts that do not fit: all problems of a kind in one message, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, done, refused, round_trip, same_bits, tensors_of
from tests.tiny_models import add_derived_buffers, save_tiny

Tensors = dict[str, torch.Tensor]


def change_config(folder: Path, **changes: Any) -> Path:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def refusal(folder: Path, *options: object) -> str:
    """The message; nothing is written."""
    out = folder.parent / "out"
    message = refused("hf2ms", folder, "-o", out, *options)
    assert not out.exists()
    return message


def test_every_missing_and_every_unexpected_tensor_is_named_at_once_with_layers_folded(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        for layer in (0, 1, 2, 3):
            del tensors[f"model.layers.{layer}.mlp.gate_proj.weight"]
        del tensors["model.layers.2.self_attn.q_proj.weight"]
        tensors["model.layers.7.mlp.gate_proj.weight"] = torch.ones(2, 2)
        tensors["adapter.weight"] = torch.ones(3)

    message = refusal(change_tensors(save_tiny(tmp_path / "model", "llama-gqa"), damage))
    assert "missing: model.layers.{0..3}.mlp.gate_proj.weight" in message
    assert "missing: model.layers.2.self_attn.q_proj.weight" in message
    assert "unexpected: model.layers.7.mlp.gate_proj.weight" in message
    assert "unexpected: adapter.weight" in message and "--rules" in message


def test_a_tied_model_with_a_head_that_equals_its_embedding(tmp_path: Path) -> None:
    """The file holds both; they come back both."""
    source = save_tiny(tmp_path / "model", "llama-tied")
    change_tensors(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert done("hf2ms", source, "--dry-run", "--json").facts["duplicates"] == [
        {"name": "lm_head.weight", "of": "model.embed_tokens.weight"}
    ]
    assert_same_folder(source, round_trip(source, tmp_path, "--tp", 2, "--pp", 2))
    names = {tensor for path in (tmp_path / "slices").rglob("*.safetensors") for tensor in load_file(path)}
    assert "lm_head.weight" not in names and "embedding.tokens.embedding_table" in names


def test_a_tied_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama-tied")

    def add_head(tensors: Tensors) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1e-3
        tensors["lm_head.weight"] = head

    change_tensors(source, add_head)
    message = refusal(source)
    assert "lm_head.weight differs from model.embed_tokens.weight" in message and "--no-tie-embeddings" in message
    assert_same_folder(source, round_trip(source, tmp_path, "--tp", 2, "--pp", 2, "--no-tie-embeddings"))


def test_an_untied_model_without_a_head(tmp_path: Path) -> None:
    source = change_config(save_tiny(tmp_path / "model", "llama-tied"), tie_word_embeddings=False)
    message = refusal(source)
    assert "not tied" in message and "'lm_head.weight'" in message and "--tie-embeddings" in message
    assert_same_folder(source, round_trip(source, tmp_path, "--tp", 2, "--pp", 2, "--tie-embeddings"))
    last = load_file(tmp_path / "slices" / "rank_3" / "checkpoint_3.safetensors")
    assert "embedding.tokens.embedding_table" in last, "a tied head stands on the last stage too"


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_embedding_is_there_once_for_each_end(pp: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    facts = done("hf2ms", tiny_folder("gpt2"), "-o", tmp_path / "slices", "--pp", pp, "--json").facts
    holders = [path.parent.name for path in (tmp_path / "slices").glob("rank_*/*") if "embedding.tokens.embedding_table" in load_file(path)]
    assert sorted(holders) == ["rank_0", "rank_1"][:pp]
    assert any("tied" in entry["why"] for entry in facts["replicated"]) == (pp > 1)


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_attention_heads": 4}, "q_proj"),
    "kv heads": ({"num_key_value_heads": 8}, "k_proj"),
    "feed-forward": ({"intermediate_size": 128}, "gate_proj"),
    "more layers": ({"num_hidden_layers": 6}, "missing: model.layers.{4..5}"),
    "fewer layers": ({"num_hidden_layers": 3}, "unexpected: model.layers.3."),
    "biases": ({"attention_bias": True}, "missing: model.layers.{0..3}.self_attn.q_proj.bias"),
}


@pytest.mark.parametrize("kind", WRONG_CONFIGS)
def test_a_config_of_another_model(kind: str, tmp_path: Path) -> None:
    changes, expected = WRONG_CONFIGS[kind]
    message = refusal(change_config(save_tiny(tmp_path / "model", "llama-head-dim"), **changes))
    assert expected in message


def test_the_rows_of_the_embedding_count_and_the_config_is_told_off(tmp_path: Path) -> None:
    source = change_config(save_tiny(tmp_path / "model", "llama-head-dim"), vocab_size=300)
    ran = done("hf2ms", source, "-o", tmp_path / "slices", "--tp", 2)
    assert "config.json says vocab_size 300, the token embedding has 256 rows" in ran.out
    done("ms2hf", tmp_path / "slices", "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "LlamaForCausalLM", [3], {"a": 1}])
def test_a_config_that_does_not_name_its_class(architectures: Any, tmp_path: Path) -> None:
    message = refusal(change_config(save_tiny(tmp_path / "model", "llama"), architectures=architectures))
    assert "'architectures'" in message and "LlamaForCausalLM" in message


def test_an_architecture_that_no_table_serves_names_those_that_are(tmp_path: Path) -> None:
    message = refusal(change_config(save_tiny(tmp_path / "model", "llama"), architectures=["T5ForConditionalGeneration"]))
    assert "T5ForConditionalGeneration" in message and "--rules FILE" in message
    assert all(name in message for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "BertModel"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_weights_are_refused_with_what_to_do(dtype: torch.dtype, tmp_path: Path) -> None:
    def quantise(tensors: Tensors) -> None:
        for name in [name for name in tensors if "proj" in name]:
            tensors[name] = tensors[name].to(dtype)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    message = refusal(change_tensors(save_tiny(tmp_path / "model", "llama-gqa"), quantise))
    assert "q_proj.weight is F8_" in message and "dequantise to bf16" in message
    assert "unexpected: model.layers.{0..3}.mlp.gate_proj.weight_scale_inv" in message


@pytest.mark.parametrize("variant", ["gpt2", "bert", "llama"])
def test_a_buffer_that_is_not_what_the_config_says_is_not_dropped(variant: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", variant)
    name = add_derived_buffers(source)[0]

    def damage(tensors: Tensors) -> None:
        values = tensors[name].clone()
        values.view(-1)[-1] = not values.view(-1)[-1] if values.dtype == torch.bool else values.view(-1)[-1] * 3
        tensors[name] = values

    message = refusal(change_tensors(source, damage))
    assert name in message and "would be dropped" in message


def test_one_theta_in_the_config_and_another_in_the_file(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama")
    add_derived_buffers(source)
    change_config(source, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    message = refusal(source)
    assert "model.layers.{0..3}.self_attn.rotary_emb.inv_freq" in message and "check config.json" in message


def test_the_same_tensor_with_and_without_its_prefix(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")
    change_tensors(source, lambda tensors: tensors.update({"wpe.weight": tensors["transformer.wpe.weight"].clone()}))
    assert "'transformer.wpe.weight' is there twice, with and without its prefix" in refusal(source)


def test_gpt2_is_read_with_and_without_its_prefix_and_comes_back_as_it_was(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")

    def without_prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    change_tensors(source, without_prefix)
    back = round_trip(source, tmp_path, "--tp", 2, "--pp", 2)
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)


def test_bert_of_2019_spells_its_norms_gamma_and_beta_and_so_they_come_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "bert")

    def old_spelling(tensors: Tensors) -> None:
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    assert_same_folder(change_tensors(source, old_spelling), round_trip(source, tmp_path, "--tp", 2))


def test_parts_of_different_dtypes_are_refused_unless_cast(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama-gqa")
    change_tensors(source, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}))
    facts = done("hf2ms", source, "--dry-run", "--json", "--dtype", "bf16").facts
    assert facts["bytes_by_dtype"].keys() == {"BF16", "I32"}, "integers are not cast"


LAYOUTS: dict[str, tuple[tuple[object, ...], tuple[str, ...]]] = {
    "heads": (("--tp", 3), ("8 attention heads cannot be divided among 3", "4 KV heads", "1, 2, 4, 8")),
    "too many": (("--tp", 16), ("8 attention heads", "1, 2, 4, 8")),
    "more stages than layers": (("--pp", 5), ("5", "4")),
    "stages that are too few": (("--pp", 3, "--layers-per-stage", "2,2"), ("3",)),
    "stages that do not add up": (("--pp", 2, "--layers-per-stage", "2,3"), ("5", "4")),
    "an empty stage": (("--pp", 2, "--layers-per-stage", "4,0"), ("layers",)),
    "vocabulary": (("--tp", 4, "--vocab-multiple", 6), ("--vocab-multiple 6", "tp 4")),
    "ranks outside": (("--tp", 2, "--ranks", "1-3"), ("no rank 2, 3", "0-1")),
    "a million ranks": (("--tp", 8, "--dp", 1_000_000), ("1048576",)),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layout_that_does_not_fit_the_model(kind: str, tmp_path: Path) -> None:
    options, expected = LAYOUTS[kind]
    message = refusal(save_tiny(tmp_path / "model", "llama-gqa"), *options)
    assert all(phrase in message for phrase in expected), message


def test_heads_like_smollm2s_name_what_blocks_and_which_values_work(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    message = refusal(source, "--tp", 2)
    assert "9 attention heads" in message and "3 KV heads" in message
    assert "tp values that work for this model: 1, 3" in message
    done("hf2ms", source, "-o", tmp_path / "slices", "--tp", 3)


def test_a_special_token_beyond_the_embedding(tmp_path: Path) -> None:
    assert "512" in refusal(change_config(save_tiny(tmp_path / "model", "llama"), eos_token_id=512))
