"""Settings as frozen dataclasses: a field carries its meaning and bounds, and TOML tables are read against them, all mistakes at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from converter.records import RecordError, decode
from mappings.config_values import shown, shown_key
from mappings.errors import Problem

T = TypeVar("T")


def setting(meaning: str, default: Any = dataclasses.MISSING, *, low: float = -math.inf, high: float = math.inf) -> Any:
    """A field of a settings dataclass. `low` and `high` are inclusive and bound numbers, or each number of a list.

    None as the default means that the key may be left out, and what happens then is in the meaning.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, "low": low, "high": high})


@dataclass(frozen=True)
class Setting:
    """What a person may know about one key: `kind` and `default` as they are written, `bounds` as text ("" for none)."""

    table: str
    key: str
    kind: str
    default: str
    bounds: str
    meaning: str


class TableReader:
    """Reads the tables of one file, collecting problems. `origins` says for a dotted key where its value was given, if not in the file."""

    def __init__(self, where: str, origins: Mapping[str, str]) -> None:
        self.problems: list[Problem] = []
        self._where, self._origins = where, origins

    def read(self, kind: type[T], data: Mapping[str, Any]) -> T | None:
        """`data`, a TOML document, as the dataclass `kind`, whose fields are the tables. None if there was a problem."""
        tables = typing.get_type_hints(kind)
        for name in data:
            if name not in tables:
                self._add(name, "there is no such table", _near(name, tables))
        values = {name: self._table(name, hint, data.get(name, {}), tables) for name, hint in tables.items()}
        return None if self.problems else kind(**values)

    def _table(self, table: str, kind: Any, data: Any, tables: Mapping[str, Any]) -> Any:
        if not isinstance(data, Mapping):
            self._add(table, f"must be a table, not {shown(data)}", f"write [{table}] and its keys below")
            return None
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for key in data:
            if key not in fields:
                self._add(f"{table}.{key}", "there is no such key", _near(key, fields) or _elsewhere(key, tables))
        hints, found = typing.get_type_hints(kind), len(self.problems)
        values = {}
        for key, field in fields.items():
            if key in data:
                values[key] = self._value(f"{table}.{key}", hints[key], field, data[key])
            elif field.default is dataclasses.MISSING:
                self._add(f"{table}.{key}", "is missing", f"{field.metadata['meaning']}")
        return None if len(self.problems) > found else kind(**values)

    def _value(self, place: str, hint: Any, field: dataclasses.Field[Any], value: Any) -> Any:
        try:
            decoded = decode(hint, value, place)
        except RecordError as error:
            self._add(place, str(error).removeprefix(f"{place} "), field.metadata["meaning"])
            return None
        for number in decoded if isinstance(decoded, tuple) else (decoded,):
            if isinstance(number, (int, float)) and not field.metadata["low"] <= number <= field.metadata["high"]:
                self._add(place, f"is {shown(number)}, not {bounds_text(field)}", field.metadata["meaning"])
        return decoded

    def _add(self, place: str, what: str, mend: str) -> None:
        self.problems.append(Problem(what, f"{self._origins.get(place, self._where)}: {'.'.join(map(shown_key, place.split('.')))}", mend))


def bounds_text(field: dataclasses.Field[Any]) -> str:
    """The bounds of a number as a person reads them, "" where there are none."""
    low, high = field.metadata["low"], field.metadata["high"]
    if math.isinf(low) and math.isinf(high):
        return ""
    if math.isinf(high):
        return f"at least {low:.15g}"
    return f"at most {high:.15g}" if math.isinf(low) else f"from {low:.15g} to {high:.15g}"


def describe(kind: Any) -> Iterator[Setting]:
    """Every key of the tables of `kind`, in the order of declaration."""
    for table, hint in typing.get_type_hints(kind).items():
        hints = typing.get_type_hints(hint)
        for field in dataclasses.fields(hint):
            default = "needed" if field.default is dataclasses.MISSING else _written(field.default)
            yield Setting(table, field.name, _kind_text(hints[field.name]), default, bounds_text(field), field.metadata["meaning"])


def _written(value: Any) -> str:
    if value is None:
        return "left out"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _kind_text(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), [item for item in typing.get_args(hint) if item is not type(None)]
    if origin is typing.Literal:
        return " | ".join(f'"{item}"' for item in arguments)
    if origin is tuple:
        return f"[{_kind_text(arguments[0])}, ...]"
    if arguments:
        return _kind_text(arguments[0])
    return {int: "whole number", float: "number", str: "text", bool: "true | false"}[hint]


def _near(name: str, known: Mapping[str, Any]) -> str:
    """Words that name the key most like this one, "" if none is like it."""
    matches = difflib.get_close_matches(name, known, 1)
    return f"did you mean {matches[0]}?" if matches else ""


def _elsewhere(key: str, tables: Mapping[str, Any]) -> str:
    homes = [name for name, kind in tables.items() if key in {field.name for field in dataclasses.fields(kind)}]
    return f"it belongs into [{homes[0]}]" if homes else "`ms-train settings` lists every key"
