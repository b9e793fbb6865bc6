"""Dialect tables: the names and layouts of another MindSpore code base, paired with the canonical parameters.

N families and M dialects are N + M tables: a family's rules give the canonical parameters, a dialect's give its tensors, and
mappings/composition.py joins the two. A table has
    dialect, description, default                    its name, what it is, the layout version that is meant when none is named
    pads_vocabulary, shares_kv_heads                 whether its networks can be cut where tp does not divide vocabulary or KV heads
    [versions]                                       each layout version, and what it is
    [[not_weights]]                                  names (`name`, or `prefix`) beside the weights in its checkpoints, and `why`
    [[network]]                                      a network: its families, those `by_analogy`, the `source` of the facts, its versions,
                                                     and `sizes` = { hidden = "heads head_dim" } that it takes for granted
    [[network.tensor]]                               name = the canonical parameter(s) `ms`, laid out as `axes`
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from mappings.axes import Atom, Axes, Composite, Item, Parts
from mappings.errors import Problem, Refused
from mappings.names import placeholders
from mappings.parameters import REPLICATED, Parameter, Role, Stage, catalogue, name_mistake, outermost
from mappings.table_reader import KNOWN_ATOMS, TableReader, parse_toml

CANONICAL = "ms-convert"
KEYS = {"dialect", "description", "default", "pads_vocabulary", "shares_kv_heads", "versions", "not_weights", "network"}
NETWORK_KEYS = {"families", "by_analogy", "source", "versions", "sizes", "tensor"}
TENSOR_KEYS = {"name", "ms", "axes", "versions", "cut", "uneven"}
FIRST_OF = {"heads": "kv_heads"}
"""An axis may be cut by what the declared cut begins with: query heads by their KV groups."""


@dataclass(frozen=True)
class DialectTensor:
    """A tensor of a dialect: each label of `axes` ("" for a single part) is a canonical parameter.

    `replicated`: every rank holds all of it, whatever cuts the parameters; `uneven`: so it is where tp does not divide the vocabulary.
    """

    name: str
    axes: Axes
    ms: tuple[tuple[str, str], ...]
    versions: tuple[str, ...]
    replicated: bool
    uneven: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(catalogue()[name] for _, name in self.ms)

    @property
    def stage(self) -> Stage:
        return self.parameters[0].stage

    @property
    def role(self) -> Role:
        return next((parameter.role for parameter in self.parameters if parameter.role), "")


@dataclass(frozen=True)
class Network:
    """The tensors of some families. `by_analogy` are families that the dialect's own code does not have so: our choice, not a fact."""

    families: tuple[str, ...]
    by_analogy: tuple[str, ...]
    source: str
    versions: tuple[str, ...]
    tensors: tuple[DialectTensor, ...]
    sizes: tuple[tuple[str, Axes], ...] = ()


@dataclass(frozen=True)
class NotWeight:
    """A name, or with `prefix` the beginning of names, that holds no weight."""

    name: str
    prefix: bool
    why: str

    def names(self, name: str) -> bool:
        return name.startswith(self.name) if self.prefix else name == self.name


@dataclass(frozen=True)
class DialectTable:
    """A validated table. `text` is its TOML, which travels in the manifest."""

    dialect: str
    description: str
    default: str
    pads_vocabulary: bool
    shares_kv_heads: bool
    versions: Mapping[str, str]
    not_weights: tuple[NotWeight, ...]
    networks: tuple[Network, ...]
    text: str
    where: str


