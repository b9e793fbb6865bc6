"""Rotary embeddings in both spellings: Transformers 5 says what a file means; what it would guess or get wrong is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappings.errors import Refused
from model.config import Rope, RopeScaling
from tests.mappings.sections import problems, public, read, without

BARE = without(public("Llama-3.1-8B"), "rope_theta", "rope_scaling")


def rope(config: dict[str, Any], family: str = "llama", architecture: str = "LlamaForCausalLM") -> Rope:
    found = read(config, family, architecture).config.rope
    assert found is not None
    return found


def scaling(config: dict[str, Any]) -> RopeScaling:
    found = rope(config).scaling
    assert found is not None
    return found


NAMES = {"kind": "rope_type", "original_max_positions": "original_max_position_embeddings"}


def assert_means_the_same(ours: Rope, theirs: dict[str, Any]) -> None:
    """`theirs` is Transformers' standardised rope_parameters."""
    assert ours.theta == theirs["rope_theta"]
    if ours.scaling is None:
        assert theirs["rope_type"] == "default"
        return
    for field in ("kind", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                  "attention_factor", "mscale", "mscale_all_dim", "truncate"):  # fmt: skip
        value = theirs.get(NAMES.get(field, field))
        if field == "original_max_positions" and ours.scaling.kind in ("linear", "dynamic"):
            value = None  # Transformers keeps the key and does not look at it.
        assert getattr(ours.scaling, field) == value, field


@st.composite
def rope_tables(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]))
    positive = st.floats(0.1, 100)
    table: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        table["factor"] = draw(st.floats(1, 64) | st.integers(1, 64))
    if kind == "llama3":
        low = draw(st.floats(0.5, 3))
        table |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 5))}
    if kind == "yarn":
        slow = draw(st.none() | st.floats(0.5, 8))
        optional = {
            "beta_slow": slow,
            "beta_fast": draw(st.floats(8, 64)) if slow is not None else None,
            "attention_factor": draw(st.none() | positive),
            "mscale": draw(st.none() | positive),
            "mscale_all_dim": draw(st.none() | positive),
            "truncate": draw(st.none() | st.booleans()),
        }
        table |= {key: value for key, value in optional.items() if value is not None}
    if kind in ("llama3", "yarn", "dynamic") and draw(st.booleans()):
        table["original_max_position_embeddings"] = draw(st.integers(1, 8192))
    return table


@given(table=rope_tables(), theta=st.floats(10, 1e8) | st.integers(10, 10**8), spelling=st.sampled_from(["4", "4 type", "5", "both"]))
def test_both_spellings_mean_what_transformers_5_makes_of_them(table: dict[str, Any], theta: float, spelling: str) -> None:
    import transformers

    config = dict(BARE)
    if spelling != "5":
        old = {("type" if key == "rope_type" and spelling == "4 type" else key): value for key, value in table.items()}
        config |= {"rope_theta": theta, "rope_scaling": None if table["rope_type"] == "default" else old}
    if spelling in ("5", "both"):
        config |= {"rope_parameters": {**table, "rope_theta": theta}}
    theirs = transformers.LlamaConfig(**copy.deepcopy(config))
    ours = rope(config)
    assert_means_the_same(ours, theirs.rope_parameters)
    assert rope(json.loads(theirs.to_json_string())) == ours, "what Transformers 5 writes again means the same"


