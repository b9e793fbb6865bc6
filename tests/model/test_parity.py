"""The bundled models against Transformers, float32 on the CPU, layer by layer, with weights so large that nothing hides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
import pytest
import torch
from mindspore import Tensor, nn

from model.build import build_model
from model.config import ModelConfig
from model.forward import Outputs, forward
from model.load import load_parameters
from tests.model.reference import CONFIGS, canonical_arrays, hidden_states, relative_error
from tests.tiny_models import tiny_model

LIMIT = 1e-5
DECODERS = [variant for variant, config in CONFIGS.items() if config.kind == "decoder"]
ENCODERS = [variant for variant, config in CONFIGS.items() if config.kind == "encoder"]


@dataclass(frozen=True)
class Reference:
    """What Transformers computes: in float32, and in float64 to tell how far float32 can be trusted."""

    states: dict[str, npt.NDArray[Any]]
    outputs: Any
    exact_states: dict[str, npt.NDArray[Any]]

    def limit(self, name: str) -> float:
        """Two float32 computations may differ by the sum of their own errors. With sharp softmaxes that can exceed LIMIT; then the measure
        is Transformers' own error, doubled.
        """
        return max(LIMIT, 2 * relative_error(self.states[name], self.exact_states[name]))

    def check(self, ours: dict[str, npt.NDArray[np.float32]]) -> None:
        assert list(ours) == list(self.states)
        errors = {name: relative_error(ours[name], wanted) for name, wanted in self.states.items()}
        assert not {name: error for name, error in errors.items() if error > self.limit(name)}

    def check_output(self, ours: npt.NDArray[np.float32] | None, wanted: torch.Tensor) -> None:
        assert ours is not None
        assert relative_error(ours, wanted.numpy()) <= 2 * self.limit(next(reversed(self.states)))


def reference(variant: str, **inputs: npt.NDArray[Any]) -> Reference:
    config, tensors = CONFIGS[variant], {name: torch.tensor(array) for name, array in inputs.items()}
    states, outputs = hidden_states(tiny_model(variant), config, **tensors)
    exact, _ = hidden_states(tiny_model(variant).double(), config, **tensors)
    return Reference(states, outputs, exact)


@lru_cache(maxsize=1)
def loaded(variant: str) -> nn.Cell:
    cell = build_model(CONFIGS[variant])
    load_parameters(cell, canonical_arrays(tiny_model(variant), CONFIGS[variant]))
    return cell


def random_ids(config: ModelConfig, seq: int) -> npt.NDArray[np.int64]:
    """[2, seq], with the vocabulary's first and last id among them."""
    ids = np.random.default_rng(1).integers(0, config.vocab, (2, seq))
    ids[0, :2] = 0, config.vocab - 1
    return ids


