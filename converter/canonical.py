"""Whole canonical parameters, one at a time: from a Hugging Face folder, merged from a rank tree, or from a single file.

Names, true shapes (no padding), and the stored dtype (bfloat16 as ml_dtypes'). Nothing is written in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converter.copies import paired_boxes
from converter.dtypes import word_type
from converter.execute import fill
from converter.formats import READERS
from converter.joined_copies import joined
from converter.layout import ParallelLayout, Slice, distinct_slices
from converter.plan import StridedCopy, TargetTensor
from converter.plan_hf2ms import plan_rank_tree
from converter.plan_ms2hf import assembled
from converter.rank_tree import RankTree
from converter.source_model import SourceModel
from converter.stored_bytes import NUMPY_TYPES
from converter.tensors import StoredTensor, contiguous_strides
from mappings.errors import Problem, Refused, refuse
from mappings.expand import Pairing, ParameterOfModel

Array = np.ndarray[Any, np.dtype[Any]]


def whole_layout(source: SourceModel) -> ParallelLayout:
    """One rank that holds everything, unpadded."""
    return ParallelLayout(1, 1, 1, (source.config.layers,), source.config.vocab, source.config.vocab)


def parameters_of_source(source: SourceModel) -> Iterator[tuple[str, Array]]:
    """Every parameter of a Hugging Face folder, through the plan. Raises Refused for a file that cannot be read."""
    tree = plan_rank_tree(source, whole_layout(source), file_format="safetensors")
    yield from filled(tree.plan.files[0].tensors)


def parameters_of_tree(tree: RankTree) -> Iterator[tuple[str, Array]]:
    """Every parameter of a rank tree, its slices merged and its padding cut."""
    yield from filled(merged_parameters(tree))


def parameters_of_file(path: Path) -> Iterator[tuple[str, Array]]:
    """Every parameter of a single .ckpt or .safetensors file that holds whole parameters."""
    for stored in stored_parameters(path).values():
        whole = StridedCopy(stored, 0, contiguous_strides(stored.shape), 0, contiguous_strides(stored.shape), stored.shape)
        yield from filled([TargetTensor(stored.name, stored.dtype, stored.shape, (whole,), stored.name)])


def stored_parameters(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a single .ckpt or .safetensors file by name. Raises Refused for another ending."""
    reader = READERS.get(path.suffix.removeprefix("."))
    if reader is None:
        raise refuse(f"not a {' or '.join('.' + name for name in READERS)} file", str(path), "give a rank tree, or one such file")
    return {tensor.name: tensor for tensor in reader(path)}


def merged_parameters(tree: RankTree) -> Iterator[TargetTensor]:
    """Every canonical parameter as a target that its distinct slices fill. Raises Refused when a slice is missing or misshapen."""
    if tree.dialect is not None:
        yield from _from_dialect(tree)
        return
    for item in tree.expansion.parameters.values():
        copies = tuple(_slice_copies(tree, item))
        dtypes = {copy.source.dtype for copy in copies}
        if len(dtypes) != 1:
            raise refuse(f"{item.name}: its slices have the dtypes {', '.join(sorted(dtypes))}", str(tree.path), "run hf2ms again")
        yield TargetTensor(item.name, dtypes.pop(), item.shape, copies, item.name)


def _from_dialect(tree: RankTree) -> Iterator[TargetTensor]:
    """The canonical parameters of a tree that has other names and layouts."""
    made = assembled(tree)
    pairings: dict[str, list[Pairing]] = defaultdict(list)
    for pairing in tree.canonical.pairings:
        pairings[pairing.ms].append(pairing)
    whole = Slice(None, 0, 0, 0, 1)
    for item in tree.canonical.parameters.values():
        sources = {pairing.hf: made[pairing.hf] for pairing in pairings[item.name]}
        copies = tuple(
            box.forward(StoredTensor(pairing.hf, tree.path, made[pairing.hf].dtype, made[pairing.hf].shape, ()))
            for pairing in pairings[item.name]
            for box in paired_boxes(tree.canonical, pairing, whole, contiguous_strides(made[pairing.hf].shape))
        )
        dtypes = {source.dtype for source in sources.values()}
        if len(dtypes) != 1:
            raise refuse(f"{item.name}: its parts have the dtypes {', '.join(sorted(dtypes))}", str(tree.path), "run hf2ms again")
        yield joined(TargetTensor(item.name, dtypes.pop(), item.shape, copies, item.name), made)


def _slice_copies(tree: RankTree, item: ParameterOfModel) -> Iterator[StridedCopy]:
    stage = tree.layout.stages_of(item.parameter, item.layer, tree.manifest.model.tied)[0]
    whole = contiguous_strides(item.shape)
    for tensor_rank, piece in distinct_slices(item.parameter, item.shape, tree.expansion.sizes, tree.layout):
        rank = tree.layout.rank(stage, 0, tensor_rank)
        stored = tree.slices[rank].get(item.name)
        if stored is None or stored.shape != piece.shape(item.shape):
            where = tree.path_of(rank, item.name)
            raise Refused("a slice does not fit", [Problem(f"{item.name} is missing or misshapen", where, "run hf2ms again")])
        count = item.shape if piece.axis is None else (*item.shape[: piece.axis], piece.stop - piece.start, *item.shape[piece.axis + 1 :])
        start = 0 if piece.axis is None else piece.start * whole[piece.axis]
        if 0 not in count:
            yield StridedCopy(stored, 0, contiguous_strides(stored.shape), start, whole, count)


def filled(targets: Iterable[TargetTensor]) -> Iterator[tuple[str, Array]]:
    """Each target's name and content, in memory instead of in a file."""
    for target in targets:
        words = np.empty(target.shape, word_type(target.dtype))
        fill(target, words)
        yield target.name, words.view(NUMPY_TYPES[target.dtype])
