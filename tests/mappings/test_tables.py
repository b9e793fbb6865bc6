"""Rule tables: what is refused, with file, rule and mend, and that nothing else happens with a broken one."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappings.errors import Problem, Refused
from mappings.expand import expand
from mappings.table_reader import MAX_DOTS, MAX_ENTRIES, MAX_TABLE_BYTES
from mappings.tables import bundled_families, bundled_table, load_table, parse_table
from tests.converter.planned import config_of, config_part, rule, table_of
from tests.mappings.sections import FAMILIES, table

Q = "layers.{layer}.attention.q_proj.weight"
K = "layers.{layer}.attention.k_proj.weight"
UP = "layers.{layer}.mlp.up_proj.weight"
GATE = "layers.{layer}.mlp.gate_proj.weight"
EXPERTS = "layers.{layer}.mlp.experts.up_proj"
PARAMETER = '[[parameter]]\nname = "layers.{layer}.extra.gamma"\naxes = "hidden"\ncut = "replicated"\nstage = "layer"\n'


def refusal(text: str) -> Refused:
    """How a table is refused: each problem names the file and says what to do."""
    with pytest.raises(Refused) as caught:
        parse_table(text, "mine.toml")
    assert caught.value.problems
    assert all(problem.where.startswith("mine.toml") and problem.what and problem.mend for problem in caught.value.problems)
    return caught.value


def told(text: str, words: str) -> Problem:
    refused = refusal(text)
    found = [problem for problem in refused.problems if words in problem.what]
    assert found, str(refused)
    return found[0]


@pytest.mark.parametrize(
    ("entries", "words", "place"),
    [
        ('extra = 3', "unknown key 'extra'", ""),
        (rule("x.{layer}.w", UP, color="red"), "unknown key 'color'", "rule 1 (x.{layer}.w)"),
        (rule("x.{layer}.w", UP, "fnn hidden"), "unknown axis 'fnn'", "rule 1"),
        (rule("x.{layer}.w", UP, "ffn hidden)"), "unexpected ')'", "rule 1"),
        (rule("x.{layer}.w", UP, "ffn"), "the hf side has the axes ffn, the ms side", "rule 1"),
        (rule("x.{layer}.w", UP, "ffn hidden heads"), "the hf side has the axes ffn hidden heads, the ms side", "rule 1"),
        (rule("x.{layer}.w", UP, "[q: ffn | k: heads] hidden"), "hf_axes has the labels", "rule 1"),
        (rule("x.{layer}.w", {"q": Q, "k": K}), "'hf_axes' is missing", "rule 1"),
        (rule("x.{layer}.w", {"q": Q, "k": K}, "[q: heads head_dim | v: kv_heads head_dim] hidden"), "hf_axes has the labels", "rule 1"),
        (rule("x.{block}.w", UP), "unknown placeholder {block}", "rule 1"),
        (rule("x.{layer}.w{", UP), "a brace without its partner", "rule 1"),
        (rule("x.w", UP), "{layer} is not on both sides", "rule 1"),
        (rule("x.{layer}.w", "final_norm.gamma"), "{layer} is not on both sides", "rule 1"),
        (rule("x.{layer}.{expert}.w", UP), "{expert} is not on both sides", "rule 1"),
        (rule("x.{layer}.w", EXPERTS, "expert_ffn hidden"), "the hf side has the axes expert_ffn hidden, the ms", "rule 1"),
        (rule("x.{layer}.w", "layers.{layer}.mlp.up.weight"), "is no canonical parameter", "rule 1"),
        (rule("x.{layer}.w", UP) + rule("y.{layer}.w", UP), f"'{UP}' is written by 2 rules", ""),
        (rule("x.{layer}.w", {"a": UP, "b": UP}, "[a: ffn | b: ffn] hidden"), f"'{UP}' is written by 2 rules", ""),
        (rule("x.{layer}.w", UP) + rule("x.{layer}.w", GATE), "'x.{layer}.w' stands in a rule and in a rule", ""),
        (rule("x.{layer}.w", UP, when="tall"), "unknown condition 'tall'", "rule 1"),
        (rule("x.{layer}.w", UP, when="layers"), "unknown condition 'layers'", "rule 1"),
        (rule("x.{layer}.w", UP, when=3), "'when' is not a condition", "rule 1"),
        (rule("x.{layer}.w", UP, from_layer=-1), "-1 is no layer number", "rule 1"),
        (rule("x.{layer}.w", UP, from_layer="true").replace('"true"', "true"), "true is no layer number", "rule 1"),
        (rule("x.{layer}.w", UP, from_layer=3, to_layer=3), "no layer is from 3 to 3", "rule 1"),
        (rule("x.w", "final_norm.gamma", to_layer=3), "a layer range for a tensor outside the layers", "rule 1"),
        ('[[rule]]\nms = "final_norm.gamma"', "'hf' is missing or not a name", "rule 1 (?)"),
        ('[[rule]]\nhf = "x"', "'ms' is missing or not a name", "rule 1 (x)"),
        ('[[rule]]\nhf = []\nms = "final_norm.gamma"', "'hf' is missing or not a name", "rule 1"),
        ('[[rule]]\nhf = "x"\nms = { q = 3 }', "'ms' is missing or not a name", "rule 1"),
        ('[[rule]]\nhf = ["a.{layer}", "b"]\nms = "final_norm.gamma"', "the spellings of hf have different placeholders", "rule 1"),
        (rule("x" * 600, "final_norm.gamma"), "'hf' is missing or not a name", "rule 1"),
        ('rule = 3', "'rule' is not a list of tables", ""),
        ('rule = [3]', "'rule' is not a list of tables", ""),
        ('[[drop]]\nhf = "x"', "'why' is missing: nothing is dropped without a reason", "drop 1 (x)"),
        ('[[drop]]\nhf = "x"\nwhy = "  "', "'why' is missing", "drop 1"),
        ('[[drop]]\nhf = "x"\nwhy = "derived"\ncheck = "guess"', "unknown check 'guess'", "drop 1"),
        ('[[drop]]\nhf = ["x", "y"]\nwhy = "derived"', "'hf' is a list of names", "drop 1"),
        ('[[drop]]\nhf = "x"\nwhy = "derived"\n' + rule("x", "final_norm.gamma"), "'x' stands in a rule and in a drop", ""),
        ('[[duplicate]]\nhf = "x"\nof = "y"', "duplicate of 'y', which no rule names", ""),
        ('[[duplicate]]\nhf = "x"', "'of' is missing or not a name", "duplicate 1"),
        ('[[duplicate]]\nhf = "x.{layer}"\nof = "y"\n' + rule("y", "final_norm.gamma"), "different placeholders", "duplicate 1"),
        ('axes = 3', "[axes] is not a table", ""),
        ("[axes]\nshared = 0", "axis 'shared' has no size", "[axes]"),
        ("[axes]\nshared = true", "axis 'shared' has no size", "[axes]"),
        ('[axes]\nshared = "size"', "axis 'shared' has no size", "[axes]"),
        ("[axes]\nshared = { key = 3 }", "axis 'shared' has no size", "[axes]"),
        ("[axes]\nhidden = 3", "axis 'hidden' has its size from ModelConfig", "[axes]"),
        ("[axes]\npair = 3", "axis 'pair' has its size from ModelConfig", "[axes]"),
        (PARAMETER.replace("hidden", "own"), "unknown axis 'own'", "parameter 1 (layers.{layer}.extra.gamma)"),
        (PARAMETER.replace("layers.{layer}.extra.gamma", UP), "in the catalogue already", "parameter 1"),
        (PARAMETER * 2, "in the catalogue already", "parameter 2"),
        (PARAMETER.replace("replicated", "ffn"), "cut 'ffn' is not the outermost axis", "parameter 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_file_rule_and_mend(entries: str, words: str, place: str) -> None:
    extra, config = (f"{entries}\n", config_part()) if "=" in entries.split("\n")[0] else ("", f"{config_part()}\n{entries}")
    assert told(extra + config, words).where.startswith(f"mine.toml, {place}" if place else "mine.toml")


def test_all_mistakes_are_told_at_once() -> None:
    entries = rule("a.{layer}.w", UP, "fnn hidden") + rule("b.w", Q) + PARAMETER.replace('"layer"', '"middle"') + '[[drop]]\nhf = "c"\n'
    message = str(refusal(f"oops = 1\n{config_part()}\nnorm_eps2 = 3\n{entries}".replace("[[rule]]", "[[rule]]", 1)))
    for words in ("unknown key 'oops'", "unknown axis 'fnn'", "{layer} is not on both sides", "stage 'middle'", "'why' is missing"):
        assert words in message
    assert re.search(r"has \d+ mistakes", message)


@pytest.mark.parametrize("key", ["family", "architectures", "config"])
def test_what_every_table_needs_is_asked_for(key: str) -> None:
    lines = [line for line in config_part().split("\n") if not line.startswith(f"{key} =")]
    text = "\n".join(lines) if key != "config" else 'family = "x"\narchitectures = ["X"]\n'
    assert any(key in problem.what for problem in refusal(text).problems)


@pytest.mark.parametrize(
    "text",
    [
        "rule = ", "[[rule]\n", "family = \"a\nb\"", "a = 1\na = 2", "x = " + "9" * 5000, "x = " + "[" * 5000, "x" + ".x" * 60_000 + " = 1",
        "x = 1 # " + "y" * MAX_TABLE_BYTES, "\x00", "x = 2024-99-99",
    ],
)  # fmt: skip
def test_a_text_that_is_no_toml_or_too_much_of_it_is_refused(text: str) -> None:
    assert len(str(refusal(text))) < 2000


def test_a_table_without_end_is_refused() -> None:
    many = "".join(f'[[drop]]\nhf = "x{index}"\nwhy = "y"\n' for index in range(MAX_ENTRIES + 1))
    told(f"{config_part()}\n{many}", "at most")
    told(f"{config_part()}\nx = [{'1.5, ' * MAX_DOTS}1.5]", "dots")


def test_a_file_that_is_missing_binary_or_huge_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge.toml").write_bytes(b"#" * (MAX_TABLE_BYTES + 2))
    os.mkfifo(tmp_path / "fifo.toml")
    for name in ("missing.toml", "binary.toml", "huge.toml", "fifo.toml", "."):
        with pytest.raises(Refused) as caught:
            load_table(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(Refused, match="no bundled rule table 'gpt9'"):
        bundled_table("gpt9")


def test_a_table_in_a_file_is_read_as_the_bundled_ones(tmp_path: Path) -> None:
    assert bundled_families() == tuple(sorted(FAMILIES))
    for family in bundled_families():
        (tmp_path / "mine.toml").write_text(bundled_table(family).text, encoding="utf-8")
        mine = load_table(tmp_path / "mine.toml")
        assert (mine.family, mine.rules, mine.drops, mine.duplicates) == (
            family, bundled_table(family).rules, bundled_table(family).drops, bundled_table(family).duplicates,
        )  # fmt: skip


def test_conditions_and_layers_tell_two_rules_for_one_parameter_apart() -> None:
    dense = rule("x.{layer}.up", UP, to_layer=1) + rule("x.{layer}.up_t", UP, "hidden ffn", from_layer=1)
    assert len(table_of(dense).rules) == 2
    opposite = rule("a", "final_norm.gamma", when="tied") + rule("b", "final_norm.gamma", when="not tied")
    told(f"{config_part()}\n{opposite.replace('not tied', 'qk_norm')}", "is written by 2 rules")
    found = table_of(opposite)
    assert [found.holds(one, config_of(tied=True)) for one in found.rules] == [True, False]
    assert [found.holds(one, config_of(tied=False)) for one in found.rules] == [False, True]


def test_a_tied_head_is_no_parameter_of_its_own() -> None:
    found = bundled_table("llama")
    (head,) = found.rules_with_role("head")
    assert [found.holds(head, config_of(tied=tied, head=True)) for tied in (True, False)] == [False, True]
    assert not found.holds(head, config_of(tied=False, head=False))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.just(2**70), st.floats(allow_nan=False), st.text(max_size=5),
    st.sampled_from(["{layer}", "layers.{expert}.w", "()", "[q: heads]", "not tied", UP, EXPERTS, "heads", "x" * 700]),
    st.lists(st.text(max_size=3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(0, 2), max_size=2),
)  # fmt: skip


@st.composite
def broken_tables(draw: st.DrawFn) -> dict[str, Any]:
    """A bundled table with some of its values dropped, replaced, doubled, or keys put in."""
    data: dict[str, Any] = copy.deepcopy(table(draw(st.sampled_from(FAMILIES))))
    if draw(st.booleans()):
        data["axes"] = {"own": draw(JUNK)}
        data["parameter"] = [{"name": draw(JUNK), "axes": "own", "cut": draw(JUNK), "stage": "last"}]
    for _ in range(draw(st.integers(1, 4))):
        place: Any = data
        while isinstance(place, (dict, list)) and place:
            keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys))
            if not (isinstance(place[key], (dict, list)) and draw(st.booleans())):
                break
            place = place[key]
        else:
            continue
        match draw(st.sampled_from(["drop", "replace", "double", "insert"])):
            case "drop":
                del place[key]
            case "replace":
                place[key] = draw(JUNK)
            case "double" if isinstance(place, list):
                place.append(copy.deepcopy(place[key]))
            case _:
                if isinstance(place, dict):
                    place[draw(st.sampled_from(["when", "hf_axes", "from_layer", "to_layer", "ms", "of", "x"]))] = draw(JUNK)
    return data


def toml(value: Any) -> str:
    """A value as TOML, tables inline. TOML has no null."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items() if item is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value if item is not None) + "]"
    return json.dumps(value) if not isinstance(value, float) else repr(value)


@settings(max_examples=150)
@given(broken_tables())
def test_a_broken_table_is_refused_or_valid_and_never_anything_else(data: dict[str, Any]) -> None:
    text = "".join(f"{json.dumps(key)} = {_lines(value)}\n" for key, value in data.items() if value is not None)
    refused = None
    try:
        found = parse_table(text, "mine.toml")
        assert all(name in found.parameters for one in found.rules for _, name in one.ms)
        expand(found, config_of(), {}, ())
    except Refused as caught:
        refused = caught
    if refused is not None:
        assert refused.problems
        assert all("mine.toml" in problem.where for problem in refused.problems)


def _lines(value: Any) -> str:
    """A list with a line for each entry, as a person writes it."""
    return "[\n" + ",\n".join(toml(item) for item in value if item is not None) + "\n]" if isinstance(value, list) else toml(value)
