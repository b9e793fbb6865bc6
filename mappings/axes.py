"""The axes notation: how a tensor's elements are laid out, written once and read in both directions.

A tensor's shape is written with the names of its logical axes, in numpy order, so that a layout is a sentence that can be checked:

    vocab hidden                                          an embedding table [vocab, hidden]
    (heads head_dim) hidden                               one axis made of two: rows are ordered by head, then by element
    hidden (heads head_dim)                               the transpose of the former, as GPT-2's Conv1D stores it
    hidden [q: heads head_dim | k: kv_heads head_dim | v: kv_heads head_dim]      three tensors side by side in one axis
    (kv_heads [q: group head_dim | k: head_dim | v: head_dim]) hidden             the same, interleaved by KV group (Megatron)
    (heads half_dim pair) hidden                          rotary elements stored interleaved (canonical: pair before half_dim)
    (ffn [gate: 1 | up: 1]) hidden                        rows that alternate: 1 stands for a part of a single element

An *atom* is a single name. Its size comes from `ModelConfig.axis_sizes`. Two layouts that name the same atoms pair element by element;
that pairing is the whole of a conversion rule. `REFINEMENTS` says which atoms are made of smaller ones, so that `heads` on one side may
meet `kv_heads group` on the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

REFINEMENTS: dict[str, tuple[str, ...]] = {"heads": ("kv_heads", "group"), "head_dim": ("pair", "half_dim")}

Refinements = Mapping[str, tuple[str, ...]]
ONE = "1"

_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|1(?![A-Za-z0-9_])|[()\[\]|:])")
MAX_DEPTH = 8
MAX_LENGTH = 1000


class AxesError(ValueError):
    """The text is not a layout; the message says where and what is expected."""


@dataclass(frozen=True)
class Atom:
    """One logical axis."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Composite:
    """Several items fused into one axis, the first varying slowest."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.items))})"


@dataclass(frozen=True)
class Parts:
    """Several tensors laid side by side: (label, items of that tensor) in order."""

    parts: tuple[tuple[str, tuple[Item, ...]], ...]

    def __str__(self) -> str:
        return "[" + " | ".join(" ".join([f"{label}:", *(map(str, items) if items else [ONE])]) for label, items in self.parts) + "]"


Item = Atom | Composite | Parts


@dataclass(frozen=True)
class AtomPlace:
    """Where an atom lies in a tensor's buffer: its size and its stride (elements)."""

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class View:
    """One labelled part of a tensor: the element at atom indices i is at `offset + sum(i * stride)` of the tensor's buffer.

    `axes` keeps the atoms grouped by the tensor axis that they belong to, in order.
    """

    offset: int
    axes: tuple[tuple[AtomPlace, ...], ...]

    @property
    def atoms(self) -> tuple[AtomPlace, ...]:
        return tuple(atom for axis in self.axes for atom in axis)


@dataclass(frozen=True)
class Axes:
    """A parsed layout: one item per tensor axis. `str()` gives the text back."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.items))

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the parts, or ("",) when the tensor is a single part."""
        for item in self.items:
            for parts in _parts_in(item):
                return tuple(label for label, _ in parts.parts)
        return ("",)

    def atoms(self, label: str = "") -> tuple[str, ...]:
        """The atoms' names that the part `label` is made of, in order."""
        return tuple(name for item in self.items for name in _atom_names(item, label))

    def all_atoms(self) -> set[str]:
        return {name for label in self.labels for name in self.atoms(label)}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape for these atom sizes. Raises KeyError for an atom without a size."""
        return tuple(_size(item, sizes) for item in self.items)

    def view(self, label: str, sizes: Mapping[str, int], strides: tuple[int, ...]) -> View:
        """The part `label` of a tensor whose axes have these strides (elements)."""
        offset, axes = 0, []
        for item, stride in zip(self.items, strides, strict=True):
            places: list[AtomPlace] = []
            offset += _place(item, stride, label, sizes, places)
            axes.append(tuple(places))
        return View(offset, tuple(axes))

    def refined(self, atoms: set[str], refinements: Refinements = REFINEMENTS) -> Axes:
        """This layout with each atom that `atoms` lacks replaced by what it is made of."""
        return Axes(tuple(_refine(item, atoms, refinements) for item in self.items))


def parse_axes(text: str) -> Axes:
    """Read a layout. Raises AxesError with the place of the first mistake."""
    if len(text) > MAX_LENGTH:
        raise AxesError(f"{text[:60]!r}...: a layout has at most {MAX_LENGTH} characters")
    parser = _Parser(text)
    items = parser.sequence(0)
    parser.expect_end()
    axes = Axes(tuple(items))
    _check(axes, text)
    return axes


class _Parser:
    """Recursive descent over the tokens of one layout."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise AxesError(
                    f"{text!r}: unexpected character {text[position:].strip()[0]!r}; use names, ( ), [ label: ... | label: ... ]"
                )
            self.tokens.append(match.group(1))
            position = match.end()
        self.next = 0

    def peek(self) -> str:
        return self.tokens[self.next] if self.next < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.next += 1
        return token

    def sequence(self, depth: int) -> list[Item]:
        if depth > MAX_DEPTH:
            raise AxesError(f"{self.text[:60]!r}: nested too deeply")
        items: list[Item] = []
        while self.peek() not in ("", ")", "]", "|"):
            token = self.take()
            if token == "(":
                items.append(Composite(self.some(depth + 1, "( )")))
                self.expect(")")
            elif token == "[":
                items.append(self.parts(depth + 1))
            elif token == ":":
                raise AxesError(f"{self.text!r}: ':' belongs after a label inside [ ]")
            elif token == ONE:
                raise AxesError(f"{self.text!r}: 1 stands alone in a part, as in [gate: 1 | up: 1]")
            else:
                items.append(Atom(token))
        return items

    def some(self, depth: int, place: str) -> tuple[Item, ...]:
        items = tuple(self.sequence(depth))
        if not items:
            raise AxesError(f"{self.text!r}: {place} names no axis")
        return items

    def parts(self, depth: int) -> Parts:
        parts: list[tuple[str, tuple[Item, ...]]] = []
        while True:
            label = self.take()
            if not label.isidentifier():
                raise AxesError(f"{self.text!r}: a part starts with a label, as in [q: ... | k: ...]")
            self.expect(":")
            parts.append((label, self.part(depth, label)))
            if self.peek() != "|":
                break
            self.take()
        self.expect("]")
        return Parts(tuple(parts))

    def part(self, depth: int, label: str) -> tuple[Item, ...]:
        if self.peek() != ONE:
            return self.some(depth, f"the part {label!r}")
        self.take()
        return ()

    def expect(self, token: str) -> None:
        found = self.take()
        if found != token:
            raise AxesError(f"{self.text!r}: expected {token!r}, found {found or 'the end'!r}")

    def expect_end(self) -> None:
        if self.peek():
            raise AxesError(f"{self.text!r}: unexpected {self.peek()!r}")


