"""One way to run a model, priced: memory of its stages, traffic, time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from train.planning.compute import bubble, model_flops, model_flops_utilisation, stage_flops
from train.planning.devices import Device
from train.planning.memory import RankMemory, rank_memory
from train.planning.parameters import RankParameters
from train.planning.run_shape import RunShape
from train.planning.traffic import Traffic, tensor_bytes, traffic


@dataclass(frozen=True)
class StageCost:
    """A stage and one of its ranks. `flops`: operations of the rank in a step, repeated forward passes included."""

    memory: RankMemory
    traffic: Traffic
    flops: int


@dataclass(frozen=True)
class Estimate:
    """`stages` has the stages that may differ: the first, the second and the last. `seconds` is of a step, and rough: see `estimate`."""

    run: RunShape
    device: Device
    stages: tuple[StageCost, ...]
    seconds: float

    @property
    def memory(self) -> RankMemory:
        """Of the stage that needs most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.usable_memory

    @property
    def bubble(self) -> float:
        return bubble(self.run.layout.pp, self.run.micro_batches)

    @property
    def flops(self) -> int:
        """Operations of a step on all devices that training needs; what is computed twice counts once."""
        return self.run.work.tokens * model_flops(self.run.work.model, self.run.work.seq)

    @property
    def tokens_per_second(self) -> float:
        return self.run.work.tokens / self.seconds

    def utilisation(self, tokens_per_second: float) -> float:
        """The model-FLOPs utilisation that this many tokens a second need."""
        work = self.run.work
        return model_flops_utilisation(tokens_per_second, work.model, work.seq, self.run.layout.ranks, self.device.flops)


def distinct_stages(stages: int) -> list[int]:
    """The stages that may need most: the first, the last, and the second, which has the most layers and waiting inputs of the others."""
    return sorted({0, min(1, stages - 1), stages - 1})


def estimate(run: RunShape, device: Device, held: Sequence[tuple[int, RankParameters]]) -> Estimate:
    """Price a run. `held`: the parameters of each of `distinct_stages`, shared by all runs of a layout.

    The time of a step is that of m + p - 1 micro-batches on the slowest stage: its arithmetic at the device's peak times `efficiency`, then
    its sums over tensor-parallel ranks and its messages, at the bandwidth that the group has; then the sums over data-parallel ranks. As in
    the bundled trainer, nothing overlaps. Memory traffic, latency and the waiting of an uneven network are left out.
    """
    stages = tuple(_stage_cost(run, device, stage, parameters) for stage, parameters in held)
    layout = run.layout
    slots = run.micro_batches + layout.pp - 1
    slowest = max(_micro_batch_seconds(run, device, stage) for stage in stages)
    after = max((stage.traffic.data + stage.traffic.optimizer) / device.bandwidth(layout.dp * layout.tp) for stage in stages)
    after += max(stage.traffic.shared / device.bandwidth(layout.ranks) for stage in stages)
    return Estimate(run, device, stages, slots * slowest + after)


def _stage_cost(run: RunShape, device: Device, stage: int, parameters: RankParameters) -> StageCost:
    flops = run.micro_batches * run.tokens * stage_flops(run, stage) // run.layout.tp
    return StageCost(rank_memory(run, stage, parameters, device.group_buffer), traffic(run, stage, parameters), flops)


def _micro_batch_seconds(run: RunShape, device: Device, stage: StageCost) -> float:
    layout = run.layout
    arithmetic = stage.flops / run.micro_batches / (device.flops * device.efficiency)
    sums = tensor_bytes(run, stage.memory.stage) / device.bandwidth(layout.tp)
    messages = stage.traffic.pipeline / run.micro_batches / device.bandwidth(layout.ranks)
    return arithmetic + sums + messages
