"""The bundled models with real weights against Transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from model.build import build_model
from model.config import ModelConfig, Rope
from model.forward import forward
from model.generate import greedy
from model.load import load_parameters
from tests.model.reference import canonical_arrays, hidden_states, relative_error

pytestmark = pytest.mark.slow

SMOLLM2 = ModelConfig(
    family="llama", kind="decoder", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, padded_vocab=49152,
    max_positions=8192, norm="rms_norm", norm_eps=1e-5, activation="silu", gated_mlp=True, rope=Rope(100_000.0, 64), tied=True,
)  # fmt: skip
MINILM = ModelConfig(
    family="bert", kind="encoder", layers=6, hidden=384, heads=12, kv_heads=12, head_dim=32, ffn=1536, vocab=30522, padded_vocab=30522,
    max_positions=512, norm="layer_norm", norm_eps=1e-12, norm_position="post", activation="gelu", gated_mlp=False,
    positions="learned", qkv_bias=True, output_bias=True, mlp_bias=True, token_types=2, pooler=True,
)  # fmt: skip
SENTENCES = ["The capital of France is Paris.", "A conversion is a list of strided copies, and a round trip alone proves nothing."]


def test_smollm2_says_what_it_says_in_transformers(smollm2: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    cell = build_model(SMOLLM2)
    load_parameters(cell, canonical_arrays(network, SMOLLM2))
    ids = AutoTokenizer.from_pretrained(smollm2)(SENTENCES[1], return_tensors="pt").input_ids
    states, outputs = hidden_states(network, SMOLLM2, input_ids=ids)
    got = forward(cell, ids.numpy())
    assert got.logits is not None
    assert relative_error(got.logits, outputs.logits.numpy()) <= 1e-4
    np.testing.assert_array_equal(got.logits.argmax(-1), outputs.logits.numpy().argmax(-1))
    assert max(relative_error(got.hidden[name], wanted) for name, wanted in states.items()) <= 1e-4

    continued = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False).numpy()
    np.testing.assert_array_equal(greedy(cell, ids.numpy(), 32, [network.generation_config.eos_token_id]), continued)


def test_minilm_sentence_vectors_are_those_of_transformers(minilm: Path) -> None:
    network = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    cell = build_model(MINILM)
    load_parameters(cell, canonical_arrays(network, MINILM))
    batch = AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    states, outputs = hidden_states(network, MINILM, **batch)
    got = forward(cell, *(batch[name].numpy() for name in ("input_ids", "token_type_ids", "attention_mask")))
    assert max(relative_error(got.hidden[name], wanted) for name, wanted in states.items()) <= 1e-5
    assert got.pooled is not None
    assert relative_error(got.pooled, outputs.pooler_output.numpy()) <= 1e-5

    weights = batch["attention_mask"].numpy()[..., None]
    mine, theirs = (np.sum(state * weights, 1) / weights.sum(1) for state in (got.hidden["layers.5"], states["layers.5"]))
    assert relative_error(mine, theirs) <= 1e-5
