"""A rank's part of a model: the shapes that the catalogue cuts, and in one process the numbers of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from mindspore import Tensor

from model.loss import IGNORED, VocabParallelCrossEntropy
from model.parallel import TensorParallel
from model.stage import build_stage
from tests.conftest import TinyFolder
from tests.model.reference import LLAMA
from train.config import ModelSettings, ParallelSettings
from train.model_source import read_model_source
from train.start import Start, read_start


def start_of(folder: Path, **parallel: Any) -> Start:
    return read_start(read_model_source(ModelSettings(str(folder))), ParallelSettings(**parallel))


@pytest.mark.parametrize(
    "variant", ["gpt2-uneven-vocab", "llama-gqa-2", "llama-mqa", "llama-uneven-vocab-tied", "qwen3-tied", "llama-bias"]
)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2), (1, 4), (8, 1)])
def test_a_stage_has_exactly_the_parameters_and_shapes_that_the_converter_cuts(
    variant: str, tp: int, pp: int, tiny_folder: TinyFolder
) -> None:
    start = start_of(tiny_folder(variant), tp=tp, pp=pp)
    for rank in range(start.layout.ranks):
        place = start.layout.coordinates(rank)
        cell = build_stage(start.model, start.stage(rank), TensorParallel(1, place.tensor) if tp == 1 else _mute(tp, place.tensor))
        wanted = {item.name: piece.shape(item.shape) for item, piece in start.slices(rank)}
        assert {name: tuple(parameter.shape) for name, parameter in cell.parameters_dict().items()} == wanted


def _mute(size: int, rank: int) -> TensorParallel:
    """A rank among others that is only built, never run."""
    return TensorParallel(size, rank, "mccl_world_group")


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_one_rank_of_its_holders_counts_each_slice(tp: int, tiny_folder: TinyFolder) -> None:
    start = start_of(tiny_folder("llama-uneven-vocab-tied"), tp=tp, pp=2, dp=2)
    replica = [rank for rank in range(start.layout.ranks) if start.layout.coordinates(rank).data == 1]
    seen = [(item.name, piece.start) for rank in replica for item, piece in start.slices(rank) if item.name in start.counted(rank)]
    every = {(item.name, piece.start) for rank in replica for item, piece in start.slices(rank)}
    assert len(seen) == len(set(seen)) and set(seen) == every


@pytest.mark.parametrize("padded", [199, 256])
def test_cross_entropy_is_pytorchs_over_the_true_vocabulary_and_leaves_out_what_has_no_label(padded: int) -> None:
    from dataclasses import replace

    random = np.random.default_rng(0)
    logits = (random.standard_normal((3, 7, padded)) * 5).astype(np.float32)
    labels = random.integers(0, 199, (3, 7)).astype(np.int32)
    labels[1, 3:] = IGNORED
    loss = VocabParallelCrossEntropy(replace(LLAMA, vocab=199, padded_vocab=padded))
    value, gradient = ms.value_and_grad(loss)(Tensor(logits), Tensor(labels))
    theirs = torch.from_numpy(logits[..., :199]).requires_grad_()
    wanted = torch.nn.functional.cross_entropy(
        theirs.reshape(-1, 199), torch.from_numpy(labels.astype(np.int64)).reshape(-1), reduction="sum"
    )
    wanted.backward()
    assert float(value.asnumpy()) == pytest.approx(wanted.item(), rel=1e-6)
    assert theirs.grad is not None
    np.testing.assert_allclose(gradient.asnumpy()[..., :199], theirs.grad.numpy(), atol=2e-5)
    assert not gradient.asnumpy()[..., 199:].any()
