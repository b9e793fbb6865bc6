"""Safetensors files: where their tensors are, and the layout of one that is to be written.

Source: the format's description in the README of github.com/huggingface/safetensors, and the library's own writer and checks
(safetensors/src/tensor.rs): 8 bytes little-endian header length, a JSON header padded with spaces to 8 bytes, then the tensors without
holes. Parsed here entry by entry: the library checks less (duplicate names, say), and a JSON parser over the whole header can be made
to use many times the header's size.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from converter.dtypes import ITEM_SIZE, item_size
from converter.recognise import MAX_SAFETENSORS_HEADER, not_a
from converter.tensors import Extent, FileIdentity, FileLayout, StoredTensor
from converter.untrusted import Problems, name_problem, opened, quoted, shape_problem
from mappings.errors import refuse

_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
_MAX_ENTRY = 4096  # characters of one tensor's entry; 32 axes of 19 digits take 700
_DOWNLOAD = "the download or copy was cut off: fetch the file again"
_BROKEN = "fetch the file again; if it stays so, whoever wrote it must write it again"

# `Dtype` of the library in its order, which the library's writer sorts by, the last first
_ALIGNMENT = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64")


class _Malformed(Exception):
    """The header's text is not what the format asks for."""


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file in the order of their data, and its `__metadata__` ({} if it has none).

    Only the header is read. Raises Refused for a file that is something else, is truncated, or does not say of each of its bytes once
    what it is.
    """
    with opened(path) as (descriptor, size):
        identity = FileIdentity.of(os.fstat(descriptor))
        header = _header_bytes(descriptor, size, path)
    try:
        tensors, metadata = _parse(header, path, identity)
    except _Malformed as error:
        raise refuse(f"the header of this safetensors file is malformed: {error}", str(path), _BROKEN) from error
    # Stable: tensors without elements share their place and stay in the header's order
    tensors.sort(key=lambda tensor: (tensor.extents[0].offset, tensor.extents[0].length))
    _check_coverage(tensors, 8 + len(header), size, path)
    return tensors, metadata


def _header_bytes(descriptor: int, size: int, path: Path) -> bytes:
    opening = os.pread(descriptor, 4096, 0)
    length = int.from_bytes(opening[:8], "little")
    if opening[8:9] != b"{":
        raise not_a("safetensors", path, opening, size)
    if length > MAX_SAFETENSORS_HEADER:
        what = f"the header would be {length} bytes; the format allows {MAX_SAFETENSORS_HEADER}"
        raise refuse(f"not a safetensors file: {what}", str(path), _BROKEN)
    if 8 + length > size:
        raise refuse(f"truncated: the header alone ends at byte {8 + length}, the file at {size}", str(path), _DOWNLOAD)
    return os.pread(descriptor, length, 8)


def _parse(header: bytes, path: Path, identity: FileIdentity) -> tuple[list[StoredTensor], dict[str, str]]:
    try:
        cursor = _Cursor(header.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Malformed(f"not UTF-8 at byte {8 + error.start}") from error
    tensors: list[StoredTensor] = []
    metadata: dict[str, str] = {}
    problems = Problems(path)
    for name in cursor.members():
        if name == _METADATA:
            metadata = {key: cursor.string() for key in cursor.members()}
            continue
        tensor = _tensor(name, cursor.entry(), 8 + len(header), path, identity)
        if isinstance(tensor, str):
            problems.add(name, tensor)
        else:
            tensors.append(tensor)
    cursor.end()
    problems.raise_if_any("entries of this safetensors header are refused")
    return tensors, metadata


class _Cursor:
    """Reads a header's JSON from left to right, one string or one tensor's entry at a time."""

    _space = re.compile(r"[ \t\n\r]*")

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_no_constant)

    def _accept(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._position):
            space = self._space.match(self._text, self._position)
            self._position = space.end() if space else self._position
            if not self._text.startswith(mark, self._position):
                return False
        self._position += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise _Malformed(f"no {mark} at character {self._position}")

    def members(self) -> Iterator[str]:
        """The names in the object here, each once; the caller reads each one's value before it takes the next."""
        self._expect("{")
        if self._accept("}"):
            return
        seen: set[str] = set()
        while True:
            name = self.string()
            if name in seen:
                raise _Malformed(f"{quoted(name)} is there twice")
            seen.add(name)
            self._expect(":")
            yield name
            if self._accept("}"):
                return
            self._expect(",")

    def string(self) -> str:
        self._expect('"')
        try:
            value, self._position = self._decoder.raw_decode(self._text, self._position - 1)
            value.encode("utf-8")
        except (json.JSONDecodeError, UnicodeEncodeError) as error:
            raise _Malformed(f"no string at character {self._position - 1}") from error
        return str(value)

    def entry(self) -> dict[str, object]:
        """The object here, which holds no object itself: so it ends at the first brace, and not far from here."""
        self._expect("{")
        start = self._position - 1
        stop = self._text.find("}", start, start + _MAX_ENTRY) + 1
        try:
            value = self._decoder.decode(self._text[start:stop]) if stop else None
        except (ValueError, RecursionError) as error:
            raise _Malformed(f"the entry at character {start} cannot be read") from error
        if not isinstance(value, dict):
            raise _Malformed(f"the entry at character {start} is longer than {_MAX_ENTRY} characters")
        self._position = stop
        return value

    def end(self) -> None:
        if self._text[self._position :].strip(" \t\n\r"):
            raise _Malformed(f"text after its end, at character {self._position}")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entry = dict(pairs)
    if len(entry) != len(pairs):
        raise ValueError("a key is there twice")
    return entry


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _tensor(name: str, entry: Mapping[str, object], start: int, path: Path, identity: FileIdentity) -> StoredTensor | str:
    """The tensor of one entry, or what is wrong with it."""
    if problem := name_problem(name):
        return problem
    if entry.keys() != _KEYS:
        return f"an entry with the keys {sorted(map(quoted, entry))}, not with dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        said = quoted(dtype) if isinstance(dtype, str) else "that is no text"
        return f"the type {said} is not known here; known are {', '.join(ITEM_SIZE)}"
    if not isinstance(shape, list) or not isinstance(offsets, list):
        return "shape or data_offsets is not a list"
    if problem := shape_problem(shape):
        return problem
    if len(offsets) != 2 or shape_problem(offsets) or offsets[0] > offsets[1]:
        return "data_offsets is not a begin and an end"
    begin, end = offsets
    needed = math.prod(shape) * ITEM_SIZE[dtype]
    if end - begin != needed:
        return f"its data_offsets span {end - begin} bytes, its shape and type need {needed if needed < 2**63 else 'over 2**63'}"
    return StoredTensor(name, path, dtype, tuple(shape), (Extent(start + begin, end - begin),), identity=identity)


