"""Whole tensors that lie in pieces, in one file or several: what every layout of a checkpoint that has no manifest is read as."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from converter.plan import StridedCopy, TargetTensor
from converter.tensors import StoredTensor, contiguous_strides
from mappings.errors import Problem, Refused


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins on each axis (elements), and where it is stored."""

    start: tuple[int, ...]
    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor whose chunks hold each of its elements once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @staticmethod
    def whole(stored: StoredTensor) -> ChunkedTensor:
        """A tensor that is stored in one piece."""
        return ChunkedTensor(stored.name, stored.dtype, stored.shape, (Chunk((0,) * len(stored.shape), stored),))

    def target(self) -> TargetTensor:
        """The tensor put together, as a target of its own."""
        strides = contiguous_strides(self.shape)
        copies = tuple(
            StridedCopy(
                chunk.stored, 0, contiguous_strides(chunk.stored.shape),
                sum(start * stride for start, stride in zip(chunk.start, strides, strict=True)), strides, chunk.stored.shape,
            )
            for chunk in self.chunks if chunk.stored.elements
        )  # fmt: skip
        return TargetTensor(self.name, self.dtype, self.shape, copies, self.name)


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint without a manifest. `kind` is a phrase for people, `folder` where its files are.

    `tensors` by name in the files' order; `ignored` are names that are no weights, by why they are left out. `files` are all files read.
    Each of `replicas` are chunks of several files that should hold the same bytes.
    """

    kind: str
    folder: Path
    tensors: Mapping[str, ChunkedTensor]
    ignored: Mapping[str, tuple[str, ...]]
    files: tuple[Path, ...]
    replicas: tuple[tuple[StoredTensor, ...], ...] = ()


def check_chunks(tensors: Iterable[ChunkedTensor]) -> None:
    """Raises Refused, naming each tensor whose chunks do not lie in it side by side, or do not fill it."""
    problems = [Problem(f"{tensor.name}: {what}", str(tensor.chunks[0].stored.path)) for tensor in tensors if (what := _problem(tensor))]
    if problems:
        raise Refused("tensors whose parts do not make a whole", problems[:20])


def _problem(tensor: ChunkedTensor) -> str | None:
    for chunk in tensor.chunks:
        stored = chunk.stored
        if stored.dtype != tensor.dtype:
            return f"a part is {stored.dtype}, the tensor {tensor.dtype}"
        if len(stored.shape) != len(tensor.shape) or len(chunk.start) != len(tensor.shape):
            return f"a part of the shape {list(stored.shape)} in a tensor of the shape {list(tensor.shape)}"
        if any(begin + size > whole for begin, size, whole in zip(chunk.start, stored.shape, tensor.shape, strict=True)):
            return "a part reaches beyond the tensor"
    held = sum(chunk.stored.elements for chunk in tensor.chunks)
    if held != math.prod(tensor.shape):
        return f"the parts hold {held} of {math.prod(tensor.shape)} elements"
    starts = {chunk.start for chunk in tensor.chunks}
    if len({chunk.stored.shape for chunk in tensor.chunks}) == 1:
        size = tensor.chunks[0].stored.shape
        even = all(begin % step == 0 for start in starts for begin, step in zip(start, size, strict=True) if step)
        return None if even and len(starts) == len(tensor.chunks) else "parts overlap"
    return "parts overlap" if any(_overlap(*pair) for pair in combinations(tensor.chunks, 2)) else None


def _overlap(first: Chunk, second: Chunk) -> bool:
    boxes = zip(first.start, first.stored.shape, second.start, second.stored.shape, strict=True)
    return all(begin < other + length and other < begin + size for begin, size, other, length in boxes)
