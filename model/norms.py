"""Normalisation over the last axis, in float32. Every rank holds gamma and beta whole."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from model.config import ModelConfig
from model.ops import rms_norm
from model.precision import Precision, unset_parameter


class RMSNorm(nn.Cell):
    """x / rms(x) * (gamma + offset). Offset 1 is Gemma's: its checkpoints store gamma - 1, and so does `gamma` here."""

    def __init__(self, size: int, epsilon: float, offset: float, precision: Precision) -> None:
        super().__init__()
        self.gamma = unset_parameter((size,), precision, "gamma")
        self.offset = offset
        self.norm = rms_norm(epsilon)
        self.add = ops.Add()
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        if self.offset:
            return self.norm(x, self.add(self.cast(self.gamma, ms.float32), self.offset))
        return self.norm(x, self.gamma)


class LayerNorm(nn.Cell):
    """(x - mean) / std * (gamma + offset) + beta."""

    def __init__(self, size: int, epsilon: float, offset: float, precision: Precision) -> None:
        super().__init__()
        self.gamma = unset_parameter((size,), precision, "gamma")
        self.beta = unset_parameter((size,), precision, "beta")
        self.offset = offset
        self.norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=epsilon)
        self.add = ops.Add()
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        gamma = self.cast(self.gamma, ms.float32)
        if self.offset:
            gamma = self.add(gamma, self.offset)
        normed, _, _ = self.norm(self.cast(x, ms.float32), gamma, self.cast(self.beta, ms.float32))
        return self.cast(normed, x.dtype)


def hidden_norm(config: ModelConfig, precision: Precision) -> nn.Cell:
    """The norm that `config` names, over the hidden axis."""
    kind = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}[config.norm]
    return kind(config.hidden, config.norm_eps, config.norm_offset, precision)
