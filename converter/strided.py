"""Integer algebra on strided copies: simplify one, cut one down to a range of its target, prove that copies cover a tensor exactly once.

All numbers count elements. No data is touched: everything here is decided from offsets, strides and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from converter.dtypes import item_size
from converter.plan import Plan, StridedCopy, TargetTensor
from converter.tensors import contiguous_strides
from mappings.errors import Problem, Refused

_PLAN_IS_WRONG = "the rule that planned this tensor is wrong: report it with the table that holds the rule"


def coalesce(copy: StridedCopy) -> StridedCopy:
    """The same copy with the fewest dimensions, ordered by target stride, the largest first.

    Dimensions of size 1 go, and neighbours that are contiguous on both sides become one. So a copy that is contiguous on both sides
    has shape () or (n,) with strides (1,); a copy without elements has shape (0,).
    """
    shape, source_strides, target_strides = copy.shape, copy.source_strides, copy.target_strides
    if source_strides == target_strides == contiguous_strides(shape):
        elements = copy.elements
        ones, flat = ((), ()) if elements == 1 else ((1,), (elements,))
        return StridedCopy(copy.source, copy.source_offset, ones, copy.target_offset, ones, flat)
    if 0 in shape:
        return replace(copy, source_strides=(1,), target_strides=(1,), shape=(0,))
    dims: list[tuple[int, int, int]] = []
    axes = sorted(zip(target_strides, source_strides, shape, strict=True), reverse=True)
    for target, source, size in axes:
        if size == 1:
            continue
        if dims and dims[-1][0] == target * size and dims[-1][1] == source * size:
            dims[-1] = (target, source, dims[-1][2] * size)
        else:
            dims.append((target, source, size))
    return replace(
        copy,
        source_strides=tuple(source for _, source, _ in dims),
        target_strides=tuple(target for target, _, _ in dims),
        shape=tuple(size for _, _, size in dims),
    )


def is_contiguous(copy: StridedCopy) -> bool:
    """Whether a coalesced copy moves one run of elements to one run."""
    return not copy.shape or (copy.target_strides == (1,) and copy.source_strides == (1,))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last element of a view, both included; 0 for a view without elements."""
    elements = 1
    for size, stride in zip(shape, strides, strict=True):
        elements += (size - 1) * stride
    return 0 if 0 in shape else elements


def target_end(copy: StridedCopy) -> int:
    """One past the last target element that the copy writes."""
    return copy.target_offset + extent(copy.shape, copy.target_strides)


def restrict(copy: StridedCopy, lo: int, hi: int) -> list[StridedCopy]:
    """The parts of a coalesced copy whose target elements lie in [lo, hi), in the order of their targets.

    A dimension cut by the range gives its whole rows as one part and the cut rows at either end as parts of their own, so there are
    at most 2 * dimensions - 1 parts when the target's dimensions are nested (each stride at least the extent of what is inside it).
    """
    if lo <= copy.target_offset and target_end(copy) <= hi:
        return [copy] if 0 not in copy.shape else []
    parts: list[StridedCopy] = []
    extents = [extent(copy.shape[axis:], copy.target_strides[axis:]) for axis in range(len(copy.shape) + 1)]
    _restrict(copy, extents, 0, copy.source_offset, copy.target_offset, lo, hi, parts)
    return [coalesce(part) for part in parts]


