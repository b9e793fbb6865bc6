"""The fused operators cannot run without an Ascend card. What can be checked here is that we call them as the installed MindSpore wants.

Two judges: MindSpore's own inference of types and shapes, which runs in graph mode before a kernel is looked for, and stand-ins that bind
each call to the operator's real signature and compute what its documentation says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Tensor, nn
from mindspore.ops.auto_generate import FlashAttentionScore, RmsNorm, RotaryPositionEmbedding, Swiglu

import model.ops
from model.build import build_model
from model.config import ModelConfig
from model.ops import (
    ComposedAttention,
    ComposedRMSNorm,
    ComposedRotary,
    ComposedSwiGLU,
    FusedAttention,
    FusedRMSNorm,
    FusedRotary,
    FusedSwiGLU,
)
from tests.model.reference import BERT, CONFIGS, QWEN3

Arrays = tuple[npt.NDArray[Any], ...]


def normal(*shape: int, seed: int = 0) -> npt.NDArray[np.float16]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


QUERY, KEY, VALUE = normal(2, 6, 40, 16), normal(2, 3, 40, 16, seed=1), normal(2, 3, 40, 16, seed=2)
PADDING = np.arange(40)[None] >= np.array([[40], [25]])
COS, SIN = normal(1, 1, 40, 16, seed=3), normal(1, 1, 40, 16, seed=4)
GATE, UP = normal(2, 10, 24), normal(2, 10, 24, seed=1)

CASES: dict[str, tuple[str, Callable[[], nn.Cell], Callable[[], nn.Cell], Arrays]] = {
    "RmsNorm": ("rms_norm", lambda: FusedRMSNorm(1e-5), lambda: ComposedRMSNorm(1e-5), (normal(2, 10, 24), normal(24, seed=1))),
    "RotaryPositionEmbedding": ("rotate", FusedRotary, ComposedRotary, (QUERY, COS, SIN)),
    "Swiglu": ("swiglu", FusedSwiGLU, ComposedSwiGLU, (GATE, UP)),
    "FlashAttentionScore": (
        "flash",
        lambda: FusedAttention(6, 0.25, causal=True),
        lambda: ComposedAttention(0.25, causal=True),
        (QUERY, KEY, VALUE),
    ),
    "FlashAttentionScore, window": (
        "flash",
        lambda: FusedAttention(6, 0.25, causal=True, window=7),
        lambda: ComposedAttention(0.25, causal=True, window=7),
        (QUERY, KEY, VALUE),
    ),
    "FlashAttentionScore, both directions": (
        "flash",
        lambda: FusedAttention(6, 0.25, causal=False),
        lambda: ComposedAttention(0.25, causal=False),
        (QUERY, KEY, VALUE),
    ),
    "FlashAttentionScore, padding": (
        "flash",
        lambda: FusedAttention(6, 0.25, causal=False),
        lambda: ComposedAttention(0.25, causal=False),
        (QUERY, KEY, VALUE, PADDING),
    ),
}
"""Operator -> the attribute that holds it, the two forms, inputs."""


@pytest.mark.parametrize("case", CASES)
def test_mindspore_infers_the_types_and_shapes_of_the_fused_operator(case: str) -> None:
    _, fused, _, arrays = CASES[case]
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(RuntimeError, match=rf"Unsupported op \[{case.split(',')[0]}\] on CPU"):
        fused()(*(Tensor(array) for array in arrays))


def test_mindspore_refuses_a_wrong_layout_before_it_looks_for_a_kernel() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(RuntimeError, match="must be equal to attribute 'head_num'"):
        FusedAttention(6, 0.25, causal=True)(*(Tensor(array.swapaxes(1, 2)) for array in (QUERY, KEY, VALUE)))


@pytest.mark.parametrize("case", CASES)
def test_the_pair_computes_the_same_by_the_operators_documentation(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, fused, composed, arrays = CASES[case]
    name = case.split(",")[0]
    monkeypatch.setattr(model.ops, name, STAND_INS[name])
    cell = fused()
    assert isinstance(getattr(cell, attribute), STAND_INS[name])
    tensors = [Tensor(array) for array in arrays]
    got, wanted = cell(*tensors), composed()(*tensors)
    assert got.dtype == wanted.dtype
    np.testing.assert_allclose(got.asnumpy(), wanted.asnumpy(), rtol=1e-2, atol=4e-3)  # float16, rounded at other places


def test_a_model_built_for_ascend_uses_every_fused_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.ops, "on_ascend", lambda: True)
    cells = [type(cell) for _, cell in build_model(QWEN3, "bfloat16").cells_and_names()]
    assert {FusedAttention, FusedRMSNorm, FusedRotary, FusedSwiGLU} <= set(cells)
    assert not {ComposedAttention, ComposedRMSNorm, ComposedRotary, ComposedSwiGLU} & set(cells)


@pytest.mark.parametrize("variant", ["llama-head-dim", "mistral-sliding", "qwen3", "bert-mlm"])
def test_mindspore_infers_a_whole_model_built_for_ascend(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.ops, "on_ascend", lambda: True)
    config = CONFIGS[variant]
    config = replace(config, layers=2, head_dim=16, rope=None if config.rope is None else replace(config.rope, rotary_dim=16))
    config = replace(config, sliding_layers=tuple(layer for layer in config.sliding_layers if layer < 2))
    ms.set_context(mode=ms.GRAPH_MODE)
    ids = Tensor(np.arange(24, dtype=np.int32)[None])
    with pytest.raises(RuntimeError, match=r"Unsupported op \[\w+\] on CPU"):
        build_model(config, "float16")(ids)


@pytest.mark.parametrize(
    ("config", "compute"),
    [
        (QWEN3, "float32"),  # the operator takes 16-bit floats only
        (replace(QWEN3, head_dim=24, rope=None, positions="learned"), "bfloat16"),  # and head sizes that are multiples of 16
        (replace(BERT, head_dim=16, attention_dropout=0.1), "bfloat16"),
    ],
)
def test_attention_that_the_fused_operator_does_not_take_is_composed(
    config: ModelConfig, compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.ops, "on_ascend", lambda: True)
    cells = [type(cell) for _, cell in build_model(config, compute).cells_and_names()]
    assert ComposedAttention in cells
    assert FusedAttention not in cells


class StandIn:
    """Calls bound to the signature of the operator `real`; the attributes of its constructor are in `self.settings`."""

    real: type
    compute: Callable[..., Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(self.real).bind(*args, **kwargs)
        bound.apply_defaults()
        self.settings = bound.arguments
        self.real(*args, **kwargs)  # its own checks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self.real.__call__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        inputs = {name: value for name, value in bound.arguments.items() if name != "self"}
        return self.compute(**{name: value.asnumpy() if isinstance(value, Tensor) else value for name, value in inputs.items()})


class DocumentedRmsNorm(StandIn):
    real = RmsNorm

    def compute(self, *, x: Any, gamma: Any) -> Any:
        assert x.dtype == gamma.dtype == np.float32
        rstd = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + self.settings["epsilon"])
        return Tensor((x * rstd * gamma).astype(np.float32)), Tensor(rstd.astype(np.float32))


class DocumentedRotaryPositionEmbedding(StandIn):
    real = RotaryPositionEmbedding

    def compute(self, *, x: Any, cos: Any, sin: Any, mode: int) -> Any:
        assert x.dtype == cos.dtype == sin.dtype
        assert mode == 0
        assert x.ndim == 4
        assert x.shape[3] % 2 == 0
        assert cos.shape == sin.shape == (1, 1, *x.shape[2:])  # "x is BNSD: 11SD"
        first, second = np.split(x, 2, -1)
        return Tensor(x * cos + np.concatenate([-second, first], -1) * sin)


class DocumentedSwiglu(StandIn):
    real = Swiglu

    def compute(self, *, input: Any, dim: int) -> Any:  # noqa: A002
        first, second = np.split(input.astype(np.float64), 2, dim)
        return Tensor((first / (1 + np.exp(-first)) * second).astype(input.dtype))


class DocumentedFlashAttentionScore(StandIn):
    real = FlashAttentionScore

    def visible(self, mask: Any, batch: int, seq: int) -> Any:
        """[batch, 1, seq, seq] True where a key takes part; 1 in `mask` discards, and modes 2 to 4 get the compressed triangle."""
        query, key = np.indices((seq, seq))
        mode = self.settings["sparse_mode"]
        if mode == 0:
            return np.ones((batch, 1, seq, seq), bool) if mask is None else mask == 0
        np.testing.assert_array_equal(mask, np.triu(np.ones((2048, 2048)), 1))
        if mode == 2:
            return np.broadcast_to(key <= query, (batch, 1, seq, seq))
        assert mode == 4
        band = (key >= query - self.settings["pre_tokens"]) & (key <= query + self.settings["next_tokens"])
        return np.broadcast_to(band, (batch, 1, seq, seq))

    def compute(self, *, query: Any, key: Any, value: Any, attn_mask: Any, **others: Any) -> Any:
        assert all(other is None for other in others.values())
        assert self.settings["input_layout"] == "BNSD"
        assert self.settings["keep_prob"] == 1
        assert query.dtype == key.dtype == value.dtype == np.float16
        batch, heads, seq, _ = query.shape
        assert heads == self.settings["head_num"]
        key, value = (np.repeat(array, heads // key.shape[1], 1).astype(np.float64) for array in (key, value))
        scores = query.astype(np.float64) @ key.swapaxes(-1, -2) * self.settings["scale_value"]
        scores = np.where(self.visible(attn_mask, batch, seq), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result = weights / weights.sum(-1, keepdims=True) @ value
        return None, None, None, Tensor(result.astype(query.dtype))


STAND_INS: dict[str, type[StandIn]] = {stand_in.real.__name__: stand_in for stand_in in StandIn.__subclasses__()}


def test_the_precision_of_a_model_decides_what_is_stored_and_what_is_computed() -> None:
    cell = build_model(replace(QWEN3, layers=1), "bfloat16", "float32")
    assert {str(parameter.dtype) for parameter in cell.get_parameters()} == {"BFloat16"}
    assert cell(Tensor(np.arange(8, dtype=np.int32)[None])).dtype == ms.float32
