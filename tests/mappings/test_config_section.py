"""Mistakes in a table's [config] part are refused with the file, the entry and the mend."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappings.config_section import ConfigSection
from mappings.config_values import SETTABLE, field_value
from mappings.errors import Refused
from mappings.hf_config import parse_config_section
from tests.mappings.sections import FAMILIES, table


def config_part(family: str = "llama", /, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(table(family)["config"]), **changes}


def refusal(data: Any, architectures: list[str] | None = None) -> Refused:
    with pytest.raises(Refused) as raised:
        parse_config_section(data, "mine.toml", architectures)
    return raised.value


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bundled_tables_are_valid(family: str) -> None:
    assert isinstance(parse_config_section(config_part(family), f"{family}.toml", table(family)["architectures"]), ConfigSection)


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"layrs": {"key": "x"}}, "[config] layrs", "no such field"),
        ({"family": {"value": "x"}}, "[config] family", "no such field"),
        ({"layers": "num_hidden_layers"}, "[config] layers", "does not say where"),
        ({"layers": {"keys": "num_hidden_layers"}}, "[config] layers", "does not say where"),
        ({"layers": {"key": "x", "defalt": 1}}, "[config] layers", "'key'"),
        ({"layers": {"key": []}}, "[config] layers", "not a name"),
        ({"layers": {"key": "x", "default": "12"}}, "[config] layers", "default must be a whole number"),
        ({"layers": {"key": "x", "default": 1, "from": "heads"}}, "[config] layers", "exclude each other"),
        ({"norm": {"value": "batch_norm"}}, "[config] norm", "layer_norm, rms_norm"),
        ({"norm_eps": {"value": True}}, "[config] norm_eps", "must be a number"),
        ({"activation": {"key": "a", "map": "activations"}}, "[config] activation", "shared maps: activation"),
        ({"activation": {"key": "a", "map": {"silu": "swiglu"}}}, "[config] activation", "map: silu"),
        ({"activation": {"key": "a", "map": "activation", "default": "x"}}, "[config] activation", "not in the map"),
        ({"ffn": {"from": "4 * hiden"}}, "[config] ffn", "not a product"),
        ({"ffn": {"from": "hidden + 4"}}, "[config] ffn", "not a product"),
        ({"ffn": {"from": ""}}, "[config] ffn", "not a product"),
        ({"ffn": {"from": "heads", "default": 3}}, "[config] ffn", "does not go with 'from'"),
        ({"ffn": {"from": "token_types"}}, "[config]", "needs the field 'token_types'"),
        ({"heads": {"from": "kv_heads"}}, "[config]", "leads back to itself"),
        ({"layers": {"present": "x.weight"}}, "[config] layers", "cannot be"),
        ({"pooler": {"present": 3}}, "[config] pooler", "not a name"),
        ({"head": {"architecture": ["GPT5"]}}, "[config] head", "not among the table's architectures"),
        ({"rope": {"value": None}}, "[config] rope", "by a reader only"),
        ({"rope": {"reader": "ropes"}}, "[config] rope", "no reader 'ropes'"),
        ({"rope": {"reader": ["rope"]}}, "[config] rope", "no reader"),
        ({"norm": {"reader": "rope"}}, "[config] norm", "no reader 'rope' for this field"),
        ({"rope": {"reader": "rope", "theta": 1}}, "[config] rope", "no option theta"),
        ({"rope": {"reader": "rope", "theta_key": 1}}, "[config] rope", "theta_key must be"),
        ({"rope": {"reader": "rope", "unwritten_theta": 1e4}}, "[config] rope", "unwritten_theta must look like"),
        ({"rope": {"reader": "rope", "unwritten_theta": {"value": 1e4, "before_transformers": 4}}}, "[config] rope", "before_transformers"),
        ({"sliding_window": {"reader": "window"}}, "[config] sliding_window", "needs the option key"),
        ({"sliding_window": {"reader": "window", "key": 5}}, "[config] sliding_window", "must be a key"),
        ({"fixed": {"a": 1}}, "[config.fixed]", "no list of supported values"),
        ({"fixed": []}, "[config.fixed]", "not a table"),
        ({"ignored": {"a": ""}}, "[config.ignored]", "without a reason"),
        ({"ignored": {"hidden_size": "x"}}, "[config]", "more than one place"),
        ({"variant": {}}, "[config]", "not a list"),
        ({"variant": [{"norm_eps": {"key": "e"}}]}, "[config.variant 1]", "'architectures' is missing"),
        ({"variant": [{"architectures": ["MistralModel"], "x": {}}]}, "[config.variant 1] x", "no such field"),
        ({"variant": ["x"]}, "[config.variant 1]", "not a table"),
    ],
)
def test_a_mistake_is_named_with_file_place_and_mend(changes: dict[str, Any], place: str, words: str) -> None:
    refused = refusal(config_part(**changes), table("llama")["architectures"])
    told = [problem for problem in refused.problems if words in problem.what or words in problem.mend]
    assert told, str(refused)
    assert told[0].where.startswith(f"mine.toml, {place}")
    assert told[0].mend


@pytest.mark.parametrize("field", ["layers", "heads", "norm_eps", "activation", "kind"])
def test_a_field_without_an_entry_is_a_mistake(field: str) -> None:
    data = config_part()
    del data[field]
    assert f"the field {field!r} has no entry" in str(refusal(data))


def test_all_mistakes_are_reported_at_once() -> None:
    message = str(refusal({"layers": {"key": 1}, "hidden": {}, "nonsense": 1, "fixed": 3}))
    assert all(words in message for words in ("layers", "hidden", "nonsense", "[config.fixed]", "'kv_heads' has no entry"))


@pytest.mark.parametrize("field", SETTABLE)
def test_every_field_has_a_type_and_bounds(field: str) -> None:
    for value in (object(), 10**60, float("inf"), float("nan")):
        with pytest.raises(ValueError):
            field_value(field, value)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_a_config_part_that_is_no_table_is_refused(data: Any) -> None:
    assert "not a table" in str(refusal(data))


def test_a_variant_overrides_field_fixed_and_ignored_for_its_architectures_only() -> None:
    changes = {
        "architectures": ["MistralModel"],
        "norm_eps": {"key": "eps"},
        "fixed": {"pretraining_tp": [1]},
        "ignored": {"rope_interleaved": "x"},
    }
    section = parse_config_section(config_part(variant=[changes]), "mine.toml")
    plain, variant = section.entries_for("LlamaModel"), section.entries_for("MistralModel")
    assert ("eps" in variant.keys_read(), "eps" in plain.keys_read()) == (True, False)
    assert "rms_norm_eps" not in variant.keys_read()
    assert ("pretraining_tp" in variant.fixed, "pretraining_tp" in variant.ignored, "pretraining_tp" in plain.ignored) == (
        True,
        False,
        True,
    )
    assert ("rope_interleaved" in variant.fixed, "rope_interleaved" in plain.fixed) == (False, True)


TOML = st.recursive(
    st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(["rope", "window", "hidden", "4 * hidden", "activation"]),
    lambda values: (
        st.lists(values, max_size=3)
        | st.dictionaries(
            st.sampled_from(["key", "value", "from", "default", "map", "reader", "present", "architecture", "types"]), values, max_size=3
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("family", ["llama", "qwen2", "bert"])
@settings(max_examples=80)
@given(data=st.data())
def test_any_content_is_a_section_or_a_refusal(family: str, data: st.DataObject) -> None:
    part = config_part(family)
    names = st.sampled_from([*part, "experts", "pooler", "variant"]) | st.text(max_size=8)
    part |= data.draw(st.dictionaries(names, TOML, min_size=1, max_size=3))
    try:
        section = parse_config_section(part, "mine.toml")
    except Refused as error:
        assert error.problems  # noqa: PT017
    else:
        assert section.entries_for("LlamaModel").sources
