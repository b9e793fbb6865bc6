"""Tensor parallelism by explicit collectives (Megatron-LM, arXiv:1909.08053, section 3): who holds what, and the two conjugate operators.

The catalogue of parameters (mappings/parameters.toml) names for each parameter the logical axis that is cut. Here the same axes of the
ModelConfig are divided (`local_config`), so the cells below simply build the parameters of a smaller model: a rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from model.config import ModelConfig


@dataclass(frozen=True)
class TensorParallel:
    """A rank's place among the tensor-parallel ranks. `group` names their communication group; a single rank needs none."""

    size: int = 1
    rank: int = 0
    group: str = ""

    def copy(self) -> nn.Cell:
        """Stands before column-parallel layers: every rank uses the same input, so its gradients are summed."""
        return CopyToRanks(self.group) if self.size > 1 else nn.Identity()

    def reduce(self) -> nn.Cell:
        """Stands after a row-parallel layer: the ranks' partial results are summed."""
        return SumOverRanks(self.group) if self.size > 1 else nn.Identity()


SINGLE = TensorParallel()


class CopyToRanks(nn.Cell):
    """Identity forward, sum over the ranks backward."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group)

    def construct(self, x: Tensor) -> Tensor:
        """x, the same on every rank -> x."""
        return x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """dout, different on every rank -> its sum."""
        return (self.all_reduce(dout),)


class SumOverRanks(nn.Cell):
    """Sum over the ranks forward, identity backward.

    MindSpore's own gradient of AllReduce is another AllReduce: right for a loss that every rank has a share of, wrong here, where every
    rank goes on to compute the same loss.
    """

    def __init__(self, group: str) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group)

    def construct(self, x: Tensor) -> Tensor:
        """x, different on every rank -> its sum."""
        return self.all_reduce(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        """dout, the same on every rank -> dout."""
        return (dout,)


class GatherRanks(nn.Cell):
    """What every rank of a group has, in the order of the ranks.

    MindSpore's CPU backend has AllGather for all ranks only. There each rank adds its part to a sum in which the others have zeros:
    negative ones, since -0 + x is x for every x, and 0 + -0 is not.
    """

    def __init__(self, ranks: int, rank: int, group: str) -> None:
        super().__init__()
        self.before, self.after = rank, ranks - 1 - rank
        on_cpu = ms.get_context("device_target") == "CPU"
        self.all_gather: Any = None if on_cpu else ops.AllGather(group)
        self.all_reduce: Any = ops.AllReduce(ops.ReduceOp.SUM, group) if on_cpu else None

    def construct(self, x: Tensor) -> Tensor:
        """x [1, ...] -> [ranks, ...]."""
        if self.all_reduce is None:
            return self.all_gather(x)
        nothing = ops.neg(ops.zeros_like(x))
        return self.all_reduce(ops.concat((nothing,) * self.before + (x,) + (nothing,) * self.after))


def local_config(config: ModelConfig, size: int) -> ModelConfig:
    """The config of what one of `size` tensor-parallel ranks holds: the cut axes divided, `vocab` (the true one) and all else unchanged.

    With fewer KV heads than ranks a rank holds one, and size / kv_heads neighbouring ranks the same one. The sizes must divide;
    `make_layout` (converter/layout.py) refuses what does not.
    """
    return replace(
        config,
        heads=config.heads // size,
        kv_heads=max(1, config.kv_heads // size),
        ffn=config.ffn // size,
        padded_vocab=config.padded_vocab // size,
    )
