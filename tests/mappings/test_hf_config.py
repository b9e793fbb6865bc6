"""config.json -> ModelConfig: public models as their authors describe them, silence, contradictions and unknown keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mappings.common_config import common_config
from mappings.hf_config import check_special_ids, parse_config_section, read_model_config
from model.config import ModelConfig
from tests.mappings.public_configs import POOLER, PUBLIC
from tests.mappings.sections import FAMILIES, problems, public, read, table, without


def parameter_count(config: ModelConfig) -> int:
    """By hand, from the shapes that the papers give."""
    h, width, kv = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    norm = h * (2 if config.norm == "layer_norm" else 1)
    attention = (
        h * width
        + 2 * h * kv
        + width * h
        + config.qkv_bias * (width + 2 * kv)
        + config.output_bias * h
        + config.qk_norm * 2 * config.head_dim
    )
    mlp = (3 if config.gated_mlp else 2) * h * config.ffn + config.mlp_bias * (config.ffn * (2 if config.gated_mlp else 1) + h)
    learned = config.max_positions * h if config.positions == "learned" else 0
    total = config.vocab * h + learned + config.token_types * h + norm + config.layers * (attention + mlp + 2 * norm)
    total += config.vocab * h if config.head and not config.tied else 0
    total += h * h + h if config.pooler else 0
    total += h * h + h + norm + config.vocab if config.mlm_head else 0
    return total + (2 * h + 2 if config.nsp_head else 0)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_model_has_the_number_of_parameters_that_its_authors_state(name: str) -> None:
    model = PUBLIC[name]
    assert parameter_count(read(model.config, model.family, model.architecture, model.tensors).config) == model.parameters


def test_what_sets_public_models_apart_is_read() -> None:
    configs = {name: read(model.config, model.family, model.architecture, model.tensors).config for name, model in PUBLIC.items()}
    assert configs["Llama-3.1-8B"].eos_ids == (128001, 128008, 128009)
    llama31 = configs["Llama-3.1-8B"].rope
    assert llama31 is not None and llama31.scaling is not None
    assert (llama31.theta, llama31.scaling.kind, llama31.scaling.factor, llama31.scaling.original_max_positions) == (
        5e5,
        "llama3",
        8.0,
        8192,
    )
    assert (configs["Mistral-7B-v0.1"].sliding_window, configs["Mistral-7B-v0.1"].sliding_layers) == (4096, tuple(range(32)))
    assert (configs["Mistral-7B-v0.3"].sliding_window, configs["Mistral-7B-v0.3"].sliding_layers) == (None, ())
    assert (configs["Mistral-Nemo"].head_dim, configs["Qwen3-0.6B"].head_dim) == (128, 128)
    assert configs["Qwen2.5-7B"].qkv_bias and not configs["Qwen2.5-7B"].output_bias and configs["Qwen2.5-7B"].sliding_window is None
    assert [configs[name].tied for name in ("gpt2", "Llama-2-7b", "SmolLM2-135M", "bert-base-uncased")] == [True, False, True, True]
    assert (configs["gpt2"].activation, configs["gpt2"].ffn, configs["bert-base-uncased"].activation) == ("gelu_tanh", 3072, "gelu")
    assert configs["SmolLM2-135M"].initializer_range == 1 / 24
    assert [configs[name].norm_position for name in ("gpt2", "Llama-2-7b", "Qwen2.5-7B", "Qwen3-8B", "all-MiniLM-L6-v2")] == [
        *["pre"] * 4,
        "post",
    ]
    assert [configs[name].kind for name in ("gpt2", "Mistral-Nemo", "bert-base-uncased")] == ["decoder", "decoder", "encoder"]


# What the file leaves out


def test_a_base_class_has_no_head_and_nothing_tied_to_it() -> None:
    config = read(public("SmolLM2-135M", architectures=["LlamaModel"]), "llama", "LlamaModel").config
    assert (config.head, config.tied) == (False, False)
    assert parameter_count(config) == PUBLIC["SmolLM2-135M"].parameters
    encoder = read(public("bert-base-uncased"), "bert", "BertModel").config
    assert (encoder.head, encoder.mlm_head, encoder.tied) == (False, False, False)


@pytest.mark.parametrize("architecture", ["GPT2Model", "MistralModel", "Qwen2Model", "Qwen3Model"])
def test_every_base_class_is_served(architecture: str) -> None:
    name = {"GPT2Model": "gpt2", "MistralModel": "Mistral-7B-v0.1", "Qwen2Model": "Qwen2.5-0.5B", "Qwen3Model": "Qwen3-0.6B"}[architecture]
    config = read(PUBLIC[name].config, PUBLIC[name].family, architecture).config
    assert config == dataclasses.replace(
        read(PUBLIC[name].config, PUBLIC[name].family, PUBLIC[name].architecture).config, head=False, tied=False
    )


def test_mistral_has_a_window_and_llama_has_none() -> None:
    assert "unknown key sliding_window = 4096" in problems(public("Llama-2-7b", sliding_window=4096))
    assert "sliding_window is missing" in problems(
        without(PUBLIC["Mistral-7B-v0.1"].config, "sliding_window"), architecture="MistralForCausalLM"
    )


def test_the_tensors_of_the_file_say_whether_bert_has_a_pooler() -> None:
    with_pooler = read(PUBLIC["all-MiniLM-L6-v2"].config, "bert", "BertModel", POOLER).config
    assert with_pooler.pooler and not with_pooler.nsp_head
    assert not read(PUBLIC["all-MiniLM-L6-v2"].config, "bert", "BertModel", ["bert.embeddings.word_embeddings.weight"]).config.pooler


def test_a_silent_file_means_what_its_class_means() -> None:
    config = read(
        without(PUBLIC["gpt2"].config | PUBLIC["gpt2-xl"].config, "attn_pdrop", "activation_function", "layer_norm_epsilon"),
        "gpt2",
        "GPT2LMHeadModel",
    ).config
    assert (config.attention_dropout, config.activation, config.norm_eps) == (0.1, "gelu_tanh", 1e-5)
    assert read(without(PUBLIC["Llama-2-7b"].config, "num_key_value_heads"), "llama", "LlamaForCausalLM").config.kv_heads == 32
    assert read(public("Llama-3.1-8B", head_dim=None), "llama", "LlamaForCausalLM").config.head_dim == 128


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "rms_norm_eps", "hidden_act", "vocab_size", "max_position_embeddings"])
def test_what_differs_between_models_of_a_family_is_never_assumed(key: str) -> None:
    assert f"{key} is missing" in problems(without(PUBLIC["Llama-3.1-8B"].config, key))
    assert f"{key} is missing" in problems(public("Llama-3.1-8B", **{key: None}))


def test_ids_may_be_none_one_or_many() -> None:
    config = read(public("Llama-2-7b", bos_token_id=None, eos_token_id=[2, 7], pad_token_id=0), "llama", "LlamaForCausalLM").config
    assert (config.bos_ids, config.eos_ids, config.pad_id) == ((), (2, 7), 0)


def test_minus_one_is_an_old_spelling_of_no_id_and_is_said() -> None:
    reading = read(public("Llama-2-7b", pad_token_id=-1), "llama", "LlamaForCausalLM")
    assert reading.config.pad_id is None
    assert any("pad_token_id is -1" in note for note in reading.notes)


# The vocabulary


def test_the_rows_of_the_embedding_count_before_the_config_and_the_difference_is_said() -> None:
    reading = read(PUBLIC["Llama-2-7b"].config, "llama", "LlamaForCausalLM", vocab_rows=32001)
    assert (reading.config.vocab, reading.config.padded_vocab) == (32001, 32001)
    assert any("32000" in note and "32001" in note for note in reading.notes)
    assert not read(PUBLIC["Mistral-7B-v0.3"].config, "llama", "MistralForCausalLM", vocab_rows=32768).notes
    assert read(without(PUBLIC["Llama-2-7b"].config, "vocab_size"), "llama", "LlamaForCausalLM", vocab_rows=99).config.vocab == 99


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "mask_token_id", "decoder_start_token_id"])
def test_a_special_id_beyond_the_embedding_is_refused(key: str) -> None:
    assert f"{key} 32000 is outside the vocabulary" in problems(public("Llama-2-7b", **{key: 32000}))
    assert read(public("Llama-2-7b", **{key: 31999}), "llama", "LlamaForCausalLM")
    assert f"{key} 31999 is outside the vocabulary" in problems(public("Llama-2-7b", **{key: 31999}), vocab_rows=31999)


def test_each_id_of_a_list_is_checked() -> None:
    assert "eos_token_id 50000" in problems(public("Llama-2-7b", eos_token_id=[2, 50000]))
    assert [problem.what.split()[1] for problem in check_special_ids({"eos_token_id": (1, 9, 12)}, 9, "x")] == ["9", "12"]


# Refused by name


def test_an_unknown_key_is_refused_by_name_and_an_empty_one_is_not() -> None:
    message = problems(public("Llama-2-7b", attn_logit_softcapping=50.0, query_pre_attn_scalar=224))
    assert "unknown key attn_logit_softcapping = 50.0" in message
    assert "unknown key query_pre_attn_scalar = 224" in message
    assert "--rules" in message
    nothings: list[Any] = [None, {}, [], ""]
    for nothing in nothings:
        assert read(public("Llama-2-7b", attn_logit_softcapping=nothing), "llama", "LlamaForCausalLM")


def test_false_is_a_value_too() -> None:
    assert "unknown key use_rope = false" in problems(public("Llama-2-7b", use_rope=False))


def test_a_key_that_the_table_reads_elsewhere_is_known() -> None:
    assert read(public("Llama-2-7b", kv_lora_rank=512), "llama", "LlamaForCausalLM", other_keys=["kv_lora_rank"])


@pytest.mark.parametrize(
    ("name", "key", "value", "supported"),
    [
        ("Llama-2-7b", "model_type", "gemma", "'llama'"),
        ("Mistral-7B-v0.1", "model_type", "llama", "'mistral'"),
        ("Mistral-7B-v0.1", "attention_bias", True, "false"),
        ("SmolLM2-135M", "rope_interleaved", True, "false"),
        ("Llama-2-7b", "is_causal", False, "true"),
        ("Qwen2.5-0.5B", "use_mrope", True, "false"),
        ("gpt2", "scale_attn_weights", False, "true"),
        ("gpt2", "add_cross_attention", True, "false"),
        ("bert-base-uncased", "is_decoder", True, "false"),
        ("bert-base-uncased", "position_embedding_type", "relative_key", "'absolute'"),
        ("Llama-2-7b", "is_encoder_decoder", 1, "false"),
    ],
)
def test_a_value_that_changes_the_computation_is_refused_with_what_is_supported(name: str, key: str, value: Any, supported: str) -> None:
    message = problems(public(name, **{key: value}), PUBLIC[name].family, PUBLIC[name].architecture)
    assert f"{key} = " in message
    assert f"supported: {supported}" in message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}, ["quant_method 'fp8'", "quantized"]),
        ("auto_map", {"AutoModelForCausalLM": "modeling_evil.X"}, ["Python code"]),
        ("per_layer_config", {"0": {"intermediate_size": 3}}, ["differ"]),
        ("pruned_heads", {"0": [1]}, ["lack some heads"]),
    ],
)
def test_what_no_family_supports_is_refused_with_the_reason(key: str, value: Any, words: list[str]) -> None:
    message = problems(public("Llama-2-7b", **{key: value}))
    assert all(word in message for word in (key, *words))


def test_an_activation_that_we_do_not_compute_is_refused_with_those_that_we_do() -> None:
    message = problems(public("Llama-2-7b", hidden_act="quick_gelu"))
    assert "hidden_act = 'quick_gelu'" in message
    assert "silu" in message


def test_two_names_of_one_thing_must_agree() -> None:
    assert "contradiction: n_embd is 768, hidden_size is 1024" in problems(public("gpt2", hidden_size=1024), "gpt2", "GPT2LMHeadModel")
    assert read(public("gpt2", hidden_size=768), "gpt2", "GPT2LMHeadModel").config.hidden == 768
    renamed = without(public("gpt2", num_hidden_layers=12), "n_layer")
    assert read(renamed, "gpt2", "GPT2LMHeadModel").config.layers == 12


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    assert "32 heads cannot share 5 KV heads" in problems(public("Llama-2-7b", num_key_value_heads=5))
    assert "does not divide: 770 / 12" in problems(public("bert-base-uncased", hidden_size=770), "bert", "BertForMaskedLM")


# Windows


def window(**changes: Any) -> tuple[int | None, tuple[int, ...]]:
    config = read(public("Qwen2.5-0.5B", num_hidden_layers=4, **changes), "qwen2", "Qwen2ForCausalLM").config
    return config.sliding_window, config.sliding_layers


def test_qwens_window_is_used_by_the_layers_that_transformers_gives_it() -> None:
    assert window(use_sliding_window=True, sliding_window=64, max_window_layers=2) == (64, (2, 3))
    assert window(use_sliding_window=True, sliding_window=64, max_window_layers=4) == (None, ())
    assert window(use_sliding_window=False, sliding_window=64, max_window_layers=2) == (None, ())
    assert window(use_sliding_window=True, sliding_window=None, max_window_layers=2) == (None, ())
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert window(use_sliding_window=True, sliding_window=64, max_window_layers=2, layer_types=types) == (64, (0, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers is missing"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window must be from 1"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ({"layer_types": ["sliding_attention"] * 24}, "contradiction"),
        ({"layer_types": ["full_attention"] * 3}, "one entry for each of the 24 layers"),
        ({"layer_types": ["full_attention"] * 23 + ["chunked_attention"]}, "'chunked_attention'"),
        ({"layer_types": "full_attention"}, "must be a list"),
    ],
)
def test_a_window_that_cannot_be_told_is_refused(changes: dict[str, Any], words: str) -> None:
    assert words in problems(public("Qwen2.5-0.5B", **changes), "qwen2", "Qwen2ForCausalLM")


# A family that does not come with the package


def test_a_family_of_a_users_own_needs_no_python() -> None:
    """Pythia's spelling: a quarter of each head rotates, and the keys have names of their own."""
    entries = {
        "kind": {"value": "decoder"}, "layers": {"key": "num_hidden_layers"}, "hidden": {"key": "hidden_size"},
        "heads": {"key": "num_attention_heads"}, "kv_heads": {"from": "heads"}, "head_dim": {"from": "hidden / heads"},
        "ffn": {"key": "intermediate_size"}, "vocab": {"key": "vocab_size"}, "max_positions": {"key": "max_position_embeddings"},
        "norm": {"value": "layer_norm"}, "norm_eps": {"key": "layer_norm_eps"},
        "activation": {"key": "hidden_act", "map": {"gelu": "gelu"}},
        "gated_mlp": {"value": False}, "experts": {"key": "num_experts", "default": 0},
        "rope": {"reader": "rope", "theta_key": "rotary_emb_base", "partial_key": ["rotary_pct", "partial_rotary_factor"]},
        "fixed": {"model_type": ["gpt_neox"], "use_parallel_residual": [True]}, "ignored": {"quantization_config": "dequantized by hand"},
    }  # fmt: skip
    config = {
        "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6, "intermediate_size": 2048, "vocab_size": 50304,
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "model_type": "gpt_neox", "use_parallel_residual": True, "num_experts": 4, "quantization_config": {"quant_method": "x"},
    }  # fmt: skip
    reading = read_model_config(
        config, parse_config_section(entries, "mine.toml"), family="pythia", architecture="X", tensors=[], where="c"
    )
    rope = reading.config.rope
    assert rope is not None
    assert (rope.theta, rope.rotary_dim, reading.config.head_dim, reading.config.experts) == (10000.0, 16, 64, 4)


def test_the_bundled_tables_speak_of_each_key_once() -> None:
    """The common list would hide a mistake in a family's own."""
    for family in FAMILIES:
        own = {*table(family)["config"].get("ignored", {}), *table(family)["config"].get("fixed", {})}
        assert not own & {*common_config().ignored, *common_config().fixed, *common_config().refused}
