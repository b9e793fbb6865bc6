"""Two steps of copies made one give what the two give one after the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from converter.joined_copies import joined
from converter.plan import StridedCopy, TargetTensor
from converter.tensors import contiguous_strides
from tests.converter.planned import Array, numbered, run, stored

MIDDLE = "between"


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def folds(draw: st.DrawFn, size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How a range of elements is held: in how many pieces, each with which axes, stored in which order."""
    pieces = draw(st.sampled_from(divisors(size)))
    rest, shape = size // pieces, []
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from(divisors(rest))))
        rest //= shape[-1]
    shape.append(rest)
    return pieces, tuple(shape), tuple(draw(st.permutations(range(len(shape)))))


def piece_of(
    fold: tuple[int, tuple[int, ...], tuple[int, ...]], index: int
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Where a piece lies between, its strides there, its strides where it is stored, its shape."""
    _, shape, order = fold
    local = contiguous_strides(tuple(shape[axis] for axis in order))
    outer = tuple(local[order.index(axis)] for axis in range(len(shape)))
    return index * int(np.prod(shape)), contiguous_strides(shape), outer, shape


@given(st.sampled_from([6, 12, 24, 36, 60]).flatmap(lambda size: st.tuples(st.just(size), folds(size), folds(size))))
def test_one_step_gives_what_two_steps_give(
    case: tuple[int, tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, tuple[int, ...], tuple[int, ...]]],
) -> None:
    size, source_fold, target_fold = case
    buffers: dict[str, Array] = {}
    steps = []
    for index in range(source_fold[0]):
        first, strides, outer, shape = piece_of(source_fold, index)
        array = numbered((size // source_fold[0],), seed=index)
        buffers[f"source {index}"] = array
        steps.append(StridedCopy(stored(f"source {index}", array), 0, outer, first, strides, shape))
    middle = TargetTensor(MIDDLE, "I64", (size,), tuple(steps), MIDDLE)
    between = run(middle, buffers)
    for index in range(target_fold[0]):
        first, strides, outer, shape = piece_of(target_fold, index)
        copy = StridedCopy(stored(MIDDLE, between), first, strides, 0, outer, shape)
        target = TargetTensor("target", "I64", (size // target_fold[0],), (copy,), "target")
        assert np.array_equal(run(joined(target, {MIDDLE: middle}), buffers), run(target, {MIDDLE: between}))
