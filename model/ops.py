"""The operators that exist in two forms, and the only place that looks at the device.

On Ascend there are fused operators; elsewhere the same function is composed of elementary ones. The two forms of a pair have one
signature and one layout: attention tensors are [batch, heads, seq, head_dim] ("BNSD"), rotary tables [1, 1, seq, rotary_dim]. All are
cells that own their primitives, each used for operands of one kind, because MindSpore's parallel compiler takes a strategy per primitive.

The fused forms follow MindSpore 2.10: `FlashAttentionScore`, `RmsNorm`, `RotaryPositionEmbedding`, `Swiglu` in
mindspore/ops/auto_generate/gen_ops_prim.py, described in the docstrings of the functions of the same name in mindspore.ops.
"""

from __future__ import annotations

import functools
import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import FlashAttentionScore, RmsNorm, RotaryPositionEmbedding, Swiglu

from model.config import Activation
from model.precision import Precision

LOWEST = float(np.finfo(np.float32).min)
FLASH_MASK_SIZE = 2048  # the compressed causal mask that sparse modes 2 and 4 ask for
SPARSE_DEFAULT, SPARSE_CAUSAL, SPARSE_BAND = 0, 2, 4
UNBOUNDED = 2**31 - 1


def on_ascend() -> bool:
    return bool(ms.get_context("device_target") == "Ascend")


def exponential_type() -> ms.Type:
    """The type in which exp, sigmoid and tanh are computed.

    MindSpore's CPU kernels approximate them in float32: measured on 2.10, relative errors up to 1e-5 (softmax), 4e-6 (sigmoid) and 1e-4
    (tanh), more than all the rest of a forward pass. In float64 they are exact to the last bit of a float32 result.
    """
    return ms.float64 if ms.get_context("device_target") == "CPU" else ms.float32


# --- lookup and activations -------------------------------------------------------------------------------------------------------------


class RowLookup(nn.Cell):
    """Rows of a table, in the compute type."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.compute_type = precision.compute_type
        self.cast_table = not on_ascend()  # the CPU's Gather knows no bfloat16; on Ascend only the rows read need a cast
        self.gather = ops.Gather()
        self.cast = ops.Cast()

    def construct(self, table: Tensor, ids: Tensor) -> Tensor:
        """table [rows, hidden], ids [batch, seq] integers -> [batch, seq, hidden]."""
        if self.cast_table:
            return self.gather(self.cast(table, self.compute_type), ids, 0)
        return self.cast(self.gather(table, ids, 0), self.compute_type)


class Softmax(nn.Cell):
    """Softmax over the last axis; any float in, float32 out."""

    def __init__(self) -> None:
        super().__init__()
        self.exponential_type = exponential_type()
        self.softmax = ops.Softmax(axis=-1)
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        return self.cast(self.softmax(self.cast(x, self.exponential_type)), ms.float32)


class Tanh(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.exponential_type = exponential_type()
        self.tanh = ops.Tanh()
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        return self.cast(self.tanh(self.cast(x, self.exponential_type)), x.dtype)


class SiLU(nn.Cell):
    """x * sigmoid(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.exponential_type = exponential_type()
        self.sigmoid = ops.Sigmoid()
        self.mul = ops.Mul()
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        gate = self.sigmoid(self.cast(x, self.exponential_type))
        return self.mul(x, self.cast(gate, x.dtype))


class GELU(nn.Cell):
    """x * Phi(x) with the error function, not its tanh approximation."""

    def __init__(self) -> None:
        super().__init__()
        self.erf = ops.Erf()
        self.scale = ops.Mul()
        self.add = ops.Add()
        self.mul = ops.Mul()

    def construct(self, x: Tensor) -> Tensor:
        twice_phi = self.add(self.erf(self.scale(x, math.sqrt(0.5))), 1.0)
        return self.mul(self.scale(x, 0.5), twice_phi)


def activation(kind: Activation) -> nn.Cell:
    """An elementwise activation by its name in ModelConfig. MindSpore's GeLU operator is the tanh approximation."""
    return {"silu": SiLU, "gelu": GELU, "gelu_tanh": ops.GeLU, "relu": ops.ReLU}[kind]()


# --- RMS norm ---------------------------------------------------------------------------------------------------------------------------


class ComposedRMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + epsilon) * gamma over the last axis, in float32."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.square = ops.Square()
        self.mean = ops.ReduceMean(keep_dims=True)
        self.add = ops.Add()
        self.rsqrt = ops.Rsqrt()
        self.scale = ops.Mul()
        self.mul = ops.Mul()
        self.cast = ops.Cast()

    def construct(self, x: Tensor, gamma: Tensor) -> Tensor:
        """x [..., hidden], gamma [hidden] -> [..., hidden] in x's type."""
        wide = self.cast(x, ms.float32)
        inverse_rms = self.rsqrt(self.add(self.mean(self.square(wide), -1), self.epsilon))
        return self.cast(self.mul(self.scale(wide, inverse_rms), self.cast(gamma, ms.float32)), x.dtype)


