"""Which ranks share a communication group, from the layout alone: the rules of train/communication.py without a framework."""

from __future__ import annotations

from dataclasses import dataclass, fields

from converter.layout import ParallelLayout


@dataclass(frozen=True)
class GroupRanks:
    """The ranks of each group of one rank (their meanings: train/communication.py). Empty: it has no such partner."""

    world: tuple[int, ...]
    tensor: tuple[int, ...]
    data: tuple[int, ...]
    model: tuple[int, ...]
    kv_replicas: tuple[int, ...]
    previous: tuple[int, ...]
    next: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def distinct(self) -> set[tuple[int, ...]]:
        """What the backend makes groups for: two roles with the same ranks share one, and a group of one needs none."""
        return {ranks for field in fields(self) if len(ranks := getattr(self, field.name)) > 1}


def group_ranks(layout: ParallelLayout, rank: int, kv_heads: int) -> GroupRanks:
    """The groups of a rank. Ranks are numbered as ParallelLayout numbers them: pipeline outermost, then data, tensor innermost."""
    place = layout.coordinates(rank)
    stages, data, tensor = range(layout.pp), range(layout.dp), range(layout.tp)
    replicas = max(1, layout.tp // kv_heads)
    same_kv = range(place.tensor // replicas * replicas, (place.tensor // replicas + 1) * replicas)

    def column(*stages: int) -> tuple[int, ...]:
        return tuple(layout.rank(stage, place.data, place.tensor) for stage in stages)

    return GroupRanks(
        world=tuple(range(layout.ranks)),
        tensor=tuple(layout.rank(place.stage, place.data, index) for index in tensor),
        data=tuple(layout.rank(place.stage, index, place.tensor) for index in data),
        model=tuple(layout.rank(stage, place.data, index) for stage in stages for index in tensor),
        kv_replicas=tuple(layout.rank(place.stage, place.data, index) for index in same_kv),
        previous=column(place.stage - 1, place.stage) if place.stage > 0 else (),
        next=column(place.stage, place.stage + 1) if place.stage < layout.pp - 1 else (),
        ends=column(0, layout.pp - 1) if layout.pp > 1 and place.stage in (0, layout.pp - 1) else (),
    )
