"""Operations, utilisation, bubble and parameter counts of a plan against published figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mappings.public_configs import LARGER, PUBLIC
from tests.train.test_plan_activations import PAPER, gpt
from train.config import ModelSettings
from train.pipeline_order import one_forward_one_backward
from train.planning.compute import bubble, model_flops, model_flops_utilisation, stage_flops
from train.planning.run_shape import RunShape, Workload
from train.planning.source import PlannedModel, read_planned_model

DECODERS = {name: public for name, public in (PUBLIC | LARGER).items() if public.family != "bert"}


def planned(name: str, folder: Path) -> PlannedModel:
    (folder / "config.json").write_text(json.dumps(DECODERS[name].config), encoding="utf-8")
    return read_planned_model(ModelSettings(str(folder)))


@pytest.mark.parametrize("name", DECODERS)
def test_a_config_alone_gives_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    model = planned(name, tmp_path)
    assert model.parameters == DECODERS[name].parameters
    for tp, pp in ((1, 1), (2, 2)) if model.config.heads % 2 == 0 and model.config.kv_heads % 2 == 0 else ((1, 1), (1, 3)):
        layout = model.cut(tp, pp, 1)
        held = sum(_size(shape) for stage in range(pp) for _, shape in model.shapes(layout, stage))
        assert tp * held >= model.parameters


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for axis in shape:
        size *= axis
    return size


@pytest.mark.parametrize("name", PAPER)
def test_operations_are_those_of_megatrons_formula(name: str) -> None:
    """Narayanan et al., arXiv:2104.04473, appendix: 96 B s l h^2 (1 + s / 6h + V / 16lh) when every layer is computed twice."""
    layers, hidden, heads = PAPER[name]
    config, seq = gpt(layers, hidden, heads), 2048
    vocab = config.vocab
    once = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model_flops(config, seq) == pytest.approx(once, rel=1e-12)
    twice = 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert model_flops(config, seq) + (model_flops(config, seq) - 6 * hidden * vocab) / 3 == pytest.approx(twice, rel=1e-12)


@pytest.mark.parametrize("name", ["Llama-2-7b", "Qwen2.5-7B", "gpt2"])
def test_operations_are_6n_plus_attention(name: str, tmp_path: Path) -> None:
    """PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T, where N are the parameters in matrices, a lookup's left out."""
    model = planned(name, tmp_path)
    config = model.config
    lookups = config.vocab if not config.tied else 0  # a tied table is the head's matrix too
    matrices = sum(_size(item.shape) for item in model.expansion.parameters.values() if len(item.shape) > 1)
    matrices -= (lookups + (config.max_positions if config.positions == "learned" else 0)) * config.hidden
    attention = 12 * config.layers * config.heads * config.head_dim * 1024
    assert model_flops(config, 1024) == 6 * matrices + attention


def test_utilisation_is_the_published_one_of_megatron_turing() -> None:
    """PaLM, arXiv:2204.02311, table 3: 65.43 thousand tokens a second on 2240 A100 of 312 teraflops are an MFU of 30.2 %."""
    found = model_flops_utilisation(65_430, gpt(*PAPER["530B"]), 2048, 2240, 312e12)
    assert found == pytest.approx(0.302, abs=0.002)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10), st.floats(0.5, 4.0))
def test_the_bubble_is_what_the_trainers_order_waits(stages: int, more: int, backward: float) -> None:
    micro_batches = stages + more
    took = _play(stages, micro_batches, backward)
    assert bubble(stages, micro_batches) == pytest.approx(1 - micro_batches * (1 + backward) / took, abs=1e-9)


def _play(stages: int, micro_batches: int, backward: float) -> float:
    """The time of a step when forward takes 1, backward `backward`, and messages nothing."""
    orders = [
        [event for event in one_forward_one_backward(stage, stages, micro_batches) if event.action in ("forward", "backward")]
        for stage in range(stages)
    ]
    done: dict[tuple[int, str, int], float] = {}
    clock = [0.0] * stages
    at = [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                event = orders[stage][at[stage]]
                source = stage - 1 if event.action == "forward" else stage + 1
                needs = (source, event.action, event.micro_batch)
                if 0 <= source < stages and needs not in done:
                    break
                clock[stage] = max(clock[stage], done.get(needs, 0.0)) + (1.0 if event.action == "forward" else backward)
                done[stage, event.action, event.micro_batch] = clock[stage]
                at[stage] += 1
    return max(clock)


def test_a_stage_before_the_last_computes_forward_twice_and_chosen_layers_once_more(tmp_path: Path) -> None:
    model = planned("Llama-2-7b", tmp_path)
    work = Workload(replace(model.config, vocab=0), 2048, 64)  # no head: every stage has the same arithmetic
    forward = model_flops(work.model, 2048) // 3
    whole = RunShape(work, model.cut(1, 4, 1), 1)
    assert [stage_flops(whole, stage) for stage in range(4)] == [forward] * 3 + [3 * forward // 4]
    again = replace(whole, recompute_every=4)  # six of a stage's eight layers
    assert stage_flops(again, 0) - stage_flops(whole, 0) == forward // 4 * 6 // 8