class FusedRMSNorm(nn.Cell):
    """ComposedRMSNorm as one operator."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.rms_norm = RmsNorm(epsilon=epsilon)
        self.cast = ops.Cast()

    def construct(self, x: Tensor, gamma: Tensor) -> Tensor:
        """x [..., hidden], gamma [hidden] -> [..., hidden] in x's type."""
        normed, _ = self.rms_norm(self.cast(x, ms.float32), self.cast(gamma, ms.float32))
        return self.cast(normed, x.dtype)


def rms_norm(epsilon: float) -> nn.Cell:
    return FusedRMSNorm(epsilon) if on_ascend() else ComposedRMSNorm(epsilon)


# --- rotary position embedding ----------------------------------------------------------------------------------------------------------


class ComposedRotary(nn.Cell):
    """Rotates element i of a head with element i + head_dim / 2: x * cos + [-second half, first half] * sin."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = ops.Split(axis=-1, output_num=2)
        self.join = ops.Concat(axis=-1)
        self.neg = ops.Neg()
        self.mul = ops.Mul()
        self.add = ops.Add()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, heads, seq, dim], cos and sin [1, 1, seq, dim], all of one type -> like x."""
        first, second = self.halves(x)
        turned = self.join((self.neg(second), first))
        return self.add(self.mul(x, cos), self.mul(turned, sin))


class FusedRotary(nn.Cell):
    """ComposedRotary as one operator (mode 0 is the half-split order)."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = RotaryPositionEmbedding()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, heads, seq, dim], cos and sin [1, 1, seq, dim], all of one type -> like x."""
        return self.rotate(x, cos, sin, 0)


def rotary() -> nn.Cell:
    return FusedRotary() if on_ascend() else ComposedRotary()


# --- SwiGLU -----------------------------------------------------------------------------------------------------------------------------


