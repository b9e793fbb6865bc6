"""How a model is cut: slices, stages, ranks, the padded vocabulary; and what is said when it cannot be cut so."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.layout import (
    MAX_RANKS,
    ParallelLayout,
    blockers,
    cut_axes,
    distinct_slices,
    make_layout,
    padded_vocabulary,
    slice_of,
    split_layers,
)
from mappings.errors import Refused
from mappings.expand import Expansion, expand
from mappings.tables import bundled_table
from model.config import ModelConfig
from tests.converter.planned import config_of


def expansion_of(config: ModelConfig, family: str = "llama") -> Expansion:
    return expand(bundled_table(family), config, {}, ())


def refusal(config: ModelConfig, **options: Any) -> str:
    with pytest.raises(Refused) as caught:
        make_layout(config, expansion_of(config), **({"tp": 1, "pp": 1} | options))
    assert all(problem.what for problem in caught.value.problems)
    assert caught.value.problems[-1].mend
    return str(caught.value)


models = st.builds(
    lambda kv_heads, group, head_dim, ffn, vocab, hidden: config_of(
        heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab, hidden=hidden
    ),
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.sampled_from([12, 24, 60, 66, 840]), st.integers(1, 300), st.integers(1, 9),
)  # fmt: skip


@given(models, st.data())
def test_slices_partition_every_parameters_cut_axis(config: ModelConfig, data: st.DataObject) -> None:
    expansion = expansion_of(config)
    tp = data.draw(st.sampled_from([tp for tp in range(1, 33) if not blockers(cut_axes(expansion), tp)]))
    layout = make_layout(config, expansion, tp=tp, pp=1)
    for item in expansion.parameters.values():
        pieces = [slice_of(item.parameter, item.shape, expansion.sizes, layout, rank) for rank in range(tp)]
        assert len({piece.shape(item.shape) for piece in pieces}) == 1
        distinct = list(distinct_slices(item.parameter, item.shape, expansion.sizes, layout))
        if pieces[0].axis is None:
            assert distinct == [(0, pieces[0])]
            assert pieces[0].shape(item.shape) == item.shape
            continue
        rows = [row for _, piece in distinct for row in range(piece.start, piece.stop)]
        assert rows == list(range(item.shape[pieces[0].axis]))
        assert [rank for rank, piece in distinct for _ in range(piece.replicas)] == [
            distinct[n // p.replicas][0] for n, p in enumerate(pieces)
        ]
        assert sum(math.prod(piece.shape(item.shape)) - piece.padding(item.shape) for _, piece in distinct) == math.prod(item.shape)


@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_each_rank_holds_the_kv_heads_of_its_query_heads(kv_heads: int, group: int, data: st.DataObject) -> None:
    config = config_of(heads=kv_heads * group, kv_heads=kv_heads, ffn=math.lcm(*range(1, 13)) * 6)
    expansion = expansion_of(config)
    tp = data.draw(st.sampled_from([tp for tp in range(1, 73) if not blockers(cut_axes(expansion), tp)]))
    layout = make_layout(config, expansion, tp=tp, pp=1)
    for rank in range(tp):
        q, k = (
            slice_of(item.parameter, item.shape, expansion.sizes, layout, rank)
            for item in (expansion.parameters[f"layers.0.attention.{name}_proj.weight"] for name in "qk")
        )
        if tp > 1:
            queries = range(q.start // config.head_dim, q.stop // config.head_dim)
            assert {query // group for query in queries} <= set(range(k.start // config.head_dim, k.stop // config.head_dim))


@given(st.integers(1, 10**6), st.integers(1, 300), st.one_of(st.none(), st.integers(1, 512)))
def test_the_padded_vocabulary_is_the_least_multiple_that_holds_the_true_one(vocab: int, tp: int, multiple: int | None) -> None:
    if multiple is not None and multiple % tp:
        with pytest.raises(Refused, match=f"--vocab-multiple {multiple} is not divisible by tp {tp}"):
            padded_vocabulary(vocab, tp, multiple)
        return
    padded = padded_vocabulary(vocab, tp, multiple)
    step = multiple or (1 if tp == 1 else math.lcm(128, tp))
    assert padded % step == 0
    assert padded % tp == 0
    assert vocab <= padded < vocab + step
    assert padded_vocabulary(padded, tp, multiple) == padded


@given(st.integers(1, 10**6))
def test_the_default_padding_is_the_same_for_every_power_of_two_up_to_128(vocab: int) -> None:
    assert len({padded_vocabulary(vocab, 2**power, None) for power in range(1, 8)}) == 1
    assert padded_vocabulary(vocab, 1, None) == vocab


@given(st.integers(1, 100), st.integers(1, 100))
def test_the_default_stages_partition_the_layers_evenly(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(Refused, match=f"{layers} layers cannot fill {pp} pipeline stages"):
            split_layers(layers, pp, None)
        return
    stages = split_layers(layers, pp, None)
    assert (len(stages), sum(stages)) == (pp, layers)
    assert max(stages) - min(stages) <= 1
    assert list(stages) == sorted(stages, reverse=True)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_layer_is_on_the_stage_that_counts_it(stages: list[int]) -> None:
    layout = ParallelLayout(1, len(stages), 1, split_layers(sum(stages), len(stages), tuple(stages)), 8, 8)
    assert [layout.stage_of_layer(layer) for layer in range(sum(stages))] == [stage for stage, n in enumerate(stages) for _ in range(n)]
    with pytest.raises(IndexError):
        layout.stage_of_layer(sum(stages))


@pytest.mark.parametrize(
    ("given_stages", "words"),
    [
        ((2, 2), "names 2 stages, --pp is 3"),
        ((1, 1, 1), "adds up to 3, the model has 4 layers"),
        ((4, 0, 0), "a stage has no layer"),
        ((5, -2, 1), "a stage has no layer"),
    ],
)
def test_stages_that_are_no_partition_are_refused(given_stages: tuple[int, ...], words: str) -> None:
    assert words in refusal(config_of(layers=4), pp=3, layers_per_stage=given_stages)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 5))
def test_ranks_are_numbered_by_stage_then_data_then_tensor(tp: int, pp: int, dp: int) -> None:
    layout = ParallelLayout(tp, pp, dp, (1,) * pp, 8, 8)
    order = [(stage, data, tensor) for stage in range(pp) for data in range(dp) for tensor in range(tp)]
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert [(place.stage, place.data, place.tensor) for place in places] == order
    assert [layout.rank(*place) for place in order] == list(range(layout.ranks)) == [place.rank for place in places]


@pytest.mark.parametrize(("tied", "pp", "stages"), [(True, 3, (0, 2)), (True, 1, (0,)), (False, 3, (0,)), (False, 1, (0,))])
def test_only_a_tied_embedding_is_on_both_ends_of_a_pipeline(tied: bool, pp: int, stages: tuple[int, ...]) -> None:
    config = config_of(layers=3, tied=tied)
    expansion = expansion_of(config)
    layout = make_layout(config, expansion, tp=1, pp=pp)
    places = {name: layout.stages_of(item.parameter, item.layer, tied) for name, item in expansion.parameters.items()}
    assert places["embedding.tokens.embedding_table"] == stages
    assert places["final_norm.gamma"] == (pp - 1,)
    assert places["layers.1.mlp_norm.gamma"] == (1 if pp == 3 else 0,)
    assert ("lm_head.weight" in places) is not tied


def test_a_refused_tp_names_the_heads_that_block_it_and_the_values_that_work() -> None:
    message = refusal(config_of(heads=9, kv_heads=3, ffn=1536), tp=2)
    assert "--tp 2 does not fit this model" in message
    assert "9 attention heads cannot be divided among 2 tensor-parallel ranks" in message
    assert "3 KV heads cannot be divided among 2 tensor-parallel ranks" in message
    assert "feed-forward" not in message
    assert "tp values that work for this model: 1, 3\n" in message + "\n"
    assert "work for this model: 1, 3, 9" in refusal(config_of(heads=9, kv_heads=3, ffn=1152), tp=2)


@pytest.mark.parametrize(("tp", "works"), [(1, True), (2, True), (4, True), (6, False), (8, True), (3, False), (16, False)])
def test_fewer_kv_heads_than_ranks_must_divide_them(tp: int, works: bool) -> None:
    axes = cut_axes(expansion_of(config_of(heads=8, kv_heads=4, ffn=48)))
    assert axes == {"heads": 8, "kv_heads": 4, "ffn": 48}
    assert (not blockers(axes, tp)) == works


def test_the_logical_width_counts_not_that_of_a_fused_tensor() -> None:
    message = refusal(config_of(heads=8, kv_heads=8, ffn=66), tp=4)
    assert "66 feed-forward width cannot be divided among 4" in message
    assert "attention heads" not in message
    assert message.endswith("1, 2")


@pytest.mark.parametrize("options", [{"tp": 0}, {"pp": 0}, {"dp": 0}, {"tp": -1}, {"tp": MAX_RANKS, "pp": 2}])
def test_a_layout_without_ranks_or_with_too_many_is_refused(options: dict[str, Any]) -> None:
    config = config_of()
    with pytest.raises(Refused, match=r"no such layout|too many ranks"):
        make_layout(config, expansion_of(config), **({"tp": 1, "pp": 1} | options))
