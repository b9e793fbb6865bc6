"""The two ends of a model that know the vocabulary: embeddings of tokens, positions and segments, and the output head."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from model.config import ModelConfig
from model.norms import hidden_norm
from model.ops import RowLookup, on_ascend
from model.parallel import SINGLE, TensorParallel
from model.precision import Precision, unset_parameter


class Embedding(nn.Cell):
    """A table of row vectors. Every rank holds it whole."""

    def __init__(self, rows: int, hidden: int, precision: Precision) -> None:
        super().__init__()
        self.embedding_table = unset_parameter((rows, hidden), precision, "embedding_table")
        self.lookup = RowLookup(precision)

    def construct(self, ids: Tensor) -> Tensor:
        """ids [batch, seq] integers in [0, rows) -> [batch, seq, hidden]."""
        return self.lookup(self.embedding_table, ids)


class VocabParallelEmbedding(Embedding):
    """A token embedding whose rows may be divided over tensor-parallel ranks: each looks up its own ids, and the results are summed.

    `rows` are the rank's; it holds those from `rank * rows` on.
    """

    def __init__(self, rows: int, hidden: int, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__(rows, hidden, precision)
        self.divided = parallel.size > 1
        self.first_row = parallel.rank * rows
        self.rows = rows
        self.reduce = parallel.reduce()
        self.cast = ops.Cast()

    def construct(self, ids: Tensor, table: Tensor | None = None) -> Tensor:
        """ids [batch, seq] integers in [0, rows of all ranks) -> [batch, seq, hidden]. `table`: the embedding's, in the compute type, where
        it was cast already.
        """
        if table is None:
            table = self.embedding_table
        if not self.divided:
            return self.lookup(table, ids)
        own = ids - self.first_row
        here = ops.logical_and(own >= 0, own < self.rows)
        found = self.lookup(table, own * self.cast(here, ms.int32))
        return self.reduce(found * ops.expand_dims(self.cast(here, found.dtype), -1))


class PositionEmbedding(nn.Cell):
    """Learned positions 0 .. seq-1."""

    def __init__(self, positions: int, hidden: int, precision: Precision) -> None:
        super().__init__()
        self.positions = positions
        self.compute_type = precision.compute_type
        self.cast_table = not on_ascend()  # the CPU's StridedSliceGrad knows no bfloat16; on Ascend only the rows read need a cast
        self.embedding_table = unset_parameter((positions, hidden), precision, "embedding_table")
        self.slice = ops.StridedSlice()
        self.cast = ops.Cast()

    def construct(self, seq: int) -> Tensor:
        """-> [seq, hidden]. Raises ValueError for a sequence longer than the table."""
        if seq > self.positions:
            raise ValueError(f"a sequence of {seq} tokens, but the model has {self.positions} positions")
        end = (seq, self.embedding_table.shape[1])
        if self.cast_table:
            return self.slice(self.cast(self.embedding_table, self.compute_type), (0, 0), end, (1, 1))
        return self.cast(self.slice(self.embedding_table, (0, 0), end, (1, 1)), self.compute_type)


class TransformerEmbedding(nn.Cell):
    """What the first layer sees: tokens, plus segments and learned positions where the config has them; normalised in a post-norm model."""

    def __init__(self, config: ModelConfig, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(config.padded_vocab, config.hidden, precision, parallel)
        self.token_types = Embedding(config.token_types, config.hidden, precision) if config.token_types else None
        self.positions = PositionEmbedding(config.max_positions, config.hidden, precision) if config.positions == "learned" else None
        self.norm = hidden_norm(config, precision) if config.norm_position == "post" else None
        self.dropout = nn.Dropout(p=config.embedding_dropout)
        self.add_types = ops.Add()
        self.add_positions = ops.Add()

    def construct(self, ids: Tensor, token_types: Tensor | None = None, table: Tensor | None = None) -> Tensor:
        """ids, token_types [batch, seq] integers -> [batch, seq, hidden]. No token types means type 0; `table` goes to `tokens`."""
        x = self.tokens(ids, table)
        if self.token_types is not None:
            x = self.add_types(x, self.token_types(ops.zeros_like(ids) if token_types is None else token_types))
        if self.positions is not None:
            x = self.add_positions(x, self.positions(ids.shape[1]))
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class VocabParallelHead(nn.Cell):
    """Logits over the vocabulary, which may be divided over tensor-parallel ranks like the rows of the embedding.

    A tied head has no weight of its own and uses the embedding's table.
    """

    def __init__(self, config: ModelConfig, has_bias: bool, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.copy = parallel.copy()
        shape = (config.padded_vocab, config.hidden)
        self.weight = None if config.tied else unset_parameter(shape, precision, "weight")
        self.bias = unset_parameter(shape[:1], precision, "bias") if has_bias else None
        self.matmul = ops.MatMul(transpose_b=True)
        self.add = ops.Add()
        self.reshape = ops.Reshape()
        self.cast = ops.Cast()

    def construct(self, x: Tensor, embedding_table: Tensor) -> Tensor:
        """x [batch, seq, hidden], embedding_table [padded_vocab, hidden] -> logits [batch, seq, padded_vocab], of the rank's rows."""
        x = self.copy(x)
        table = embedding_table if self.weight is None else self.weight
        logits = self.matmul(self.reshape(x, (-1, x.shape[-1])), self.cast(table, x.dtype))
        if self.bias is not None:
            logits = self.add(logits, self.cast(self.bias, logits.dtype))
        return self.reshape(logits, (*x.shape[:-1], -1))
