"""Every transform that a rule can say, forward and backward, against what a person writes with numpy: slice first, then fuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.layout import blockers, cut_axes, make_layout
from converter.regions import ranges_of_axis
from converter.tensors import contiguous_strides
from mappings.axes import AtomPlace
from mappings.errors import Refused
from model.config import ModelConfig
from tests.converter.planned import (
    Array,
    Arrays,
    attention_sizes,
    config_of,
    expanded,
    merged,
    numbered,
    rule,
    slices_of,
    table_of,
)

Expected = Callable[[int, int], Arrays]
"""(rank, tp) -> the rank's slices, by hand."""

Q, K, V, OUT = (f"layers.{{layer}}.attention.{name}_proj.weight" for name in "qkvo")
GATE, UP, DOWN = (f"layers.{{layer}}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
EXPERTS = {name: f"layers.{{layer}}.mlp.experts.{name}_proj" for name in ("gate", "up", "down")}


def check(entries: str, config: ModelConfig, tensors: Arrays, expected: Expected, data: st.DataObject, **options: Any) -> None:
    """At a random tp that fits: each rank's slices are the expected ones, and give the tensors back."""
    expansion = expanded(table_of(entries), config, tensors)
    axes = cut_axes(expansion)
    tp = data.draw(st.sampled_from([tp for tp in range(1, 25) if not blockers(axes, tp)]), label="tp")
    layout = make_layout(config, expansion, tp=tp, pp=1, **options)
    ranks = slices_of(expansion, layout, tensors)
    for rank, slices in enumerate(ranks):
        wanted = expected(rank, tp)
        assert slices.keys() == wanted.keys()
        for name, array in wanted.items():
            assert np.array_equal(slices[name], array), (name, rank, tp)
    back = merged(expansion, layout, ranks)
    assert all(np.array_equal(back[name], array) for name, array in tensors.items())


def part(array: Array, rank: int, tp: int, axis: int = 0) -> Array:
    return np.split(array, tp, axis)[rank]


def kv_part(array: Array, rank: int, tp: int, kv_heads: int) -> Array:
    """With fewer KV heads than ranks each head is repeated for the ranks that share it."""
    heads = array.reshape(kv_heads, -1, *array.shape[1:])
    repeated = np.repeat(heads, max(1, tp // kv_heads), axis=0)
    return part(repeated, rank, tp).reshape(-1, *array.shape[1:])


@given(attention_sizes(), st.data())
def test_renamed_heads_are_cut_whole_and_kv_heads_replicated(sizes: dict[str, int], data: st.DataObject) -> None:
    config = config_of(**sizes)
    heads, kv, dim, hidden = config.heads, config.kv_heads, config.head_dim, config.hidden
    q, k, o = numbered((heads * dim, hidden)), numbered((kv * dim, hidden), 1), numbered((hidden, heads * dim), 2)
    tensors = {"h.0.q": q, "h.0.k": k, "h.0.o": o}
    entries = rule("h.{layer}.q", Q) + rule("h.{layer}.k", K) + rule("h.{layer}.o", OUT)

    def expected(rank: int, tp: int) -> Arrays:
        names = [name.format(layer=0) for name in (Q, K, OUT)]
        return dict(zip(names, (part(q, rank, tp), kv_part(k, rank, tp, kv), part(o, rank, tp, 1)), strict=True))

    check(entries, config, tensors, expected, data)


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.data())
def test_conv1d_weights_are_transposed_square_ones_too(hidden: int, ffn: int, square: bool, data: st.DataObject) -> None:
    config = config_of(hidden=hidden, ffn=hidden if square else ffn)
    up, down = numbered((hidden, config.ffn)), numbered((config.ffn, hidden), 1)
    entries = rule("h.{layer}.c_fc", UP, "hidden ffn") + rule("h.{layer}.c_proj", DOWN, "ffn hidden")

    def expected(rank: int, tp: int) -> Arrays:
        return {UP.format(layer=0): part(up.T, rank, tp), DOWN.format(layer=0): part(down.T, rank, tp, 1)}

    check(entries, config, {"h.0.c_fc": up, "h.0.c_proj": down}, expected, data)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_tensor_that_is_a_strided_view_of_its_storage_is_read_by_its_strides(hidden: int, ffn: int, data: st.DataObject) -> None:
    config = config_of(hidden=hidden, ffn=ffn)
    storage = numbered((hidden, ffn))
    expansion = expanded(table_of(rule("h.{layer}.up", UP)), config, {"h.0.up": storage.T})
    tp = data.draw(st.sampled_from([tp for tp in range(1, ffn + 1) if ffn % tp == 0]))
    ranks = slices_of(expansion, make_layout(config, expansion, tp=tp, pp=1), {"h.0.up": storage.T})
    assert np.array_equal(np.concatenate([slices[UP.format(layer=0)] for slices in ranks]), storage.T)


@given(attention_sizes(), st.booleans(), st.data())
def test_contiguous_fused_qkv_is_split_before_it_is_cut(sizes: dict[str, int], conv1d: bool, data: st.DataObject) -> None:
    config = config_of(**sizes)
    heads, kv, dim, hidden = config.heads, config.kv_heads, config.head_dim, config.hidden
    fused = numbered(((heads + 2 * kv) * dim, hidden))
    q, k, v = np.split(fused, [heads * dim, (heads + kv) * dim])
    parts = "[q: heads head_dim | k: kv_heads head_dim | v: kv_heads head_dim]"
    entries = rule("h.{layer}.qkv", {"q": Q, "k": K, "v": V}, f"hidden {parts}" if conv1d else f"{parts} hidden")

    def expected(rank: int, tp: int) -> Arrays:
        cut = part(q, rank, tp), kv_part(k, rank, tp, kv), kv_part(v, rank, tp, kv)
        return {name.format(layer=0): array for name, array in zip((Q, K, V), cut, strict=True)}

    check(entries, config, {"h.0.qkv": np.ascontiguousarray(fused.T) if conv1d else fused}, expected, data)


@given(attention_sizes(), st.booleans(), st.data())
def test_fused_qkv_interleaved_by_kv_group_is_taken_apart_by_group(sizes: dict[str, int], bias: bool, data: st.DataObject) -> None:
    """Megatron's layout: for each KV head its query heads, its key, its value."""
    config = config_of(**sizes)
    kv, group, dim = config.kv_heads, config.heads // config.kv_heads, config.head_dim
    width = () if bias else (config.hidden,)
    q, k, v = (numbered((count * dim, *width), seed) for seed, count in enumerate((config.heads, kv, kv)))
    rows = []
    for head in range(kv):
        rows += [q[head * group * dim : (head + 1) * group * dim], k[head * dim : (head + 1) * dim], v[head * dim : (head + 1) * dim]]
    targets = {label: f"layers.{{layer}}.attention.{label}_proj.{'bias' if bias else 'weight'}" for label in "qkv"}
    axes = "(kv_heads [q: group head_dim | k: head_dim | v: head_dim])"

    def expected(rank: int, tp: int) -> Arrays:
        cut = part(q, rank, tp), kv_part(k, rank, tp, kv), kv_part(v, rank, tp, kv)
        return {targets[label].format(layer=0): array for label, array in zip("qkv", cut, strict=True)}

    check(rule("h.{layer}.qkv", targets, axes if bias else f"{axes} hidden"), config, {"h.0.qkv": np.concatenate(rows)}, expected, data)


@given(attention_sizes(even_heads=True), st.booleans(), st.data())
def test_interleaved_rotary_rows_become_half_split_within_each_head(sizes: dict[str, int], bias: bool, data: st.DataObject) -> None:
    """Interleaved: elements 2i and 2i + 1 rotate together. Half-split: i and i + head_dim / 2."""
    config = config_of(**sizes)
    heads, kv, dim = config.heads, config.kv_heads, config.head_dim
    width, kind = ((), "bias") if bias else ((config.hidden,), "weight")
    q, k = numbered((heads * dim, *width)), numbered((kv * dim, *width), 1)
    q_name, k_name = (f"layers.{{layer}}.attention.{name}_proj.{kind}" for name in "qk")
    hidden = "" if bias else " hidden"
    entries = rule("h.{layer}.q", q_name, f"(heads half_dim pair){hidden}") + rule(
        "h.{layer}.k", k_name, f"(kv_heads half_dim pair){hidden}"
    )

    def half_split(array: Array, count: int) -> Array:
        by_head = array.reshape(count, dim, *width)
        halves: Array = np.concatenate([by_head[:, 0::2], by_head[:, 1::2]], axis=1)
        return halves.reshape(array.shape)

    def expected(rank: int, tp: int) -> Arrays:
        return {
            q_name.format(layer=0): part(half_split(q, heads), rank, tp),
            k_name.format(layer=0): kv_part(half_split(k, kv), rank, tp, kv),
        }

    check(entries, config, {"h.0.q": q, "h.0.k": k}, expected, data)


@given(st.integers(1, 12), st.integers(1, 4), st.booleans(), st.data())
def test_fused_gate_and_up_are_cut_each_for_itself(ffn: int, hidden: int, interleaved: bool, data: st.DataObject) -> None:
    """Side by side, or row by row in turn."""
    config = config_of(ffn=ffn, hidden=hidden)
    gate, up = numbered((ffn, hidden)), numbered((ffn, hidden), 1)
    both = np.stack([gate, up], axis=1).reshape(2 * ffn, hidden) if interleaved else np.concatenate([gate, up])
    if interleaved:
        axes = "(ffn [gate: one | up: other]) hidden"
        own = "[axes]\none = 1\nother = 1\n" + "".join(
            f'[[parameter]]\nname = "layers.{{layer}}.mlp.{name}"\naxes = "(ffn {axis}) hidden"\ncut = "ffn"\nstage = "layer"\n'
            for name, axis in (("gate", "one"), ("up", "other"))
        )
        targets = {"gate": "layers.{layer}.mlp.gate", "up": "layers.{layer}.mlp.up"}
    else:
        axes, own, targets = "[gate: ffn | up: ffn] hidden", "", {"gate": GATE, "up": UP}

    def expected(rank: int, tp: int) -> Arrays:
        return {targets["gate"].format(layer=0): part(gate, rank, tp), targets["up"].format(layer=0): part(up, rank, tp)}

    check(own + rule("h.{layer}.gate_up", targets, axes), config, {"h.0.gate_up": both}, expected, data)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4), st.data())
