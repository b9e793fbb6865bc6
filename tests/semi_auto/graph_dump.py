"""A compiled graph as MindSpore dumps it after its front end ("validate"), read into nodes: one flat list in an order of execution."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_NODE = re.compile(r"^  %(\d+)\([^)]*\) = (?:PrimFunc_)?(\w+)\(")
_PARAMETER = re.compile(r"^%para\d+_(\S+): <\w+\[\w+(?:\[\w+\])?\]?, \(([^)]*)\)")
_TOKEN = re.compile(
    r"\s*(?:%para\d+_(?P<parameter>[\w.]+)|%(?P<node>\d+)"
    r"|Tensor\(shape=\[(?P<shape>[^\]]*)\], dtype=(?P<dtype>\w+), value=(?P<value>[^)]*)\)"
    r"|(?P<kind>I64|F32|Bool)\((?P<number>[^)]*)\)|(?P<monad>[UI]O?Monad\[\w\])|(?P<none>None)|(?P<mark>[(),]))"
)
_WRAPPED = re.compile(r"\n +(?=-?\d+\.\d*e)")  # the values of a constant go on
_PARTNER = re.compile(r"(?:dest|src)_rank: I64\((\d+)\)")
_TAG = re.compile(r"sr_tag: I64\((\d+)\)")
_RANKS = re.compile(r"group_rank_ids: \(([^)]*)\)")
_REDUCTION = re.compile(r'\bop: "(\w+)"')
_FORWARD = re.compile(r'forward_unique_id: "(\d+)"')
_OWN = re.compile(r'\{unique_id: "(\d+)"')


@dataclass(frozen=True)
class Ref:
    """The value of another node."""

    node: int


@dataclass(frozen=True)
class Held:
    """A parameter, or an input of the graph."""

    name: str


@dataclass(frozen=True)
class Elided:
    """A constant tensor whose values are not in the dump."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """One call.

    Args:
        ranks, reduction: of a collective, those that take part, and "sum" or "max".
        partner, tag: of a Send or Receive, the other rank, and what tells messages between the two apart.
        own, forward: the number of a forward operator, and of the one whose gradient a backward operator computes.
    """

    number: int
    operator: str
    arguments: tuple[Any, ...]
    ranks: tuple[int, ...]
    reduction: str
    partner: int
    tag: str
    own: str
    forward: str


@dataclass(frozen=True)
class Graph:
    """`shapes`: of the parameters, as this rank holds them."""

    nodes: tuple[Node, ...]
    shapes: dict[str, tuple[int, ...]]


def read_dump(path: Path) -> Graph:
    """Raises ValueError for an argument of a kind that is not known here."""
    nodes, shapes = [], {}
    for line in _WRAPPED.sub(" ", path.read_text()).splitlines():
        held = _PARAMETER.match(line)
        if held is not None:
            shapes[held.group(1)] = _integers(held.group(2))
        found = _NODE.match(line)
        if found is not None:
            nodes.append(_node(found, line))
    return Graph(tuple(nodes), shapes)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _node(found: re.Match[str], line: str) -> Node:
    def text(pattern: re.Pattern[str]) -> str:
        match = pattern.search(line)
        return match.group(1) if match is not None else ""

    arguments = _tuple(_tokens(line, found.end()))
    return Node(
        int(found.group(1)), found.group(2), arguments, _integers(text(_RANKS)), text(_REDUCTION), int(text(_PARTNER) or -1), text(_TAG),
        text(_OWN), text(_FORWARD),
    )  # fmt: skip


def _tokens(line: str, place: int) -> Iterator[re.Match[str]]:
    while True:
        token = _TOKEN.match(line, place)
        if token is None:
            raise ValueError(f"not understood: {line[place : place + 80]}")
        yield token
        place = token.end()


def _tuple(tokens: Iterator[re.Match[str]]) -> tuple[Any, ...]:
    """The values up to the closing parenthesis."""
    values: list[Any] = []
    for token in tokens:
        if token["mark"] == ")":
            break
        if token["mark"] == "(":
            values.append(_tuple(tokens))
        elif token["mark"] is None:
            values.append(_value(token))
    return tuple(values)


def _value(token: re.Match[str]) -> Any:
    if token["parameter"] is not None:
        return Held(token["parameter"])
    if token["node"] is not None:
        return Ref(int(token["node"]))
    if token["value"] == "[...]":
        return Elided(_integers(token["shape"]))
    if token["value"] is not None and token["shape"]:
        return np.array(token["value"].strip("[ ]").split(), np.float64).reshape(_integers(token["shape"]))
    if token["value"] is not None:
        return float(token["value"]) if token["dtype"].startswith("Float") else int(token["value"])
    if token["kind"] is not None:
        return float(token["number"]) if token["kind"] == "F32" else int(token["number"])
    return None
