"""The trainer against the bare model in one process, and four ranks: tokens a second, time of a step, memory of a rank."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.timing import machine
from tests.train.jobs import run_cases
from tests.train.worker import Case

BATCH, SEQ = 8, 128
WARM_STEPS, STEPS = 2, 12
RATE = 1e-4
SIZES = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": SEQ, "vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}


def small_gpt2(folder: Path) -> Path:
    """A GPT-2 of 14 million parameters, random weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).save_pretrained(folder)
    return folder


def bare_step(folder: Path) -> Callable[[np.ndarray[Any, Any]], float]:
    """Forward, backward and AdamW on the whole model: MindSpore's own `nn.TrainOneStepCell` and fused optimizer, one graph.

    With the trainer's loss: `ops.cross_entropy` takes twice as long on a CPU, and the ratio would say nothing about the trainer. A function
    under `ms.jit` takes 1.5 times as long as this cell.
    """
    from mindspore import Tensor, nn

    from converter.canonical import parameters_of_source
    from model.build import build_model
    from model.load import load_parameters
    from model.loss import VocabParallelCrossEntropy
    from train.config import ModelSettings
    from train.model_source import read_model_source

    class MeanLoss(nn.Cell):
        def __init__(self, model: nn.Cell, cross_entropy: nn.Cell) -> None:
            super().__init__(auto_prefix=False)
            self.model, self.cross_entropy = model, cross_entropy

        def construct(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.cross_entropy(self.model(ids), labels) / labels.size

    source = read_model_source(ModelSettings(str(folder)))
    assert source.hf is not None
    model = build_model(source.config)
    load_parameters(model, parameters_of_source(source.hf))
    optimizer = nn.AdamWeightDecay(model.trainable_params(), RATE, weight_decay=0.1)
    step = nn.TrainOneStepCell(MeanLoss(model, VocabParallelCrossEntropy(source.config)), optimizer)
    step.set_train(True)

    def run(rows: np.ndarray[Any, Any]) -> float:
        return float(step(Tensor(rows[:, :-1]), Tensor(rows[:, 1:])).asnumpy())

    return run


def trainer_step(folder: Path) -> Callable[[np.ndarray[Any, Any]], float]:
    """The same step by the trainer: with the global norm, clipping and its bookkeeping."""
    from train.communication import make_groups
    from train.config import ModelSettings, ParallelSettings
    from train.model_source import read_model_source
    from train.start import read_start
    from train.step import StepSettings, Trainer, labels_of

    start = read_start(read_model_source(ModelSettings(str(folder))), ParallelSettings())
    trainer = Trainer(start, make_groups(start.layout, 0, start.model.kv_heads), StepSettings())

    def run(rows: np.ndarray[Any, Any]) -> float:
        return trainer.step(*labels_of(rows, None), RATE).loss

    return run


def in_one_process(folder: Path) -> None:
    """Both in turn, step by step, so that a machine's moods meet both alike."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE)
    steps = {"bare model": bare_step(folder), "trainer": trainer_step(folder)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    rows = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (WARM_STEPS + STEPS, BATCH, SEQ + 1)).astype(np.int32)
    for index, row in enumerate(rows):
        for name, step in sorted(steps.items(), reverse=bool(index % 2)):
            began = time.perf_counter()
            step(row)
            if index >= WARM_STEPS:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: BATCH * SEQ / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        times = seconds[name]
        print(f"{name:12} {rate:8.0f} tokens/s  (a step {statistics.median(times):.2f} s, {min(times):.2f}-{max(times):.2f})")
    print(f"trainer / bare model: {rates['trainer'] / rates['bare model']:.3f}")


def on_four_ranks(folder: Path, work: Path) -> None:
    """tp 2 x pp 2 on this host."""
    rows = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (WARM_STEPS + STEPS, BATCH, SEQ + 1)).astype(np.int32)
    np.save(work / "rows.npy", rows)
    case = Case("2x2x1", str(folder), str(work / "rows.npy"), (RATE,) * len(rows), tp=2, pp=2, micro_batches=4)
    results = [of_rank["2x2x1"] for of_rank in run_cases([case], work / "job", 4)]
    times = results[0]["seconds"][WARM_STEPS:]
    peaks = ", ".join(f"{result['peak_bytes'] / 1e6:.0f}" for result in results)
    first = results[0]["seconds"][0]
    spread = f"{min(times):.2f}-{max(times):.2f}"
    print(f"tp 2 x pp 2, 4 micro-batches: a step {statistics.median(times):.2f} s ({spread}), the first {first:.1f} s")
    print(f"peak memory of the ranks: {peaks} MB")


def main(work: Path) -> None:
    """All measurements of this file."""
    print(f"{machine()}; GPT-2 of 14 million parameters, batch {BATCH} x {SEQ}, float32, graph mode")
    folder = small_gpt2(work / "gpt2")
    in_one_process(folder)
    on_four_ranks(folder, work)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary))
