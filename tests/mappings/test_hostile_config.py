"""config.json files of strangers: refused with a clear message or read, never a crash."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappings.common_config import common_config
from mappings.errors import Refused
from model.config import ModelConfig
from tests.mappings.public_configs import PUBLIC
from tests.mappings.sections import problems, public, read, section


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", "32"), ("num_hidden_layers", 32.0), ("num_hidden_layers", True), ("num_hidden_layers", -1),
        ("num_hidden_layers", 10_001), ("num_hidden_layers", 10**30), ("num_attention_heads", 100_001), ("vocab_size", 10**8 + 1),
        ("hidden_size", [4096]), ("rms_norm_eps", "1e-5"), ("rms_norm_eps", math.inf), ("rms_norm_eps", math.nan), ("rms_norm_eps", -1e-6),
        ("rope_theta", math.inf), ("rope_theta", 10**40), ("rope_theta", "10000"), ("rope_theta", False), ("attention_dropout", 1.5),
        ("tie_word_embeddings", "false"), ("tie_word_embeddings", 0), ("bos_token_id", "1"), ("eos_token_id", [[2]]), ("eos_token_id", -7),
        ("eos_token_id", [1] * 2000), ("sep_token_id", {"a": 1}), ("hidden_act", {"name": "silu"}), ("rope_scaling", "linear"),
        ("max_position_embeddings", 0), ("initializer_range", -0.1),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_name(key: str, value: Any) -> None:
    message = problems(public("Llama-2-7b", **{key: value}))
    assert key in message
    assert len(message) < 1000


@pytest.mark.parametrize("key", ["num_hidden_layers", "rms_norm_eps", "rope_theta", "eos_token_id", "not_a_key"])
def test_a_number_too_long_to_print_is_refused(key: str) -> None:
    assert f"{key}" in problems(public("Llama-2-7b", **{key: 10**5000}))


@pytest.mark.parametrize("config", [[], None, 7, "config"])
def test_a_file_that_is_no_table_is_refused(config: Any) -> None:
    assert "no model configuration" in problems(config)


def test_all_problems_are_reported_at_once_and_many_unknown_keys_are_folded() -> None:
    strange = {f"key_{index}": index for index in range(500)}
    message = problems(public("Llama-2-7b", num_hidden_layers="x", hidden_act="y", rope_scaling={"type": "su"}, **strange))
    assert all(words in message for words in ("num_hidden_layers", "hidden_act", "'su'", "key_0 ", "and 480 more unknown keys"))
    assert "key_499" not in message


def test_text_of_a_stranger_cannot_write_to_the_terminal() -> None:
    message = problems(public("Llama-2-7b", **{"evil\x1b[2J\n": "\x1b]0;x\x07", "hidden_act": "\x1b[31m" * 100}))
    assert not any(ord(letter) < 32 and letter != "\n" for letter in message)
    assert max(map(len, message.splitlines())) < 400


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**18, 10**25)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["silu", "yarn", "full_attention"]),
    lambda values: (
        st.lists(values, max_size=4)
        | st.dictionaries(st.text(max_size=12) | st.sampled_from(["rope_type", "factor", "rope_theta", "type"]), values, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("name", ["gpt2", "Llama-3.1-8B", "Mistral-7B-v0.1", "Qwen2.5-0.5B", "Qwen3-8B", "bert-base-uncased"])
@settings(max_examples=60)
@given(data=st.data())
def test_a_hostile_config_is_refused_or_read_and_never_crashes(name: str, data: st.DataObject) -> None:
    model = PUBLIC[name]
    keys = sorted({*section(model.family).entries_for(model.architecture).keys_read(), *model.config, *common_config().special_ids})
    changes = data.draw(st.dictionaries(st.sampled_from(keys) | st.text(max_size=10), JSON, min_size=1, max_size=5))
    removed = data.draw(st.sets(st.sampled_from(keys), max_size=2))
    config = {key: value for key, value in {**copy.deepcopy(model.config), **changes}.items() if key not in removed}
    refusal: Refused | None
    try:
        result = read(config, model.family, model.architecture, vocab_rows=data.draw(st.none() | st.integers(-5, 10**10))).config
    except Refused as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.problems
        assert len(str(refusal)) < 30_000
        return
    assert 1 <= result.layers <= 10_000 and 1 <= result.vocab <= 10**8 and result.heads % result.kv_heads == 0
    assert all(0 <= number < result.vocab for number in (*result.bos_ids, *result.eos_ids))
    assert ModelConfig.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result
