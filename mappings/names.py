"""Tensor names: patterns with `{layer}` and `{expert}`, and folding long lists of names for a person to read."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable

PLACEHOLDERS = ("layer", "expert")
MAX_NAME_LENGTH = 512

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,17})(?=\.|\Z)")


def placeholders(pattern: str) -> tuple[str, ...]:
    """The placeholders of a name pattern, in order of appearance."""
    return tuple(_PLACEHOLDER.findall(pattern))


def fill(pattern: str, **numbers: int | None) -> str:
    """The whole name for these numbers: fill("layers.{layer}.x", layer=3) is "layers.3.x"."""
    return _PLACEHOLDER.sub(lambda match: str(numbers[match.group(1)]), pattern)


def number_free(name: str) -> str:
    """A name or pattern with every number and placeholder between dots as `{}`: equal for a pattern and the names that it stands for."""
    return _NUMBER.sub("{}", _PLACEHOLDER.sub("{}", name))


def fold_names(names: Iterable[str]) -> list[str]:
    """Names with their numbers folded: model.layers.{0..31}.mlp.up_proj.weight. Order of first appearance is kept.

    Where not every combination of the numbers is among the names, their count follows.
    """
    groups: dict[tuple[str, ...], set[tuple[int, ...]]] = defaultdict(set)
    for name in names:
        groups[tuple(_NUMBER.split(name))].add(tuple(int(number) for number in _NUMBER.findall(name)))
    return [_folded(pieces, numbers) for pieces, numbers in groups.items()]


def _folded(pieces: tuple[str, ...], numbers: set[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    text = pieces[0] + "".join(_ranges(column) + piece for column, piece in zip(columns, pieces[1:], strict=True))
    return text if math.prod(map(len, columns)) == len(numbers) else f"{text} ({len(numbers)} names)"


def _ranges(values: list[int]) -> str:
    if len(values) == 1:
        return str(values[0])
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"
