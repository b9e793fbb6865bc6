"""The protobuf wire format: what MindSpore's checkpoint and strategy files are made of.

Source: https://protobuf.dev/programming-guides/encoding/. Readers take positions in a source and never more bytes than asked for, so that
a message of many gigabytes is scanned without reading its contents; every length is checked against the message around it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_FIXED = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT = 10  # bytes of a 64-bit number
_WINDOW = 4096


class WireError(ValueError):
    """The bytes are not a protobuf message, or end before it does."""


class Source(Protocol):
    """Bytes that can be read at any place."""

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer at the end."""
        ...


class BytesSource:
    """Bytes in memory; `size` is that of the file which they begin, if they are not all of it."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self._data = data
        self.size = len(data) if size is None else size

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


class FileSource:
    """An open file, read in small windows; `size` is where it is taken to end."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size
        self._start = 0
        self._window = b""

    def read(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.size - offset))
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._window):
            self._window = os.pread(self._descriptor, max(length, _WINDOW), offset)
            self._start, begin = offset, 0
        return self._window[begin : begin + length]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: the place of its payload, and for a varint its value (unsigned)."""

    number: int
    wire: int
    start: int
    end: int
    value: int = 0


def read_varint(source: Source, offset: int, end: int) -> tuple[int, int]:
    """The number at `offset` and the place after it. Raises WireError if it does not end before `end` or has over 64 bits."""
    value = 0
    for index, byte in enumerate(source.read(offset, min(_MAX_VARINT, end - offset))):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >> 64:
                break
            return value, offset + index + 1
    raise WireError(f"no number of at most 64 bits at byte {offset}")


def read_field(source: Source, offset: int, end: int, *, beyond: bool = False) -> Field:
    """The field at `offset` of a message that ends at `end`. Raises WireError if it ends later, which `beyond` allows."""
    key, start = read_varint(source, offset, end)
    number, wire, value = key >> 3, key & 7, 0
    if not 0 < number < 2**29:
        raise WireError(f"no field at byte {offset}")
    if wire == VARINT:
        value, stop = read_varint(source, start, end)
    elif wire == LENGTH:
        length, start = read_varint(source, start, end)
        stop = start + length
    elif wire in _FIXED:
        stop = start + _FIXED[wire]
    else:
        raise WireError(f"field {number} at byte {offset} has the unknown wire type {wire}")
    if stop > end and not beyond:
        raise WireError(f"field {number} at byte {offset} ends at byte {stop}, {stop - end} bytes after the message around it")
    return Field(number, wire, start, stop, value)


def fields(source: Source, start: int, end: int) -> Iterator[Field]:
    """The fields of the message from `start` to `end`, in order. Raises WireError where it is malformed."""
    while start < end:
        field = read_field(source, start, end)
        yield field
        start = field.end


def read_integers(source: Source, field: Field) -> Iterator[int]:
    """The numbers of one occurrence of a repeated integer field, packed or not, as signed 64-bit integers."""
    if field.wire == VARINT:
        yield _signed(field.value)
        return
    if field.wire != LENGTH:
        raise WireError(f"field {field.number} at byte {field.start} does not hold integers")
    position = field.start
    while position < field.end:
        value, position = read_varint(source, position, field.end)
        yield _signed(value)


def _signed(value: int) -> int:
    return value - 2**64 if value >> 63 else value


def varint(value: int) -> bytes:
    """`value` as a varint; a negative one in two's complement of 64 bits, as protobuf does for int32 and int64."""
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def integer_field(number: int, value: int) -> bytes:
    """An integer field with its key."""
    return varint(number << 3 | VARINT) + varint(value)


def integer_fields(number: int, values: Iterable[int]) -> bytes:
    """A repeated integer field, unpacked: how proto2, MindSpore's dialect, writes it."""
    return b"".join(integer_field(number, value) for value in values)


def length_prefix(number: int, length: int) -> bytes:
    """What stands before `length` bytes of a string, bytes or message field."""
    return varint(number << 3 | LENGTH) + varint(length)


def bytes_field(number: int, payload: bytes) -> bytes:
    """A string, bytes or message field with its key and length."""
    return length_prefix(number, len(payload)) + payload
