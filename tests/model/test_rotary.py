"""Rotary frequencies, tables and partial rotation against Transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mindspore import Tensor
from transformers import LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model.config import Rope, RopeScaling
from model.rotary import ApplyRotary, inverse_frequencies, rotary_tables
from tests.model.reference import relative_error

SCALINGS: list[tuple[RopeScaling | None, dict[str, Any]]] = [
    (None, {"rope_type": "default"}),
    (RopeScaling("linear", 2.5), {"rope_type": "linear", "factor": 2.5}),
    (RopeScaling("dynamic", 4.0), {"rope_type": "dynamic", "factor": 4.0}),
    (
        RopeScaling("llama3", 8.0, original_max_positions=128, low_freq_factor=1.0, high_freq_factor=4.0),
        {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    (
        RopeScaling("yarn", 4.0, original_max_positions=128),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    ),
    (
        RopeScaling("yarn", 4.0, original_max_positions=128, attention_factor=0.7, beta_fast=20.0, beta_slow=3.0),
        {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.7, "beta_fast": 20.0,
            "beta_slow": 3.0,
        },
    ),
    (  # so short a context that the ramp has no width
        RopeScaling("yarn", 4.0, original_max_positions=6),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    ),
    (
        RopeScaling("yarn", 40.0, original_max_positions=128, mscale=0.9, mscale_all_dim=0.7, truncate=False),
        {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 128, "mscale": 0.9, "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
]  # fmt: skip


def hf_rotary(parameters: dict[str, Any], theta: float, dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=512,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("scaling", "parameters"), SCALINGS)
@pytest.mark.parametrize("theta", [500.0, 500_000.0])
@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("seq", [100, 512, 700])
def test_tables_are_those_of_transformers(
    scaling: RopeScaling | None, parameters: dict[str, Any], theta: float, dim: int, seq: int
) -> None:
    reference = hf_rotary(parameters, theta, dim)
    cos, sin = reference(torch.zeros(1, seq, 1), torch.arange(seq)[None])
    rope = Rope(theta, dim, scaling=scaling)
    frequencies, _ = inverse_frequencies(rope, max_positions=512, seq=seq)
    np.testing.assert_array_max_ulp(frequencies, reference.inv_freq.numpy(), 4)
    for got, wanted in zip(rotary_tables(rope, 512, seq), (cos, sin), strict=True):
        # an error of one unit in a frequency is one of `seq` units in the last angle
        np.testing.assert_allclose(got, wanted[0].numpy(), rtol=0, atol=seq * 2**-23)


def test_dynamic_scaling_depends_on_the_length_alone() -> None:
    """Transformers keeps the frequencies of the longest sequence it has seen; ours are those of a fresh model."""
    rope = Rope(10_000.0, 16, scaling=RopeScaling("dynamic", 4.0))
    before = rotary_tables(rope, 64, 80)[0]
    assert not np.array_equal(rotary_tables(rope, 64, 200)[0][:80], before)
    np.testing.assert_array_equal(rotary_tables(rope, 64, 80)[0], before)
    np.testing.assert_array_equal(rotary_tables(rope, 64, 64)[0], rotary_tables(Rope(10_000.0, 16), 64, 64)[0])


@pytest.mark.parametrize("rotary_dim", [4, 10, 16])
def test_partial_rotation_is_that_of_gpt_neox(rotary_dim: int) -> None:
    query = np.random.default_rng(0).standard_normal((2, 3, 20, 16)).astype(np.float32)
    rope = Rope(1000.0, rotary_dim)
    tables = rotary_tables(rope, 64, 20)
    wanted, _ = apply_rotary_pos_emb(torch.tensor(query), torch.tensor(query), *(torch.tensor(table)[None] for table in tables))
    got = ApplyRotary(rope, 16)(Tensor(query), *(Tensor(table[None, None]) for table in tables))
    assert relative_error(got.asnumpy(), wanted.numpy()) < 1e-6
