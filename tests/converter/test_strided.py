"""The algebra on strided copies against numpy, which enumerates every element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from converter.plan import StridedCopy, TargetTensor
from converter.strided import check_cover, coalesce, first_overlap, is_contiguous, restrict
from converter.tensors import Extent, StoredTensor

ELEMENTS = 1 << 12
SOURCE = StoredTensor("weight", Path("model.safetensors"), "U16", (ELEMENTS,), (Extent(0, 2 * ELEMENTS),))


def moves(copy: StridedCopy) -> list[tuple[int, int]]:
    """Every (source element, target element) of a copy, sorted: the oracle."""
    elements = np.arange(ELEMENTS)
    return sorted(
        zip(
            as_strided(elements[copy.source_offset :], copy.shape, [8 * s for s in copy.source_strides]).ravel().tolist(),
            as_strided(elements[copy.target_offset :], copy.shape, [8 * s for s in copy.target_strides]).ravel().tolist(),
            strict=True,
        )
    )


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """(offset, strides) of a random view of this shape: a slice of a larger array whose axes stand in a random order."""
    pads = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    base = np.arange(int(np.prod([shape[axis] + sum(pads[axis]) for axis in order], dtype=int))).reshape(
        [shape[axis] + sum(pads[axis]) for axis in order]
    )
    view = base.transpose([order.index(axis) for axis in range(len(shape))])
    view = view[tuple(slice(before, before + size) for (before, _), size in zip(pads, shape, strict=True))]
    offset = int(view.ravel()[0]) if view.size else 0
    return offset, tuple(stride // 8 for stride in view.strides)


@st.composite
def copies(draw: st.DrawFn) -> StridedCopy:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    source, target = draw(views(shape)), draw(views(shape))
    return StridedCopy(SOURCE, source[0], source[1], target[0], target[1], shape)


@given(copies())
@settings(max_examples=100)
def test_a_coalesced_copy_moves_the_same_elements_in_fewer_dimensions_of_descending_target_stride(copy: StridedCopy) -> None:
    simple = coalesce(copy)
    assert moves(simple) == moves(copy)
    assert len(simple.shape) <= max(1, len(copy.shape))
    assert 1 not in simple.shape
    assert list(simple.target_strides) == sorted(simple.target_strides, reverse=True)
    assert coalesce(simple) == simple


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 9), st.integers(0, 9))
def test_a_copy_contiguous_on_both_sides_becomes_one_run(shape: list[int], source: int, target: int) -> None:
    strides = tuple(stride // 8 for stride in np.empty(shape).strides)
    simple = coalesce(StridedCopy(SOURCE, source, strides, target, strides, tuple(shape)))
    assert is_contiguous(simple)
    assert simple.elements == np.prod(shape, dtype=int)


def test_a_transpose_is_not_contiguous() -> None:
    assert not is_contiguous(coalesce(StridedCopy(SOURCE, 0, (1, 3), 0, (4, 1), (3, 4))))


@given(copies(), st.integers(0, 300), st.integers(0, 300))
@settings(max_examples=200)
def test_restricting_keeps_exactly_the_moves_into_the_range(copy: StridedCopy, lo: int, hi: int) -> None:
    parts = restrict(coalesce(copy), lo, hi)
    assert sorted(move for part in parts for move in moves(part)) == [move for move in moves(copy) if lo <= move[1] < hi]
    assert len(parts) <= max(1, 2 * len(coalesce(copy).shape) - 1)


def test_restricting_a_view_whose_rows_interleave_keeps_exactly_the_moves_into_the_range() -> None:
    copy = coalesce(StridedCopy(SOURCE, 0, (2, 1), 0, (2, 3), (2, 2)))  # targets 0, 3, 2, 5
    for lo in range(7):
        for hi in range(lo, 7):
            parts = restrict(copy, lo, hi)
            assert sorted(move for part in parts for move in moves(part)) == sorted(m for m in moves(copy) if lo <= m[1] < hi)


def tensor_of(shape: tuple[int, ...], parts: list[StridedCopy], padding: int = 0) -> TargetTensor:
    return TargetTensor("layers.0.attention.qkv.weight", "U16", shape, tuple(parts), "qkv", padding)


def count_writes(tensor: TargetTensor) -> np.ndarray:  # type: ignore[type-arg]
    counts = np.zeros(tensor.elements, int)
    for copy in tensor.copies:
        for _, target in moves(copy):
            counts[target] += 1
    return counts


def step_of(indices: np.ndarray, axis: int) -> int:  # type: ignore[type-arg]
    """The stride of an array of element indices."""
    return int(indices.take(1, axis).ravel()[0] - indices.ravel()[0]) if indices.size and indices.shape[axis] > 1 else 1


@st.composite
def partitions(draw: st.DrawFn) -> TargetTensor:
    """A tensor cut again and again along random axes of random reshapes, with now and then a piece left out, doubled or moved."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    pieces = [np.arange(int(np.prod(shape))).reshape(shape)]
    for _ in range(draw(st.integers(0, 5))):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        axis = draw(st.integers(0, piece.ndim - 1))
        if draw(st.booleans()) and piece.shape[axis] % 2 == 0:
            halves = piece.reshape(*piece.shape[:axis], piece.shape[axis] // 2, 2, *piece.shape[axis + 1 :])
            pieces += [half.squeeze(axis + 1) for half in np.split(halves, 2, axis + 1)]
        else:
            pieces += np.split(piece, [draw(st.integers(0, piece.shape[axis]))], axis)
    parts = []
    for piece in pieces:
        strides = tuple(step_of(piece, axis) for axis in range(piece.ndim))
        order = draw(st.permutations(range(piece.ndim)))
        size, strides = tuple(piece.shape[axis] for axis in order), tuple(strides[axis] for axis in order)
        packed = tuple(stride // 8 for stride in np.empty(size).strides)
        parts.append(StridedCopy(SOURCE, 0, packed, int(piece.ravel()[0]) if piece.size else 0, strides, size))
    fault = draw(st.sampled_from(["none", "none", "missing", "double", "moved"]))
    if fault == "missing":
        parts.pop()
    if fault == "double":
        parts.append(draw(st.sampled_from(parts)))
    if fault == "moved":
        copy = parts.pop(draw(st.integers(0, len(parts) - 1)))
        offset = max(0, copy.target_offset + draw(st.integers(-3, 3)))
        parts.append(StridedCopy(SOURCE, 0, copy.source_strides, offset, copy.target_strides, copy.shape))
    missing = int(np.prod(shape)) - sum(copy.elements for copy in parts)
    return tensor_of(shape, parts, draw(st.sampled_from([0, max(0, missing)])))


@given(partitions())
@settings(max_examples=300)
def test_a_cover_is_accepted_exactly_when_every_element_is_written_once_or_is_padding(tensor: TargetTensor) -> None:
    inside = all(not copy.elements or max(target for _, target in moves(copy)) < tensor.elements for copy in tensor.copies)
    counts = count_writes(tensor) if inside else np.zeros(0)
    right = inside and counts.max(initial=0) <= 1 and (counts == 0).sum() == tensor.padding
    assert (check_cover(tensor) == []) == right
    if inside:
        twice = first_overlap(tensor.copies)
        assert (twice is None) == (counts.max(initial=0) <= 1)
        assert twice is None or counts[twice] > 1


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=3), st.integers(0, 5))
def test_a_view_that_touches_an_element_twice_is_found(dims: list[tuple[int, int]], offset: int) -> None:
    strides, shape = tuple(stride for stride, _ in dims), tuple(size for _, size in dims)
    copy = StridedCopy(SOURCE, 0, strides, offset, strides, shape)
    counts = count_writes(tensor_of((ELEMENTS,), [copy]))
    assert (first_overlap([copy]) is None) == (counts.max() <= 1)


