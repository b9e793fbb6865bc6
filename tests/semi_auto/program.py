"""One rank of a compilation: declares the trainer's own cell for a case and compiles it, which leaves strategy files and graph dumps.

python -m tests.semi_auto.program CASE FOLDER       (under msrun, in the environment of tests/semi_auto/stubs.py)
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.communication import get_rank, init
from mindspore.graph.api import _cell_graph_executor

import model.embedding
import model.ops
import train.semi_auto_cell
from tests.semi_auto.cases import CASES, SEQ
from train.semi_auto import declare_decoder, set_parallel_mode, training_cell
from train.step import StepSettings

AFTER_THE_FRONT_END = ("/plugin/gpu/", "/backend/", "on GPU")
"""In an error: the front end is through; then the GPU backend misses an operator of Ascend's, or the partner of a Send."""


def compile_case(name: str, folder: Path) -> None:
    """Compile the training cell of a case as this process's rank."""
    case = CASES[name]
    ms.set_context(mode=ms.GRAPH_MODE, device_target="GPU")
    init()
    set_parallel_mode(case.layout, case.optimizer_sharding, str(folder / f"strategy_{get_rank()}.ckpt"))
    settings = StepSettings(
        case.micro_batches, optimizer_sharding=case.optimizer_sharding, compute="bfloat16" if case.ascend else "float32"
    )
    for module in (model.ops, model.embedding, train.semi_auto_cell):
        setattr(module, "on_ascend", lambda: case.ascend)  # noqa: B010 (mypy knows no such attribute of theirs)
    stage = case.layout.coordinates(get_rank()).stage
    cell = training_cell(declare_decoder(case.config, case.layout, settings), case.layout, settings, stage)
    ids = Tensor(np.zeros((4 * case.micro_batches, SEQ), np.int32))
    try:
        _cell_graph_executor.compile(cell, ids, ids, phase="train")
    except RuntimeError as error:
        if not any(place in str(error) for place in AFTER_THE_FRONT_END):
            raise


if __name__ == "__main__":
    compile_case(sys.argv[1], Path(sys.argv[2]))