class ComposedSwiGLU(nn.Cell):
    """silu(gate) * up."""

    def __init__(self) -> None:
        super().__init__()
        self.silu = SiLU()
        self.mul = ops.Mul()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [batch, seq, ffn] -> [batch, seq, ffn]."""
        return self.mul(self.silu(gate), up)


class FusedSwiGLU(nn.Cell):
    """ComposedSwiGLU as one operator.

    Gate and up are stacked on an axis of their own: along ffn, which tensor parallelism cuts, they could not be joined without
    communication.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = ops.Stack(axis=2)
        self.swiglu = Swiglu()
        self.squeeze = ops.Squeeze(axis=2)

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [batch, seq, ffn] -> [batch, seq, ffn]."""
        return self.squeeze(self.swiglu(self.stack((gate, up)), 2))


def swiglu() -> nn.Cell:
    return FusedSwiGLU() if on_ascend() else ComposedSwiGLU()


# --- attention --------------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def causal_bias(seq: int, window: int | None) -> Tensor:
    """[1, 1, seq, seq] float32: 0 where query i sees key j (j <= i and, with a window, j > i - window), the lowest float elsewhere."""
    query, key = np.arange(seq)[:, None], np.arange(seq)[None, :]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return Tensor(np.where(hidden, np.float32(LOWEST), np.float32(0))[None, None])


@functools.lru_cache(maxsize=1)
def flash_mask() -> Tensor:
    """[2048, 2048] uint8: 1 above the diagonal, what the operator discards. It repeats this block over longer sequences."""
    return Tensor(np.triu(np.ones((FLASH_MASK_SIZE, FLASH_MASK_SIZE), np.uint8), 1))


def check_padding(causal: bool, padding: Tensor | None) -> None:
    if causal and padding is not None:
        raise ValueError("causal attention takes no padding mask: pad on the right, where nothing sees it")


class ComposedAttention(nn.Cell):
    """softmax(scale * query key^T) value; heads / kv_heads neighbouring query heads share a key/value head.

    Args:
        scale: factor of the scores.
        causal: query i sees keys up to i; with `window`, only the last `window` of them, itself included.
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(self, scale: float, causal: bool, window: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = scale
        self.causal = causal
        self.window = window
        self.causal_bias = ms.constexpr(causal_bias)
        self.score = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.mul = ops.Mul()
        self.hide_future = ops.Add()
        self.padding_bias = ops.Mul()
        self.hide_padding = ops.Add()
        self.softmax = Softmax()
        self.dropout = nn.Dropout(p=dropout)
        self.reshape = ops.Reshape()
        self.cast = ops.Cast()

    def construct(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """query [batch, heads, seq, head_dim]; key, value [batch, kv_heads, seq, head_dim]; padding [batch, seq] bool, True where a key is
        to be ignored -> [batch, heads, seq, head_dim]. Raises ValueError for padding in causal attention.
        """
        check_padding(self.causal, padding)
        batch, heads, seq, head_dim = query.shape
        kv_heads = key.shape[1]
        by_group = (batch, kv_heads, heads // kv_heads * seq, head_dim)
        scores = self.score(self.reshape(query, by_group), key)
        scores = self.mul(self.cast(self.reshape(scores, (batch, heads, seq, seq)), ms.float32), self.scale)
        if self.causal:
            scores = self.hide_future(scores, self.causal_bias(seq, self.window))
        if padding is not None:
            bias = self.padding_bias(self.cast(padding, ms.float32), LOWEST)
            scores = self.hide_padding(scores, self.reshape(bias, (batch, 1, 1, seq)))
        weights = self.cast(self.dropout(self.softmax(scores)), value.dtype)
        mixed = self.mix(self.reshape(weights, (batch, kv_heads, heads // kv_heads * seq, seq)), value)
        return self.reshape(mixed, query.shape)


class FusedAttention(nn.Cell):
    """ComposedAttention without dropout as one operator, for float16 and bfloat16.

    Causal attention uses the operator's compressed mask (sparse mode 2, or 4 for a band of `window - 1` tokens before the query), so that
    no [seq, seq] mask exists; a padding mask is given in full.
    """

    def __init__(self, heads: int, scale: float, causal: bool, window: int | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.flash = FlashAttentionScore(
            head_num=heads,
            keep_prob=1.0,
            scale_value=scale,
            pre_tokens=UNBOUNDED if window is None else window - 1,
            next_tokens=0 if causal else UNBOUNDED,
            input_layout="BNSD",
            sparse_mode=SPARSE_DEFAULT if not causal else SPARSE_CAUSAL if window is None else SPARSE_BAND,
        )
        self.flash_mask = flash_mask() if causal else None
        self.reshape = ops.Reshape()
        self.cast = ops.Cast()

    def construct(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """query [batch, heads, seq, head_dim]; key, value [batch, kv_heads, seq, head_dim]; padding [batch, seq] bool, True where a key is
        to be ignored -> [batch, heads, seq, head_dim]. Raises ValueError for padding in causal attention.
        """
        check_padding(self.causal, padding)
        mask = self.flash_mask
        if padding is not None:
            batch, _, seq, _ = query.shape
            mask = ops.BroadcastTo((batch, 1, seq, seq))(self.reshape(self.cast(padding, ms.uint8), (batch, 1, 1, seq)))
        return self.flash(query, key, value, None, None, None, mask, None, None, None)[3]


def attention(heads: int, head_dim: int, scale: float, causal: bool, window: int | None, dropout: float, precision: Precision) -> nn.Cell:
    """Scaled dot-product attention.

    The fused operator takes 16-bit floats and head sizes that are multiples of 16 up to 512. Attention dropout stays composed, since the
    fused operator wants its random mask as packed bits.
    """
    fits = precision.compute in ("float16", "bfloat16") and head_dim % 16 == 0 and head_dim <= 512 and dropout == 0
    if on_ascend() and fits:
        return FusedAttention(heads, scale, causal, window)
    return ComposedAttention(scale, causal, window, dropout)
