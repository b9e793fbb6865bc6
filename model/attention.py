"""Self-attention with as many key/value heads as the config says: one per query head, one per group of them, or one for all."""

from __future__ import annotations

from mindspore import Parameter, Tensor, nn, ops

from model.config import ModelConfig
from model.linear import ColumnParallelLinear, RowParallelLinear
from model.norms import RMSNorm
from model.ops import attention
from model.parallel import SINGLE, TensorParallel
from model.precision import Precision
from model.rotary import ApplyRotary


def score_scale(config: ModelConfig, layer: int) -> float:
    """The factor of the attention scores of layer `layer`, counted from 0."""
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return scale / (layer + 1) if config.scale_by_layer else scale


class GroupedQueryAttention(nn.Cell):
    """Attention of layer `layer`. Tensor parallelism divides the heads: q, k and v by columns, o by rows.

    `config` is the rank's (`local_config`). `head_dim * heads` need not be `hidden`. With `qk_norm` queries and keys are
    normalised per head before they are rotated.
    """

    def __init__(self, config: ModelConfig, layer: int, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        query_size, key_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.copy = parallel.copy()
        self.q_proj = ColumnParallelLinear(config.hidden, query_size, config.qkv_bias, precision)
        self.k_proj = ColumnParallelLinear(config.hidden, key_size, config.qkv_bias, precision)
        self.v_proj = ColumnParallelLinear(config.hidden, key_size, config.qkv_bias, precision)
        self.o_proj = RowParallelLinear(query_size, config.hidden, config.output_bias, precision, parallel)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset, precision) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset, precision) if config.qk_norm else None
        self.rotate = ApplyRotary(config.rope, config.head_dim) if config.rope is not None else None
        self.attention = attention(
            config.heads,
            config.head_dim,
            score_scale(config, layer),
            causal=config.kind == "decoder",
            window=config.sliding_window if layer in config.sliding_layers else None,
            dropout=config.attention_dropout,
            precision=precision,
        )
        self.reshape = ops.Reshape()
        self.heads_first = ops.Transpose()
        self.heads_last = ops.Transpose()

    def partial_parameters(self) -> list[Parameter]:
        """What every rank holds whole and uses for its own heads only: a gradient is the sum of the tensor-parallel ranks'."""
        return [norm.gamma for norm in (self.q_norm, self.k_norm) if norm is not None]

    def key_value_parameters(self) -> list[Parameter]:
        """What ranks that share a KV head hold alike, each using it for its own query heads: a gradient is the sum of theirs."""
        found = [self.k_proj.weight, self.k_proj.bias, self.v_proj.weight, self.v_proj.bias]
        return [parameter for parameter in found if parameter is not None]

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, seq, n * head_dim] -> [batch, seq, n, head_dim]."""
        return self.reshape(x, (x.shape[0], x.shape[1], -1, self.head_dim))

    def construct(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden], cos and sin [1, 1, seq, rotary_dim], padding [batch, seq] bool, True where a key is to be ignored
        -> [batch, seq, hidden].
        """
        x = self.copy(x)
        query, key, value = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (self.heads_first(heads, (0, 2, 1, 3)) for heads in (query, key, value))
        if self.rotate is not None:
            query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        mixed = self.heads_last(self.attention(query, key, value, padding), (0, 2, 1, 3))
        return self.o_proj(self.reshape(mixed, (x.shape[0], x.shape[1], -1)))
