"""A plan as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from train.planning.choices import Choice
from train.planning.compute import model_flops
from train.planning.devices import Device
from train.planning.estimate import Estimate, StageCost
from train.planning.run_shape import Workload
from train.planning.source import PlannedModel


def facts_of(
    model: PlannedModel, work: Workload, device: Device, devices: int, found: Sequence[Choice], tokens_per_second: float | None
) -> dict[str, Any]:
    """Everything that a plan says. Bytes, operations and seconds are plain numbers."""
    return {
        "model": {"path": str(model.folder), "family": model.config.family, "parameters": model.parameters},
        "workload": {
            "seq_length": work.seq, "global_batch": work.global_batch, "tokens": work.tokens, "weights": work.weights,
            "compute": work.compute, "flops_per_token": model_flops(model.config, work.seq), "tokens_per_second": tokens_per_second,
        },
        "device": {**asdict(device), "usable_memory": device.usable_memory},
        "devices": devices,
        "layouts": [_layout(choice, tokens_per_second) for choice in found],
    }  # fmt: skip


def _layout(choice: Choice, tokens_per_second: float | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "dp": choice.dp, "tp": choice.tp, "pp": choice.pp, "feasible": choice.feasible,
        "problems": [asdict(problem) for problem in choice.problems],
    }  # fmt: skip
    if choice.best is not None:
        facts |= _way(choice.best) | _costs(choice.best, tokens_per_second)
        facts["variants"] = [_way(variant) | _summary(variant) for variant in choice.variants]
    return facts


def _way(found: Estimate) -> dict[str, Any]:
    run = found.run
    return {
        "micro_batch": run.micro_batch, "micro_batches": run.micro_batches, "recompute_every": run.recompute_every,
        "optimizer_sharding": run.optimizer_sharding,
    }  # fmt: skip


def _summary(found: Estimate) -> dict[str, Any]:
    memory = found.memory
    return {
        "fits": found.fits, "bytes": memory.total, "activations": memory.activations, "optimizer": memory.optimizer,
        "seconds": found.seconds,
    }  # fmt: skip


def _costs(found: Estimate, tokens_per_second: float | None) -> dict[str, Any]:
    layout = found.run.layout
    return {
        "layers_per_stage": list(layout.layers_per_stage), "padded_vocab": layout.padded_vocab, "bubble": found.bubble,
        "flops": found.flops, "seconds": found.seconds, "tokens_per_second": found.tokens_per_second,
        "utilisation": found.utilisation(found.tokens_per_second),
        "utilisation_needed": found.utilisation(tokens_per_second) if tokens_per_second else None,
        "bytes": found.memory.total, "fits": found.fits, "stages": [_stage(stage) for stage in found.stages],
    }  # fmt: skip


def _stage(stage: StageCost) -> dict[str, Any]:
    memory = asdict(stage.memory) | {"total": stage.memory.total}
    return {
        "stage": memory.pop("stage"),
        "memory": memory,
        "sent": asdict(stage.traffic) | {"total": stage.traffic.total},
        "flops": stage.flops,
    }
