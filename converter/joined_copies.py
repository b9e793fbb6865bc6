"""Two steps of copies made one: from tensors that are stored, through a tensor that nobody writes, into tensors that are written.

A box of the tensor between is a set of offsets `first + sum(index * stride)`. The strides of both steps, from long to short, are the
places of a number system as long as each divides the one before; offsets are its numbers, and boxes are ranges of digits, which intersect
digit by digit. A dimension whose stride divides no other (three ranks on one side, two on the other) is taken apart first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

from converter.plan import Plan, StridedCopy, TargetTensor
from converter.regions import ranges_of_axis
from mappings.axes import AtomPlace
from mappings.errors import refuse


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a step: a box of the tensor between (`first`, `strides`), and where it lies in the tensor on the outside."""

    first: int
    strides: tuple[int, ...]
    outer_first: int
    outer_strides: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joint:
    """Equal elements of the two outer tensors: where the box begins in each, its strides there, its shape."""

    source_first: int
    source_strides: tuple[int, ...]
    target_first: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]


def joined(target: TargetTensor, made: Mapping[str, TargetTensor]) -> TargetTensor:
    """The target, filled from what the tensors that it reads are made of (`made`, by name). Raises Refused where that leaves a hole."""
    copies = tuple(
        StridedCopy(step.source, joint.source_first, joint.source_strides, joint.target_first, joint.target_strides, joint.shape)
        for copy in target.copies
        for step in made[copy.source.name].copies
        for joint in joints(_second(copy), _first(step))
    )
    filled = sum(copy.elements for copy in copies)
    if filled + target.padding != target.elements:
        raise refuse(
            f"{filled} of {target.elements - target.padding} elements have a source", target.name, "this is a defect of ms-convert"
        )
    return replace(target, copies=copies)


def joined_plan(plan: Plan, made: Mapping[str, TargetTensor]) -> Plan:
    """Every tensor of a plan, filled so. Slices that several ranks hold stay one object."""
    known: dict[int, TargetTensor] = {}
    for tensor in (tensor for file in plan.files for tensor in file.tensors):
        if id(tensor) not in known:
            known[id(tensor)] = joined(tensor, made)
    return Plan(tuple(replace(file, tensors=tuple(known[id(tensor)] for tensor in file.tensors)) for file in plan.files))


def _first(step: StridedCopy) -> Half:
    return _half(step.shape, step.target_offset, step.target_strides, step.source_offset, step.source_strides)


def _second(copy: StridedCopy) -> Half:
    return _half(copy.shape, copy.source_offset, copy.source_strides, copy.target_offset, copy.target_strides)


def _half(shape: tuple[int, ...], first: int, strides: tuple[int, ...], outer_first: int, outer_strides: tuple[int, ...]) -> Half:
    """Without the dimensions of a single element."""
    dims = [dim for dim in zip(shape, strides, outer_strides, strict=True) if dim[0] > 1]
    return Half(first, tuple(dim[1] for dim in dims), outer_first, tuple(dim[2] for dim in dims), tuple(dim[0] for dim in dims))


@functools.lru_cache(1 << 16)
def joints(second: Half, first: Half) -> tuple[Joint, ...]:
    """What a box that is written from the tensor between shares with one that is read into it. Layers of a model have the same."""
    places = _places(first, second)
    for longer, shorter in pairwise(places):
        if longer % shorter:
            whole, apart = (second, first) if longer in first.strides else (first, second)
            parts = _taken_apart(apart, longer)
            pairs = [(part, whole) if apart is second else (whole, part) for part in parts]
            return tuple(joint for pair in pairs for joint in joints(*pair))
    return tuple(_intersections(_Digits(first, places), _Digits(second, places)))


def _places(*halves: Half) -> list[int]:
    return sorted({1, *(stride for half in halves for stride in half.strides)}, reverse=True)


def _taken_apart(half: Half, stride: int) -> Iterator[Half]:
    """The box without the dimension of this stride: one for each of its indices."""
    place = half.strides.index(stride)

    def without(values: tuple[int, ...]) -> tuple[int, ...]:
        return (*values[:place], *values[place + 1 :])

    for index in range(half.shape[place]):
        yield Half(
            half.first + index * stride, without(half.strides), half.outer_first + index * half.outer_strides[place],
            without(half.outer_strides), without(half.shape),
        )  # fmt: skip


class _Digits:
    """A box as ranges of digits: `boxes` are (start, length) for each place, `strides` the outer stride of each place's digit."""

    def __init__(self, half: Half, places: list[int]) -> None:
        self.strides = [0] * len(places)
        self.first = half.outer_first
        dims = sorted(zip(map(places.index, half.strides), half.shape, half.outer_strides, strict=True))
        rest, above, ranges = half.first, 0, []
        for place, size, outer in dims:
            number, rest = divmod(rest, places[place])
            digits = [AtomPlace("", _radix(places, at), places[at] // places[place]) for at in range(above, place + 1)]
            ranges.append(ranges_of_axis(digits, 0, number, number + size))
            self.first -= number * outer
            for at in range(above, place + 1):
                self.strides[at] = outer * (places[at] // places[place])
            above = place + 1
        for at in range(above, len(places)):
            number, rest = divmod(rest, places[at])
            ranges.append([((number, 1),)])
        self.boxes = [tuple(digit for group in groups for digit in group) for groups in product(*ranges)]


def _radix(places: list[int], at: int) -> int:
    """How many digits a place has; the first of a number has any."""
    return places[at - 1] // places[at] if at else 1 << 62


def _intersections(first: _Digits, second: _Digits) -> Iterator[Joint]:
    for one, other in product(first.boxes, second.boxes):
        both = [(max(start, begin), min(start + length, begin + count)) for (start, length), (begin, count) in zip(one, other, strict=True)]
        if any(low >= high for low, high in both):
            continue
        wide = [place for place, (low, high) in enumerate(both) if high - low > 1]
        yield Joint(
            first.first + sum(low * stride for (low, _), stride in zip(both, first.strides, strict=True)),
            tuple(first.strides[place] for place in wide),
            second.first + sum(low * stride for (low, _), stride in zip(both, second.strides, strict=True)),
            tuple(second.strides[place] for place in wide),
            tuple(both[place][1] - both[place][0] for place in wide),
        )
