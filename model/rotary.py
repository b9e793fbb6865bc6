"""Rotary position embedding: frequencies, their scaling for long contexts, and the cell that gives a layer its cosines and sines.

The scaling rules are those of transformers' modeling_rope_utils.py, rounded to float32 where it rounds, because an error of one unit in a
frequency becomes an error of `position` units in an angle. Everything is computed on the host, so every device sees the same tables.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn, ops

from model.config import ModelConfig, Rope, RopeScaling
from model.ops import rotary

Floats = npt.NDArray[np.float32]


def power(base: float, exponents: Any) -> Any:
    """base ** exponents for a float32 base, rounded to float32 once: what torch gives, and numpy's own float32 power does not."""
    return np.power(np.float64(np.float32(base)), np.asarray(exponents, np.float64)).astype(np.float32)


def powers(base: float, dim: int) -> Floats:
    """base ** (2i / dim) for i in [0, dim / 2), float32."""
    result: Floats = power(base, np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    return result


def dynamic_base(theta: float, dim: int, factor: float, max_positions: int, seq: int) -> float:
    """The base of NTK-aware scaling, which grows with the sequence once it is longer than `max_positions`."""
    length = max(seq, max_positions)
    stretch = np.float32(factor) * np.float32(length) / np.float32(max_positions) - np.float32(factor - 1)
    return float(np.float32(theta) * power(float(stretch), dim / (dim - 2)))


def llama3_frequencies(frequencies: Floats, scaling: RopeScaling, original: int) -> Floats:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, those between blended."""
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    wavelengths = np.float32(2 * math.pi) / frequencies
    factor = np.float32(scaling.factor)
    scaled = np.where(wavelengths > np.float32(original / low), frequencies / factor, frequencies)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelengths >= np.float32(original / high)) & (wavelengths <= np.float32(original / low))
    return np.where(between, blended, scaled).astype(np.float32)


def yarn_frequencies(theta: float, dim: int, scaling: RopeScaling, original: int) -> Floats:
    """YaRN (arXiv 2309.00071): a linear ramp between interpolated and unchanged frequencies."""

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction_dim(scaling.beta_fast or 32), correction_dim(scaling.beta_slow or 1)
    if scaling.truncate is None or scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = 1 - ramp
    unscaled = powers(theta, dim)
    return (1 / (np.float32(scaling.factor) * unscaled) * (1 - kept) + 1 / unscaled * kept).astype(np.float32)


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines: given, or from `mscale` and `mscale_all_dim`, or 0.1 ln(factor) + 1."""

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def inverse_frequencies(rope: Rope, max_positions: int, seq: int) -> tuple[Floats, float]:
    """Radians per position of each pair, [rotary_dim / 2] float32, and the factor of cosines and sines.

    Args:
        max_positions: `max_position_embeddings` of the model.
        seq: length of the sequence; only dynamic scaling depends on it.
    """
    dim, scaling = rope.rotary_dim, rope.scaling
    if scaling is None:
        return 1 / powers(rope.theta, dim), 1.0
    original = scaling.original_max_positions or max_positions
    if scaling.kind == "linear":
        return 1 / powers(rope.theta, dim) / np.float32(scaling.factor), 1.0
    if scaling.kind == "dynamic":
        return 1 / powers(dynamic_base(rope.theta, dim, scaling.factor, max_positions, seq), dim), 1.0
    if scaling.kind == "llama3":
        return llama3_frequencies(1 / powers(rope.theta, dim), scaling, original), 1.0
    return yarn_frequencies(rope.theta, dim, scaling, original), yarn_attention_factor(scaling)


def rotary_tables(rope: Rope, max_positions: int, seq: int) -> tuple[Floats, Floats]:
    """Cosines and sines for positions 0 .. seq-1, each [seq, rotary_dim] float32, the second half repeating the first."""
    frequencies, factor = inverse_frequencies(rope, max_positions, seq)
    angles = np.arange(seq, dtype=np.float32)[:, None] * frequencies[None, :]
    wide = np.concatenate([angles, angles], axis=-1).astype(np.float64)
    return np.cos(wide).astype(np.float32) * np.float32(factor), np.sin(wide).astype(np.float32) * np.float32(factor)


class RotaryEmbedding(nn.Cell):
    """The tables of one forward pass, shared by all layers. There are no parameters: they follow from the config."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rope, max_positions = config.rope, config.max_positions
        assert rope is not None, "build_model checks it"

        @functools.lru_cache(maxsize=8)
        def tables(seq: int) -> tuple[Tensor, Tensor]:
            cos, sin = rotary_tables(rope, max_positions, seq)
            return Tensor(cos[None, None]), Tensor(sin[None, None])

        self.tables = ms.constexpr(tables)

    def construct(self, seq: int) -> tuple[Tensor, Tensor]:
        """-> cos, sin, each [1, 1, seq, rotary_dim] float32."""
        tables: tuple[Tensor, Tensor] = self.tables(seq)
        return tables


class ApplyRotary(nn.Cell):
    """Rotates the first `rotary_dim` elements of each head and passes the others on."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        super().__init__()
        self.rotary_dim = rope.rotary_dim
        self.partial = rope.rotary_dim < head_dim
        self.rotary = rotary()
        self.front = ops.StridedSlice()
        self.back = ops.StridedSlice()
        self.join = ops.Concat(axis=-1)
        self.cast = ops.Cast()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, heads, seq, head_dim], cos and sin [1, 1, seq, rotary_dim] -> like x."""
        cos, sin = self.cast(cos, x.dtype), self.cast(sin, x.dtype)
        if self.partial:
            batch, heads, seq, head_dim = x.shape
            one = (1, 1, 1, 1)
            front = self.front(x, (0, 0, 0, 0), (batch, heads, seq, self.rotary_dim), one)
            back = self.back(x, (0, 0, 0, self.rotary_dim), (batch, heads, seq, head_dim), one)
            return self.join((self.rotary(front, cos, sin), back))
        return self.rotary(x, cos, sin)