@dataclass(frozen=True)
class Dialect:
    """A dialect in one of its layout versions."""

    table: DialectTable
    version: str

    def __str__(self) -> str:
        return f"{self.table.dialect}@{self.version}"

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(family for network in self.table.networks if self.version in network.versions for family in network.families)

    def by_analogy(self, family: str) -> bool:
        """Whether the layout of this family is this tool's own choice: the dialect's code has no such network."""
        return family in self.network(family).by_analogy

    def network(self, family: str) -> Network:
        """The network of a family. Raises Refused, naming what there is."""
        for network in self.table.networks:
            if family in network.families and self.version in network.versions:
                return network
        others = [version for version in self.table.versions if family in Dialect(self.table, version).families]
        mend = f"{self.table.dialect} has {family} in the versions {', '.join(others)}" if others else f"it has {', '.join(self.families)}"
        raise Refused(f"{self} has no network for the family {family}", [Problem(f"no table for {family}", self.table.where, mend)])

    def tensors(self, family: str) -> tuple[DialectTensor, ...]:
        return tuple(tensor for tensor in self.network(family).tensors if self.version in tensor.versions)

    def alike(self, family: str) -> tuple[str, ...]:
        """The other versions whose tensors have the same names, but not all the same layout."""
        mine = {tensor.name: tensor.axes for tensor in self.tensors(family)}
        found = []
        for version in self.table.versions:
            other = Dialect(self.table, version)
            theirs = {tensor.name: tensor.axes for tensor in other.tensors(family)} if family in other.families else {}
            if theirs.keys() == mine.keys() and theirs != mine:
                found.append(version)
        return tuple(found)


def bundled_dialects() -> tuple[str, ...]:
    """The names of the dialects that come with the package."""
    entries = files("mappings").joinpath("dialects").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


@functools.cache
def bundled_dialect(name: str) -> DialectTable:
    """The bundled table of a dialect, which must be one of `bundled_dialects`."""
    text = files("mappings").joinpath("dialects").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse_dialect(text, f"dialects/{name}.toml")


def target_named(text: str) -> Dialect | None:
    """The dialect that `--target` or `--from` names: `mindformers`, or `mindformers-legacy@1.3` with its layout version.

    None for the canonical names, `ms-convert`. Raises Refused, naming what there is.
    """
    name, at, version = text.partition("@")
    if name == CANONICAL and not at:
        return None
    if name not in bundled_dialects():
        mend = f"there are {', '.join((CANONICAL, *bundled_dialects()))}"
        raise Refused(f"no dialect is named {name[:80]!r}", [Problem("unknown dialect", mend=mend)])
    return dialect_of(bundled_dialect(name), version if at else bundled_dialect(name).default)


def dialect_of(table: DialectTable, version: str) -> Dialect:
    """A table in a version. Raises Refused for one that it does not have."""
    if version not in table.versions:
        mend = f"{table.dialect} has the versions {', '.join(table.versions)}; write {table.dialect}@{table.default} for example"
        raise Refused(f"{table.dialect} has no layout version {version[:40]!r}", [Problem("unknown version", table.where, mend)])
    return Dialect(table, version)


def parse_dialect(text: str, where: str) -> DialectTable:
    """Validate the text of a dialect table. Raises Refused with every mistake: file, tensor, mend."""
    return _DialectReader(parse_toml(text, where, "dialect table"), text, where).read()


