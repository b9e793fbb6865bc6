"""Device memory of a rank: what the bundled trainer holds through a step, in bytes.

Weights, gradients and the optimizer's state are exact: the shapes are the converter's slices, the rules those of train/optimizer.py and
train/pipeline.py. The rest is an estimate from what those modules do, one phase of a step after another:

| phase | held besides weights, optimizer state and buffers |
|---|---|
| backward | gradients so far (float32), those of this micro-batch, activations, logits |
| adding | both sums, before and after (float32), and the micro-batch's gradients |
| summing | gradients before and after the sums, and of the piece that is under way (train/sum_pieces.py) two copies in one run |
| updating | gradients before and after the sums; with divided state the gathered weights |

A stage before the last keeps the *inputs* of the micro-batches that are under way and computes forward again, so whatever the stage, one
micro-batch's activations are held at a time. (Megatron's 1F1B keeps the activations of up to `pp` micro-batches; arXiv:2205.05198, 4.2.3.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from converter.layout import ParallelLayout
from train.group_ranks import group_ranks
from train.planning.activations import FLASH_STATISTICS, end_bytes, layer_bytes
from train.planning.parameters import RankParameters
from train.planning.run_shape import RunShape
from train.sum_pieces import largest_piece

FLOAT32 = 4
LOGIT_BYTES = 3 * FLOAT32
"""Of each logit: three float32 arrays live at once in model/loss.py's backward pass (exponentials, and two gradients)."""
FLASH_MASK = 2048 * 2048


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of a stage.

    gradients: of a step, when all micro-batches are added up. new_gradients: of one micro-batch. working: temporaries of one layer's
    backward pass, with the layer that is computed again. casts: weights in the type of the activations, where that differs. communication:
    HCCL's buffers. tables: masks and rotary tables. phases: what each phase holds besides.
    """

    stage: int
    weights: int
    gradients: int
    new_gradients: int
    optimizer: int
    activations: int
    inputs: int
    logits: int
    working: int
    casts: int
    communication: int
    tables: int
    phases: dict[str, int]

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return self.weights + self.optimizer + self.communication + self.tables + max(self.phases.values())


def rank_memory(run: RunShape, stage: int, parameters: RankParameters, group_buffer: int) -> RankMemory:
    """The memory of a rank of `stage` that holds these parameters."""
    work = run.work
    elements = parameters.elements
    new_gradients = work.weight_bytes * elements
    gradients = FLOAT32 * elements if run.micro_batches > 1 else new_gradients
    activations, inputs = activation_bytes(run, stage), input_bytes(run, stage)
    logits = LOGIT_BYTES * run.tokens * (run.layout.padded_vocab // run.layout.tp) if run.last(stage) else 0
    casts = work.compute_bytes * elements if work.weights != work.compute else 0
    working = working_bytes(run, stage)
    phases = _gradient_phases(run, parameters, gradients, new_gradients)
    phases["backward"] = (gradients if run.micro_batches > 1 else 0) + new_gradients + activations + inputs + logits + working + casts
    groups = _groups(run.layout, stage, work.model.kv_heads)
    return RankMemory(
        stage, work.weight_bytes * elements, gradients, new_gradients, optimizer_bytes(run, parameters), activations, inputs, logits,
        working, casts, group_buffer * groups, _table_bytes(run), phases,
    )  # fmt: skip


def optimizer_bytes(run: RunShape, parameters: RankParameters) -> int:
    """AdamW's moments and master weights."""
    return parameters.state_bytes(run.work.weights == "float32", run.layout.dp if run.optimizer_sharding else 1)


def activation_bytes(run: RunShape, stage: int) -> int:
    """What the forward pass of one micro-batch keeps for its backward pass; of a layer that is computed again, its input."""
    work, kept = run.work, run.kept_layers(stage)
    again = run.layout.layers_per_stage[stage] - kept
    per_token = kept * layer_bytes(run.rank_model, work.seq, work.compute_bytes, work.kernels)
    per_token += again * work.compute_bytes * work.model.hidden
    if run.last(stage):
        per_token += end_bytes(work.model, work.compute_bytes, work.kernels)
    return run.tokens * per_token


def input_bytes(run: RunShape, stage: int) -> int:
    """Inputs of the micro-batches under way: token ids (int32) on the first stage, hidden states on the others."""
    per_token = 4 if stage == 0 else run.work.compute_bytes * run.work.model.hidden
    return run.waiting(stage) * run.tokens * per_token


def working_bytes(run: RunShape, stage: int) -> int:
    """Temporaries of one layer's backward pass: the gradients of its feed-forward or its attention, whichever is more, and of the hidden
    states; and all that a layer keeps, where layers are computed again.
    """
    work, rank = run.work, run.rank_model
    compute = work.compute_bytes
    feed_forward = (3 if rank.gated_mlp else 2) * compute * rank.ffn
    attention = 2 * compute * rank.head_dim * (rank.heads + rank.kv_heads)
    if work.kernels.flash and not rank.attention_dropout and compute == 2:
        attention += FLASH_STATISTICS * rank.heads
    else:
        attention += 2 * work.kernels.softmax * rank.heads * work.seq
    again = run.kept_layers(stage) < run.layout.layers_per_stage[stage]
    repeated = layer_bytes(rank, work.seq, compute, work.kernels) if again else 0
    return run.tokens * (max(feed_forward, attention) + (FLOAT32 + 2 * compute) * work.model.hidden + repeated)


def _gradient_phases(run: RunShape, parameters: RankParameters, gradients: int, new_gradients: int) -> dict[str, int]:
    whole = FLOAT32 * parameters.elements
    wide = 0 if gradients == whole else whole  # a copy only where the gradients are narrower
    adding = 2 * whole + new_gradients if run.micro_batches > 1 else 0
    piece = FLOAT32 * largest_piece(parameters.elements, parameters.largest)
    summing = gradients + wide + (whole - wide + 2 * piece if run.layout.dp > 1 else 0)
    after = whole if run.layout.dp > 1 else wide
    return {"adding": adding, "summing": summing, "updating": gradients + after + _divided_bytes(run, parameters)}


def _divided_bytes(run: RunShape, parameters: RankParameters) -> int:
    """What gathering divided weights takes: this rank's part in one piece, everybody's, and the weights that are cut from it."""
    if not run.optimizer_sharding:
        return 0
    part = parameters.divided_elements(run.work.weights == "float32", run.layout.dp)
    return part * FLOAT32 + part * run.layout.dp * (FLOAT32 + run.work.weight_bytes)


@lru_cache(maxsize=1024)
def _groups(layout: ParallelLayout, stage: int, kv_heads: int) -> int:
    return len(group_ranks(layout, layout.rank(stage, 0, 0), kv_heads).distinct)


def _table_bytes(run: RunShape) -> int:
    work, model = run.work, run.work.model
    rotary = 2 * FLOAT32 * work.seq * model.rope.rotary_dim if model.rope is not None else 0
    flash = work.kernels.flash and not model.attention_dropout and work.compute_bytes == 2
    windows = 2 if model.sliding_layers and len(model.sliding_layers) < model.layers else 1
    return rotary + (FLASH_MASK if flash else windows * FLOAT32 * work.seq**2)
