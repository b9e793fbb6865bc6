"""Parameter types and the command class of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
MAX_LISTED = 1 << 20


class Command(click.Command):
    """A command with --debug: a traceback instead of one screen when something fails (read by `command_line.run_command_line`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."))


class RankList(click.ParamType[Any]):
    """`0-7,12` as a tuple of numbers."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        ranks: set[int] = set()
        for piece in str(value).split(","):
            first, dash, last = piece.strip().partition("-")
            if not _is_number(first) or (dash and not _is_number(last)) or (dash and int(last) < int(first)):
                self.fail(f"{value!r} is not a list of ranks such as 0-7,12", param, ctx)
            if int(last or first) >= MAX_LISTED:
                self.fail(f"{piece.strip()!r} is too large for a rank", param, ctx)
            ranks.update(range(int(first), int(last or first) + 1))
        return tuple(sorted(ranks))


class LayerCounts(click.ParamType[Any]):
    """`10,10,12` as a tuple of numbers."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        pieces = [piece.strip() for piece in str(value).split(",")]
        if not all(_is_number(piece) for piece in pieces):
            self.fail(f"{value!r} is not a list of layer counts such as 10,10,12", param, ctx)
        return tuple(int(piece) for piece in pieces)


class ByteSize(click.ParamType[Any]):
    """`500MB` or `2GiB` as a number of bytes."""

    name = "size"
    units: ClassVar[dict[str, int]] = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        number = text.rstrip("BGIKMbgikm ")
        unit = self.units.get(text[len(number) :].strip().upper() or "B")
        if not _is_number(number) or unit is None or not int(number):
            self.fail(f"{value!r} is not a size such as 500MB or 2GiB", param, ctx)
        return int(number) * unit


class FiniteRange(click.FloatRange):
    """A number between bounds. click's own range lets nan and, without an upper bound, inf pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def folder_argument(name: str) -> Callable[[F], F]:
    """The folder that a command reads."""
    return click.argument(name, type=click.Path())
