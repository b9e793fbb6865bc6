"""Who talks to whom: communication groups from the layout, and point to point between pipeline stages, whatever the backend has."""

from __future__ import annotations

from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.communication import create_group

from converter.layout import Coordinates, ParallelLayout
from mappings.errors import refuse
from model.ops import on_ascend
from model.parallel import TensorParallel
from train.group_ranks import group_ranks


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, in order. A group of one has no name: nothing needs to be said."""

    ranks: tuple[int, ...]
    name: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Groups:
    """The groups of one rank.

    tensor: the ranks that share its layers. data: those that hold the same slices. model: all of its data-parallel replica, tensor and
    pipeline. previous, next: itself and its neighbour in the pipeline. ends: first and last stage, which share a tied embedding.
    kv_replicas: the tensor-parallel ranks that hold the same KV heads. None: it has no such partner.
    """

    place: Coordinates
    world: Group
    tensor: Group
    data: Group
    model: Group
    kv_replicas: Group
    previous: Group | None
    next: Group | None
    ends: Group | None

    @property
    def tensor_parallel(self) -> TensorParallel:
        return TensorParallel(self.tensor.size, self.place.tensor, self.tensor.name)


def make_groups(layout: ParallelLayout, rank: int, kv_heads: int) -> Groups:
    """The groups of a rank. Every rank calls this, after `init()` if there are several."""
    ranks = group_ranks(layout, rank, kv_heads)

    def group(members: tuple[int, ...]) -> Group:
        return _group(layout, members)

    def pair(members: tuple[int, ...]) -> Group | None:
        return _group(layout, members) if members else None

    return Groups(
        layout.coordinates(rank), group(ranks.world), group(ranks.tensor), group(ranks.data), group(ranks.model), group(ranks.kv_replicas),
        pair(ranks.previous), pair(ranks.next), pair(ranks.ends),
    )  # fmt: skip


_created: set[str] = set()


def _group(layout: ParallelLayout, ranks: tuple[int, ...]) -> Group:
    """The group of these ranks, made in the backend once: two roles with the same ranks share one."""
    if len(ranks) == 1:
        return Group(ranks)
    if len(ranks) == layout.ranks:
        return Group(ranks, "hccl_world_group" if on_ascend() else "mccl_world_group")
    name = "ranks-" + "-".join(map(str, ranks))
    if name not in _created:
        create_group(name, list(ranks))
        _created.add(name)
    return Group(ranks, name)


class GroupSum(nn.Cell):
    """Sum over a group; what a group of one holds is the sum already."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group.name) if group.size > 1 else None

    def construct(self, x: Tensor) -> Tensor:
        """x, of one shape on every rank -> the sum on every rank."""
        return x if self.all_reduce is None else self.all_reduce(x)


class PointToPoint:
    """One rank's end of the connection to a neighbour: each `send` there meets a `receive` here, in the same order.

    On Ascend the backend's Send and Receive. MindSpore's CPU backend has neither: there both ends sum over their group of two, the receiver
    adding negative zeros, which changes no value.
    """

    def __init__(self, group: Group, rank: int) -> None:
        (self.peer,) = (other for other in group.ranks if other != rank)
        self._group = group
        self._sum = GroupSum(group)
        self._send: nn.Cell | None = None
        self._receive: dict[tuple[tuple[int, ...], str], nn.Cell] = {}

    def send(self, x: Tensor) -> None:
        """Send x to the peer."""
        if not on_ascend():
            self._sum(x)
            return
        if self._send is None:
            self._send = _Send(self.peer, self._group.name)
        self._send(x)

    def receive(self, shape: tuple[int, ...], dtype: ms.Type) -> Tensor:
        """What the peer sends, which has this shape and type."""
        if not on_ascend():
            return self._sum(ops.neg(ops.zeros(shape, dtype)))
        key = (shape, str(dtype))
        if key not in self._receive:
            self._receive[key] = _Receive(self.peer, shape, dtype, self._group.name)
        return self._receive[key]()


class _Send(nn.Cell):
    def __init__(self, peer: int, group: str) -> None:
        super().__init__()
        self.transfer = ops.Send(sr_tag=0, dest_rank=peer, group=group)

    def construct(self, x: Tensor) -> Tensor:
        return ops.depend(x, self.transfer(x))


class _Receive(nn.Cell):
    def __init__(self, peer: int, shape: tuple[int, ...], dtype: ms.Type, group: str) -> None:
        super().__init__()
        self.transfer = ops.Receive(sr_tag=0, src_rank=peer, shape=list(shape), dtype=dtype, group=group)

    def construct(self) -> Tensor:
        return self.transfer()


def check_rank(layout: ParallelLayout, rank: int, ranks: int) -> None:
    """Raises Refused when the processes that run are not the layout's."""
    if ranks != layout.ranks or not 0 <= rank < ranks:
        what = f"rank {rank} of {ranks}, but tp {layout.tp} x pp {layout.pp} x dp {layout.dp} is {layout.ranks} ranks"
        raise refuse(what, "parallel", "start it with `ms-train launch`")
