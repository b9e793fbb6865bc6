"""Whether a run starts from the model that it should: its first loss against Transformers', or at least against a guess.

Wrong weights do not stop a training: it recovers from them, and what they cost is seen much later. The first loss shows them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mappings.errors import refuse
from model.loss import IGNORED
from train.config import ModelSettings, TrainConfig
from train.loader import open_loader
from train.model_source import read_model_source
from train.semi_auto import AnyTrainer
from train.step import Tokens, labels_of
from train.watch import Watch

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}
"""Relative, by the narrower of the types of weights and activations; Transformers computes in float32. Measured on tiny models, whose
weights have standard deviation 0.5: 1e-7 with float32 weights, 1.3e-3 with bfloat16 ones.
"""


def note_on_first_loss(watch: Watch, loss: float, vocabulary: int, *, compared: bool) -> None:
    """Warn of a first loss above ln(vocabulary), that of a model which gives every token the same probability.

    `compared`: it is Transformers' loss, so that the model or the data are the reason, and not the conversion.
    """
    guess = math.log(vocabulary)
    if loss > guess:
        advice = "Transformers finds the same" if compared else "Compare with Transformers: --check-start HF_FOLDER"
        watch.note(
            f"warning: the first loss is {loss:.4f}, and guessing costs ln({vocabulary}) = {guess:.4f}: a trained model is below. {advice}"
        )


def check_start(config: TrainConfig, trainer: AnyTrainer, watch: Watch, step: int) -> None:
    """Compare the loss of the first batch, without dropout, with Transformers', where `watch.check_start` asks for it and nothing was
    trained yet. Called by all ranks at once; rank 0 computes Transformers' side in float32.

    Raises Refused, on rank 0, when they differ by more than TOLERANCE.
    """
    if config.watch.check_start is None or step > 0:
        return
    groups = trainer.groups
    mine = next(open_loader(config, groups.place.data))
    found = trainer.evaluate([labels_of(mine.ids, mine.mask)])
    if groups.place.rank == 0:
        whole = next(open_loader(replace(config, parallel=replace(config.parallel, dp=1)), 0))
        wanted = transformers_loss(replace(config.model, path=config.watch.check_start), *labels_of(whole.ids, whole.mask))
        watch.note(_compared(config, found, wanted))
    trainer.wait_for_all()


def _compared(config: TrainConfig, found: float, wanted: float) -> str:
    tolerance = max(TOLERANCE[config.precision.kind], TOLERANCE[config.compute])
    difference = abs(found - wanted) / abs(wanted)
    told = f"the loss of the first batch is {found:.6f}, Transformers' {wanted:.6f}: relative difference {difference:.1e}"
    if not difference <= tolerance:
        raise refuse(
            f"{told}, more than {tolerance:g}",
            f"watch.check_start: {config.watch.check_start}",
            "these are not the same weights, or not the same model: `ms-convert verify` names the first tensor and layer that differ",
        )
    return told


def transformers_loss(settings: ModelSettings, ids: Tokens, labels: Tokens) -> float:
    """The mean loss over all labels of these sequences, [sequences, seq] each, by Transformers in float32, one after the other.

    Raises Refused for a folder that Transformers cannot load.
    """
    from model.reference import load_reference  # isort: skip (it imports MindSpore before torch)

    import torch

    source = read_model_source(settings).hf
    if source is None:
        raise refuse("is a rank tree", f"watch.check_start: {settings.path}", "give the Hugging Face folder that the weights came from")
    model = load_reference(source)
    total = 0.0
    with torch.no_grad():
        for sequence, targets in zip(ids, labels, strict=True):
            logits = model(torch.from_numpy(sequence.astype(np.int64))[None], use_cache=False).logits[0]
            chosen = torch.from_numpy(targets.astype(np.int64))
            total += float(torch.nn.functional.cross_entropy(logits, chosen, ignore_index=IGNORED, reduction="sum"))
    return total / max(int(np.count_nonzero(labels != IGNORED)), 1)
