"""MindSpore strategy files of a rank tree: how each parameter is cut, in the form that MindSpore's own tools read."""

from __future__ import annotations

from typing import Protocol

from converter.layout import ParallelLayout, slice_of
from converter.strategy_format import ParameterLayout, write_merged, write_strategy
from mappings.expand import Expansion
from model.config import ModelConfig

WHOLE_GROUP = -1
"""The optimizer's cut of a parameter goes over all ranks that hold the same slice."""


class CutModel(Protocol):
    """What it takes to say how a model is cut: its parameters, and whether its embeddings are tied."""

    @property
    def expansion(self) -> Expansion: ...

    @property
    def config(self) -> ModelConfig: ...


def strategy_path(rank: int) -> str:
    """Where MindFormers keeps a rank's strategy file, relative to the output folder."""
    return f"strategy/ckpt_strategy_rank_{rank}.ckpt"


def strategy_files(source: CutModel, layout: ParallelLayout) -> dict[str, bytes]:
    """Path -> content, one file for each rank; ranks of a stage have equal ones."""
    by_stage = [write_strategy(stage_layouts(source, layout, stage), stage) for stage in range(layout.pp)]
    return {strategy_path(rank): by_stage[layout.coordinates(rank).stage] for rank in range(layout.ranks)}


def merged_strategy(source: CutModel, layout: ParallelLayout) -> bytes:
    """The strategies of all stages in one file, as `ms.load_distributed_checkpoint` takes them."""
    return write_merged({stage: stage_layouts(source, layout, stage) for stage in range(layout.pp)})


def stage_layouts(source: CutModel, layout: ParallelLayout, stage: int, *, optimizer_sharding: bool = False) -> list[ParameterLayout]:
    """How each parameter of a stage is cut, as MindSpore's parallel compiler says it of the bundled model.

    The device matrix is [dp, tp], without axes of one; replicated KV heads split tp into [KV heads, replicas]. A tensor map names, for each
    axis, the device axis counted from the right that cuts it, or -1 (source: MindSpore `parallel/_parallel_serialization.py`).

    With `optimizer_sharding` axis 0 of a slice is divided once more among all ranks that hold it, where it divides: what MindSpore's
    `enable_parallel_optimizer` does with a threshold of 0. (Not a replicated KV head, which the compiler does not know.)
    """
    found = []
    for item in source.expansion.parameters.values():
        if stage not in layout.stages_of(item.parameter, item.layer, source.config.tied):
            continue
        piece = slice_of(item.parameter, item.shape, source.expansion.sizes, layout, 0)
        parts = layout.tp // piece.replicas if piece.axis is not None else 1
        matrix, device_axis = _device_matrix(layout.dp, parts, layout.tp // parts)
        tensor_map = tuple(device_axis if parts > 1 and axis == piece.axis else -1 for axis in range(len(item.shape)))
        holders = layout.dp * layout.tp // parts
        divided = optimizer_sharding and parts in (1, layout.tp) and holders > 1 and piece.shape(item.shape)[0] % holders == 0
        found.append(ParameterLayout(item.name, matrix, tensor_map, *((parts, WHOLE_GROUP) if divided else (0, 0))))
    return found


def _device_matrix(dp: int, parts: int, replicas: int) -> tuple[tuple[int, ...], int]:
    """The arrangement [dp, parts, replicas] without axes of one, and the number of the axis of the parts, from the right."""
    matrix = tuple(size for size in (dp, parts, replicas) if size > 1) or (1,)
    return matrix, int(replicas > 1)
