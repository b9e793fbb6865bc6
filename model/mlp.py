"""The feed-forward block. Tensor parallelism divides ffn: gate and up by columns, down by rows. Configs are the rank's (`local_config`)."""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from model.config import ModelConfig
from model.linear import ColumnParallelLinear, RowParallelLinear
from model.ops import activation, swiglu
from model.parallel import SINGLE, TensorParallel
from model.precision import Precision


class MLP(nn.Cell):
    """down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.copy = parallel.copy()
        self.up_proj = ColumnParallelLinear(config.hidden, config.ffn, config.mlp_bias, precision)
        self.down_proj = RowParallelLinear(config.ffn, config.hidden, config.mlp_bias, precision, parallel)
        self.activation = activation(config.activation)

    def construct(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        return self.down_proj(self.activation(self.up_proj(self.copy(x))))


class GatedProduct(nn.Cell):
    """activation(gate) * up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = activation(config.activation)
        self.mul = ops.Mul()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [batch, seq, ffn] -> [batch, seq, ffn]."""
        return self.mul(self.activation(gate), up)


class GatedMLP(nn.Cell):
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GeGLU with gelu."""

    def __init__(self, config: ModelConfig, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.copy = parallel.copy()
        self.gate_proj = ColumnParallelLinear(config.hidden, config.ffn, config.mlp_bias, precision)
        self.up_proj = ColumnParallelLinear(config.hidden, config.ffn, config.mlp_bias, precision)
        self.down_proj = RowParallelLinear(config.ffn, config.hidden, config.mlp_bias, precision, parallel)
        self.product = swiglu() if config.activation == "silu" else GatedProduct(config)

    def construct(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        x = self.copy(x)
        return self.down_proj(self.product(self.gate_proj(x), self.up_proj(x)))


def mlp(config: ModelConfig, precision: Precision, parallel: TensorParallel = SINGLE) -> nn.Cell:
    return GatedMLP(config, precision, parallel) if config.gated_mlp else MLP(config, precision, parallel)
