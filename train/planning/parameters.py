"""The parameters of a rank, alike ones counted together: a plan adds them up some thousand times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mappings.names import number_free
from train.optimizer_shares import share_of


@dataclass(frozen=True)
class Alike:
    """`count` parameters of one shape, a tensor-parallel rank's slices, whose names differ in their layer only."""

    name: str
    shape: tuple[int, ...]
    count: int

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class RankParameters:
    """What one rank holds."""

    alike: tuple[Alike, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> RankParameters:
        """From every name and shape."""
        counts = Counter((number_free(name), shape) for name, shape in shapes)
        return cls(tuple(Alike(name, shape, count) for (name, shape), count in counts.items()))

    @cached_property
    def elements(self) -> int:
        return sum(alike.elements for alike in self.alike)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter."""
        return max((math.prod(alike.shape) for alike in self.alike), default=0)

    def elements_of(self, *modules: str) -> int:
        """Elements of the parameters of these modules, as `k_proj` in layers.3.attention.k_proj.weight."""
        return sum(self._by_module[module] for module in modules)

    @cached_property
    def _by_module(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for alike in self.alike:
            found.update(dict.fromkeys(alike.name.split(".")[-2:-1], alike.elements))
        return found

    def state_bytes(self, is_float32: bool, ranks: int) -> int:
        """Of AdamW's moments and master weights, when `ranks` data-parallel ranks divide them."""
        return self._shared(is_float32, ranks)[0]

    def divided_elements(self, is_float32: bool, ranks: int) -> int:
        """Of the parameters whose state is divided over `ranks`, the elements that one of them updates."""
        return self._shared(is_float32, ranks)[1]

    def _shared(self, is_float32: bool, ranks: int) -> tuple[int, int]:
        """Both of them, added up once."""
        known = self._sums.get((is_float32, ranks))
        if known is None:
            shares = [(alike.count, share_of(alike.shape, is_float32, ranks, 0)) for alike in self.alike]
            state = sum(count * share.state_bytes for count, share in shares)
            known = self._sums[is_float32, ranks] = state, sum(count * share.elements for count, share in shares if share.divided)
        return known

    @cached_property
    def _sums(self) -> dict[tuple[bool, int], tuple[int, int]]:
        return {}
