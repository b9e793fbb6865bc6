"""The composed operators against their definitions in numpy float64."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from model.ops import ComposedAttention, ComposedRMSNorm, ComposedRotary, ComposedSwiGLU, RowLookup, Softmax, Tanh, activation
from model.precision import Precision
from tests.model.reference import relative_error

Wide = npt.NDArray[np.float64]

SIZES = st.integers(1, 5)
FLOAT32 = 5e-7
"""Relative error of a float32 result of a handful of operations."""


def normal(*shape: int, seed: int = 0, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def run(cell: Any, *arrays: npt.NDArray[Any]) -> npt.NDArray[Any]:
    result: npt.NDArray[Any] = cell(*(Tensor(array) for array in arrays)).asnumpy()
    return result


def softmax(x: Wide) -> Wide:
    powers = np.exp(x - x.max(-1, keepdims=True))
    result: Wide = powers / powers.sum(-1, keepdims=True)
    return result


def attention(query: Wide, key: Wide, value: Wide, scale: float, visible: npt.NDArray[np.bool_]) -> Wide:
    """Head by head; `visible` [batch, query, key]."""
    result = np.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[batch, head] @ key[batch, head // group].T * scale
            result[batch, head] = softmax(np.where(visible[batch], scores, -np.inf)) @ value[batch, head // group]
    return result


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_exp_sigmoid_and_tanh_are_as_precise_as_float32_allows(mode: int) -> None:
    ms.set_context(mode=mode)
    x = normal(64, 64)
    wide = x.astype(np.float64)
    for cell, wanted in (
        (Softmax(), softmax(wide)),
        (Tanh(), np.tanh(wide)),
        (activation("silu"), wide / (1 + np.exp(-wide))),
    ):
        np.testing.assert_allclose(run(cell, x), wanted, rtol=3e-7, atol=1e-30)


def test_activations_follow_their_definitions() -> None:
    x = normal(40, 50)
    wide = x.astype(np.float64)
    error_function = np.vectorize(math.erf)
    assert relative_error(run(activation("gelu"), x), wide * 0.5 * (1 + error_function(wide / math.sqrt(2)))) < FLOAT32
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    assert relative_error(run(activation("gelu_tanh"), x), wide * 0.5 * (1 + np.tanh(inner))) < FLOAT32
    np.testing.assert_array_equal(run(activation("relu"), x), np.maximum(x, 0))


@settings(max_examples=15)
@given(batch=SIZES, seq=SIZES, hidden=st.integers(1, 70), epsilon=st.sampled_from([1e-6, 1e-5, 0.1]))
def test_rms_norm_follows_its_definition(batch: int, seq: int, hidden: int, epsilon: float) -> None:
    x, gamma = normal(batch, seq, hidden), normal(hidden, seed=1)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * gamma
    assert relative_error(run(ComposedRMSNorm(epsilon), x, gamma), wanted) < FLOAT32


def test_rms_norm_of_half_precision_is_computed_in_float32() -> None:
    x = normal(3, 64, spread=1000.0).astype(np.float16)  # the squares overflow float16
    wide = x.astype(np.float64)
    got = run(ComposedRMSNorm(1e-6), x, np.ones(64, np.float16))
    assert got.dtype == np.float16
    assert relative_error(got, wide / np.sqrt((wide**2).mean(-1, keepdims=True))) < 1e-3


def test_attention_of_half_precision_is_masked_and_normalised_in_float32() -> None:
    query, key, value = (normal(1, 2, 40, 16, seed=seed).astype(np.float16) for seed in range(3))
    visible = np.tri(40, dtype=bool)[None]
    wanted = attention(query.astype(np.float64), key.astype(np.float64), value.astype(np.float64), 0.25, visible)
    got = run(ComposedAttention(0.25, causal=True), query, key, value)
    assert got.dtype == np.float16
    assert relative_error(got, wanted) < 2e-2  # the scores themselves come out of a float16 product


@settings(max_examples=15)
@given(batch=SIZES, heads=SIZES, seq=SIZES, half=st.integers(1, 20))
def test_rotary_turns_each_pair_by_its_angle(batch: int, heads: int, seq: int, half: int) -> None:
    x, angles = normal(batch, heads, seq, 2 * half), normal(1, 1, seq, half, seed=1)
    cos, sin = (np.concatenate([table(angles)] * 2, -1) for table in (np.cos, np.sin))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles.astype(np.float64))
    assert relative_error(run(ComposedRotary(), x, cos, sin), np.concatenate([turned.real, turned.imag], -1)) < FLOAT32


@settings(max_examples=15)
@given(batch=SIZES, seq=SIZES, ffn=st.integers(1, 70))
def test_swiglu_follows_its_definition(batch: int, seq: int, ffn: int) -> None:
    gate, up = normal(batch, seq, ffn), normal(batch, seq, ffn, seed=1)
    wide = gate.astype(np.float64)
    assert relative_error(run(ComposedSwiGLU(), gate, up), wide / (1 + np.exp(-wide)) * up) < FLOAT32


@settings(max_examples=25)
@given(
    batch=SIZES, kv_heads=SIZES, group=SIZES, seq=st.integers(1, 12), head_dim=st.integers(1, 20), window=st.none() | st.integers(1, 12),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_causal_attention_follows_its_definition(
    batch: int, kv_heads: int, group: int, seq: int, head_dim: int, window: int | None, seed: int
) -> None:
    query = normal(batch, kv_heads * group, seq, head_dim, seed=seed)
    key, value = (normal(batch, kv_heads, seq, head_dim, seed=seed + offset) for offset in (1, 2))
    row, column = np.indices((seq, seq))
    visible = np.broadcast_to((column <= row) & (column > row - (window or seq)), (batch, seq, seq))
    wanted = attention(query.astype(np.float64), key.astype(np.float64), value.astype(np.float64), 0.3, visible)
    assert relative_error(run(ComposedAttention(0.3, causal=True, window=window), query, key, value), wanted) < 1e-5


@settings(max_examples=25)
@given(batch=SIZES, heads=SIZES, lengths=st.lists(st.integers(1, 12), min_size=5, max_size=5), head_dim=st.integers(1, 20))
def test_attention_in_both_directions_ignores_padding(batch: int, heads: int, lengths: list[int], head_dim: int) -> None:
    query, key, value = (normal(batch, heads, 12, head_dim, seed=seed) for seed in range(3))
    padding = np.arange(12)[None] >= np.array(lengths[:batch])[:, None]
    visible = np.broadcast_to(~padding[:, None], (batch, 12, 12))
    wanted = attention(query.astype(np.float64), key.astype(np.float64), value.astype(np.float64), 0.3, visible)
    assert relative_error(run(ComposedAttention(0.3, causal=False), query, key, value, padding), wanted) < 1e-5


def test_causal_attention_refuses_a_padding_mask() -> None:
    x = normal(1, 2, 4, 8)
    with pytest.raises(ValueError, match="padding"):
        run(ComposedAttention(0.3, causal=True), x, x, x, np.zeros((1, 4), bool))


def test_a_bfloat16_table_is_read_in_the_compute_type() -> None:
    table, ids = normal(20, 8), np.array([[3, 19, 0]], np.int32)
    rows = RowLookup(Precision("bfloat16", "float32"))(Tensor(table, ms.bfloat16), Tensor(ids)).asnumpy()
    np.testing.assert_array_equal(rows, Tensor(table, ms.bfloat16).float().asnumpy()[ids])
