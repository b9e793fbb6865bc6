"""Frozen dataclasses to JSON and back, with every field checked on the way in: files that we read may come from strangers."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar, Union

T = TypeVar("T")
MAX_INTEGER = 1 << 62


class RecordError(ValueError):
    """The JSON is not such a record; the message says at which place."""


def encode(value: Any) -> Any:
    """JSON values of a record (dataclasses become objects, tuples lists)."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: Any, place: str = "") -> T:
    """The record of type `kind` that `value` describes. Raises RecordError for a wrong type, an unknown field or a missing one."""
    return typing.cast(T, _decode(kind, value, place or "the record"))


def _decode(kind: Any, value: Any, place: str) -> Any:
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _decode(next(item for item in typing.get_args(kind) if item is not type(None)), value, place)
    if origin is typing.Literal:
        if value not in typing.get_args(kind) or isinstance(value, bool):
            raise RecordError(f"{place} is {_short(value)}, not one of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, place)
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{place} is {_short(value)}, not an object")
        return {key: _decode(typing.get_args(kind)[1], item, f"{place}.{key[:80]}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, place)
    return _decode_scalar(kind, value, place)


def _decode_tuple(arguments: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise RecordError(f"{place} is {_short(value)}, not a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if len(value) != len(arguments):
        raise RecordError(f"{place} has {len(value)} entries, not {len(arguments)}")
    return tuple(_decode(kind, item, f"{place}[{index}]") for index, (kind, item) in enumerate(zip(arguments, value, strict=True)))


def _decode_dataclass(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{place} is {_short(value)}, not an object")
    hints, fields, required = _fields_of(kind)
    unknown = sorted(set(value) - fields)
    if unknown:
        raise RecordError(f"{place} has the unknown field {_short(unknown[0])}")
    missing = [name for name in required if name not in value]
    if missing:
        raise RecordError(f"{place} lacks the field {missing[0]!r}")
    return kind(**{name: _decode(hints[name], item, f"{place}.{name}") for name, item in value.items()})


@functools.cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str], tuple[str, ...]]:
    """Types, names and required names of a dataclass's fields."""
    fields = dataclasses.fields(kind)
    required = tuple(f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
    return typing.get_type_hints(kind), frozenset(field.name for field in fields), required


def _decode_scalar(kind: Any, value: Any, place: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_INTEGER:
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{place} is {_short(value)}, not {'a text' if kind is str else f'of type {kind.__name__}'}")
    if kind is float and not math.isfinite(value):
        raise RecordError(f"{place} is {value}, not a finite number")
    if kind is int and not -1 <= value < MAX_INTEGER:
        raise RecordError(f"{place} is {_short(value)}, out of range")
    return value


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        return "a huge number"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
