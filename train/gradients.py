"""After the backward passes: sums over the ranks that share a parameter, the mean over all tokens, and the global norm.

| shared by | why a rank's gradient is only a part | summed over |
|---|---|---|
| tensor-parallel ranks: norms of queries and keys | each rank's heads | the tensor group |
| tensor-parallel ranks with one KV head: k and v projections | each rank's query heads | the ranks that hold the same head |
| first and last stage: a tied embedding | lookup here, head there | the two ends |
| data-parallel ranks: everything | each rank's sequences | the data group |

All other replicas (norms, biases after a reduction) have the whole gradient already, since `CopyToRanks` and `SumOverRanks`
(model/parallel.py) make what reaches them equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from model.attention import GroupedQueryAttention
from model.stage import DecoderStage
from train.communication import Group, Groups, GroupSum
from train.sum_pieces import PIECE_ELEMENTS, sum_pieces

TIED = "embedding.tokens.embedding_table"


def _indices(stage: DecoderStage, weights: Sequence[Parameter], chosen: Sequence[Parameter]) -> tuple[int, ...]:
    names = {parameter.name for parameter in chosen}
    return tuple(index for index, weight in enumerate(weights) if weight.name in names)


class FlatSum(nn.Cell):
    """Sums some of a tuple of gradients over a group, in one exchange, after every exchange before it.

    Exchanges that do not depend on each other run in any order, and on two ranks in different ones; then they meet the wrong one.
    """

    def __init__(self, group: Group, weights: Sequence[Parameter], chosen: Sequence[int]) -> None:
        super().__init__()
        self.sum = GroupSum(group)
        self.chosen = tuple(chosen)
        self.shapes = tuple(tuple(weights[index].shape) for index in chosen)
        self.bounds = tuple(int(bound) for bound in np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)]))
        self.active = group.size > 1 and bool(self.chosen)

    def construct(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """float32 gradients -> the same with those of `chosen` summed."""
        if not self.active:
            return gradients
        parts: tuple[Tensor, ...] = ()
        for index in self.chosen:
            parts += (ops.reshape(gradients[index], (-1,)),)
        flat = self.sum(ops.depend(ops.concat(parts) if len(parts) > 1 else parts[0], gradients))
        result: tuple[Tensor, ...] = ()
        place = 0
        for index in range(len(gradients)):
            if index in self.chosen:
                result += (ops.reshape(flat[self.bounds[place] : self.bounds[place + 1]], self.shapes[place]),)
                place += 1
            else:
                result += (gradients[index],)
        return result


class SynchronizedGradients(nn.Cell):
    """Every parameter's whole gradient on every rank that holds it, and the global norm.

    Args:
        owned: for each weight, whether this rank counts it in the norm: exactly one holder of each slice does.
        piece: elements that one exchange with the other data-parallel ranks carries at most. All in one would take the gradients' memory
            twice more.
    """

    def __init__(
        self, stage: DecoderStage, weights: Sequence[Parameter], groups: Groups, owned: Sequence[bool], piece: int = PIECE_ELEMENTS
    ) -> None:
        super().__init__()
        attentions = [cell for _, cell in stage.cells_and_names() if isinstance(cell, GroupedQueryAttention)]
        partial = [parameter for attention in attentions for parameter in attention.partial_parameters()]
        keys_values = [parameter for attention in attentions for parameter in attention.key_value_parameters()]
        ends = groups.ends if groups.ends is not None and stage.config.tied else Group((groups.place.rank,))
        tied = [weight for weight in weights if weight.name == TIED]
        self.sum_tensor = FlatSum(groups.tensor, weights, _indices(stage, weights, partial))
        self.sum_replicas = FlatSum(groups.kv_replicas, weights, _indices(stage, weights, keys_values))
        self.sum_ends = FlatSum(ends, weights, _indices(stage, weights, tied))
        pieces = sum_pieces([weight.size for weight in weights], piece)
        self.sum_data = nn.CellList([FlatSum(groups.data, weights, chosen) for chosen in pieces])
        self.sum_model = GroupSum(groups.model)
        self.owned = tuple(owned)
        self.sum = ops.ReduceSum()

    def construct(self, gradients: tuple[Tensor, ...], factor: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Gradients of this rank and the factor that makes their sum a mean and takes the loss scale out
        -> float32 gradients, still to be multiplied by `factor`, and the norm that they then have.
        """
        wide: tuple[Tensor, ...] = ()
        for index in range(len(gradients)):
            wide += (ops.cast(gradients[index], ms.float32),)
        wide = self.sum_ends(self.sum_replicas(self.sum_tensor(wide)))
        for sum_piece in self.sum_data:
            wide = sum_piece(wide)
        squared = ops.zeros((), ms.float32)
        for index in range(len(wide)):
            if self.owned[index]:
                # Rows first: a CPU sums over all axes at once with one thread, eight times slower
                squared = squared + self.sum(self.sum(wide[index] * wide[index], -1))
        return wide, ops.sqrt(self.sum_model(ops.depend(squared, wide))) * factor
