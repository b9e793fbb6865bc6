"""Fused tensors at any number of heads, sizes and ranks are what numpy makes of the ranks' slices, and give the parts back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.layout import cutting_of, make_layout
from mappings.composition import compose
from mappings.dialect_table import target_named
from mappings.expand import expand
from mappings.tables import bundled_table
from tests.converter.cut_by_hand import rows
from tests.converter.dialects_by_hand import LEGACY, MCORE, alternating, by_kv_group, side_by_side
from tests.converter.planned import Array, Arrays, config_of, merged, numbered, slices_of

FUSED = [*MCORE, *(target for target in LEGACY if target.endswith("-fused"))]
NAMES = {
    True: ("decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
    False: ("model.layers.0.attention.w_qkv.weight", "model.layers.0.feed_forward.w_gate_hidden.weight"),
}


def expected(target: str, tensors: Arrays, rank: int, tp: int, kv_heads: int) -> tuple[Array, Array]:
    """A rank's two fused tensors, by hand."""
    q, k, v = (rows(tensors[f"model.layers.0.self_attn.{part}_proj.weight"], rank, tp) for part in "qkv")
    gate, up = (rows(tensors[f"model.layers.0.mlp.{part}_proj.weight"], rank, tp) for part in ("gate", "up"))
    version = target.partition("@")[2]
    together = version in ("2.0-contiguous", "2.0-contiguous-attention", "1.3-fused")
    qkv = side_by_side(q, k, v) if together else by_kv_group(q, k, v, kv_heads // tp)
    return qkv, side_by_side(gate, up) if version in ("2.0-contiguous", "2.0-contiguous-mlp", "1.3-fused") else alternating(gate, up)


@settings(max_examples=60)
@given(st.sampled_from(FUSED), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_fused_tensors_of_any_size(target: str, tp: int, kv_per_rank: int, group: int, head_dim: int, ffn_per_rank: int) -> None:
    kv_heads = tp * kv_per_rank
    heads = kv_heads * group
    config = config_of(
        family="llama", layers=1, head=True, hidden=heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        ffn=tp * ffn_per_rank, vocab=tp * 5, padded_vocab=tp * 5,
    )  # fmt: skip
    canonical = expand(bundled_table("llama"), config, {}, ())
    dialect = target_named(target)
    layout = make_layout(config, canonical, tp=tp, pp=1, dialect=dialect)
    composed = compose(canonical, dialect, cutting_of(layout), "llama")
    tensors = {name: numbered(shape, seed) for seed, (name, shape) in enumerate(canonical.hf_shapes.items())}
    ranks = slices_of(composed, layout, tensors)
    for rank, slices in enumerate(ranks):
        for name, array in zip(NAMES[target.startswith("mindformers@")], expected(target, tensors, rank, tp, kv_heads), strict=True):
            assert np.array_equal(slices[name], array)
    back = merged(composed, layout, ranks)
    assert back.keys() == tensors.keys() and all(np.array_equal(back[name], array) for name, array in tensors.items())
