"""Layers that no family of the parity tests uses, against Transformers' and PyTorch's modules; and dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
import pytest
import torch
from mindspore import Tensor, nn
from transformers import GemmaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from model.build import build_model
from model.load import load_parameters
from model.mlp import GatedMLP
from model.norms import LayerNorm, RMSNorm
from model.precision import Precision
from tests.model.reference import CONFIGS, LLAMA, canonical_arrays, relative_error
from tests.tiny_models import tiny_model

X = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32) * 3


def compare(ours: nn.Cell, theirs: torch.nn.Module, names: dict[str, str]) -> float:
    """The relative error of `ours` for X with the random parameters of `theirs`; `names` maps its parameters to ours."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        wanted = theirs(torch.tensor(X)).numpy()
        load_parameters(ours, [(names[name], parameter.numpy()) for name, parameter in theirs.named_parameters()])
    return relative_error(ours(Tensor(X)).asnumpy(), wanted)


def test_an_rms_norm_with_offset_is_gemmas() -> None:
    assert compare(RMSNorm(64, 1e-5, 1.0, Precision()), GemmaRMSNorm(64, 1e-5), {"weight": "gamma"}) < 1e-6


def test_a_layer_norm_is_pytorchs_and_with_offset_nemotrons() -> None:
    names = {"weight": "gamma", "bias": "beta"}
    assert compare(LayerNorm(64, 1e-5, 0.0, Precision()), torch.nn.LayerNorm(64, 1e-5), names) < 1e-6
    assert compare(LayerNorm(64, 1e-5, 1.0, Precision()), NemotronLayerNorm1P(64, 1e-5), names) < 1e-6


def test_a_gated_mlp_with_gelu_is_gemmas() -> None:
    theirs = GemmaMLP(GemmaConfig(hidden_size=64, intermediate_size=96, hidden_activation="gelu_pytorch_tanh"))
    ours = GatedMLP(replace(LLAMA, activation="gelu_tanh"), Precision())
    assert compare(ours, theirs, {f"{part}_proj.weight": f"{part}_proj.weight" for part in ("gate", "up", "down")}) < 1e-6


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("embedding_dropout", ms.PYNATIVE_MODE),
        ("attention_dropout", ms.PYNATIVE_MODE),
        ("hidden_dropout", ms.PYNATIVE_MODE),
        ("hidden_dropout", ms.GRAPH_MODE),
    ],
)
def test_dropout_acts_in_training_only(place: str, mode: int) -> None:
    ids = Tensor(np.arange(20, dtype=np.int32)[None])

    def logits(training: bool, **dropout: Any) -> npt.NDArray[np.float32]:
        cell = build_model(replace(CONFIGS["gpt2"], layers=1, **dropout))
        weights = canonical_arrays(tiny_model("gpt2", num_hidden_layers=1), CONFIGS["gpt2"])
        load_parameters(cell, weights)
        result: npt.NDArray[np.float32] = cell.set_train(training)(ids).asnumpy()
        return result

    ms.set_context(mode=mode)
    ms.set_seed(1)
    plain = logits(training=True)
    np.testing.assert_array_equal(logits(training=False, **{place: 0.5}), plain)
    assert relative_error(logits(training=True, **{place: 0.5}), plain) > 0.05
