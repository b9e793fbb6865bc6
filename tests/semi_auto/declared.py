"""The strategies that the operators of a case's decoder are given, by the place of the operator."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import model.embedding
import model.ops
from tests.semi_auto.cases import Case
from train.semi_auto import declare_decoder
from train.step import StepSettings


def declared_strategies(case: Case) -> dict[str, Any]:
    """ "layers.0.attention.q_proj.matmul" -> [strategy of inputs, of outputs or None, pipeline stage], as JSON has them."""
    settings = StepSettings(compute="bfloat16" if case.ascend else "float32")
    with patch.object(model.ops, "on_ascend", lambda: case.ascend), patch.object(model.embedding, "on_ascend", lambda: case.ascend):
        decoder = declare_decoder(case.config, case.layout, settings)
    found = {}
    for name, cell in decoder.cells_and_names():
        for attribute, primitive in cell._primitives.items():
            facts = primitive.get_attr_dict() if primitive is not None else {}
            if facts.get("in_strategy") is not None:
                found[f"{name}.{attribute}"] = [facts["in_strategy"], facts.get("out_strategy"), getattr(cell, "pipeline_stage", None)]
    strategies: dict[str, Any] = json.loads(json.dumps(found))
    return strategies