def test_experts_are_stacked_and_each_is_cut(experts: int, width: int, hidden: int, data: st.DataObject) -> None:
    config = config_of(experts=experts, expert_ffn=width, hidden=hidden)
    gate_up = [numbered((2 * width, hidden), seed) for seed in range(experts)]
    down = [numbered((width, hidden), experts + seed) for seed in range(experts)]
    entries = rule("h.{layer}.e.{expert}.gate_up", {"g": EXPERTS["gate"], "u": EXPERTS["up"]}, "[g: expert_ffn | u: expert_ffn] hidden")
    entries += rule("h.{layer}.e.{expert}.down_t", EXPERTS["down"], "expert_ffn hidden")
    tensors = {f"h.0.e.{expert}.gate_up": array for expert, array in enumerate(gate_up)}
    tensors |= {f"h.0.e.{expert}.down_t": array for expert, array in enumerate(down)}

    def expected(rank: int, tp: int) -> Arrays:
        return {
            EXPERTS["gate"].format(layer=0): np.stack([part(array[:width], rank, tp) for array in gate_up]),
            EXPERTS["up"].format(layer=0): np.stack([part(array[width:], rank, tp) for array in gate_up]),
            EXPERTS["down"].format(layer=0): np.stack([part(array.T, rank, tp, 1) for array in down]),
        }

    check(entries, config, tensors, expected, data)


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["experts expert_ffn hidden", "(experts expert_ffn) hidden"]),
    st.data(),
)
def test_a_stack_that_is_cut_by_experts_gives_each_rank_its_experts(
    per_rank: int, width: int, hidden: int, axes: str, data: st.DataObject
) -> None:
    config = config_of(experts=per_rank * 2, expert_ffn=width, hidden=hidden)
    arrays = [numbered((width, hidden), seed) for seed in range(config.experts)]
    name = "layers.{layer}.mlp.own_experts"
    entries = f'[[parameter]]\nname = "{name}"\naxes = "{axes}"\ncut = "experts"\nstage = "layer"\n'
    tensors = {f"h.0.e.{expert}": array for expert, array in enumerate(arrays)}

    def expected(rank: int, tp: int) -> Arrays:
        mine = arrays[rank * config.experts // tp : (rank + 1) * config.experts // tp]
        return {name.format(layer=0): np.concatenate(mine) if "(" in axes else np.stack(mine)}

    check(entries + rule("h.{layer}.e.{expert}", name, "expert_ffn hidden"), config, tensors, expected, data)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 8), st.booleans(), st.data())
