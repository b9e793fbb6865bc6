"""A JSON reader that keeps line numbers, and reads on behind the mistakes that people make in JSON: comments, trailing commas, a key twice.

The standard library's reader forgets where a value stood and stops at the first comment. Strings and numbers are still read by its rules.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

MAX_DEPTH = 32
MAX_SLIPS = 1000
_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)

Value = Union[dict[str, "Node"], list["Node"], str, int, float, bool, None]  # noqa: UP007 (the names in quotes are no types yet)


@dataclass(frozen=True)
class Node:
    """A value and the line, counted from 1, that it begins on."""

    value: Value
    line: int


@dataclass(frozen=True)
class Slip:
    """Something that is no JSON."""

    what: str
    line: int


class Unreadable(Exception):
    """The text cannot be understood from a line on."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.slip = Slip(what, line)


def read(text: str) -> tuple[Node | None, list[Slip]]:
    """The document, or None if it cannot be understood, and everything in it that JSON does not allow."""
    reader = _Reader(text)
    try:
        document = reader.value(reader.skip(0), 0)
        end = reader.skip(reader.end)
        if end < len(text):
            reader.slips.append(Slip("something follows the end of the document", reader.line(end)))
    except Unreadable as error:
        return None, [*reader.slips, error.slip]
    return document, reader.slips


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class _Reader:
    """`end` is the position behind the value that was read last."""

    def __init__(self, text: str) -> None:
        self.slips: list[Slip] = []
        self.end = 0
        self._text = text
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, position: int) -> int:
        return bisect_right(self._starts, position)

    def _slip(self, what: str, position: int) -> None:
        """One more slip. Raises Unreadable when there are so many that this is another kind of file."""
        if len(self.slips) == MAX_SLIPS:
            raise Unreadable(f"more than {MAX_SLIPS} things that are no JSON", self.line(position))
        self.slips.append(Slip(what, self.line(position)))

    def skip(self, position: int) -> int:
        """The position of the next thing that is neither space nor comment."""
        while True:
            position = _end(_SPACE.match(self._text, position), position)
            comment = _COMMENT.match(self._text, position)
            if comment is None:
                return position
            self._slip("a comment, which JSON has not", position)
            position = comment.end()

    def value(self, position: int, depth: int) -> Node:
        line, sign = self.line(position), self._text[position : position + 1]
        if depth > MAX_DEPTH:
            raise Unreadable(f"values within values, more than {MAX_DEPTH} deep", line)
        if sign == "{":
            return Node(self._object(position + 1, depth), line)
        if sign == "[":
            return Node([self.value(item, depth + 1) for item in self._items(position + 1, "]")], line)
        if not sign:
            raise Unreadable("the file ends in the middle of a value", line)
        return Node(self._plain(position), line)

    def _plain(self, position: int) -> Any:
        """A text, a number, true, false or null."""
        try:
            value, self.end = _DECODER.raw_decode(self._text, position)
        except json.JSONDecodeError as error:
            raise Unreadable(error.msg.lower(), self.line(min(error.pos, len(self._text)))) from error
        except ValueError as error:  # NaN, or more digits than Python reads
            raise Unreadable("a number that JSON has not, or with too many digits", self.line(position)) from error
        return value

    def _object(self, position: int, depth: int) -> dict[str, Node]:
        members: dict[str, Node] = {}
        for start in self._items(position, "}"):
            if self._text[start] != '"':
                raise Unreadable(f"expected a key in quotes, found {self._text[start]!r}", self.line(start))
            key: str = self._plain(start)
            colon = self.skip(self.end)
            if self._text[colon : colon + 1] != ":":
                raise Unreadable(f"no colon behind the key {key[:80]!r}", self.line(min(colon, len(self._text))))
            if key in members:
                self._slip(f"the key {key[:80]!r} a second time in one object", start)
            members[key] = self.value(self.skip(colon + 1), depth + 1)
        return members

    def _items(self, position: int, closing: str) -> Iterator[int]:
        """Where each item begins. The caller reads it, which moves `end`, before it asks for the next."""
        position = self.skip(position)
        while self._text[position : position + 1] != closing:
            if position >= len(self._text):
                raise Unreadable(f"the file ends before a {closing!r}", self.line(len(self._text)))
            yield position
            position = self.skip(self.end)
            if self._text[position : position + 1] == ",":
                comma, position = position, self.skip(position + 1)
                if self._text[position : position + 1] == closing:
                    self._slip(f"a comma before {closing!r}", comma)
            elif self._text[position : position + 1] != closing:
                found = self._text[position : position + 1]
                what = f"expected a comma or {closing!r}, found {found!r}" if found else f"the file ends before a {closing!r}"
                raise Unreadable(what, self.line(position))
        self.end = position + 1


def _end(match: re.Match[str] | None, position: int) -> int:
    return position if match is None else match.end()
