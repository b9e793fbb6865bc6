"""What the forward pass keeps for the backward pass, tensor by tensor.

The method is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4: add
up, per token, every tensor that some backward operator needs. There a layer keeps sbh (34 + 5 a s / h) bytes, and under tensor parallelism
sbh (10 + 24 / t + 5 a s / (h t)) (equations 1 and 2; s sequence, b micro-batch, h hidden, a heads, t tensor-parallel ranks). The bundled
layers differ from Megatron's: norms compute in float32 and so keep a float32 input; heads may be fewer for keys and values, the
feed-forward gated; the fused attention of Ascend keeps two statistics of each row of scores instead of the scores. `Kernels` states such
differences, and everything else follows from the ModelConfig.

On a CPU this is what MindSpore 2.10 holds when operators run one by one (tests/train/test_plan_activations.py measures it). Its graph mode
there holds several times as much, with or without recomputation: it does not free intermediate results of a backward graph early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from model.config import Activation, ModelConfig

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Kernels:
    """What operators keep, in bytes of an element.

    norm_input: the input of a norm. norm_scaled: what a composed RMS norm keeps besides, 0 for a fused one. flash: attention is one
    operator and keeps no scores; only for 16-bit activations without attention dropout (model/ops.py). softmax, exponential: the result of
    a softmax, of a sigmoid. rotary: whether a composed rotary embedding keeps its two factors. fused_gate: SwiGLU is one operator. mask:
    of a dropout mask, 0: the type of what it masks.
    """

    norm_input: int
    norm_scaled: int
    flash: bool
    softmax: int
    exponential: int
    rotary: bool
    fused_gate: bool
    mask: int = 0


FUSED = Kernels(norm_input=4, norm_scaled=0, flash=True, softmax=4, exponential=4, rotary=False, fused_gate=True)
"""The bundled model on Ascend."""

COMPOSED = Kernels(norm_input=4, norm_scaled=4, flash=False, softmax=8, exponential=8, rotary=True, fused_gate=False)
"""The bundled model on a CPU, where exponentials are float64."""

FLASH_STATISTICS = 2 * 8 * 4
"""Bytes that FlashAttentionScore keeps of each row of scores: maximum and sum, [batch, heads, seq, 8] float32 each."""


@dataclass(frozen=True)
class Kept:
    """One tensor that is kept: its bytes per token on one tensor-parallel rank."""

    name: str
    bytes_per_token: int


@lru_cache(maxsize=1024)
def of_rank(config: ModelConfig, tp: int) -> ModelConfig:
    """The config of what one tensor-parallel rank computes (model/parallel.py cuts its layers alike)."""
    return replace(config, heads=config.heads // tp, kv_heads=max(1, config.kv_heads // tp), ffn=config.ffn // tp)


def kept_by_layer(config: ModelConfig, seq: int, compute: int, kernels: Kernels) -> Iterator[Kept]:
    """What one layer keeps. `config` is the rank's (`of_rank`), `compute` the bytes of an element of the activations."""
    yield from _kept_by_norm("attention_norm", config, compute, kernels)
    yield from _kept_by_attention(config, seq, compute, kernels)
    yield from _kept_by_norm("mlp_norm", config, compute, kernels)
    yield from _kept_by_mlp(config, compute, kernels)
    if config.hidden_dropout:
        yield Kept("dropout masks", 2 * (kernels.mask or compute) * config.hidden)


@lru_cache(maxsize=1024)
def layer_bytes(config: ModelConfig, seq: int, compute: int, kernels: Kernels) -> int:
    """Bytes per token that one layer keeps."""
    return sum(kept.bytes_per_token for kept in kept_by_layer(config, seq, compute, kernels))


def end_bytes(config: ModelConfig, compute: int, kernels: Kernels) -> int:
    """Bytes per token that the final norm keeps, with its result, which the head reads."""
    return sum(kept.bytes_per_token for kept in _kept_by_norm("final_norm", config, compute, kernels))


def _kept_by_norm(name: str, config: ModelConfig, compute: int, kernels: Kernels) -> Iterator[Kept]:
    """The norm, and its result, which the linear layers after it read."""
    scaled = kernels.norm_scaled if config.norm == "rms_norm" else 0
    yield Kept(f"{name} input", (kernels.norm_input + scaled) * config.hidden)
    yield Kept(f"{name} result", compute * config.hidden)


def _kept_by_attention(config: ModelConfig, seq: int, compute: int, kernels: Kernels) -> Iterator[Kept]:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    if config.qk_norm:
        yield Kept("query and key norms", (kernels.norm_input + kernels.norm_scaled) * (query + key))
    if config.rope is not None and kernels.rotary:
        rotated = config.rope.rotary_dim * (config.heads + config.kv_heads)
        yield Kept("rotary factors", 2 * compute * rotated)
    yield Kept("query, key, value", compute * (query + 2 * key))
    if kernels.flash and not config.attention_dropout and compute == 2:
        yield Kept("attention result", compute * query)
        yield Kept("attention statistics", FLASH_STATISTICS * config.heads)
    else:
        yield Kept("scores", _score_bytes(config, compute, kernels) * config.heads * seq)
    yield Kept("o_proj input", compute * query)


def _score_bytes(config: ModelConfig, compute: int, kernels: Kernels) -> int:
    """Bytes of each score: the softmax, and what is multiplied with the values where that is another tensor; with dropout its mask."""
    if config.attention_dropout:
        return kernels.softmax + (kernels.mask or 4) + compute  # the bundled model masks float32
    return kernels.softmax + (compute if compute != kernels.softmax else 0)


def _kept_by_mlp(config: ModelConfig, compute: int, kernels: Kernels) -> Iterator[Kept]:
    if config.gated_mlp and config.activation == "silu" and kernels.fused_gate:
        yield Kept("gate and up", 2 * compute * config.ffn)
    elif config.gated_mlp:
        yield Kept("activation", (_activation_bytes(config.activation, compute, kernels) + compute) * config.ffn)
        yield Kept("up", compute * config.ffn)
    else:
        yield Kept("activation", _activation_bytes(config.activation, compute, kernels) * config.ffn)
    yield Kept("down_proj input", compute * config.ffn)


def _activation_bytes(activation: Activation, compute: int, kernels: Kernels) -> int:
    """Bytes of an element that an activation (model/ops.py) keeps besides its result."""
    if activation == "silu":  # x, the sigmoid, and the sigmoid in x's type
        return compute + kernels.exponential + (compute if compute != kernels.exponential else 0)
    return {"gelu_tanh": 1, "gelu": 3, "relu": 0}[activation] * compute
