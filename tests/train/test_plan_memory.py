"""The plan's bytes against what the trainer holds and sends, rank by rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from converter.layout import ParallelLayout
from model.stage import Stage, build_stage
from tests.train.lone_rank import Exchanges, lone_rank, nbytes
from train.communication import make_groups
from train.config import FloatType, ModelSettings
from train.gradients import SynchronizedGradients
from train.optimizer import AdamW, AdamWSettings
from train.pipeline import MicroBatch, Pipeline
from train.planning.memory import rank_memory
from train.planning.parameters import RankParameters
from train.planning.run_shape import RunShape, Workload
from train.planning.source import PlannedModel, read_planned_model
from train.planning.traffic import gathered, summed, traffic

SEQ, MICRO_BATCH = 16, 2
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 1, "vocab_size": 199, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_theta": 10000.0,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": 256,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 64, "n_head": 4, "n_layer": 3,
    "n_positions": 64, "vocab_size": 201, "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
CONFIGS = {"llama, tied, one KV head, biases": LLAMA, "qwen3": QWEN3, "gpt2": GPT2}
LAYOUTS = list(product((1, 2), repeat=3))


@dataclass(frozen=True)
class Trained:
    """A rank of the trainer and what it exchanged."""

    pipeline: Pipeline
    optimizer: AdamW
    synchronize: SynchronizedGradients
    exchanges: Exchanges


@contextmanager
def trained(run: RunShape, rank: int, patch: pytest.MonkeyPatch) -> Iterator[Trained]:
    """The trainer's own parts for one rank, put together as train/step.py does it. The weights stay NaN: sizes do not depend on them."""
    layout, place = run.layout, run.layout.coordinates(rank)
    begin = sum(layout.layers_per_stage[: place.stage])
    stage = Stage(range(begin, begin + layout.layers_per_stage[place.stage]), place.stage == 0, place.stage == layout.pp - 1)
    with lone_rank(patch) as exchanges:
        groups = make_groups(layout, rank, run.work.model.kv_heads)
        pipeline = Pipeline(build_stage(run.work.model, stage, groups.tensor_parallel, run.work.weights, "float32"), groups)
        weights = list(pipeline.weights)
        optimizer = AdamW(weights, AdamWSettings(), {}, groups.data, groups.place.data, run.optimizer_sharding)
        yield Trained(pipeline, optimizer, SynchronizedGradients(pipeline.stage, weights, groups, [True] * len(weights)), exchanges)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> PlannedModel:
    config: dict[str, Any] = CONFIGS[request.param]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_planned_model(ModelSettings(str(tmp_path / "config.json")))


def run_of(model: PlannedModel, layout: ParallelLayout, weights: FloatType, micro_batches: int, sharding: bool) -> RunShape:
    config = replace(model.config, padded_vocab=layout.padded_vocab)
    work = Workload(config, SEQ, MICRO_BATCH * micro_batches * layout.dp, weights, "float32")
    return RunShape(work, layout, MICRO_BATCH, 0, sharding)


def held_by(model: PlannedModel, layout: ParallelLayout, rank: int) -> tuple[int, RankParameters]:
    stage = layout.coordinates(rank).stage
    return stage, RankParameters.of(model.shapes(layout, stage))


def some_ranks(layout: ParallelLayout) -> set[int]:
    """Of each stage the first and the last rank."""
    return {layout.rank(stage, *inner) for stage in range(layout.pp) for inner in ((0, 0), (layout.dp - 1, layout.tp - 1))}


def micro_batch() -> MicroBatch:
    ids = Tensor(np.arange(MICRO_BATCH * SEQ).reshape(MICRO_BATCH, SEQ) % 199, ms.int32)
    return MicroBatch(ids, ids)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", [False, True])
def test_weights_and_optimizer_state_are_what_the_trainer_allocates_to_the_byte(
    model: PlannedModel, sharding: bool, weights: FloatType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tp, pp, dp in LAYOUTS:
        run = run_of(model, model.cut(tp, pp, dp), weights, pp, sharding)
        for rank in some_ranks(run.layout):
            planned = rank_memory(run, *held_by(model, run.layout, rank), 0)
            with trained(run, rank, monkeypatch) as found:
                assert nbytes(found.pipeline.stage.get_parameters()) == planned.weights, (tp, pp, dp, rank)
                assert nbytes(found.optimizer.states()) == planned.optimizer, (tp, pp, dp, rank)


@pytest.mark.parametrize(("weights", "micro_batches"), [("float32", 2), ("bfloat16", 3)])
def test_gradients_and_everything_that_is_sent_in_a_step_are_what_the_trainer_makes_to_the_byte(
    model: PlannedModel, micro_batches: int, weights: FloatType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tp, pp, dp in LAYOUTS:
        run = run_of(model, model.cut(tp, pp, dp), weights, micro_batches, True)
        for rank in {run.layout.rank(stage, dp - 1, tp - 1) for stage in range(pp)}:
            stage, parameters = held_by(model, run.layout, rank)
            with trained(run, rank, monkeypatch) as found:
                gradients, _ = found.pipeline.run([micro_batch()] * micro_batches, Tensor(1.0, ms.float32))
                whole, _ = found.synchronize(gradients, Tensor(1.0, ms.float32))
                found.optimizer.step(whole, 1.0, 1e-3, 1)
                assert nbytes(gradients) == rank_memory(run, stage, parameters, 0).gradients, (tp, pp, dp, rank)
            sent, seen = traffic(run, stage, parameters), found.exchanges
            sums = sum(summed(size, ranks) for ranks, size in seen.of("tensor sum"))
            assert sums + sum(gathered(size, ranks) for ranks, size in seen.of("tensor gather")) == sent.tensor, (tp, pp, dp, rank)
            assert sum(size for _, size in seen.of("message")) == sent.pipeline, (tp, pp, dp, rank)
            assert sum(gathered(size, ranks) for ranks, size in seen.of("optimizer gather")) == sent.optimizer, (tp, pp, dp, rank)
            assert sum(summed(size, ranks) for ranks, size in seen.of("group sum")) == sent.data + sent.shared, (tp, pp, dp, rank)


def test_one_micro_batch_leaves_gradients_in_the_type_of_the_weights(model: PlannedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(model, model.cut(1, 1, 1), "bfloat16", 1, False)
    with trained(run, 0, monkeypatch) as found:
        gradients, _ = found.pipeline.run([micro_batch()], Tensor(1.0, ms.float32))
        assert nbytes(gradients) == rank_memory(run, *held_by(model, run.layout, 0), 0).gradients == 2 * model.parameters