class _DialectReader(TableReader):
    def __init__(self, data: dict[str, Any], text: str, where: str) -> None:
        super().__init__(data, where)
        self.text = text
        self.versions: tuple[str, ...] = ()

    def read(self) -> DialectTable:
        self.check_keys(self.data, KEYS, "")
        name, default = self.string("dialect", required=True), self.string("default", required=True)
        versions = self.data.get("versions")
        if not isinstance(versions, dict) or not versions or not all(isinstance(value, str) for value in versions.values()):
            self.wrong("[versions] is missing", 'write [versions] and below it "1.0" = "what it is"')
            versions = {}
        self.versions = tuple(versions)
        if default not in self.versions:
            self.wrong(f"the default {default!r} is no version", f"use one of {', '.join(self.versions)}")
        not_weights = self.each("not_weights", self.not_weight)
        networks = self.each("network", self.network)
        pads, shares = self.flag("pads_vocabulary"), self.flag("shares_kv_heads")
        self.check_families(networks)
        if self.problems:
            raise Refused(f"the dialect table {self.where} has mistakes", self.problems)
        description = self.string("description")
        return DialectTable(
            name, description, default, pads, shares, versions, tuple(not_weights), tuple(networks), self.text, self.where
        )  # fmt: skip

    def flag(self, key: str) -> bool:
        if not isinstance(self.data.get(key), bool):
            self.wrong(f"{key!r} is missing", f"write {key} = false or true")
        return bool(self.data.get(key))

    def check_families(self, networks: Collection[Network]) -> None:
        for version in self.versions:
            found = [family for network in networks if version in network.versions for family in network.families]
            for family in sorted({family for family in found if found.count(family) > 1}):
                self.wrong(f"two networks for {family} in version {version}", "let their versions or families differ")

    def chosen_versions(self, entry: dict[str, Any], outer: tuple[str, ...], place: str) -> tuple[str, ...]:
        if "versions" not in entry:
            return outer
        chosen = self.strings(entry["versions"], "versions", place, f'write versions = ["{outer[0] if outer else "1.0"}"]')
        for version in sorted(set(chosen) - set(outer)):
            self.wrong(f"{version!r} is no version here", f"known: {', '.join(outer)}", place)
        return chosen

    def not_weight(self, entry: dict[str, Any], place: str) -> NotWeight | None:
        self.check_keys(entry, {"name", "prefix", "why"}, place)
        found = [key for key in ("name", "prefix") if isinstance(entry.get(key), str) and entry[key]]
        if len(found) != 1 or not isinstance(entry.get("why"), str):
            self.wrong("an entry is a name or a prefix, and why", 'write prefix = "adam_m." and why = "..."', place)
            return None
        return NotWeight(entry[found[0]], found[0] == "prefix", entry["why"])

    def network(self, entry: dict[str, Any], place: str) -> Network | None:
        before = len(self.problems)
        self.check_keys(entry, NETWORK_KEYS, place)
        families = self.strings(entry.get("families"), "families", place, 'write families = ["llama"]')
        analogy = self.strings(entry["by_analogy"], "by_analogy", place, 'write ["llama"]') if "by_analogy" in entry else ()
        if not set(analogy) <= set(families):
            self.wrong("'by_analogy' names a family that is not among 'families'", "name it in both", place)
        source = entry.get("source")
        if not isinstance(source, str) or not source:
            self.wrong("'source' is missing: where the facts are from", 'write source = "..."', place)
        versions = self.chosen_versions(entry, self.versions, place)
        entries = entry.get("tensor", [])
        if not isinstance(entries, list) or not all(isinstance(item, dict) for item in entries):
            self.wrong("'tensor' is not a list of tables", "write [[network.tensor]] before each", place)
            return None
        found = [self.tensor(item, versions, f"{place}, {str(item.get('name', '?'))[:100]}") for item in entries]
        tensors = tuple(tensor for tensor in found if tensor is not None)
        self.check_once(tensors, versions, place)
        sizes = self.network_sizes(entry.get("sizes", {}), place)
        return Network(families, analogy, str(source), versions, tensors, sizes) if len(self.problems) == before else None

    def network_sizes(self, value: Any, place: str) -> tuple[tuple[str, Axes], ...]:
        example = 'write sizes = { hidden = "heads head_dim" }'
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            self.wrong("'sizes' is not a table of axes", example, place)
            return ()
        for atom in sorted(set(value) - KNOWN_ATOMS):
            self.wrong(f"unknown axis {atom!r}", f"known: {', '.join(sorted(KNOWN_ATOMS))}", place)
        read = {atom: self.axes(text, KNOWN_ATOMS, place, example) for atom, text in value.items()}
        return tuple((atom, axes) for atom, axes in read.items() if axes is not None)

    def check_once(self, tensors: Collection[DialectTensor], versions: tuple[str, ...], place: str) -> None:
        for version in versions:
            names: dict[str, int] = defaultdict(int)
            for tensor in (tensor for tensor in tensors if version in tensor.versions):
                for name in (f"the tensor {tensor.name}", *(ms for _, ms in tensor.ms)):
                    names[name] += 1
            for name in (name for name, count in names.items() if count > 1):
                self.wrong(f"{name} is there twice in version {version}", "let the versions of the two differ", place)

    def tensor(self, entry: dict[str, Any], versions: tuple[str, ...], place: str) -> DialectTensor | None:
        before = len(self.problems)
        self.check_keys(entry, TENSOR_KEYS, place)
        name = entry.get("name")
        if not isinstance(name, str) or name_mistake(name):
            self.wrong("'name' is missing or not a name", name_mistake(name) if isinstance(name, str) else 'write name = "..."', place)
        ms = self.targets(entry.get("ms"), catalogue(), place)
        versions = self.chosen_versions(entry, versions, place)
        if entry.get("cut", REPLICATED) != REPLICATED or entry.get("uneven", REPLICATED) != REPLICATED:
            self.wrong("'cut' and 'uneven' can only be \"replicated\"", "leave it out: the cut is that of the canonical parameters", place)
        if len(self.problems) > before or not isinstance(name, str):
            return None
        text = entry.get("axes", str(catalogue()[next(iter(ms.values()))].axes) if set(ms) == {""} else None)
        example = 'for example axes = "[q: heads head_dim | k: kv_heads head_dim] hidden"'
        if not isinstance(text, str):
            self.wrong("'axes' is missing: it says how the parts lie in the tensor", example, place)
            return None
        axes = self.axes(text, KNOWN_ATOMS, place, example)
        if axes is None:
            return None
        tensor = DialectTensor(name, axes, tuple(ms.items()), versions, "cut" in entry, "uneven" in entry)
        self.check_tensor(tensor, place)
        return tensor if len(self.problems) == before else None

    def check_tensor(self, tensor: DialectTensor, place: str) -> None:
        if set(tensor.axes.labels) != {label for label, _ in tensor.ms}:
            self.wrong(f"axes has the labels {tensor.axes.labels}, ms has {tuple(dict(tensor.ms))}", "name every part on both sides", place)
            return
        for label, ms in tensor.ms:
            mine = catalogue()[ms].axes.refined(set(tensor.axes.atoms(label)))
            if set(mine.atoms()) != set(tensor.axes.refined(set(mine.atoms())).atoms(label)):
                what = f"the part {label!r} has the axes {' '.join(tensor.axes.atoms(label))}, {ms} is {catalogue()[ms].axes}"
                self.wrong(what, "let both name the same axes", place)
            if set(placeholders(ms)) != set(placeholders(tensor.name)):
                self.wrong(f"{tensor.name} and {ms} have different placeholders", "let both have the same", place)
        if len({parameter.stage for parameter in tensor.parameters}) > 1:
            self.wrong("its parameters are on different pipeline stages", "a tensor is on one stage", place)
        if not tensor.replicated and place_of_cut(tensor) is None:
            what = f"no axis of {tensor.axes} begins with what cuts its parameters: {', '.join(item.cut for item in tensor.parameters)}"
            self.wrong(what, "let one axis, or each part of one axis, begin with it", place)


