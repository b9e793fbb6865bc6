"""Bytes that a rank sends in a step, by kind, as the bundled trainer communicates.

Of a sum over n ranks (all-reduce) each rank sends 2 (n - 1) / n of its size, of a gather (n - 1) / n of what is gathered: a ring, and the
least that is possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from train.planning.memory import FLOAT32
from train.planning.parameters import RankParameters
from train.planning.run_shape import RunShape


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank of a stage sends in a step.

    tensor: within layers, embedding and loss, over tensor-parallel ranks. pipeline: hidden states and their gradients, to neighbours.
    data: gradients, over data-parallel ranks. optimizer: updated weights, where they divide the state. shared: gradients of what other
    ranks of a replica hold too (a tied embedding, shared KV heads, norms of queries and keys).
    """

    tensor: int
    pipeline: int
    data: int
    optimizer: int
    shared: int

    @property
    def total(self) -> int:
        return self.tensor + self.pipeline + self.data + self.optimizer + self.shared


def summed(size: int, ranks: int) -> int:
    """Bytes that a rank sends so that `size` bytes are summed over `ranks`."""
    return 2 * size * (ranks - 1) // ranks


def gathered(size: int, ranks: int) -> int:
    """Bytes that a rank sends so that all of `ranks` get the `size` bytes that they hold together."""
    return size * (ranks - 1) // ranks


def traffic(run: RunShape, stage: int, parameters: RankParameters) -> Traffic:
    """What a rank of a stage sends."""
    layout, work = run.layout, run.work
    hidden = run.tokens * work.compute_bytes * work.model.hidden
    directions = (not run.last(stage)) + (stage > 0)
    return Traffic(
        tensor=run.micro_batches * tensor_bytes(run, stage),
        pipeline=run.micro_batches * directions * hidden,
        data=summed(FLOAT32 * parameters.elements, layout.dp),
        optimizer=_gathered_weights(run, parameters),
        shared=_shared_gradients(run, stage, parameters),
    )


def tensor_bytes(run: RunShape, stage: int) -> int:
    """What one micro-batch makes a rank send to its tensor-parallel partners."""
    hidden = summed(run.tokens * run.work.compute_bytes * run.work.model.hidden, run.layout.tp)
    forward = 2 * run.layout.layers_per_stage[stage]  # after o_proj and after down_proj
    repeated = 2 * (run.layout.layers_per_stage[stage] - run.kept_layers(stage))
    backward = forward  # before q, k, v and before the feed-forward
    sums = forward * (1 if run.last(stage) else 2) + repeated + backward
    if stage == 0:
        sums += 1 if run.last(stage) else 2  # the embedding's
    if not run.last(stage):
        return sums * hidden
    # Before the head, backward; and for each token three float32 numbers of the loss, of which the maximum is gathered
    return (
        (sums + 1) * hidden
        + summed(2 * FLOAT32 * run.tokens, run.layout.tp)
        + gathered(FLOAT32 * run.tokens * run.layout.tp, run.layout.tp)
    )


def _gathered_weights(run: RunShape, parameters: RankParameters) -> int:
    if not run.optimizer_sharding:
        return 0
    part = parameters.divided_elements(run.work.weights == "float32", run.layout.dp)
    return gathered(FLOAT32 * run.layout.dp * part, run.layout.dp)


def _shared_gradients(run: RunShape, stage: int, parameters: RankParameters) -> int:
    layout, model = run.layout, run.work.model
    total = 0
    if model.tied and layout.pp > 1 and (stage == 0 or run.last(stage)):
        total += summed(FLOAT32 * parameters.elements_of("tokens"), 2)
    total += summed(FLOAT32 * parameters.elements_of("k_proj", "v_proj"), max(1, layout.tp // model.kv_heads))
    return total + summed(FLOAT32 * parameters.elements_of("q_norm", "k_norm"), layout.tp)
