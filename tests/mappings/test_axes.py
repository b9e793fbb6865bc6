"""The axes notation against numpy's own reshape, split and concatenate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.tensors import contiguous_strides
from mappings.axes import MAX_DEPTH, MAX_LENGTH, AxesError, View, parse_axes

Array = np.ndarray[Any, Any]


@dataclass
class Layout:
    """A random layout as nested lists: a name, ("(", items), or ("[", {label: items})."""

    items: list[Any]
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return " ".join(map(written, self.items))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.length(item) for item in self.items)

    def length(self, item: Any) -> int:
        if isinstance(item, str):
            return self.sizes[item]
        kind, inner = item
        if kind == "(":
            return math.prod(map(self.length, inner))
        return sum(math.prod(map(self.length, items)) for items in inner.values())


def written(item: Any) -> str:
    if isinstance(item, str):
        return item
    kind, inner = item
    if kind == "(":
        return f"({' '.join(map(written, inner))})"
    return "[" + " | ".join(f"{label}: {' '.join(map(written, items))}" for label, items in inner.items()) + "]"


@st.composite
def layouts(draw: st.DrawFn, with_parts: bool = False) -> Layout:
    layout = Layout([])

    def atom() -> str:
        name = f"a{len(layout.sizes)}"
        layout.sizes[name] = draw(st.integers(1, 4))
        return name

    def items(depth: int, parts: bool) -> list[Any]:
        count = draw(st.integers(1, 3))
        special = draw(st.integers(0, count - 1)) if parts else -1
        return [item(depth, index == special) for index in range(count)]

    def item(depth: int, parts: bool) -> Any:
        if parts and (depth == 2 or draw(st.booleans())):
            return "[", {label: items(2, False) for label in draw(st.sampled_from(["q", "qk", "qkv"]))}
        if parts or (depth < 2 and draw(st.booleans())):
            return "(", items(depth + 1, parts)
        return atom()

    layout.items = items(0, with_parts)
    return layout


def by_numpy(array: Array, items: list[Any], label: str, layout: Layout) -> Array:
    """The part `label` of `array` with one axis for each atom: split and reshape, one tensor axis at a time."""
    axis = 0
    todo = list(items)
    while axis < len(todo):
        if isinstance(todo[axis], str):
            axis += 1
            continue
        kind, inner = todo[axis]
        if kind == "[":
            ends = np.cumsum([math.prod(map(layout.length, part)) for part in inner.values()])
            array = np.split(array, ends[:-1], axis)[list(inner).index(label)]
            inner = inner[label]
        array = array.reshape(*array.shape[:axis], *map(layout.length, inner), *array.shape[axis + 1 :])
        todo[axis : axis + 1] = inner
    return array


def seen(view: View, buffer: Array) -> Array:
    """A view of a buffer with one axis for each atom."""
    shape, strides = [atom.size for atom in view.atoms], [atom.stride * buffer.itemsize for atom in view.atoms]
    return np.lib.stride_tricks.as_strided(buffer[view.offset :], shape, strides)


def labels_of(items: list[Any]) -> list[str]:
    for item in items:
        if not isinstance(item, str):
            kind, inner = item
            found = list(inner) if kind == "[" else labels_of(inner)
            if found:
                return found
    return []


@given(layouts())
def test_a_single_tensors_view_is_numpys_reshape(layout: Layout) -> None:
    array = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    axes = parse_axes(layout.text)
    assert axes.shape(layout.sizes) == layout.shape
    assert axes.labels == ("",)
    view = axes.view("", layout.sizes, contiguous_strides(layout.shape))
    assert np.array_equal(seen(view, array.reshape(-1)), by_numpy(array, layout.items, "", layout))


@given(layouts(with_parts=True))
def test_the_parts_views_are_numpys_splits_and_together_the_tensor(layout: Layout) -> None:
    array = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    axes = parse_axes(layout.text)
    assert axes.shape(layout.sizes) == layout.shape
    assert list(axes.labels) == labels_of(layout.items)
    views = {label: axes.view(label, layout.sizes, contiguous_strides(layout.shape)) for label in axes.labels}
    for label, view in views.items():
        assert np.array_equal(seen(view, array.reshape(-1)), by_numpy(array, layout.items, label, layout))
        assert tuple(atom.name for atom in view.atoms) == axes.atoms(label)
    together = np.concatenate([seen(view, array.reshape(-1)).reshape(-1) for view in views.values()])
    assert np.array_equal(np.sort(together), array.reshape(-1))


@given(layouts(with_parts=True), st.randoms(use_true_random=False))
def test_a_view_of_a_transposed_tensor_has_the_same_elements(layout: Layout, random: Any) -> None:
    order = list(range(len(layout.shape)))
    random.shuffle(order)
    array = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    stored = np.ascontiguousarray(array.transpose(order))
    strides = stored.transpose(np.argsort(order)).strides
    for label in parse_axes(layout.text).labels:
        view = parse_axes(layout.text).view(label, layout.sizes, tuple(stride // array.itemsize for stride in strides))
        assert np.array_equal(seen(view, stored.reshape(-1)), by_numpy(array, layout.items, label, layout))


@given(layouts(with_parts=True))
def test_str_gives_the_text_back(layout: Layout) -> None:
    axes = parse_axes(layout.text)
    assert str(axes) == layout.text
    assert parse_axes(f"  {layout.text.replace(' ', '   ').replace('(', ' ( ')} ") == axes


@pytest.mark.parametrize(
    ("text", "refined", "atoms"),
    [
        ("(heads head_dim) hidden", "((kv_heads group) head_dim) hidden", {"kv_heads", "group", "head_dim", "hidden"}),
        ("(heads head_dim) hidden", "(heads (pair half_dim)) hidden", {"heads", "half_dim", "pair", "hidden"}),
        ("[q: heads head_dim | k: kv_heads head_dim]", "[q: (kv_heads group) head_dim | k: kv_heads head_dim]", {"kv_heads", "head_dim"}),
        ("hidden", "hidden", set()),
    ],
)
def test_refining_replaces_only_what_the_other_side_lacks(text: str, refined: str, atoms: set[str]) -> None:
    sizes = {"heads": 6, "kv_heads": 2, "group": 3, "head_dim": 4, "half_dim": 2, "pair": 2, "hidden": 5}
    finer = parse_axes(text).refined(atoms)
    assert str(finer) == refined
    assert finer.shape(sizes) == parse_axes(text).shape(sizes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vocab, hidden", "unexpected character ','"),
        ("vocab hid-den", "unexpected character '-'"),
        ("vocab 3", "unexpected character '3'"),
        ("(heads head_dim", "expected ')', found 'the end'"),
        ("(heads head_dim] hidden", "expected ')', found ']'"),
        ("heads) hidden", "unexpected ')'"),
        ("hidden | ffn", "unexpected '|'"),
        ("q: hidden", "':' belongs after a label"),
        ("[q heads | k: kv_heads]", "expected ':', found 'heads'"),
        ("[: heads]", "starts with a label"),
        ("[q: heads", "expected ']', found 'the end'"),
        ("[q: heads | ]", "starts with a label"),
        ("[q: heads | q: ffn]", "a label is used twice"),
        ("[q: heads] [k: ffn]", "only one [ ]"),
        ("[q: [r: heads] | k: ffn]", "only one [ ]"),
        ("(heads head_dim) heads", "'heads' appears twice"),
        ("hidden [q: heads hidden | k: ffn]", "'hidden' appears twice"),
        ("() hidden", "names no axis"),
        ("[q: | k: ffn]", "'q' names no axis"),
        ("hidden 1", "1 stands alone in a part"),
        ("[q: 1 heads | k: ffn]", "expected ']'"),
        ("(ffn [q: 11 | k: 1])", "unexpected character '1'"),
        ("(" * (MAX_DEPTH + 2) + "a" + ")" * (MAX_DEPTH + 2), "nested too deeply"),
        ("a" * (MAX_LENGTH + 1), "at most"),
    ],
)
def test_a_mistake_is_named(text: str, words: str) -> None:
    with pytest.raises(AxesError) as caught:
        parse_axes(text)
    assert words in str(caught.value)
    assert text[:20] in str(caught.value)


@given(st.text(st.sampled_from("()[]|: \tqkv_9é-"), max_size=40))
def test_any_text_is_a_layout_or_a_clear_error(text: str) -> None:
    try:
        axes = parse_axes(text)
    except AxesError:
        return
    assert parse_axes(str(axes)) == axes