@dataclass(frozen=True)
class PlaceOfCut:
    """Along which axis of the tensor ranks cut it: by the atom `by`, or ("") each part by its own, a rank holding its piece of each."""

    axis: int
    by: str


def place_of_cut(tensor: DialectTensor) -> PlaceOfCut | None:
    """Where a dialect's tensor is cut; None where no axis allows what its parameters say. Not for parameters that are all replicated."""
    cuts = {label: catalogue()[ms].cut for label, ms in tensor.ms}
    if set(cuts.values()) == {REPLICATED}:
        return PlaceOfCut(-1, REPLICATED)
    for axis, item in enumerate(tensor.axes.items):
        first = outermost(item)
        if first and all(first in (cut, FIRST_OF.get(cut)) for cut in cuts.values()):
            return PlaceOfCut(axis, first)
        if isinstance(item, Parts) and all(items and outermost(items[0]) == cuts[label] for label, items in item.parts):
            return PlaceOfCut(axis, "")
    return None


def per_rank(parts: Parts, rank_axis: str, renamed: Mapping[str, str]) -> Composite:
    """Parts side by side within each rank: `[q: heads head_dim | ...]` becomes `(rank [q: heads_of_rank head_dim | ...])`."""
    inner = tuple((label, (_first_renamed(items[0], renamed), *items[1:])) for label, items in parts.parts)
    return Composite((Atom(rank_axis), Parts(inner)))


def _first_renamed(item: Item, renamed: Mapping[str, str]) -> Item:
    if isinstance(item, Composite):
        return Composite((_first_renamed(item.items[0], renamed), *item.items[1:]))
    assert isinstance(item, Atom), "a table with parts within parts is refused when it is read"
    return Atom(renamed[item.name])
