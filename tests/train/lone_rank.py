"""One rank of a job, alone in this process: what it would exchange is noted, and its partners answer with what it has.

So a rank of any layout can be built, run and measured without starting the others; only its numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops

import model.loss
import train.communication
import train.gradients
import train.optimizer
import train.pipeline
from model.execution import synchronous_pynative
from model.parallel import TensorParallel
from train.communication import Group


def nbytes(tensors: Any) -> int:
    """Bytes of all elements."""
    return sum(tensor.size * tensor.itemsize for tensor in tensors)


@dataclass
class Exchanges:
    """(kind, ranks, bytes) of each exchange: of a sum what is summed, of a gather what all ranks get, of a message what it holds."""

    seen: list[tuple[str, int, int]] = field(default_factory=list)

    def add(self, kind: str, ranks: int, x: Tensor) -> None:
        self.seen.append((kind, ranks, x.size * x.itemsize))

    def of(self, kind: str) -> list[tuple[int, int]]:
        return [(ranks, size) for name, ranks, size in self.seen if name == kind]


class _TensorSum(nn.Cell):
    """A sum over tensor-parallel ranks: forward, or backward."""

    def __init__(self, exchanges: Exchanges, ranks: int, backward: bool) -> None:
        super().__init__()
        self.exchanges, self.ranks, self.backward = exchanges, ranks, backward

    def construct(self, x: Tensor) -> Tensor:
        if not self.backward:
            self.exchanges.add("tensor sum", self.ranks, x)
        return x * 1.0

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        if self.backward:
            self.exchanges.add("tensor sum", self.ranks, dout)
        return (dout,)


class _Gather(nn.Cell):
    def __init__(self, exchanges: Exchanges, kind: str, ranks: int) -> None:
        super().__init__()
        self.exchanges, self.kind, self.ranks = exchanges, kind, ranks

    def construct(self, x: Tensor) -> Tensor:
        found = ops.concat((x,) * self.ranks)
        self.exchanges.add(self.kind, self.ranks, found)
        return found


class _GroupSum(nn.Cell):
    def __init__(self, exchanges: Exchanges, group: Group) -> None:
        super().__init__()
        self.exchanges, self.group = exchanges, group

    def construct(self, x: Tensor) -> Tensor:
        if self.group.size > 1 and x.ndim:  # a scalar is the norm
            self.exchanges.add("group sum", self.group.size, x)
        return x


class _Neighbour:
    def __init__(self, exchanges: Exchanges) -> None:
        self.exchanges = exchanges

    def send(self, x: Tensor) -> None:
        self.exchanges.add("message", 2, x)

    def receive(self, shape: tuple[int, ...], dtype: ms.Type) -> Tensor:
        return ops.ones(shape, dtype)


@contextmanager
def lone_rank(patch: pytest.MonkeyPatch) -> Iterator[Exchanges]:
    """Within: no rank has partners, and operators run one by one, so that exchanges are seen as they are made."""
    exchanges = Exchanges()
    patch.setattr(train.communication, "create_group", lambda name, ranks: None)
    patch.setattr(train.communication, "_created", set())
    patch.setattr(TensorParallel, "copy", lambda self: _TensorSum(exchanges, self.size, True) if self.size > 1 else nn.Identity())
    patch.setattr(TensorParallel, "reduce", lambda self: _TensorSum(exchanges, self.size, False) if self.size > 1 else nn.Identity())
    patch.setattr(model.loss, "GatherRanks", lambda ranks, rank, group: _Gather(exchanges, "tensor gather", ranks))
    patch.setattr(train.optimizer, "GatherRanks", lambda ranks, rank, group: _Gather(exchanges, "optimizer gather", ranks))
    patch.setattr(train.gradients, "GroupSum", lambda group: _GroupSum(exchanges, group))
    patch.setattr(train.pipeline, "PointToPoint", lambda group, rank: _Neighbour(exchanges))
    with synchronous_pynative():
        yield exchanges