@pytest.mark.parametrize(
    ("copy", "words"),
    [
        (StridedCopy(SOURCE, 1, (1,), 0, (1,), (ELEMENTS,)), "reads past"),
        (StridedCopy(SOURCE, 0, (1,), 1, (1,), (ELEMENTS,)), "writes past"),
        (StridedCopy(SOURCE, 0, (1,), -1, (1,), (ELEMENTS,)), "negative"),
        (StridedCopy(SOURCE, ELEMENTS, (-1,), 0, (1,), (ELEMENTS,)), "negative"),
        (StridedCopy(SOURCE, 0, (1, 1), 0, (1,), (ELEMENTS,)), "sizes"),
    ],
)
def test_a_view_outside_its_tensor_is_named(copy: StridedCopy, words: str) -> None:
    problems = check_cover(tensor_of((ELEMENTS,), [copy]))
    assert [words in problem.what for problem in problems] == [True]
    assert problems[0].where == "layers.0.attention.qkv.weight"


def huge(elements: int) -> StoredTensor:
    return StoredTensor("experts", Path("model.safetensors"), "U16", (elements,), (Extent(0, 2 * elements),))


def test_interleaved_columns_of_a_huge_tensor_are_proved_without_enumerating_it() -> None:
    rows, columns, ranks = 1 << 20, 1 << 20, 16
    source = huge(rows * columns)
    width = columns // ranks
    parts = [StridedCopy(source, 0, (width, 1), rank * width, (columns, 1), (rows, width)) for rank in range(ranks)]
    assert check_cover(tensor_of((rows, columns), parts)) == []
    crooked = [*parts[1:], StridedCopy(source, 0, (width, 1), 1, (columns, 1), (rows, width))]
    assert [problem.what for problem in check_cover(tensor_of((rows, columns), crooked))] == [
        f"element {width} of {rows * columns} is written more than once"
    ]


def test_experts_cut_in_rows_and_columns_of_a_huge_tensor_are_proved_without_enumerating_it() -> None:
    experts, rows, columns, ranks = 256, 4096, 1 << 14, 4
    source = huge(experts * rows * columns)
    shape = (experts, rows // ranks, columns // ranks)
    strides = (rows * columns, columns, 1)
    packed = (shape[1] * shape[2], shape[2], 1)
    starts = [row * shape[1] * columns + column * shape[2] for row in range(ranks) for column in range(ranks)]
    parts = [StridedCopy(source, 0, packed, start, strides, shape) for start in starts]
    assert check_cover(tensor_of((experts, rows, columns), parts)) == []
    assert len(check_cover(tensor_of((experts, rows, columns), [*parts[:-1], parts[0]]))) == 1


def test_a_single_row_among_interleaved_columns_is_found() -> None:
    parts = [StridedCopy(SOURCE, 0, (4, 1), column, (8, 1), (100, 4)) for column in (0, 4)]
    extra = StridedCopy(SOURCE, 0, (1,), 8 * 70 + 3, (1,), (3,))
    assert first_overlap([*parts, extra]) in (8 * 70 + 3, 8 * 70 + 4, 8 * 70 + 5)
    assert first_overlap([parts[0], extra]) == 8 * 70 + 3
