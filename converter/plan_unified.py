"""Planning unified safetensors: whole parameters, in file order, in parts of a size that a user chooses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from converter.layout import ParallelLayout
from converter.plan import Plan, TargetFile, TargetTensor
from converter.plan_hf2ms import DTYPE_OPTIONS, RankTreePlan, SlicePlanner
from converter.source_model import SourceModel

MAX_FILE_BYTES = 3 << 30
"""Bytes of tensor data in a part, where nothing else is asked for: as MindSpore's `unified_safetensors`."""


def whole_on_disk(layout: ParallelLayout) -> ParallelLayout:
    """One rank that holds everything; the vocabulary is padded as the ranks of `layout` will cut it."""
    return ParallelLayout(1, 1, 1, (sum(layout.layers_per_stage),), layout.vocab, layout.padded_vocab)


def plan_unified(source: SourceModel, layout: ParallelLayout, *, max_file_bytes: int, dtype: str = "keep", run: str = "") -> RankTreePlan:
    """Plan the parts for the ranks of `layout`, which will cut them. Raises Refused when parts of one parameter differ in dtype."""
    whole = whole_on_disk(layout)
    tensors = SlicePlanner(source, whole, DTYPE_OPTIONS[dtype]).tensors_of(0, 0)
    metadata = (("format", "ms"), ("ms_convert_run", run))
    files = [
        TargetFile(f"part{number}.safetensors", "safetensors", tuple(part), metadata)
        for number, part in enumerate(_parts(tensors, max_file_bytes))
    ]
    return RankTreePlan(Plan(tuple(files)), whole, (), {number: file.path for number, file in enumerate(files)})


def _parts(tensors: Iterable[TargetTensor], most: int) -> Iterator[list[TargetTensor]]:
    """The tensors in order, in parts of at most `most` bytes; one that is larger has a part of its own."""
    part: list[TargetTensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.nbytes > most:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.nbytes
    yield part