def segments_and_mask(seq: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two segments in each row, the second row a third shorter."""
    token_types = (np.arange(seq)[None] >= np.array([[seq // 2], [seq // 4]])).astype(np.int64)
    return token_types, (np.arange(seq)[None] < np.array([[seq], [seq - seq // 3]])).astype(np.int64)


@pytest.mark.parametrize("variant", DECODERS)
def test_a_decoder_computes_what_transformers_computes(variant: str) -> None:
    """40 tokens: longer than every sliding window, than the original context of every scaling and than the maximum of the dynamic one."""
    ids = random_ids(CONFIGS[variant], 40)
    wanted, got = reference(variant, input_ids=ids), forward(loaded(variant), ids)
    wanted.check(got.hidden)
    if CONFIGS[variant].head:
        wanted.check_output(got.logits, wanted.outputs.logits)
        assert got.logits is not None
        np.testing.assert_array_equal(got.logits.argmax(-1), wanted.outputs.logits.numpy().argmax(-1))
    else:
        assert got.logits is None


@pytest.mark.parametrize("variant", ENCODERS)
def test_an_encoder_computes_what_transformers_computes(variant: str) -> None:
    config, ids = CONFIGS[variant], random_ids(CONFIGS[variant], 20)
    token_types, mask = segments_and_mask(20)
    wanted = reference(variant, input_ids=ids, token_type_ids=token_types, attention_mask=mask)
    got = forward(loaded(variant), ids, token_types, mask)
    wanted.check(got.hidden)
    if config.mlm_head:
        logits = wanted.outputs.logits if "logits" in wanted.outputs else wanted.outputs.prediction_logits
        wanted.check_output(got.logits, logits)
        assert got.logits is not None
        np.testing.assert_array_equal(got.logits.argmax(-1), logits.numpy().argmax(-1))
    if config.nsp_head:
        wanted.check_output(got.nsp_logits, wanted.outputs.seq_relationship_logits)
    elif config.pooler:
        wanted.check_output(got.pooled, wanted.outputs.pooler_output)
    assert present(got) == (config.mlm_head, config.pooler, config.nsp_head)


def present(outputs: Outputs) -> tuple[bool, bool, bool]:
    return outputs.logits is not None, outputs.pooled is not None, outputs.nsp_logits is not None


def test_an_encoder_needs_neither_token_types_nor_a_mask() -> None:
    ids = random_ids(CONFIGS["bert"], 20)
    reference("bert", input_ids=ids).check(forward(loaded("bert"), ids).hidden)


@pytest.mark.parametrize("seq", [16, 32])
def test_dynamic_scaling_does_nothing_up_to_the_models_own_length(seq: int) -> None:
    ids = random_ids(CONFIGS["llama-rope-dynamic"], seq)
    reference("llama-rope-dynamic", input_ids=ids).check(forward(loaded("llama-rope-dynamic"), ids).hidden)


@pytest.mark.parametrize("variant", ["gpt2", "llama-rope-yarn", "mistral-sliding", "qwen3-bias"])
def test_graph_mode_computes_a_decoder_alike(variant: str) -> None:
    ids = random_ids(CONFIGS[variant], 40)
    eager = forward(loaded(variant), ids)
    ms.set_context(mode=ms.GRAPH_MODE)
    logits, states = loaded(variant)(Tensor(ids.astype(np.int32)), True)
    for state, wanted in zip((*states, logits), (*eager.hidden.values(), eager.logits), strict=True):
        assert relative_error(state.asnumpy(), np.asarray(wanted)) <= LIMIT


def test_graph_mode_computes_an_encoder_alike() -> None:
    ids = random_ids(CONFIGS["bert-pretraining"], 20)
    token_types, mask = segments_and_mask(20)
    eager = forward(loaded("bert-pretraining"), ids, token_types, mask)
    ms.set_context(mode=ms.GRAPH_MODE)
    inputs = [Tensor(array.astype(np.int32)) for array in (ids, token_types, mask)]
    logits, pooled, nsp_logits, states = loaded("bert-pretraining")(*inputs, True)
    ours = (logits, pooled, nsp_logits, *states)
    for got, wanted in zip(ours, (eager.logits, eager.pooled, eager.nsp_logits, *eager.hidden.values()), strict=True):
        assert relative_error(got.asnumpy(), np.asarray(wanted)) <= LIMIT


def gradients(variant: str, ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
    """Of sum(logits * weights), by canonical name, in the mode that is set."""
    cell = loaded(variant)

    def loss(ids: Tensor, weights: Tensor) -> Tensor:
        return (cell(ids) * weights).sum()

    parameters = list(cell.get_parameters())
    values = ms.grad(loss, None, parameters)(Tensor(ids.astype(np.int32)), Tensor(weights))
    return {parameter.name: value.asnumpy() for parameter, value in zip(parameters, values, strict=True)}


@pytest.mark.parametrize("variant", ["gpt2-inner", "llama-tied", "llama-bias", "mistral-sliding", "qwen3"])
def test_gradients_are_those_of_pytorch(variant: str) -> None:
    """Gradients go through the softmaxes twice and lose two more digits; a wrong one is wrong by its own size."""
    config, ids = CONFIGS[variant], random_ids(CONFIGS[variant], 24)
    weights = np.random.default_rng(2).standard_normal((2, 24, config.vocab)).astype(np.float32)
    network = tiny_model(variant)
    (network(input_ids=torch.tensor(ids)).logits * torch.tensor(weights)).sum().backward()
    for parameter in network.parameters():
        parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    wanted, got = dict(canonical_arrays(network, config)), gradients(variant, ids, weights)
    assert set(got) == set(wanted)
    scale = max(np.abs(array).max() for array in wanted.values())
    errors = {name: relative_error(got[name], wanted[name]) for name in got if np.abs(wanted[name]).max() > 1e-4 * scale}
    assert not {name: error for name, error in errors.items() if error > 1e-3}
    assert len(errors) > 0.9 * len(got) - config.layers  # softmax makes the gradient of a key's bias zero
