"""Run by msrun: trains the cases of a JSON file on its ranks, one after the other, and rank by rank writes what happened.

Starting processes costs more than a tiny model's steps, so one job does many cases. Arguments: the file of cases, the folder of results.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from converter.records import decode

FloatType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Case:
    """What to train. `rows` is a .npy of int32 [steps, global batch, seq + 1]; `mask`, if given, is of the same shape.

    `save`: where the weights go at the end, as a checkpoint.
    """

    name: str
    model: str
    rows: str
    learning_rates: tuple[float, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    mask: str | None = None
    clip_norm: float = 1.0
    decay: float = 0.1
    optimizer_sharding: bool = False
    parameters: FloatType = "float32"
    compute: FloatType = "float32"
    loss_scale: float | None = None
    recompute_every: int = 0
    pynative: bool = False
    save: str | None = None


def run(case: Case, rank: int) -> dict[str, Any]:
    """Train on this rank. -> losses, norms and seconds of each step."""
    import mindspore as ms

    from train.communication import make_groups
    from train.config import ModelSettings, ParallelSettings
    from train.loss_scale import LossScale
    from train.model_source import read_model_source
    from train.optimizer import AdamWSettings
    from train.start import read_start
    from train.step import StepSettings, Trainer, labels_of

    ms.set_context(mode=ms.PYNATIVE_MODE if case.pynative else ms.GRAPH_MODE)
    parallel = ParallelSettings(case.tp, case.pp, case.dp, case.micro_batches, optimizer_sharding=case.optimizer_sharding)
    start = read_start(read_model_source(ModelSettings(case.model)), parallel)
    start = replace(start, model=replace(start.model, embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0))
    groups = make_groups(start.layout, rank, start.model.kv_heads)
    scale = LossScale() if case.loss_scale is None else LossScale(case.loss_scale, window=1000, dynamic=True)
    settings = StepSettings(
        case.micro_batches, case.clip_norm, AdamWSettings(decay=case.decay), case.optimizer_sharding, case.parameters, case.compute,
        case.recompute_every,
    )  # fmt: skip
    trainer = Trainer(start, groups, settings, scale)
    rows = np.load(case.rows)
    masks = np.load(case.mask) if case.mask else None
    part = rows.shape[1] // case.dp
    mine = slice(groups.place.data * part, (groups.place.data + 1) * part)
    results: dict[str, Any] = {"losses": [], "norms": [], "seconds": [], "overflows": [], "scales": []}
    for step, rate in enumerate(case.learning_rates):
        began = time.perf_counter()
        ids, labels = labels_of(rows[step, mine], None if masks is None else masks[step, mine])
        result = trainer.step(ids, labels, rate)
        results["losses"].append(result.loss)
        results["norms"].append(result.norm)
        results["overflows"].append(result.overflow)
        results["scales"].append(trainer.scale.scale)
        results["seconds"].append(time.perf_counter() - began)
    results["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if case.save is not None:
        from train.checkpoint import save_checkpoint
        from train.training_state import Progress

        save_checkpoint(trainer, Path(case.save), Progress(len(case.learning_rates), 0, 0), keep=0)
    return results


def main(cases: Path, output: Path) -> None:
    """Every case; several ranks when msrun has started this process."""
    import mindspore as ms
    from mindspore.communication import get_rank, init

    ms.set_device("CPU")
    rank = 0
    if "MS_WORKER_NUM" in os.environ:
        init()
        rank = get_rank()
    results = {}
    for data in json.loads(cases.read_text(encoding="utf-8")):
        case = decode(Case, data, "case")
        results[case.name] = run(case, rank)
    (output / f"rank_{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
