"""Reading tables (TOML) that people write: bounded, every mistake collected with its file, its entry and its mend."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Collection, Set
from pathlib import Path
from typing import Any, TypeVar

from mappings.axes import REFINEMENTS, Axes, AxesError, parse_axes
from mappings.errors import Problem, Refused
from mappings.names import MAX_NAME_LENGTH
from mappings.parameters import catalogue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_TABLE_BYTES = 1 << 20
MAX_ENTRIES = 1000
MAX_DOTS = 200  # of a line: TOML readers take a time that grows with the square of a dotted key's parts

T = TypeVar("T")

KNOWN_ATOMS = {atom for parameter in catalogue().values() for atom in parameter.axes.all_atoms()} | {
    name for parts in REFINEMENTS.values() for name in parts
}


def read_text(path: Path, what: str, mend: str) -> str:
    """The text of a table, which must be a regular file; one byte more than is allowed is read. Raises Refused."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")
            return file.read(MAX_TABLE_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{what} cannot be read", [Problem(str(error), str(path), mend)]) from error


def _open_without_waiting(path: str, flags: int) -> int:
    """A FIFO would wait for somebody who writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse_toml(text: str, where: str, what: str) -> dict[str, Any]:
    """The TOML of a `what`. Raises Refused for one that is too large, or not TOML."""
    if len(text) > MAX_TABLE_BYTES:
        raise Refused(f"not a {what}", [Problem("larger than 1 MiB", where, f"give a TOML {what}")])
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise Refused(f"not a {what}", [Problem(f"a line with more than {MAX_DOTS} dots", where, "write it as several lines")])
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the {what} is not valid TOML", [Problem(str(error)[:300], where, "mend the TOML")]) from error


class TableReader:
    """Collects the problems of one table while reading it."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self.problems: list[Problem] = []

    def wrong(self, what: str, mend: str, place: str = "") -> None:
        self.problems.append(Problem(what, f"{self.where}, {place}" if place else self.where, mend))

    def string(self, key: str, required: bool = False) -> str:
        value = self.data.get(key, "")
        if not isinstance(value, str) or (required and not value):
            self.wrong(f"{key!r} is missing or not a text", f'write {key} = "..."')
            return ""
        return value

    def strings(self, value: Any, key: str, place: str, mend: str) -> tuple[str, ...]:
        values = [value] if isinstance(value, str) else value
        if (
            not isinstance(values, list)
            or not values
            or not all(isinstance(item, str) and 0 < len(item) <= MAX_NAME_LENGTH for item in values)
        ):
            self.wrong(f"{key!r} is missing or not a name", mend, place)
            return ()
        return tuple(values)

    def each(self, key: str, read: Callable[[dict[str, Any], str], T | None]) -> list[T]:
        entries = self.data.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            self.wrong(f"{key!r} is not a list of tables", f"write [[{key}]] before each")
            return []
        if len(entries) > MAX_ENTRIES:
            self.wrong(f"{len(entries)} entries [[{key}]]: at most {MAX_ENTRIES} are read", "use {layer} and {expert} in names")
            return []
        found = []
        for index, entry in enumerate(entries, start=1):
            name = entry.get("hf") or entry.get("name") or "?"
            item = read(entry, f"{key} {index} ({str(name)[:100]})")
            if item is not None:
                found.append(item)
        return found

    def axes(self, text: str, known: Set[str], place: str, example: str) -> Axes | None:
        """A layout over the `known` axes; None when it is none, or names others."""
        try:
            axes = parse_axes(text)
        except AxesError as error:
            self.wrong(str(error), example, place)
            return None
        before = len(self.problems)
        self.check_atoms(axes, known, place)
        return axes if len(self.problems) == before else None

    def check_atoms(self, axes: Axes, known: Set[str], place: str) -> None:
        for name in sorted(axes.all_atoms() - known):
            self.wrong(f"unknown axis {name!r} in {str(axes)!r}", f"known: {', '.join(sorted(known))}; give others a size in [axes]", place)

    def check_keys(self, entry: dict[str, Any], known: set[str], place: str) -> None:
        for key in sorted(set(entry) - known):
            self.wrong(f"unknown key {key!r}", f"known: {', '.join(sorted(known))}", place)

    def targets(self, value: Any, parameters: Collection[str], place: str) -> dict[str, str]:
        targets = {"": value} if isinstance(value, str) else value
        if not isinstance(targets, dict) or not targets or not all(isinstance(name, str) for name in targets.values()):
            self.wrong(
                "'ms' is missing or not a name",
                'write ms = "final_norm.gamma", or ms = { q = "...", k = "..." } with one name per label',
                place,
            )
            return {}
        for name in targets.values():
            if name not in parameters:
                self.wrong(
                    f"{name!r} is no canonical parameter",
                    "see mappings/parameters.toml for the names, or declare it in a [[parameter]] of this table",
                    place,
                )
        return targets
