"""Writing a rank's arrays in the converter's file formats, and reading them back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from converter.canonical import filled
from converter.execute import LAYOUTS
from converter.formats import READERS
from converter.manifest import TensorRecord
from converter.open_files import OpenFiles
from converter.partial_files import PartialFile
from converter.plan import StridedCopy, TargetFile, TargetTensor
from converter.tensors import StoredTensor, contiguous_strides

Array = np.ndarray[Any, np.dtype[Any]]
DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16"}


def record_of(name: str, array: Array) -> TensorRecord:
    """The record of an array as a manifest has it, with its checksum."""
    return TensorRecord(name, DTYPES[array.dtype], array.shape, xxhash.xxh3_64_hexdigest(_bytes(array)))


def write_arrays(folder: Path, path: str, file_format: str, arrays: Sequence[tuple[str, Array]], metadata: Mapping[str, str]) -> int:
    """Write C-contiguous arrays to `path` below `folder`; the file has its name when all of it is on the disk. -> its size in bytes."""
    targets = tuple(TargetTensor(name, DTYPES[array.dtype], array.shape, (), name) for name, array in arrays)
    kept = tuple(metadata.items()) if file_format == "safetensors" else ()
    partial = PartialFile(TargetFile(path, file_format, targets, kept), folder, LAYOUTS[file_format], OpenFiles(os.O_WRONLY), durable=True)
    try:
        for index, (_, array) in enumerate(arrays):
            partial.write(index, 0, _bytes(array))
            partial.tensor_done(index, "")
        return partial.finish().size
    except BaseException:
        partial.discard()
        raise


def read_arrays(path: Path, file_format: str) -> Iterator[tuple[str, Array]]:
    """Every array of a file, one at a time. Raises Refused for a damaged file."""
    yield from stored_arrays(READERS[file_format](path))


def stored_arrays(tensors: Iterable[StoredTensor]) -> Iterator[tuple[str, Array]]:
    """Stored tensors, whole, one at a time."""
    for stored in tensors:
        strides = contiguous_strides(stored.shape)
        copies = (StridedCopy(stored, 0, strides, 0, strides, stored.shape),)
        yield from filled([TargetTensor(stored.name, stored.dtype, stored.shape, copies, stored.name)])


def _bytes(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
