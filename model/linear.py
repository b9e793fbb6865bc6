"""Linear layers. Weights are [out, in], as in Hugging Face.

Under tensor parallelism a column-parallel layer holds some of the outputs (weight and bias cut along axis 0) and a row-parallel layer
some of the inputs (weight cut along axis 1; the bias is whole and is added once, after the reduction). Sizes are those of the rank.
"""

from __future__ import annotations

from mindspore import Tensor, nn, ops

from model.parallel import SINGLE, TensorParallel
from model.precision import Precision, unset_parameter


class Linear(nn.Cell):
    """x @ weight^T + bias. Every rank holds it whole."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool, precision: Precision) -> None:
        super().__init__()
        self.weight = unset_parameter((out_features, in_features), precision, "weight")
        self.bias = unset_parameter((out_features,), precision, "bias") if has_bias else None
        self.matmul = ops.MatMul(transpose_b=True)
        self.add = ops.Add()
        self.reshape = ops.Reshape()
        self.cast = ops.Cast()

    def project(self, x: Tensor) -> Tensor:
        """x [..., in] -> [tokens, out], without the bias."""
        return self.matmul(self.reshape(x, (-1, x.shape[-1])), self.cast(self.weight, x.dtype))

    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        """y [tokens, out] -> [..., out] with the bias, where x is [..., in]."""
        if self.bias is not None:
            y = self.add(y, self.cast(self.bias, y.dtype))
        return self.reshape(y, (*x.shape[:-1], -1))

    def construct(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.finish(self.project(x), x)


class ColumnParallelLinear(Linear):
    """A linear layer whose outputs may be divided over tensor-parallel ranks: every input goes to every rank.

    Layers that share an input share the operator that sums its gradients (`TensorParallel.copy`), so it stands before them, not in here.
    """


class RowParallelLinear(Linear):
    """A linear layer whose inputs may be divided over tensor-parallel ranks: the ranks' products are summed before the bias is added."""

    def __init__(
        self, in_features: int, out_features: int, has_bias: bool, precision: Precision, parallel: TensorParallel = SINGLE
    ) -> None:
        super().__init__(in_features, out_features, has_bias, precision)
        self.reduce = parallel.reduce()

    def construct(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.finish(self.reduce(self.project(x)), x)
