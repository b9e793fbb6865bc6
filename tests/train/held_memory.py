"""Prints the bytes that a layer holds while a model computes its loss and gradients once, operator by operator.

Measured as the growth of the process from a model of few layers to one of many: MindSpore never gives CPU memory back, so the second only
adds what it needs more. Arguments: a ModelConfig as JSON, sequences, tokens of each.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor

from model.config import ModelConfig
from model.execution import synchronous_pynative
from model.stage import Stage, build_stage
from train.pipeline import LossAndGradients


def resident(key: str) -> int:
    """VmRSS, or its peak VmHWM, in bytes (proc(5))."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def grown(config: ModelConfig, batch: int, seq: int) -> int:
    """Bytes by which this process has grown at its peak."""
    random = np.random.default_rng(0)
    stage = build_stage(config, Stage(range(config.layers)))
    for parameter in stage.trainable_params():
        parameter.set_data(Tensor(0.02 * random.standard_normal(parameter.shape).astype(np.float32)))
    gradients = LossAndGradients(stage, ParameterTuple(stage.trainable_params()))
    ids = Tensor(random.integers(0, config.vocab, (batch, seq)), ms.int32)
    factor = Tensor(1.0, ms.float32)
    gradients(ids[:1, :8], ids[:1, :8], factor)[0].asnumpy()  # what is loaded at the first use is not the model's
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    before = resident("VmRSS")
    gradients(ids, ids, factor)[0].asnumpy()
    return resident("VmHWM") - before


def main(config: ModelConfig, batch: int, seq: int, few: int = 2, many: int = 6) -> float:
    """-> bytes of a layer."""
    with synchronous_pynative():
        grown(replace(config, layers=few), batch, seq)
        return grown(replace(config, layers=many), batch, seq) / (many - few)


if __name__ == "__main__":
    print(main(ModelConfig.from_json(json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
