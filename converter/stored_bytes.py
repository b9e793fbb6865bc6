"""Reading the bytes of stored tensors: checksums, comparisons, and small arrays. Memory stays at one block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from converter.dtypes import item_size, word_type
from converter.tensors import FileIdentity, StoredTensor, contiguous_strides
from converter.untrusted import changed_files
from mappings.errors import refuse

BLOCK_BYTES = 4 << 20
MAX_SMALL_BYTES = 256 << 20

NUMPY_TYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


def blocks(tensor: StoredTensor) -> Iterator[memoryview]:
    """The tensor's buffer, extent by extent, in blocks of at most 4 MiB; each is valid until the next is asked for.

    Raises Refused when the file is shorter than its header says, or not the one any more whose header was read.
    """
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max((extent.length for extent in tensor.extents), default=0))))
    descriptor = os.open(tensor.path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would block for ever
    try:
        if tensor.identity is not None and FileIdentity.of(os.fstat(descriptor)) != tensor.identity:
            raise changed_files([tensor.path])
        for extent in tensor.extents:
            done = 0
            while done < extent.length:
                count = os.preadv(descriptor, [buffer[: extent.length - done]], extent.offset + done)
                if count == 0:
                    raise refuse("the file ended early: it was cut or changed while it was read", str(tensor.path), "run the command again")
                yield buffer[:count]
                done += count
    finally:
        os.close(descriptor)


def checksum(tensor: StoredTensor) -> str:
    """The 64-bit xxHash3 of the tensor's buffer, in hex."""
    digest = xxhash.xxh3_64()
    for block in blocks(tensor):
        digest.update(block)
    return digest.hexdigest()


def read_small(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    """The tensor as a numpy array (bfloat16 as ml_dtypes'). For buffers and the like, not for weights.

    Raises Refused above 256 MiB, in the file or by its shape (few bytes may be expanded to many), and for a type that numpy has not.
    """
    if max(sum(extent.length for extent in tensor.extents), tensor.nbytes) > MAX_SMALL_BYTES:
        raise refuse(f"{tensor.name} is too large for what it should be", str(tensor.path), "check that the file is this model's")
    if tensor.dtype not in NUMPY_TYPES:
        raise refuse(f"{tensor.name} is {tensor.dtype}, not what it should be", str(tensor.path), "check that the file is this model's")
    content = b"".join(bytes(block) for block in blocks(tensor))
    flat = np.frombuffer(content, dtype=NUMPY_TYPES[tensor.dtype])
    strides = tuple(stride * flat.itemsize for stride in tensor.strides or contiguous_strides(tensor.shape))
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors have the same type, shape and bytes. Contiguous tensors are compared block by block."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if (first.path, first.extents, first.strides) == (second.path, second.extents, second.strides):
        return True
    if first.strides is not None or second.strides is not None:
        word = word_type(first.dtype)
        return bool(np.array_equal(read_small(first).view(word), read_small(second).view(word)))
    left, right = blocks(first), blocks(second)
    return all(a == b for a, b in zip(_rechunk(left), _rechunk(right), strict=True))


def _rechunk(pieces: Iterator[memoryview]) -> Iterator[bytes]:
    """The same bytes in blocks of exactly one size, whatever the extents are."""
    pending = b""
    for piece in pieces:
        pending += piece
        while len(pending) >= BLOCK_BYTES:
            yield pending[:BLOCK_BYTES]
            pending = pending[BLOCK_BYTES:]
    if pending:
        yield pending


def stored_bytes(tensor: StoredTensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.elements * item_size(tensor.dtype)
