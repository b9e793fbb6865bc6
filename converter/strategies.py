"""MindSpore strategy files of a rank tree: how each parameter is cut, in the form that MindSpore's own tools read."""

from __future__ import annotations

from typing import Protocol

from converter.layout import ParallelLayout, slice_of
from converter.strategy_format import ParameterLayout, write_merged, write_strategy
from mappings.expand import Expansion
from model.config import ModelConfig


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


def stage_layouts(source: CutModel, layout: ParallelLayout, stage: int) -> list[ParameterLayout]:
    """How each parameter of a stage is cut.

    The device matrix is [dp, tp]; replicated KV heads split tp into [KV heads, replicas]. A tensor map names, for each axis, the device
    axis counted from the right that cuts it, or -1 (source: MindSpore `parallel/_parallel_serialization.py`).
    """
    found = []
    for item in source.expansion.parameters.values():
        if stage not in layout.stages_of(item.parameter, item.layer, source.config.tied):
            continue
        piece = slice_of(item.parameter, item.shape, source.expansion.sizes, layout, 0)
        replicated_heads = piece.axis is not None and piece.replicas > 1
        matrix = (layout.dp, layout.tp // piece.replicas, piece.replicas) if replicated_heads else (layout.dp, layout.tp)
        cut = layout.tp > 1 and piece.axis is not None
        tensor_map = tuple((1 if replicated_heads else 0) if cut and axis == piece.axis else -1 for axis in range(len(item.shape)))
        found.append(ParameterLayout(item.name, matrix, tensor_map))
    return found
