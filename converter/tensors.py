"""Where a tensor's bytes are on disk: the common answer of every format's reader."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from converter.dtypes import item_size


class FileIdentity(NamedTuple):
    """By what a file is known again: st_dev, st_ino, bytes, st_mtime_ns. Another file in its place, or writing to it, changes that."""

    device: int
    inode: int
    size: int
    modified: int

    @staticmethod
    def of(status: os.stat_result) -> FileIdentity:
        """The identity of the file with this status."""
        return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of a tensor's content at byte `offset` of its file."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, found from headers alone.

    `extents` are the pieces of its buffer in order (one, but for a .ckpt parameter over 512 MiB); `dtype` is a safetensors name.
    `strides` (elements, never negative) is None for a C-contiguous tensor; a torch tensor may be a strided view of its storage.
    `identity` is the file's when its header was read, taken from the same descriptor: whoever reads the content later refuses a file that
    is not that one any more. None where no header was read.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    strides: tuple[int, ...] | None = None
    identity: FileIdentity | None = field(default=None, compare=False, repr=False)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself (the product of its shape), whatever the storage holds around it."""
        return self.elements * item_size(self.dtype)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """C-order strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where everything goes in a file that is to be written: computed from names, shapes and dtypes before any data is read.

    `literals` are (offset, bytes) pieces to be written as they are (headers, tags); `extents[i]` are the places of tensor i's bytes, in
    the order of the tensors given. Literals and extents together cover `size` bytes exactly once.
    """

    size: int
    literals: tuple[tuple[int, bytes], ...]
    extents: tuple[tuple[Extent, ...], ...]
