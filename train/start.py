"""What a run starts from, cut for its ranks: the layout, and each rank's slices, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converter.canonical import filled
from converter.layout import ParallelLayout, Slice, held_slices, make_layout
from converter.plan_hf2ms import plan_rank_tree
from converter.rank_tree import RankTree, read_rank_tree
from mappings.errors import Problem, Refused
from mappings.expand import Expansion, ParameterOfModel
from model.config import ModelConfig
from model.stage import Stage
from train.config import ParallelSettings
from train.model_source import ModelSource, check_layout
from train.slice_files import record_of, stored_arrays

MAX_PROBLEMS = 20
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Start:
    """A model source and how the run cuts it. `model` is the whole model, its vocabulary padded for all ranks.

    `tree` is there when the source is a rank tree (the output of hf2ms, or a checkpoint of the trainer).
    """

    source: ModelSource
    tree: RankTree | None
    expansion: Expansion
    layout: ParallelLayout
    model: ModelConfig

    @property
    def config(self) -> ModelConfig:
        """The model as a rank tree's strategy files describe it (converter/strategies.py)."""
        return self.model

    @property
    def recorded_model(self) -> ModelConfig:
        """The model as its manifest records it: as it came, whatever dropout the run uses."""
        return replace(self.source.config, padded_vocab=self.layout.padded_vocab)

    def stage(self, rank: int) -> Stage:
        """The pipeline stage of a rank."""
        index, counts = self.layout.coordinates(rank).stage, self.layout.layers_per_stage
        begin = sum(counts[:index])
        return Stage(range(begin, begin + counts[index]), index == 0, index == self.layout.pp - 1)

    def slices(self, rank: int) -> Iterator[tuple[ParameterOfModel, Slice]]:
        """The parameters of a rank, and what it holds of each."""
        place = self.layout.coordinates(rank)
        yield from held_slices(self.expansion.parameters.values(), self.expansion.sizes, self.layout, place, self.model.tied)

    def counted(self, rank: int) -> set[str]:
        """The parameters whose slice this rank, of all that hold it in one data-parallel replica, is the first to hold."""
        place = self.layout.coordinates(rank)
        first = {
            item.name: self.layout.stages_of(item.parameter, item.layer, self.model.tied)[0] for item in self.expansion.parameters.values()
        }
        return {item.name for item, piece in self.slices(rank) if first[item.name] == place.stage and place.tensor % piece.replicas == 0}

    def parameters(self, rank: int) -> Iterator[tuple[str, Array]]:
        """(canonical name, this rank's slice) in the stored type. Padding is zero.

        Raises Refused for a file that cannot be read, and, after the last slice, for those that are not what a rank tree's manifest says.
        """
        place = self.layout.coordinates(rank)
        if self.tree is not None:
            yield from _unchanged(self.tree, self.tree.layout.rank(place.stage, 0, place.tensor))
            return
        assert self.source.hf is not None, "a source is one of the two"
        first = self.layout.rank(place.stage, 0, place.tensor)
        planned = plan_rank_tree(self.source.hf, self.layout, file_format="safetensors", ranks=[first])
        yield from filled(planned.plan.files[0].tensors)


def _unchanged(tree: RankTree, rank: int) -> Iterator[tuple[str, Array]]:
    """A rank's slices. A .ckpt file does not say which rank and step it is of: that it is another's shows only in its values."""
    recorded = {tensor.name: (file.path, tensor.xxh3) for file in tree.manifest.files if file.rank == rank for tensor in file.tensors}
    problems = []
    for name, array in stored_arrays(tree.slices[rank].values()):
        path, checksum = recorded[name]
        if checksum and record_of(name, array).xxh3 != checksum:
            problems.append(Problem(f"{name} is not what the manifest recorded", str(tree.path / path), "choose another source"))
        yield name, array
    if problems:
        raise Refused("the weights are of another checkpoint, or were changed", problems[:MAX_PROBLEMS])


def read_start(source: ModelSource, parallel: ParallelSettings) -> Start:
    """Cut a model source as `parallel` says. Raises Refused for a layout that does not fit it, and for a rank tree that is not whole."""
    if source.manifest is not None:
        problems = list(check_layout(source, parallel))
        if problems:
            raise Refused("the rank tree was cut for another layout", problems)
        tree = read_rank_tree(source.path)
        layout = replace(tree.layout, dp=parallel.dp)
        return Start(source, tree, tree.expansion, layout, source.config)
    assert source.hf is not None, "a source is one of the two"
    layout = make_layout(
        source.config, source.hf.expansion, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp,
        layers_per_stage=parallel.layers_per_stage, vocab_multiple=parallel.vocab_multiple,
    )  # fmt: skip
    return Start(source, None, source.hf.expansion, layout, replace(source.config, padded_vocab=layout.padded_vocab))
