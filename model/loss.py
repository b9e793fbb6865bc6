"""Cross entropy over a vocabulary that may be divided over tensor-parallel ranks."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from model.config import ModelConfig
from model.ops import LOWEST, exponential_type
from model.parallel import SINGLE, GatherRanks, TensorParallel

IGNORED = -100
"""The label of a position that predicts nothing, as in Transformers."""


class VocabParallelCrossEntropy(nn.Cell):
    """-log softmax(logits)[label], in float32, summed over the positions that have a label.

    No rank sees all logits: the ranks exchange the maximum, the sum of exponentials and the label's logit of each position (Megatron-LM,
    arXiv:1909.08053, section 3). Rows past the true vocabulary have no part in the softmax. The maximum goes through a gather, since
    MindSpore's CPU collectives have no AllReduce(max).
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        rows = config.padded_vocab  # the rank's
        self.first_row = parallel.rank * rows
        self.rows = rows
        self.divided = parallel.size > 1
        is_padding = np.arange(self.first_row, self.first_row + rows) >= config.vocab
        self.padding = Tensor(np.where(is_padding, np.float32(LOWEST), np.float32(0))) if is_padding.any() else None
        self.gather_ranks = GatherRanks(parallel.size, parallel.rank, parallel.group) if self.divided else None
        self.sum_ranks = parallel.reduce()
        self.wide = exponential_type()
        self.cast = ops.Cast()
        self.reshape = ops.Reshape()
        self.hide_padding = ops.Add()
        self.shift = ops.Sub()
        self.exp = ops.Exp()
        self.log = ops.Log()
        self.max = ops.ReduceMax(keep_dims=True)
        self.sum = ops.ReduceSum()
        self.pick = ops.GatherD()
        self.has_label = ops.NotEqual()
        self.without_ignored = ops.Mul()
        self.column = ops.ExpandDims()
        self.subtract = ops.Sub()
        self.mask = ops.Mul()
        self.total = ops.ReduceSum()

    def largest(self, logits: Tensor) -> Tensor:
        """The largest logit of each position over all ranks, [tokens, 1], as a constant: it cancels out of the loss."""
        local = ops.stop_gradient(self.max(logits, -1))
        if self.gather_ranks is None:
            return local
        return ops.stop_gradient(ops.ReduceMax()(self.gather_ranks(ops.expand_dims(local, 0)), 0))

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [batch, seq, the rank's rows], labels [batch, seq] int32, IGNORED or in [0, vocab) -> the sum, a float32 scalar."""
        logits = self.cast(self.reshape(logits, (-1, self.rows)), ms.float32)
        labels = self.reshape(labels, (-1,))
        if self.padding is not None:
            logits = self.hide_padding(logits, self.padding)
        shifted = self.shift(logits, self.largest(logits))
        labelled = self.has_label(labels, IGNORED)
        exponentials, picked = self.sum(self.exp(shifted), -1), self.label_logits(shifted, labels, labelled)
        if self.divided:
            # One exchange for both: two independent ones could meet in another order on another rank
            both = self.sum_ranks(ops.stack((exponentials, picked)))
            exponentials, picked = both[0], both[1]
        losses = self.subtract(self.cast(self.log(self.cast(exponentials, self.wide)), ms.float32), picked)
        return self.total(self.mask(losses, self.cast(labelled, ms.float32)))

    def label_logits(self, shifted: Tensor, labels: Tensor, labelled: Tensor) -> Tensor:
        """shifted [tokens, rows], labels and labelled [tokens] -> the logit of each label, [tokens]: 0 where another rank has it, anything
        where there is no label.
        """
        if not self.divided:
            index = self.without_ignored(labels, self.cast(labelled, ms.int32))
            return self.reshape(self.pick(shifted, 1, self.column(index, -1)), (-1,))
        own = labels - self.first_row
        here = ops.logical_and(own >= 0, own < self.rows)
        picked = self.pick(shifted, 1, ops.expand_dims(own * self.cast(here, ms.int32), -1))
        return ops.reshape(picked, (-1,)) * self.cast(here, ms.float32)
