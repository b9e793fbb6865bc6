"""One way to run a model: its layout, and what a step does with it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from converter.layout import ParallelLayout
from model.config import ModelConfig
from train.config import FloatType
from train.planning.activations import BYTES, FUSED, Kernels, of_rank


@dataclass(frozen=True)
class Workload:
    """What every layout of a plan has to do. `weights`, `compute`: element types; `kernels`: what operators keep."""

    model: ModelConfig
    seq: int
    global_batch: int
    weights: FloatType = "bfloat16"
    compute: FloatType = "bfloat16"
    kernels: Kernels = FUSED

    @property
    def weight_bytes(self) -> int:
        return BYTES[self.weights]

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.compute]

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.global_batch * self.seq


@dataclass(frozen=True)
class RunShape:
    """A layout with the settings of a step. `micro_batch`: sequences of one micro-batch."""

    work: Workload
    layout: ParallelLayout
    micro_batch: int
    recompute_every: int = 0
    optimizer_sharding: bool = False

    @property
    def micro_batches(self) -> int:
        return self.work.global_batch // self.layout.dp // self.micro_batch

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch * self.work.seq

    @cached_property
    def rank_model(self) -> ModelConfig:
        """The config of what one tensor-parallel rank computes."""
        return of_rank(self.work.model, self.layout.tp)

    def last(self, stage: int) -> bool:
        return stage == self.layout.pp - 1

    def kept_layers(self, stage: int) -> int:
        """Layers of a stage whose activations are kept: as train/step.py chooses them, the first and then every k-th."""
        layers = self.layout.layers_per_stage[stage]
        return -(-layers // self.recompute_every) if self.recompute_every else layers

    def waiting(self, stage: int) -> int:
        """Micro-batches whose inputs a stage keeps at once under 1F1B (train/pipeline_order.py)."""
        return min(self.layout.pp - stage, self.micro_batches)