def _restrict(
    copy: StridedCopy, extents: list[int], axis: int, source: int, target: int, lo: int, hi: int, parts: list[StridedCopy]
) -> None:
    """Append the parts in [lo, hi) of the sub-copy of dimensions `axis`... that starts at (source, target)."""
    if target >= hi or target + extents[axis] <= lo or 0 in copy.shape:
        return
    if axis == len(copy.shape):
        parts.append(replace(copy, source_offset=source, target_offset=target, source_strides=(), target_strides=(), shape=()))
        return
    size, stride, source_stride = copy.shape[axis], copy.target_strides[axis], copy.source_strides[axis]
    inner = extents[axis + 1]
    first = max(0, (lo - target - inner) // stride + 1)
    last = min(size, -((target - hi) // stride))
    whole_first = max(first, -((target - lo) // stride))
    whole_last = max(whole_first, min(last, (hi - target - inner) // stride + 1))
    for row in range(first, min(whole_first, last)):
        _restrict(copy, extents, axis + 1, source + row * source_stride, target + row * stride, lo, hi, parts)
    if whole_first < whole_last:
        parts.append(
            StridedCopy(
                copy.source,
                source + whole_first * source_stride,
                copy.source_strides[axis:],
                target + whole_first * stride,
                copy.target_strides[axis:],
                (whole_last - whole_first, *copy.shape[axis + 1 :]),
            )
        )
    for row in range(whole_last, last):
        _restrict(copy, extents, axis + 1, source + row * source_stride, target + row * stride, lo, hi, parts)


def check_cover(tensor: TargetTensor) -> list[Problem]:
    """What is wrong with a tensor's copies; empty if every element is written exactly once or is declared padding.

    Exact for any copies: views inside both tensors, pairwise disjoint, and as many elements as the tensor holds without its padding.
    """
    problems = [Problem(what, tensor.name, _PLAN_IS_WRONG) for copy in tensor.copies for what in _view_problems(copy, tensor)]
    if problems:
        return problems
    written = sum(copy.elements for copy in tensor.copies)
    if written + tensor.padding != tensor.elements:
        what = f"{tensor.elements} elements, of which copies write {written} and {tensor.padding} are padding"
        problems.append(Problem(what, tensor.name, _PLAN_IS_WRONG))
    if len(tensor.copies) == 1 and tensor.copies[0].target_strides == contiguous_strides(tensor.copies[0].shape):
        return problems
    twice = first_overlap(tensor.copies)
    if twice is not None:
        problems.append(Problem(f"element {twice} of {tensor.elements} is written more than once", tensor.name, _PLAN_IS_WRONG))
    return problems


def refuse_holes(plan: Plan) -> None:
    """Raises Refused unless the plan writes every element of every target exactly once: the last look before the first byte.

    Ranks that share a target are looked at once. Takes about a second for 200,000 copies.
    """
    distinct = {id(tensor): tensor for file in plan.files for tensor in file.tensors}
    problems = [problem for tensor in distinct.values() for problem in check_cover(tensor)]
    if problems:
        raise Refused("the plan has holes or overlaps", problems)


def _view_problems(copy: StridedCopy, tensor: TargetTensor) -> list[str]:
    """Whether both views have the copy's dimensions and lie inside their tensor."""
    shape, strides = copy.shape, (copy.source_strides, copy.target_strides)
    if not len(shape) == len(strides[0]) == len(strides[1]):
        return [f"a copy from {copy.source.name} has {len(shape)} sizes, {len(strides[0])} source and {len(strides[1])} target strides"]
    if min((copy.source_offset, copy.target_offset, *shape, *strides[0], *strides[1])) < 0:
        return [f"a copy from {copy.source.name} has a negative offset, size or stride"]
    if 0 in shape:
        return []
    problems = []
    stored = sum(piece.length for piece in copy.source.extents) // item_size(copy.source.dtype)
    if copy.source_offset + extent(shape, strides[0]) > stored:
        problems.append(f"a copy reads past the {stored} elements stored for {copy.source.name}")
    if copy.target_offset + extent(shape, strides[1]) > tensor.elements:
        problems.append(f"a copy from {copy.source.name} writes past the end of the tensor's {tensor.elements} elements")
    return problems


class _Places(NamedTuple):
    """A set of target elements: nested dimensions (size, stride), the largest stride first, each stride at least the extent inside it."""

    start: int
    dims: tuple[tuple[int, int], ...]
    end: int  # one past the last element

    @property
    def dense(self) -> bool:
        return not self.dims or (len(self.dims) == 1 and self.dims[0][1] == 1)


def _places(start: int, dims: tuple[tuple[int, int], ...]) -> _Places:
    end = start + 1
    for size, stride in dims:
        end += (size - 1) * stride
    return _Places(start, dims, end)


_TargetView = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, strides, shape


def first_overlap(copies: Iterable[StridedCopy]) -> int | None:
    """A target element that the copies write more than once, or None."""
    views = tuple((copy.target_offset, copy.target_strides, copy.shape) for copy in copies)
    return _first_overlap_again(views) if len(views) <= _REMEMBERED_VIEWS else _first_overlap(views)


def _first_overlap(views: tuple[_TargetView, ...]) -> int | None:
    return _overlap([places for view in views for places in _places_of(view)])


# The same parameter of every layer is put together in the same way
_REMEMBERED_VIEWS = 256
_first_overlap_again = lru_cache(maxsize=256)(_first_overlap)


def _places_of(view: _TargetView) -> list[_Places]:
    start, strides, shape = view
    if 0 in shape:
        return []
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(strides, shape, strict=True), reverse=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return _nested(start, tuple(dims))


def _nested(start: int, dims: tuple[tuple[int, int], ...]) -> list[_Places]:
    """The elements as sets with nested dimensions.

    A dimension that is not nested is taken apart, so that an overlap inside one view shows too.
    """
    for axis, (size, stride) in enumerate(dims):
        if stride < _places(0, dims[axis + 1 :]).end:
            rest = dims[:axis] + dims[axis + 1 :]
            rows = range(size if stride else 2)  # without a stride two rows say it all
            return [places for row in rows for places in _nested(start + row * stride, rest)]
    return [_places(start, dims)]


def _overlap(sets: list[_Places]) -> int | None:
    """An element in more than one of the sets. Sets whose bounds are apart are disjoint; only those that interleave are compared."""
    if len(sets) < 2:
        return None
    ordered = sorted(sets)
    cluster = [ordered[0]]
    end = ordered[0].end
    for places in ordered[1:]:
        if places.start >= end:
            if (found := _overlap_in_cluster(cluster)) is not None:
                return found
            cluster = []
        cluster.append(places)
        end = max(end, places.end)
    return _overlap_in_cluster(cluster)


def _overlap_in_cluster(cluster: list[_Places]) -> int | None:
    """An element in more than one of the sets, whose bounds form one chain: compare them row by row of the widest stride.

    Sets usually fill the same columns in a whole range of rows, so one comparison serves the range.
    """
    if len(cluster) == 1:
        return None
    if all(places.dense for places in cluster):
        return next(after.start for before, after in pairwise(cluster) if after.start < before.end)
    width = max(places.dims[0][1] for places in cluster if places.dims)
    bands = [band for places in cluster for band in _bands(places, width)]
    starting: dict[int, list[_Places]] = {}
    stopping: dict[int, list[_Places]] = {}
    for first, last, columns in bands:
        starting.setdefault(first, []).append(columns)
        stopping.setdefault(last, []).append(columns)
    here: list[_Places] = []
    for row in sorted(starting.keys() | stopping.keys()):
        for columns in stopping.get(row, ()):
            here.remove(columns)
        here += starting.get(row, ())
        if row in starting and (found := _overlap(here)) is not None:
            return row * width + found
    return None


def _bands(places: _Places, width: int) -> list[tuple[int, int, _Places]]:
    """The set as bands (first row, last row + 1, columns of each of these rows), for rows of `width` elements."""
    row, column = divmod(places.start, width)
    if column + places.end - places.start <= width:
        return [(row, row + 1, _places(column, places.dims))]
    if places.dense:
        last_row, last_column = divmod(places.end, width)
        head = [(row, row + 1, _run(column, width))] if column else []
        body = [(row + bool(column), last_row, _run(0, width))]
        tail = [(last_row, last_row + 1, _run(0, last_column))] if last_column else []
        return [*head, *(band for band in body if band[0] < band[1]), *tail]
    (size, stride), inner = places.dims[0], _places(column, places.dims[1:])
    if stride == width and inner.end <= width:
        return [(row, row + size, inner)]
    if stride == width:
        # Columns that cross into the next row: each of the parts is one row high, and repeats in every row
        return [(row + first, row + first + size, columns) for first, _, columns in _bands(inner, width)]
    return [band for index in range(size) for band in _bands(_places(places.start + index * stride, places.dims[1:]), width)]


def _run(start: int, stop: int) -> _Places:
    return _Places(start, ((stop - start, 1),) if stop - start > 1 else (), stop)
