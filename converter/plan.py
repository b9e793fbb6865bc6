"""The plan: every byte of every output file, and the strided copies that fill it, known before the first byte is written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from converter.dtypes import item_size
from converter.tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """One strided copy between a view of a source tensor and a view of a target tensor (all numbers in elements).

    Element `i` (a multi-index into `shape`) goes from `source_offset + sum(i * source_strides)` to
    `target_offset + sum(i * target_strides)`. Both views lie inside their tensor and touch no element twice.
    Source offsets count in the source's *buffer*, so the tensor's own strides are already folded in.
    """

    source: StoredTensor
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """A tensor to be written, C-contiguous. Elements that no copy fills are padding: zero, `padding` of them.

    Targets with the same `group` read the same source tensors (the slices of one parameter for the ranks of one stage); the executor
    advances them together, so that each source byte is read once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    copies: tuple[StridedCopy, ...]
    group: str
    padding: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * item_size(self.dtype)


@dataclass(frozen=True, slots=True)
class TargetFile:
    """A file to be written: `path` relative to the output folder, with forward slashes; tensors in file order."""

    path: str
    format: str  # "safetensors" or "ckpt"
    tensors: tuple[TargetTensor, ...]
    metadata: tuple[tuple[str, str], ...] = ()  # safetensors __metadata__


@dataclass(frozen=True, slots=True)
class Plan:
    """All files of one conversion."""

    files: tuple[TargetFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in all files."""
        return sum(tensor.nbytes for file in self.files for tensor in file.tensors)
