"""Greedy continuations against Transformers' `generate`."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import torch

from mappings.errors import Refused
from model.build import build_model
from model.generate import greedy
from model.load import load_parameters
from tests.model.reference import CONFIGS, canonical_arrays
from tests.tiny_models import tiny_model

PROMPT = np.array([[17, 3, 88, 121]])


@pytest.mark.parametrize("variant", ["gpt2", "llama-gqa", "mistral-sliding", "qwen3"])
@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_greedy_continues_as_transformers_does(variant: str, mode: int) -> None:
    network = tiny_model(variant)
    wanted = network.generate(torch.tensor(PROMPT), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0).numpy()
    cell = build_model(CONFIGS[variant])
    load_parameters(cell, canonical_arrays(network, CONFIGS[variant]))
    ms.set_context(mode=mode)
    got = greedy(cell, PROMPT, 20)
    assert ms.get_context("mode") == mode
    np.testing.assert_array_equal(got, wanted)
    stop = int(wanted[0, 10])
    ended = greedy(cell, PROMPT, 20, eos=[stop, 255])
    np.testing.assert_array_equal(ended, wanted[:, : ended.shape[1]])
    assert ended[0, -1] in (stop, 255)


def test_greedy_stops_at_the_last_learned_position() -> None:
    cell = build_model(CONFIGS["gpt2"])
    load_parameters(cell, canonical_arrays(tiny_model("gpt2"), CONFIGS["gpt2"]))
    with pytest.raises(Refused, match="64 positions"):
        greedy(cell, np.full((1, 60), 5), 10)