def test_public_spellings() -> None:
    llama31 = scaling(public("Llama-3.1-8B"))
    assert llama31 == RopeScaling("llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    advice = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = read(public("Qwen2.5-7B", rope_scaling=advice), "qwen2", "Qwen2ForCausalLM")
    assert qwen.config.rope == Rope(1e6, 128, scaling=RopeScaling("yarn", 4.0, 32768))
    assert not qwen.notes


# Theta


@pytest.mark.parametrize(
    ("name", "family", "architecture"),
    [
        ("Llama-3.1-8B", "llama", "LlamaForCausalLM"),
        ("Mistral-7B-v0.1", "llama", "MistralForCausalLM"),
        ("Qwen2.5-0.5B", "qwen2", "Qwen2ForCausalLM"),
        ("Qwen3-0.6B", "qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_a_silent_file_is_refused_where_transformers_would_assume_10000(name: str, family: str, architecture: str) -> None:
    import transformers

    config = without(public(name), "rope_theta", "rope_scaling")
    model_type = getattr(
        transformers, {"LlamaForCausalLM": "LlamaConfig"}.get(architecture, architecture.removesuffix("ForCausalLM") + "Config")
    )
    assert model_type(**copy.deepcopy(config)).rope_parameters["rope_theta"] == 10000
    assert "rope_theta is missing" in problems(config, family, architecture)
    assert "rope_theta is missing" in problems({**config, "rope_parameters": {"rope_type": "default"}}, family, architecture)
    assert "rope_theta is missing" in problems(without(config, "transformers_version"), family, architecture)


def test_a_file_of_the_years_in_which_llama_had_one_theta_means_it_and_that_is_said() -> None:
    reading = read(public("Llama-2-7b"), "llama", "LlamaForCausalLM")
    assert reading.config.rope == Rope(10000.0, 128)
    assert any("4.31" in note and "10000" in note for note in reading.notes)
    for release in ("4.33.0", "4.57.1", "5.0.0", "40.1", "unknown", ""):
        assert "rope_theta is missing" in problems(public("Llama-2-7b", transformers_version=release))
    assert rope(public("Llama-2-7b", rope_theta=1e6)).theta == 1e6


def test_a_v5_file_saved_again_by_transformers_4_contradicts_itself_and_is_refused() -> None:
    """4.57 keeps rope_parameters as an unknown key and writes its own default beside it."""
    message = problems({**BARE, "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert "contradiction: rope_theta says 10000.0, rope_parameters.rope_theta says 500000.0" in message


# Refused


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "rope type 'longrope'"),
        ({"type": "su", "short_factor": [1.0]}, "rope type 'su'"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope type 'proportional'"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "rope type 'mrope'"),
        ({"rope_type": ["linear"], "factor": 2.0}, "a list of 1 values"),
        ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, "contradiction"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor of the rope must be a number"),
        ({"rope_type": "dynamic", "factor": 0}, "factor of the rope must be from"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}, "alpha = 1000"),
        ({"rope_type": "default", "factor": 2.0}, "rope type 'default' with the key factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "must be greater"),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192.5}, "must be a whole number"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_slow": 64.0}, "beta_fast"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}, "per layer type"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rope_that_we_do_not_compute_is_refused_by_name(key: str, table: dict[str, Any], words: str) -> None:
    assert words in problems({**BARE, "rope_theta": 500000.0, key: table})


def test_a_whole_rotary_factor_is_no_problem_and_heads_must_have_pairs() -> None:
    assert rope(public("Llama-3.1-8B", partial_rotary_factor=1.0)).rotary_dim == 128
    assert "partial_rotary_factor is 0.5" in problems(public("Llama-3.1-8B", partial_rotary_factor=0.5))
    assert "they go in pairs" in problems(public("Llama-3.1-8B", head_dim=33))


@pytest.mark.parametrize(
    "table", [{"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}]
)
def test_the_original_length_may_stand_outside_the_table_but_not_disagree(table: dict[str, Any]) -> None:
    outside = {**BARE, "rope_theta": 5e5, "original_max_position_embeddings": 4096}
    assert scaling({**outside, "rope_scaling": table}).original_max_positions == 4096
    assert scaling({**BARE, "rope_theta": 5e5, "rope_scaling": table}).original_max_positions == BARE["max_position_embeddings"]
    inside = {**table, "original_max_position_embeddings": 8192}
    assert "contradiction: original_max_position_embeddings says 4096" in problems({**outside, "rope_scaling": inside})


def test_where_releases_of_transformers_differ_on_yarn_the_reader_says_so() -> None:
    table = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16384}
    notes = read({**BARE, "rope_parameters": table}, "llama", "LlamaForCausalLM").notes
    assert any("factor 4 is used" in note for note in notes)
    without_factor = read({**BARE, "rope_parameters": {**table, "factor": None}}, "llama", "LlamaForCausalLM")
    assert without_factor.config.rope is not None and without_factor.config.rope.scaling is not None
    assert without_factor.config.rope.scaling.factor == BARE["max_position_embeddings"] / 16384


def test_a_refused_rope_does_not_hide_other_problems() -> None:
    with pytest.raises(Refused) as refusal:
        read({**without(BARE, "head_dim", "hidden_size"), "rope_parameters": {"rope_type": "longrope"}}, "llama", "LlamaForCausalLM")
    said = [problem.what for problem in refusal.value.problems]
    assert (
        any("hidden_size" in what for what in said)
        and any("longrope" in what for what in said)
        and any("rope_theta" in what for what in said)
    )
