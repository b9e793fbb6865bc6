"""MindSpore checkpoints (.ckpt): where their parameters are, and the layout of one that is to be written. No MindSpore needed.

Source: mindspore/train/checkpoint.proto and serialization.py (`_exec_save`, `_parse_ckpt_proto`, `_load_ckpt_into_param_dict`):

    Checkpoint  { repeated Value value = 1 }
    Value       { string tag = 1; oneof { TensorProto tensor = 2; MapTensorProto maptensor = 3 } }
    TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }

A parameter over 512 MiB is written as consecutive Values with the same tag and the dims of the whole. Optional tail: `crc_num` and ten
bytes. MindSpore writes a scalar without dims, and takes dims of [0] for one too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from converter.dtypes import item_size
from converter.protobuf_wire import (
    LENGTH,
    Field,
    FileSource,
    WireError,
    bytes_field,
    fields,
    integer_fields,
    length_prefix,
    read_field,
    read_integers,
)
from converter.recognise import not_a, recognise_opening
from converter.tensors import Extent, FileIdentity, FileLayout, StoredTensor
from converter.untrusted import MAX_AXES, MAX_NAME, Problems, name_problem, opened, quoted, shape_problem
from mappings.errors import refuse

SLICE_BYTES = 512 * 1024 * 1024  # `SLICE_SIZE` (in KiB) in serialization.py
MAX_PARAMETERS = 500_000  # five times what the largest public models have

# `tensor_to_ms_type` in serialization.py, without "str" and "Int4", which are no tensors of whole bytes
MINDSPORE_TYPES = {
    "F64": "Float64", "F32": "Float32", "F16": "Float16", "BF16": "BFloat16",
    "I64": "Int64", "I32": "Int32", "I16": "Int16", "I8": "Int8",
    "U64": "UInt64", "U32": "UInt32", "U16": "UInt16", "U8": "UInt8", "BOOL": "Bool",
}  # fmt: skip
SAFETENSORS_TYPES = {mindspore: safetensors for safetensors, mindspore in MINDSPORE_TYPES.items()}

_CRC_TAIL = 17  # bytes: b"crc_num" and ten digits of base 256
_BROKEN = "copy the file again from where it was saved"
_SAVE_AGAIN = "load it with mindspore.load_checkpoint and save it again without this entry"


@dataclass(frozen=True, slots=True)
class _Piece:
    """One Value: a parameter, or a part of a long one."""

    tag: str
    type: str
    dims: tuple[int, ...]
    content: Extent | None  # None for a MapTensorProto


def read_ckpt(path: Path) -> list[StoredTensor]:
    """The parameters of a MindSpore checkpoint in file order, found by seeks: contents are not read.

    Raises Refused for a file that is something else, is truncated, encrypted or malformed, or holds an entry that is no tensor
    (a string of `append_dict`, a hash table).
    """
    with opened(path) as (descriptor, size):
        identity = FileIdentity.of(os.fstat(descriptor))
        opening = os.pread(descriptor, 4096, 0)
        if recognise_opening(opening, size) not in ("ckpt", "ckpt_truncated"):
            raise not_a("ckpt", path, opening, size)
        tail = os.pread(descriptor, _CRC_TAIL, max(0, size - _CRC_TAIL))
        source = FileSource(descriptor, size - _CRC_TAIL if tail.startswith(b"crc_num") else size)
        try:
            pieces = list(_pieces(source, path))
        except WireError as error:
            raise refuse(f"this MindSpore checkpoint is malformed: {error}", str(path), _BROKEN) from error
    return _parameters(pieces, path, identity)


def _pieces(source: FileSource, path: Path) -> Iterator[_Piece]:
    position = 0
    count = 0
    while position < source.size:
        value = read_field(source, position, source.size, beyond=True)
        if value.end > source.size:
            what = f"truncated: the parameter at byte {position} ends at byte {value.end}, the file at {source.size}"
            raise refuse(what, str(path), _BROKEN)
        if (value.number, value.wire) != (1, LENGTH):
            raise WireError(f"field {value.number} at byte {position} is not of a checkpoint")
        count += 1
        if count > MAX_PARAMETERS:
            raise refuse(f"over {MAX_PARAMETERS} parameters or parts of them in one file", str(path), "split it into several files")
        yield _piece(source, value)
        position = value.end


def _piece(source: FileSource, value: Field) -> _Piece:
    parts = _single_fields(source, value, (1, 2, 3))
    if 1 not in parts or len(parts) != 2:
        raise WireError(f"the value at byte {value.start} does not hold a tag and a tensor")
    tag = _text(source, parts[1], MAX_NAME * 4)
    if 3 in parts:
        return _Piece(tag, "", (), None)
    tensor = parts[2]
    dims: list[int] = []
    members: dict[int, Field] = {}
    for field in fields(source, tensor.start, tensor.end):
        if field.number == 1 and len(dims) <= MAX_AXES and field.end - field.start <= 10 * MAX_AXES:
            dims.extend(read_integers(source, field))
        elif field.number in (2, 3) and field.wire == LENGTH and field.number not in members:
            members[field.number] = field
        else:
            raise WireError(f"field {field.number} at byte {field.start} is not of a tensor, or is there too often")
    if len(members) != 2:
        raise WireError(f"the tensor at byte {tensor.start} has no type or no content")
    content = members[3]
    return _Piece(tag, _text(source, members[2], 64), tuple(dims), Extent(content.start, content.end - content.start))


def _single_fields(source: FileSource, message: Field, numbers: Sequence[int]) -> dict[int, Field]:
    """The fields of a message that holds each of `numbers` at most once, as strings, bytes or messages, and nothing else."""
    found: dict[int, Field] = {}
    for field in fields(source, message.start, message.end):
        if field.number not in numbers or field.number in found or field.wire != LENGTH:
            raise WireError(f"field {field.number} at byte {field.start} is not of a parameter, or is there twice")
        found[field.number] = field
    return found


def _text(source: FileSource, field: Field, limit: int) -> str:
    if field.end - field.start > limit:
        raise WireError(f"a name of {field.end - field.start} bytes at byte {field.start}")
    try:
        return source.read(field.start, field.end - field.start).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"the name at byte {field.start} is not UTF-8") from error


def _parameters(pieces: Sequence[_Piece], path: Path, identity: FileIdentity) -> list[StoredTensor]:
    problems = Problems(path)
    tensors = []
    seen: set[str] = set()
    for tag, group in groupby(pieces, key=lambda piece: piece.tag):
        parameter = "two parameters have this name" if tag in seen else _parameter(tag, list(group), path, identity)
        seen.add(tag)
        if isinstance(parameter, str):
            problems.add(tag, parameter, _SAVE_AGAIN)
        else:
            tensors.append(parameter)
    problems.raise_if_any("entries of this MindSpore checkpoint are refused")
    return tensors


def _parameter(tag: str, pieces: Sequence[_Piece], path: Path, identity: FileIdentity) -> StoredTensor | str:
    """The parameter that consecutive Values of one tag make up, or what is wrong with it."""
    if problem := name_problem(tag):
        return problem
    extents = tuple(piece.content for piece in pieces if piece.content is not None)
    if len(extents) != len(pieces):
        return "a hash table (MapParameter), not a tensor"
    first = pieces[0]
    if any((piece.type, piece.dims) != (first.type, first.dims) for piece in pieces):
        return "its parts disagree in type or dims"
    if first.type not in SAFETENSORS_TYPES:
        return f"the type {quoted(first.type)}, not one of {', '.join(SAFETENSORS_TYPES)}"
    if problem := shape_problem(first.dims):
        return problem
    dtype, held = SAFETENSORS_TYPES[first.type], sum(extent.length for extent in extents)
    shape = () if first.dims == (0,) and held == item_size(dtype) else first.dims
    needed = math.prod(shape) * item_size(dtype)
    if held != needed:
        return f"its content is {held} bytes, its dims and type need {needed if needed < 2**63 else 'over 2**63'}"
    return StoredTensor(tag, path, dtype, shape, extents, identity=identity)


def ckpt_layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> FileLayout:
    """The layout of a .ckpt with these (name, safetensors dtype, shape) in this order, as MindSpore writes it, without the crc tail.

    Raises Refused for what MindSpore would not read back as it is: types that it has not, names that are there twice, the shape (0,).
    """
    literals: list[tuple[int, bytes]] = []
    places: list[tuple[Extent, ...]] = []
    position = 0
    names: set[str] = set()
    for name, dtype, shape in tensors:
        if problem := _unwritable(name, dtype, shape, names):
            raise refuse(f"a MindSpore checkpoint cannot hold this tensor: {problem}", quoted(name), "write safetensors instead")
        names.add(name)
        extents = []
        for length in _slices(math.prod(shape) * item_size(dtype)):
            prefix = _value_prefix(name, MINDSPORE_TYPES[dtype], shape, length)
            literals.append((position, prefix))
            extents.append(Extent(position + len(prefix), length))
            position = extents[-1].offset + length
        places.append(tuple(extents))
    return FileLayout(position, tuple(literals), tuple(places))


def _unwritable(name: str, dtype: str, shape: tuple[int, ...], names: set[str]) -> str | None:
    if name in names:
        return "two tensors have this name"
    if dtype not in MINDSPORE_TYPES:
        return f"MindSpore has no type for {dtype}"
    if shape == (0,):
        return "MindSpore takes the dims [0] for a scalar"
    return None


def _slices(nbytes: int) -> list[int]:
    """The lengths of a parameter's parts; one without elements has one part, lest it be left out."""
    whole, rest = divmod(nbytes, SLICE_BYTES)
    return [SLICE_BYTES] * whole + ([rest] if rest or not whole else [])


def _value_prefix(name: str, mindspore_type: str, dims: Sequence[int], length: int) -> bytes:
    """What stands in a checkpoint before `length` bytes of a parameter's content, which come last in all the messages around them."""
    tensor = integer_fields(1, dims) + bytes_field(2, mindspore_type.encode()) + length_prefix(3, length)
    value = bytes_field(1, name.encode()) + length_prefix(2, len(tensor) + length) + tensor
    return length_prefix(1, len(value) + length) + value