def _check(axes: Axes, text: str) -> None:
    groups = [parts for item in axes.items for parts in _parts_in(item)]
    if len(groups) > 1:
        raise AxesError(f"{text!r}: only one [ ] per tensor")
    labels = axes.labels
    if len(set(labels)) != len(labels):
        raise AxesError(f"{text!r}: a label is used twice")
    for label in labels:
        names = axes.atoms(label)
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise AxesError(f"{text!r}: axis {repeated[0]!r} appears twice in one tensor")


def _parts_in(item: Item) -> Iterator[Parts]:
    if isinstance(item, Parts):
        yield item
        for _, items in item.parts:
            for inner in items:
                yield from _parts_in(inner)
    elif isinstance(item, Composite):
        for inner in item.items:
            yield from _parts_in(inner)


def _atom_names(item: Item, label: str) -> Iterator[str]:
    if isinstance(item, Atom):
        yield item.name
    elif isinstance(item, Composite):
        for inner in item.items:
            yield from _atom_names(inner, label)
    else:
        for part_label, items in item.parts:
            if part_label == label:
                for inner in items:
                    yield from _atom_names(inner, label)


def _size(item: Item, sizes: Mapping[str, int]) -> int:
    if isinstance(item, Atom):
        return sizes[item.name]
    if isinstance(item, Composite):
        return math.prod(_size(inner, sizes) for inner in item.items)
    return sum(math.prod(_size(inner, sizes) for inner in items) for _, items in item.parts)


def _place(item: Item, stride: int, label: str, sizes: Mapping[str, int], places: list[AtomPlace]) -> int:
    """Append the atoms of `item` (outermost first) and return the offset of the part `label` within it."""
    if isinstance(item, Atom):
        places.append(AtomPlace(item.name, sizes[item.name], stride))
        return 0
    if isinstance(item, Composite):
        return _place_sequence(item.items, stride, label, sizes, places)
    offset = 0
    for part_label, items in item.parts:
        if part_label == label:
            return offset + _place_sequence(items, stride, label, sizes, places)
        offset += stride * math.prod(_size(inner, sizes) for inner in items)
    raise KeyError(label)


def _place_sequence(items: tuple[Item, ...], stride: int, label: str, sizes: Mapping[str, int], places: list[AtomPlace]) -> int:
    offset = 0
    strides = [stride] * len(items)
    for index in range(len(items) - 2, -1, -1):
        strides[index] = strides[index + 1] * _size(items[index + 1], sizes)
    for inner, inner_stride in zip(items, strides, strict=True):
        offset += _place(inner, inner_stride, label, sizes, places)
    return offset


def _refine(item: Item, atoms: set[str], refinements: Refinements) -> Item:
    if isinstance(item, Atom):
        if item.name in atoms or item.name not in refinements:
            return item
        return Composite(tuple(_refine(Atom(name), atoms, refinements) for name in refinements[item.name]))
    if isinstance(item, Composite):
        return Composite(tuple(_refine(inner, atoms, refinements) for inner in item.items))
    return Parts(tuple((label, tuple(_refine(inner, atoms, refinements) for inner in items)) for label, items in item.parts))
