"""A box of a tensor in the terms of its logical axes: which atoms' indices lie in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from converter.layout import Slice
from mappings.axes import AtomPlace

Ranges = tuple[tuple[int, int], ...]
"""(start, length) for each atom."""


@dataclass(frozen=True, slots=True)
class Region:
    """The elements [start, stop) of each axis of a tensor; they are stored as a tensor of the shape `stored`, which padding may enlarge."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    stored: tuple[int, ...]

    @staticmethod
    def of(piece: Slice, shape: tuple[int, ...]) -> Region:
        """What a rank holds of a parameter with the true shape `shape`."""
        start, stop = [0] * len(shape), list(shape)
        if piece.axis is not None:
            start[piece.axis], stop[piece.axis] = piece.start, piece.stop
        return Region(tuple(start), tuple(stop), piece.shape(shape))

    def boxes(self, axes: Sequence[Sequence[AtomPlace]], offsets: Sequence[int]) -> Iterator[Ranges]:
        """The region as boxes of atoms, in order. `axes` are the atoms of each axis with strides and offsets in elements of that axis."""
        found = [
            ranges_of_axis(places, offset, start, stop)
            for places, offset, start, stop in zip(axes, offsets, self.start, self.stop, strict=True)
        ]
        for ranges in product(*found):
            yield tuple(atom for axis in ranges for atom in axis)


def ranges_of_axis(places: Sequence[AtomPlace], offset: int, start: int, stop: int) -> list[Ranges]:
    """Those indices of an axis' atoms whose place, `offset + sum(index * stride)`, is in [start, stop), as boxes in ascending order.

    The atoms stand in order, each with a stride at least as long as all that follow it.
    """
    if not places:
        return [()] if start <= offset < stop else []
    place, rest = places[0], places[1:]
    within = 1 + sum((inner.size - 1) * inner.stride for inner in rest)
    first, last = (
        _clip(number, place.size) for number in ((start - offset - within) // place.stride + 1, -((offset - stop) // place.stride))
    )
    whole = (_clip(-((offset - start) // place.stride), place.size), _clip((stop - offset - within) // place.stride + 1, place.size))
    if whole[0] >= whole[1]:
        return [box for index in range(first, last) for box in _at(index, place, rest, offset, start, stop)]
    low = [box for index in range(first, whole[0]) for box in _at(index, place, rest, offset, start, stop)]
    high = [box for index in range(whole[1], last) for box in _at(index, place, rest, offset, start, stop)]
    return [*low, ((whole[0], whole[1] - whole[0]), *((0, inner.size) for inner in rest)), *high]


def _clip(number: int, size: int) -> int:
    return max(0, min(number, size))


def _at(index: int, place: AtomPlace, rest: Sequence[AtomPlace], offset: int, start: int, stop: int) -> list[Ranges]:
    return [((index, 1), *box) for box in ranges_of_axis(rest, offset + index * place.stride, start, stop)]