def _check_coverage(tensors: Sequence[StoredTensor], start: int, size: int, path: Path) -> None:
    problems = Problems(path)
    position = start
    for tensor in tensors:
        extent = tensor.extents[0]
        if extent.offset != position:
            relation = "leaves a hole after" if extent.offset > position else "overlaps"
            problems.add(tensor.name, f"it begins at byte {extent.offset} and {relation} the tensor before it, which ends at {position}")
        position = extent.offset + extent.length
    problems.raise_if_any("the tensors of this safetensors file do not follow each other")
    if position > size:
        raise refuse(f"truncated: the header speaks of {position} bytes, the file has {size}", str(path), _DOWNLOAD)
    if position < size:
        raise refuse(f"{size - position} bytes follow after the last tensor, which ends at byte {position}", str(path), _BROKEN)


def safetensors_layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> FileLayout:
    """The layout of a safetensors file with these (name, dtype, shape) in this order; empty `metadata` is left out.

    For the order of `library_order` the header is byte for byte what the safetensors library writes. Raises Refused for a name that is
    reserved or there twice, and for a header that the library would not read.
    """
    entries = [f"{_quote(_METADATA)}:{json.dumps(dict(metadata), ensure_ascii=False, separators=(',', ':'))}"] if metadata else []
    names = {_METADATA}
    ends = [0]
    for name, dtype, shape in tensors:
        if name in names:
            raise refuse("this name is reserved" if name == _METADATA else "two tensors have this name", quoted(name))
        names.add(name)
        ends.append(ends[-1] + math.prod(shape) * item_size(dtype))
        dims = ",".join(map(str, shape))
        entries.append(f'{_quote(name)}:{{"dtype":"{dtype}","shape":[{dims}],"data_offsets":[{ends[-2]},{ends[-1]}]}}')
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_SAFETENSORS_HEADER:
        what = f"a safetensors header of {len(header)} bytes; the format allows {MAX_SAFETENSORS_HEADER}"
        raise refuse(what, mend="write more and smaller files")
    start = 8 + len(header)
    extents = tuple((Extent(start + begin, end - begin),) for begin, end in pairwise(ends))
    return FileLayout(start + ends[-1], ((0, len(header).to_bytes(8, "little") + header),), extents)


def library_order(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[int]:
    """The order in which the library writes these tensors, as indices: wide types first, so that each is aligned, then by name's bytes."""
    return sorted(range(len(tensors)), key=lambda index: (-_ALIGNMENT.index(tensors[index][1]), tensors[index][0].encode()))


def _quote(text: str) -> str:
    # Escapes what serde_json escapes, in the same spelling
    return json.dumps(text, ensure_ascii=False)
