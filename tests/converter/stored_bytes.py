"""Tensors on disk, read and written byte by byte: what the executor does, in the fewest lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from converter.dtypes import item_size, word_type
from converter.tensors import FileLayout, StoredTensor, contiguous_strides
from mappings.errors import Refused

Header = tuple[str, str, tuple[int, ...]]
"""A tensor's name, safetensors dtype and shape."""


def read_words(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    """The tensor's elements as unsigned words, from its extents and strides alone."""
    with tensor.path.open("rb") as file:
        pieces = [os.pread(file.fileno(), extent.length, extent.offset) for extent in tensor.extents]
    buffer = np.frombuffer(b"".join(pieces), word_type(tensor.dtype))
    strides = tensor.strides if tensor.strides is not None else contiguous_strides(tensor.shape)
    size = item_size(tensor.dtype)
    return np.lib.stride_tricks.as_strided(buffer, tensor.shape, [stride * size for stride in strides]).copy()


def write_layout(path: Path, layout: FileLayout, contents: Sequence[bytes]) -> None:
    """Writes a file as its layout says; fails unless literals and extents cover each of its bytes once."""
    pieces = dict(layout.literals)
    for extents, content in zip(layout.extents, contents, strict=True):
        position = 0
        for extent in extents:
            if extent.length:
                assert extent.offset not in pieces
                pieces[extent.offset] = content[position : position + extent.length]
            position += extent.length
        assert position == len(content)
    with path.open("wb") as file:
        for offset in sorted(pieces):
            assert file.tell() == offset
            file.write(pieces[offset])
        assert file.tell() == layout.size


def random_content(headers: Sequence[Header], seed: int) -> list[bytes]:
    """Random bytes for each tensor; for a boolean, zeros and ones."""
    generator = np.random.default_rng(seed)
    return [
        generator.integers(0, 2 if dtype == "BOOL" else 256, int(np.prod(shape)) * item_size(dtype), np.uint8).tobytes()
        for _, dtype, shape in headers
    ]


def headers(dtypes: Sequence[str], smallest: int = 0) -> st.SearchStrategy[list[Header]]:
    """Tensors with different names, among them odd ones, and up to four axes."""
    names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
    shapes = st.lists(st.integers(smallest, 4), max_size=4).map(tuple)
    return st.lists(st.tuples(names, st.sampled_from(list(dtypes)), shapes), min_size=1, max_size=8, unique_by=lambda header: header[0])


@st.composite
def damaged(draw: st.DrawFn, original: bytes, until: int) -> bytes:
    """`original` with some of its first `until` bytes changed, put in or taken out, or cut off somewhere."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, min(until, len(data))))
        match draw(st.sampled_from(["change", "insert", "remove", "cut"])):
            case "change":
                data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=9))
            case "remove":
                del data[place : place + draw(st.integers(1, 9))]
            case _:
                del data[place:]
    return bytes(data)


def accepted(read: Callable[[Path], list[StoredTensor]], path: Path, data: bytes) -> list[StoredTensor] | None:
    """What `read` makes of a file with this content: None if refused, with a title that fits a screen. Everything else escapes."""
    path.write_bytes(data)
    try:
        return read(path)
    except Refused as caught:
        refused = caught
    assert refused.problems
    assert str(refused).replace("\n", "").isprintable()
    assert len(str(refused)) < 20_000
    return None


def assert_inside(tensors: Sequence[StoredTensor], size: int) -> None:
    """Every extent lies in the file and suffices for its tensor."""
    for tensor in tensors:
        assert all(extent.offset >= 0 and extent.length >= 0 and extent.offset + extent.length <= size for extent in tensor.extents)
        assert tensor.strides is not None or sum(extent.length for extent in tensor.extents) == tensor.nbytes


def refusal(read: Callable[[Path], object], path: Path, data: bytes | None = None) -> str:
    """The message with which `read` refuses the file (of this content)."""
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(Refused) as caught:
        read(path)
    assert str(path.name) in str(caught.value)
    return str(caught.value)


def each_truncation(data: bytes, step: int) -> Iterator[bytes]:
    """`data` cut off at every `step`-th byte."""
    return (data[:length] for length in range(0, len(data), step))