def test_a_padded_vocabulary_ends_in_zeros_and_they_do_not_come_back(
    vocab: int, hidden: int, factor: int, transposed: bool, data: st.DataObject
) -> None:
    config = config_of(vocab=vocab, hidden=hidden)
    table = numbered((vocab, hidden))
    multiple = math.lcm(*range(1, 11)) // 10 * factor
    padded = np.concatenate([table, np.zeros((-vocab % multiple, hidden), np.int64)])
    name = "embedding.tokens.embedding_table"
    entries = rule("wte", name, "hidden vocab" if transposed else "")
    expansion = expanded(table_of(entries), config, {"wte": np.ascontiguousarray(table.T) if transposed else table})
    for tp in (1, 2, 3, 4, 6, 7):
        layout = make_layout(config, expansion, tp=tp, pp=1, vocab_multiple=multiple)
        tensors = {"wte": np.ascontiguousarray(table.T) if transposed else table}
        ranks = slices_of(expansion, layout, tensors)
        assert all(np.array_equal(slices[name], part(padded, rank, tp)) for rank, slices in enumerate(ranks))
        assert np.array_equal(merged(expansion, layout, ranks)["wte"], tensors["wte"])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_range_of_a_composite_axis_is_the_union_of_its_boxes(sizes: list[int], data: st.DataObject) -> None:
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    indices = np.arange(total).reshape(sizes)
    places = [AtomPlace("", size, stride) for size, stride in zip(sizes, contiguous_strides(tuple(sizes)), strict=True)]
    boxes = ranges_of_axis(places, 0, start, stop)
    found = [indices[tuple(slice(first, first + length) for first, length in box)].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate(found), np.arange(start, stop))
    assert len(boxes) <= 2 * len(sizes) - 1


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3), st.data())
def test_a_range_of_an_axis_with_gaps_is_the_union_of_its_boxes(atoms: list[tuple[int, int]], data: st.DataObject) -> None:
    """As one part of a fused tensor lies in its axis: something else comes before it, after it, and between."""
    offset, stride = data.draw(st.integers(0, 3)), 1
    places: list[AtomPlace] = []
    for size, gap in reversed(atoms):
        places.insert(0, AtomPlace("", size, stride))
        stride = stride * size + gap
    numbers = np.full(offset + stride + 3, -1)
    indices = np.arange(math.prod(size for size, _ in atoms)).reshape([size for size, _ in atoms])
    for index, number in np.ndenumerate(indices):
        numbers[offset + sum(i * place.stride for i, place in zip(index, places, strict=True))] = number
    start = data.draw(st.integers(0, len(numbers) - 1))
    stop = data.draw(st.integers(start, len(numbers)))
    boxes = ranges_of_axis(places, offset, start, stop)
    found = [indices[tuple(slice(first, first + length) for first, length in box)].reshape(-1) for box in boxes]
    inside = numbers[start:stop]
    assert np.array_equal(np.concatenate([*found, np.zeros(0, int)]), inside[inside >= 0])


@pytest.mark.parametrize(("head_dim", "heads"), [(3, 2), (5, 1)])
def test_an_odd_head_dim_has_no_halves(head_dim: int, heads: int) -> None:
    entries = rule("h.{layer}.q", Q, "(heads half_dim pair) hidden")
    with pytest.raises(Refused, match=f"head_dim is {head_dim}, which is not pair \\(2\\) x half_dim \\({head_dim // 2}\\)"):
        expanded(table_of(entries), config_of(heads=heads, kv_heads=heads, head_dim=head_dim), {})
