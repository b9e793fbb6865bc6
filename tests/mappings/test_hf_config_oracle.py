"""config.json -> ModelConfig against Transformers' own config classes, and its models for the keys that are not read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappings.common_config import common_config
from mappings.config_section import FromKey
from model.config import ModelConfig
from tests.mappings.sections import read, section

CLASSES = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", "GPT2Config"),
    "llama": ("llama", "LlamaForCausalLM", "LlamaConfig"),
    "mistral": ("llama", "MistralForCausalLM", "MistralConfig"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
    "bert": ("bert", "BertForMaskedLM", "BertConfig"),
}


def written(config: Any, diff: bool) -> dict[str, Any]:
    """The config as save_pretrained writes it (diff), or with every key."""
    data: dict[str, Any] = json.loads(config.to_json_string(use_diff=diff))
    return data


def assert_same(ours: ModelConfig, theirs: Any, kind: str) -> None:
    assert (ours.layers, ours.hidden, ours.heads, ours.vocab) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.num_attention_heads, theirs.vocab_size,
    )  # fmt: skip
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.initializer_range == theirs.initializer_range
    assert ours.tied == theirs.tie_word_embeddings
    ids = [[] if value is None else value if isinstance(value, list) else [value] for value in (theirs.bos_token_id, theirs.eos_token_id)]
    assert [list(ours.bos_ids), list(ours.eos_ids), ours.pad_id] == [*ids, theirs.pad_token_id]
    if kind in ("gpt2", "bert"):
        assert ours.head_dim * ours.heads == ours.hidden and ours.kv_heads == ours.heads and ours.rope is None
    else:
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        rope = theirs.rope_parameters
        assert ours.rope is not None
        assert (ours.kv_heads, ours.head_dim, ours.ffn) == (theirs.num_key_value_heads, head_dim, theirs.intermediate_size)
        assert (ours.norm_eps, ours.attention_dropout) == (theirs.rms_norm_eps, theirs.attention_dropout)
        assert (ours.rope.theta, ours.rope.rotary_dim) == (rope["rope_theta"], head_dim)
    if kind == "gpt2":
        assert ours.ffn == (theirs.n_inner or 4 * theirs.n_embd)
        assert (ours.norm_eps, ours.scale_by_layer) == (theirs.layer_norm_epsilon, theirs.scale_attn_by_inverse_layer_idx)
        assert (ours.embedding_dropout, ours.attention_dropout, ours.hidden_dropout) == (
            theirs.embd_pdrop,
            theirs.attn_pdrop,
            theirs.resid_pdrop,
        )
    if kind == "bert":
        assert (ours.ffn, ours.norm_eps, ours.token_types) == (theirs.intermediate_size, theirs.layer_norm_eps, theirs.type_vocab_size)
        assert (ours.hidden_dropout, ours.attention_dropout) == (theirs.hidden_dropout_prob, theirs.attention_probs_dropout_prob)
        assert ours.embedding_dropout == theirs.hidden_dropout_prob
    if kind in ("qwen2", "qwen3"):
        sliding = tuple(i for i, name in enumerate(theirs.layer_types) if name == "sliding_attention")
        assert (ours.sliding_window if sliding else None, ours.sliding_layers) == (theirs.sliding_window if sliding else None, sliding)
    if kind == "mistral":
        window = theirs.sliding_window
        assert (ours.sliding_window, ours.sliding_layers) == (window, tuple(range(ours.layers)) if window else ())
    if kind in ("llama", "qwen3"):
        assert (ours.qkv_bias, ours.output_bias) == (theirs.attention_bias, theirs.attention_bias)
    if kind == "llama":
        assert ours.mlp_bias == theirs.mlp_bias


@pytest.mark.parametrize("diff", [True, False], ids=["as saved", "every key"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_config_with_the_defaults_of_its_class_is_read(kind: str, diff: bool) -> None:
    import transformers

    family, architecture, name = CLASSES[kind]
    theirs = getattr(transformers, name)()
    assert_same(read(written(theirs, diff), family, architecture).config, theirs, kind)


@st.composite
def arguments(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Arguments of a config class, all different from the class's defaults as often as not."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads, head_dim, layers = kv_heads * group, 2 * draw(st.integers(3, 40)), draw(st.integers(1, 6))
    vocab = draw(st.integers(300, 400))
    token = st.one_of(st.none(), st.integers(0, 299))
    dropout = st.floats(0, 0.9)
    common = {
        "vocab_size": vocab, "initializer_range": draw(st.floats(1e-3, 0.9)), "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": draw(token), "pad_token_id": draw(token),
        "eos_token_id": draw(token | st.lists(st.integers(0, 299), min_size=1, max_size=4)),
    }  # fmt: skip
    if kind == "gpt2":
        return common | {
            "n_embd": heads * head_dim, "n_head": heads, "n_layer": layers, "n_positions": draw(st.integers(1, 4096)),
            "n_inner": draw(st.one_of(st.none(), st.integers(1, 500))), "layer_norm_epsilon": draw(st.floats(1e-12, 1e-3)),
            "scale_attn_by_inverse_layer_idx": draw(st.booleans()), "embd_pdrop": draw(dropout), "attn_pdrop": draw(dropout),
            "resid_pdrop": draw(dropout), "reorder_and_upcast_attn": draw(st.booleans()),
        }  # fmt: skip
    sizes = {
        "hidden_size": heads * head_dim, "num_attention_heads": heads, "num_hidden_layers": layers,
        "intermediate_size": draw(st.integers(1, 500)), "max_position_embeddings": draw(st.integers(1, 10**6)),
    }  # fmt: skip
    if kind == "bert":
        return common | sizes | {
            "layer_norm_eps": draw(st.floats(1e-13, 1e-3)), "type_vocab_size": draw(st.integers(1, 16)),
            "hidden_dropout_prob": draw(dropout), "attention_probs_dropout_prob": draw(dropout),
        }  # fmt: skip
    decoder = common | sizes | {
        "num_key_value_heads": kv_heads, "rms_norm_eps": draw(st.floats(1e-12, 1e-3)), "attention_dropout": draw(dropout),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.floats(10, 1e7))},
    }  # fmt: skip
    if kind in ("llama", "mistral", "qwen3"):
        decoder["head_dim"] = (
            2 * draw(st.integers(3, 40)) if kind == "qwen3" else draw(st.one_of(st.none(), st.integers(3, 40).map(lambda n: 2 * n)))
        )
    if kind in ("llama", "qwen3"):
        decoder["attention_bias"] = draw(st.booleans())
    if kind == "llama":
        decoder["mlp_bias"] = draw(st.booleans())
    if kind != "llama":
        decoder["sliding_window"] = draw(st.one_of(st.none(), st.integers(1, 5000)))
    if kind in ("qwen2", "qwen3"):
        decoder |= {"use_sliding_window": draw(st.booleans()), "max_window_layers": draw(st.integers(0, 8))}
    return decoder


@pytest.mark.parametrize("kind", CLASSES)
@settings(max_examples=25)
@given(data=st.data())
def test_what_transformers_writes_is_read_as_transformers_means_it(kind: str, data: st.DataObject) -> None:
    import transformers

    family, architecture, name = CLASSES[kind]
    theirs = getattr(transformers, name)(**data.draw(arguments(kind)))
    config = read(written(theirs, data.draw(st.booleans())), family, architecture).config
    assert_same(config, theirs, kind)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("kind", CLASSES)
def test_a_default_in_a_table_is_the_default_of_the_class(kind: str) -> None:
    import transformers

    family, architecture, name = CLASSES[kind]
    data = written(getattr(transformers, name)(), diff=False)
    whole = read(data, family, architecture).config
    defaults = [
        source
        for source in section(family).entries_for(architecture).sources.values()
        if isinstance(source, FromKey) and source.default is not None
    ]
    assert len(defaults) > 2
    for source in defaults:
        silent = {key: value for key, value in data.items() if key not in source.keys}
        assert read(silent, family, architecture).config == whole, source.keys


@pytest.mark.parametrize("kind", CLASSES)
def test_every_field_of_the_config_class_is_spoken_of(kind: str) -> None:
    """A release of Transformers that adds a key makes this fail, before a user meets it."""
    import transformers

    family, architecture, name = CLASSES[kind]
    entries, common = section(family).entries_for(architecture), common_config()
    spoken = {*entries.keys_read(), *entries.fixed, *entries.ignored, *common.fixed, *common.ignored, *common.refused, *common.special_ids}
    assert {field.name for field in dataclasses.fields(getattr(transformers, name))} <= spoken


ANOTHER = {
    "use_cache": False, "output_attentions": True, "output_hidden_states": True, "chunk_size_feed_forward": 2,
    "problem_type": "regression", "id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0}, "gradient_checkpointing": True,
    "reorder_and_upcast_attn": True, "summary_type": "mean", "summary_use_proj": False, "summary_activation": "tanh",
    "summary_proj_to_labels": False, "summary_first_dropout": 0.9, "classifier_dropout": 0.9, "pretraining_tp": 2, "n_ctx": 3,
    "max_sequence_length": 3, "is_llama_config": True, "directionality": "uni", "pooler_fc_size": 3, "pooler_num_attention_heads": 3,
    "pooler_num_fc_layers": 5, "pooler_size_per_head": 7, "pooler_type": "x", "torchscript": True, "tie_last_hidden_states": False,
}  # fmt: skip
"""A value other than the usual one, for keys whose type a test cannot guess."""


@pytest.mark.parametrize("kind", CLASSES)
def test_an_ignored_key_changes_nothing_that_transformers_computes(kind: str) -> None:
    import torch
    import transformers

    family, architecture, name = CLASSES[kind]
    size = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
    }
    size |= (
        {"eos_token_id": 2}
        if kind in ("gpt2", "bert")
        else {"eos_token_id": 2, "intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
    )
    ids = torch.tensor([[3, 17, 39, 5]])

    def model(extra: dict[str, Any]) -> Any:
        config = getattr(transformers, name)(**size, **extra, attn_implementation="eager")
        return getattr(transformers, architecture)(config).eval()

    def logits(made: Any) -> torch.Tensor:
        with torch.no_grad():
            output = made(ids)
        assert isinstance(output.logits, torch.Tensor)
        return output.logits

    torch.manual_seed(0)
    plain = model({})
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    state, expected = plain.state_dict(), logits(plain)
    keys = [key for key in ANOTHER if key in {*section(family).entries_for(architecture).ignored, *common_config().ignored}]
    assert len(keys) > 8
    for key in keys:
        other = model({key: ANOTHER[key]})
        other.load_state_dict(state)
        torch.testing.assert_close(logits(other), expected, rtol=1e-5, atol=1e-5, msg=key)
