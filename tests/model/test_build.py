"""What a config makes of a model, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mappings.errors import Refused
from model.attention import score_scale
from model.build import build_model
from model.config import Rope
from model.forward import forward
from tests.model.reference import BERT, GPT2, LLAMA, QWEN3


def test_a_tied_or_missing_head_has_no_parameter() -> None:
    assert "lm_head.weight" in build_model(LLAMA).parameters_dict()
    assert "lm_head.weight" not in build_model(replace(LLAMA, tied=True)).parameters_dict()
    assert "lm_head.weight" not in build_model(replace(LLAMA, head=False)).parameters_dict()


def test_a_padded_vocabulary_pads_the_embedding_and_the_head() -> None:
    parameters = build_model(replace(LLAMA, vocab=199, padded_vocab=256)).parameters_dict()
    assert parameters["embedding.tokens.embedding_table"].shape == (256, 64)
    assert parameters["lm_head.weight"].shape == (256, 64)


def test_the_scale_of_the_scores_follows_the_config() -> None:
    assert score_scale(replace(LLAMA, head_dim=16), 3) == 0.25
    assert score_scale(replace(GPT2, head_dim=16, scale_by_layer=True), 3) == 0.0625
    assert score_scale(replace(LLAMA, attention_scale=0.7), 3) == 0.7


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (replace(LLAMA, experts=4), ["experts"]),
        (replace(LLAMA, kv_heads=3), ["kv_heads"]),
        (replace(LLAMA, vocab=257), ["padded_vocab"]),
        (replace(LLAMA, norm_position="post"), ["norm_position"]),
        (replace(BERT, norm_position="pre"), ["norm_position"]),
        (replace(LLAMA, rope=None), ["rope"]),
        (replace(GPT2, rope=Rope(10_000.0, 8)), ["rope"]),
        (replace(LLAMA, rope=Rope(10_000.0, 8, style="interleaved")), ["rope.style"]),
        (replace(LLAMA, rope=Rope(10_000.0, 10)), ["rope.rotary_dim"]),
        (replace(LLAMA, rope=Rope(10_000.0, 7)), ["rope.rotary_dim"]),
        (replace(LLAMA, sliding_layers=(0,)), ["sliding_window"]),
        (replace(LLAMA, sliding_window=8, sliding_layers=(0, 4)), ["sliding_layers"]),
        (replace(BERT, sliding_window=8, sliding_layers=(0,)), ["sliding_layers"]),
        (replace(BERT, nsp_head=True), ["nsp_head"]),
        (replace(BERT, tied=True), ["tied"]),
        (replace(LLAMA, pooler=True), ["kind"]),
        (replace(LLAMA, experts=4, kv_heads=3, rope=None), ["experts", "kv_heads", "rope"]),
    ],
)
def test_a_config_that_is_not_computed_is_refused_with_all_its_problems(config: Any, where: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        build_model(config)
    assert [problem.where for problem in caught.value.problems] == where


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (QWEN3, [np.array([[0, 256]])]),
        (QWEN3, [np.array([[0, -1]])]),
        (replace(QWEN3, vocab=199), [np.array([[199]])]),
        (QWEN3, [np.array([1, 2])]),
        (GPT2, [np.zeros((1, 65), np.int64)]),
        (BERT, [np.zeros((1, 4), np.int64), np.array([[0, 1, 2, 0]])]),
    ],
)
def test_inputs_that_no_table_has_a_row_for_are_refused(config: Any, inputs: list[Any]) -> None:
    with pytest.raises(Refused):
        forward(build_model(config), *inputs)
