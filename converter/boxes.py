"""A strided copy as boxes in the order of its source, to be cut to what fits into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from converter.plan import StridedCopy
from converter.tensors import StoredTensor


class Dim(NamedTuple):
    """One dimension of a box: its size and its strides in elements."""

    size: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Box:
    """A strided copy with at least one dimension, the largest source stride first."""

    source: StoredTensor
    source_offset: int
    target_offset: int
    dims: tuple[Dim, ...]

    @staticmethod
    def of(copy: StridedCopy) -> Box:
        """The copy as one box."""
        axes = sorted(zip(copy.source_strides, copy.target_strides, copy.shape, strict=True), reverse=True)
        dims = tuple(Dim(size, source, target) for source, target, size in axes) or (Dim(1, 1, 1),)
        return Box(copy.source, copy.source_offset, copy.target_offset, dims)

    def moved(self, by: int) -> Box:
        """The box with its target `by` elements further on."""
        return Box(self.source, self.source_offset, self.target_offset + by, self.dims)

    @property
    def rows_extent(self) -> int:
        """Source elements from the first to the last of one row (one index of the first dimension), both included."""
        return 1 + sum((dim.size - 1) * dim.source for dim in self.dims[1:])

    def split(self, rows: int) -> Iterator[Box]:
        """Boxes of `rows` rows (the last may have fewer)."""
        size, source, target = self.dims[0]
        for row in range(0, size, rows):
            dims = (Dim(min(rows, size - row), source, target), *self.dims[1:])
            yield Box(self.source, self.source_offset + row * source, self.target_offset + row * target, dims)

    def rows(self) -> Iterator[Box]:
        """Each row as a box without the first dimension."""
        size, source, target = self.dims[0]
        for row in range(size):
            yield Box(self.source, self.source_offset + row * source, self.target_offset + row * target, self.dims[1:])

    def offsets(self, outer: int) -> Iterator[tuple[int, int]]:
        """The (source, target) offsets of every index of the first `outer` dimensions, in order."""
        return _offsets(self.dims[:outer], self.source_offset, self.target_offset)

    def packed(self, outer: int) -> Box:
        """The same box, read from where the runs inside the first `outer` dimensions were put one after the other."""
        dims = list(self.dims)
        stride = math.prod(dim.size for dim in dims[outer:])
        for axis in range(outer - 1, -1, -1):
            dims[axis] = Dim(dims[axis].size, stride, dims[axis].target)
            stride *= dims[axis].size
        return Box(self.source, 0, self.target_offset, tuple(dims))


def _offsets(dims: Sequence[Dim], source: int, target: int) -> Iterator[tuple[int, int]]:
    if not dims:
        yield source, target
        return
    size, source_stride, target_stride = dims[0]
    if len(dims) == 1:
        yield from ((source + index * source_stride, target + index * target_stride) for index in range(size))
        return
    for index in range(size):
        yield from _offsets(dims[1:], source + index * source_stride, target + index * target_stride)


def run_of(dims: Sequence[Dim]) -> tuple[int, int]:
    """(n, run): the dimensions after the first n fill `run` adjacent elements of the source."""
    run, outer = 1, len(dims)
    while outer and dims[outer - 1].source == run:
        outer -= 1
        run *= dims[outer].size
    return outer, run


def in_order(dims: Sequence[Dim]) -> bool:
    """Whether the target is written in the source's order."""
    return all(before.target >= after.target for before, after in pairwise(dims))


def across(dims: Sequence[Dim]) -> bool:
    """Whether neither side's adjacent elements are adjacent on the other side: a transpose."""
    return dims[-1].target != 1 and any(dim.target == 1 and dim.size > 1 for dim in dims)
