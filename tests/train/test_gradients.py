"""Gradients after the backward passes: their sums in pieces, and the norm."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore import Tensor, nn

import train.gradients
from converter.layout import Coordinates
from model.stage import Stage, build_stage
from tests.model.reference import LLAMA
from train.communication import Group, Groups
from train.gradients import SynchronizedGradients
from train.sum_pieces import largest_piece, sum_pieces


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 100))
def test_pieces_hold_every_parameter_once_in_order_and_no_more_than_they_may_unless_one_alone_does(sizes: list[int], most: int) -> None:
    pieces = list(sum_pieces(sizes, most))
    assert [index for piece in pieces for index in piece] == list(range(len(sizes)))
    assert all(len(piece) == 1 or sum(sizes[index] for index in piece) <= most for piece in pieces)


@given(st.lists(st.integers(1, 1 << 28), min_size=1, max_size=40))
def test_no_piece_is_larger_than_a_plan_counts(sizes: list[int]) -> None:
    counted = largest_piece(sum(sizes), max(sizes))
    assert all(sum(sizes[index] for index in piece) <= counted for piece in sum_pieces(sizes))


class _ThreeEqualRanks(nn.Cell):
    """The sum over a group whose ranks all have what this one has."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.ranks = float(group.size)

    def construct(self, x: Tensor) -> Tensor:
        return x * self.ranks


@pytest.mark.parametrize("piece", [1, 1000, 3000, 1 << 20])
def test_in_any_pieces_every_gradient_is_summed_over_the_data_parallel_ranks_and_has_its_norm(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.gradients, "GroupSum", _ThreeEqualRanks)
    alone = Group((0,))
    groups = Groups(Coordinates(0, 0, 0, 0), Group((0, 1, 2), "x"), alone, Group((0, 1, 2), "x"), alone, alone, None, None, None)
    stage = build_stage(LLAMA, Stage(range(LLAMA.layers)))
    weights = stage.trainable_params()
    rng = np.random.default_rng(0)
    gradients = [rng.normal(0, 5, weight.shape).astype(np.float32) for weight in weights]
    synchronize = SynchronizedGradients(stage, weights, groups, [True] * len(weights), piece)
    found, norm = synchronize(ms.mutable(tuple(Tensor(gradient) for gradient in gradients)), Tensor(0.5, ms.float32))
    for gradient, tensor in zip(gradients, found, strict=True):
        np.testing.assert_array_equal(tensor.asnumpy(), gradient * np.float32(3))
    expected = 0.5 * np.sqrt(sum(float(np.sum((3.0 * gradient.astype(np.float64)) ** 2)) for gradient in gradients))
    np.testing.assert_allclose(float(norm.asnumpy()), expected, rtol=1e-6)
