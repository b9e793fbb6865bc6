"""Arithmetic of a step, and the part of it that a pipeline waits.

A product of matrices [m, k] and [k, n] is 2 m k n operations; backward takes twice those of forward. Embedding lookups, norms and other
elementwise work are left out, attention counts whole rows of scores although half of them are masked: both as in Narayanan et al.,
arXiv:2104.04473, appendix ("FLOPs per iteration", 72 B s l h^2 (1 + s / 6h + V / 12lh) without recomputation for a model with ffn 4h), and
in PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T operations per token, N the parameters in matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

from model.config import ModelConfig
from train.planning.run_shape import RunShape


def layer_flops(model: ModelConfig, seq: int, windowed: bool) -> int:
    """Forward operations per token of one layer of the whole model; `windowed`: its attention has the model's sliding window."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    seen = min(seq, model.sliding_window or seq) if windowed else seq
    attention = 2 * model.hidden * (2 * query + 2 * key) + 2 * 2 * seen * query
    return attention + 2 * model.hidden * model.ffn * (3 if model.gated_mlp else 2)


def layers_flops(model: ModelConfig, seq: int, layers: Sequence[int]) -> int:
    """Forward operations per token of these layers."""
    windowed = sum(layer in model.sliding_layers for layer in layers) if model.sliding_layers else 0
    return (len(layers) - windowed) * layer_flops(model, seq, False) + windowed * layer_flops(model, seq, True)


def head_flops(model: ModelConfig) -> int:
    """Forward operations per token of the head, padding left out."""
    return 2 * model.hidden * model.vocab


def model_flops(model: ModelConfig, seq: int) -> int:
    """Operations per token that training needs, forward and backward, whatever is computed twice: what MFU counts (PaLM, appendix B)."""
    return 3 * (layers_flops(model, seq, range(model.layers)) + head_flops(model))


def stage_flops(run: RunShape, stage: int) -> int:
    """Operations per token that all ranks of a stage do, repeated forward passes included.

    A stage before the last computes its forward pass twice; a layer that is computed again once more.
    """
    model, seq, counts = run.work.model, run.work.seq, run.layout.layers_per_stage
    first = sum(counts[:stage])
    layers = range(first, first + counts[stage])
    again = [layer for layer in layers if run.recompute_every and (layer - first) % run.recompute_every]
    forward = layers_flops(model, seq, layers) + (head_flops(model) if run.last(stage) else 0)
    return (3 if run.last(stage) else 4) * forward + layers_flops(model, seq, again)


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits: (p - 1) / (m + p - 1), that is (p - 1) / m of the time of the work (arXiv:2104.04473,
    section 2.2.1, 1F1B with flush).
    """
    return (stages - 1) / (micro_batches + stages - 1)


def model_flops_utilisation(tokens_per_second: float, model: ModelConfig, seq: int, devices: int, flops: float) -> float:
    """MFU, PaLM's definition (arXiv:2204.02311, appendix B): observed tokens a second over those that the devices' peak would allow."""
    return tokens_per_second * model_flops(model, seq) / (devices * flops)
