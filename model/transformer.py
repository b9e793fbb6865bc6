"""The layer that decoder and encoder share."""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor, nn, ops

from model.attention import GroupedQueryAttention
from model.config import ModelConfig
from model.mlp import mlp
from model.norms import hidden_norm
from model.parallel import SINGLE, TensorParallel
from model.precision import Precision


class TransformerLayer(nn.Cell):
    """Attention and MLP, each with a residual connection and a norm: of its input (pre-norm) or of the sum (post-norm)."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.attention_norm = hidden_norm(config, precision)
        self.attention = GroupedQueryAttention(config, layer, precision, parallel)
        self.mlp_norm = hidden_norm(config, precision)
        self.mlp = mlp(config, precision, parallel)
        self.attention_dropout = nn.Dropout(p=config.hidden_dropout)
        self.mlp_dropout = nn.Dropout(p=config.hidden_dropout)
        self.add = ops.Add()

    def construct(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """x [batch, seq, hidden], cos and sin [1, 1, seq, rotary_dim], padding [batch, seq] bool, True where a key is to be ignored
        -> [batch, seq, hidden].
        """
        if self.pre_norm:
            x = self.add(x, self.attention_dropout(self.attention(self.attention_norm(x), cos, sin, padding)))
            return self.add(x, self.mlp_dropout(self.mlp(self.mlp_norm(x))))
        x = self.attention_norm(self.add(x, self.attention_dropout(self.attention(x, cos, sin, padding))))
        return self.mlp_norm(self.add(x, self.mlp_dropout(self.mlp(x))))


class TransformerLayers(nn.CellList):
    """Layers of a model, in order: all of them, or those of a pipeline stage. Their parameters carry their numbers in the whole model."""

    def __init__(
        self, config: ModelConfig, precision: Precision, parallel: TensorParallel = SINGLE, numbers: Sequence[int] | None = None
    ) -> None:
        numbers = range(config.layers) if numbers is None else numbers
        super().__init__()
        for number in numbers:
            self.insert_child_to_cell(str(number), TransformerLayer(config, number, precision, parallel))

    def __getitem__(self, index: int) -> TransformerLayer:
        """The layer at a place of this stage, from 0; CellList would look for it under its number, which is the whole model's."""
        layer: TransformerLayer = list(self.cells())[index]
        return layer
