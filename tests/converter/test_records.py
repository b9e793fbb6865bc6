"""Records to JSON and back, and JSON of strangers."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.manifest import LayoutRecord, Manifest, RankFileRecord, SideFileRecord, SourceRecord
from converter.records import MAX_INTEGER, RecordError, decode, encode
from model.config import ModelConfig, Rope, RopeScaling


@dataclass(frozen=True)
class Leaf:
    size: int
    ratio: float | None = None


@dataclass(frozen=True)
class Tree:
    kind: Literal["a", "b", 1]
    leaves: tuple[Leaf, ...]
    pair: tuple[int, str]
    names: dict[str, tuple[int, ...]]
    anything: dict[str, Any]
    flag: bool = False


GOOD: dict[str, Any] = {
    "kind": "a", "leaves": [{"size": 1}, {"size": 2, "ratio": 0.5}], "pair": [3, "x"], "names": {"n": [1, 2]}, "anything": {"y": [None]},
}  # fmt: skip

JSON = st.dictionaries(
    st.text(max_size=3), st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4)
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, within the bounds of records."""
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return st.builds(typing.cast(type, kind), **{name: values_of(hint) for name, hint in typing.get_type_hints(kind).items()})
    if typing.get_origin(kind) is dict:
        return JSON if arguments[1] is Any else st.dictionaries(st.text(max_size=3), values_of(arguments[1]), max_size=3)
    if typing.get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(arguments)
    if arguments:
        return st.one_of(*map(values_of, arguments))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-1, MAX_INTEGER - 1), float: st.floats(allow_nan=False, allow_infinity=False), str: st.text(max_size=5),
        bool: st.booleans(), type(None): st.none(),
    }  # fmt: skip
    return simple[kind]


@given(st.sampled_from([Tree, LayoutRecord, RankFileRecord, SideFileRecord, SourceRecord, ModelConfig, Manifest]).flatmap(values_of))
def test_a_record_comes_back_equal_from_its_json(record: Any) -> None:
    assert decode(type(record), json.loads(json.dumps(encode(record)))) == record


def test_a_model_config_comes_back_equal_from_its_json() -> None:
    config = ModelConfig(
        "llama", "decoder", 4, 64, 8, 4, 16, 96, 199, 256, 128, "rms_norm", 1e-5, "silu", True,
        rope=Rope(5e5, 16, scaling=RopeScaling("llama3", 8.0, 32, 1.0, 4.0)), sliding_window=8, sliding_layers=(1, 3), eos_ids=(2, 5),
    )  # fmt: skip
    assert decode(ModelConfig, json.loads(json.dumps(encode(config)))) == config
    assert encode(config) == json.loads(json.dumps(config.to_json()))


def test_a_good_record_is_read() -> None:
    assert decode(Tree, GOOD) == Tree("a", (Leaf(1), Leaf(2, 0.5)), (3, "x"), {"n": (1, 2)}, {"y": [None]})
    assert decode(Leaf, {"size": 3, "ratio": 2}).ratio == 2.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "c"}, "the record.kind is 'c', not one of a, b, 1"),
        ({"kind": True}, "kind is True, not one of"),
        ({"kind": ["a"]}, "kind is a list, not one of"),
        ({"leaves": {}}, "leaves is an object, not a list"),
        ({"leaves": [3]}, "leaves[0] is 3, not an object"),
        ({"leaves": [{}]}, "leaves[0] lacks the field 'size'"),
        ({"leaves": [{"size": 1}, {"size": True}]}, "leaves[1].size is True, not of type int"),
        ({"leaves": [{"size": 1.0}]}, "leaves[0].size is 1.0, not of type int"),
        ({"leaves": [{"size": -2}]}, "size is -2, out of range"),
        ({"leaves": [{"size": MAX_INTEGER}]}, "out of range"),
        ({"leaves": [{"size": 10**400}]}, "size is a huge number, out of range"),
        ({"leaves": [{"size": 1, "ratio": "x"}]}, "ratio is 'x', not of type float"),
        ({"leaves": [{"size": 1, "ratio": float("nan")}]}, "ratio is nan, not a finite number"),
        ({"leaves": [{"size": 1, "ratio": float("-inf")}]}, "not a finite number"),
        ({"leaves": [{"size": 1, "ratio": 10**400}]}, "ratio is a huge number"),
        ({"leaves": [{"size": 1, "ratio": False}]}, "ratio is False"),
        ({"pair": [3]}, "pair has 1 entries, not 2"),
        ({"pair": ["x", 3]}, "pair[0] is 'x', not of type int"),
        ({"pair": [3, None]}, "pair[1] is None, not a text"),
        ({"names": []}, "names is a list, not an object"),
        ({"names": {"n": 3}}, "names.n is 3, not a list"),
        ({"anything": "x"}, "anything is 'x', not an object"),
        ({"flag": 1}, "flag is 1, not of type bool"),
        ({"other": 1}, "the record has the unknown field 'other'"),
        ({"x" * 5000: 1}, "has the unknown field 'xxx"),
        ({"kind": "z" * 10**6}, "kind is 'zzz"),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError) as caught:
        decode(Tree, GOOD | changes)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("missing", ["kind", "leaves", "pair", "names", "anything"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(RecordError, match=f"lacks the field '{missing}'"):
        decode(Tree, {key: value for key, value in GOOD.items() if key != missing})


@pytest.mark.parametrize("value", [None, 3, "x", [], True])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(RecordError, match="not an object"):
        decode(Tree, value)
