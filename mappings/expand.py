"""From a table and a model to concrete names: which HF tensor pairs with which parameter, for every layer and expert of *this* model.

After expansion "missing" and "unexpected" are set differences, not guesses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from mappings.axes import REFINEMENTS, Axes, Refinements, View
from mappings.config_values import shown
from mappings.errors import Problem, Refused
from mappings.names import fill, number_free, placeholders
from mappings.parameters import Parameter
from mappings.rules import PLACEHOLDER_ATOM, Drop, Rule
from mappings.tables import FamilyTable
from model.config import ModelConfig

MAX_NAMES = 400_000
MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Pairing:
    """One part of one HF tensor equals one parameter, element by element.

    With `expert` it equals one slice of a stacked parameter, with `ms_label` one part of a parameter that is several side by side.
    """

    hf: str
    ms: str
    rule: Rule
    label: str
    expert: int | None
    ms_label: str = ""


@dataclass(frozen=True, slots=True)
class ParameterOfModel:
    """A parameter of this model: its declaration, its true shape (uncut, unpadded), and its layer (None outside the layers)."""

    name: str
    parameter: Parameter
    shape: tuple[int, ...]
    layer: int | None


@dataclass
class Expansion:
    """All names of one model on both sides.

    `hf_shapes` are the HF tensors that must be there; `drops` and `duplicates` (name -> name that it repeats) those that may be.
    The parameters are the canonical ones, or those of another dialect that they were composed with (mappings/composition.py).
    """

    table: FamilyTable
    sizes: Mapping[str, int]
    pairings: list[Pairing] = field(default_factory=list)
    hf_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: dict[str, ParameterOfModel] = field(default_factory=dict)
    drops: dict[str, Drop] = field(default_factory=dict)
    duplicates: dict[str, str] = field(default_factory=dict)
    refinements: Refinements = field(default_factory=lambda: REFINEMENTS)
    boxes: dict[Any, Any] = field(default_factory=dict)  # worked out and kept by converter/copies.py
    _views: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], tuple[View, View]] = field(default_factory=dict)

    def views(self, pairing: Pairing, hf_strides: tuple[int, ...], ms_strides: tuple[int, ...]) -> tuple[View, View]:
        """The two views that hold the same elements: of the HF tensor and of the parameter, for tensors with these strides.

        The views' atoms have the same names; `{expert}` is not applied (`expert_stride`).
        """
        key = (id(pairing.rule), pairing.label, hf_strides, ms_strides)
        if key not in self._views:
            ms_axes = self.parameters[pairing.ms].parameter.axes.refined(set(pairing.rule.hf_axes.atoms(pairing.label)), self.refinements)
            hf_axes = pairing.rule.hf_axes.refined(set(ms_axes.atoms(pairing.ms_label)), self.refinements)
            self._views[key] = (
                hf_axes.view(pairing.label, self.sizes, hf_strides), ms_axes.view(pairing.ms_label, self.sizes, ms_strides)
            )  # fmt: skip
        return self._views[key]

    @property
    def hf_names(self) -> Iterator[str]:
        """Every HF name that the table knows for this model."""
        yield from self.hf_shapes
        yield from self.duplicates
        yield from self.drops


def expand(table: FamilyTable, config: ModelConfig, hf_config: Mapping[str, Any], present: Collection[str]) -> Expansion:
    """Every name of this model. `present` (HF names in the file, prefix restored) decides between the spellings of a rule.

    Raises Refused when a size that the table needs is not in the config or does not divide, and when two rules meet on one tensor.
    """
    sizes = axis_sizes(table, config, hf_config)
    expansion = Expansion(table, sizes)
    rules = [(rule, _layers(rule, config, hf_config, table)) for rule in table.rules if table.holds(rule, config)]
    _check_sizes(expansion, [rule for rule, layers in rules if layers and (config.experts or not _per_expert(rule.hf[0]))])
    written: dict[tuple[str, int | None], str] = {}
    clashes = (problem for rule, layers in rules for problem in _expand_rule(expansion, rule, layers, config.experts, present, written))
    problems = list(islice(clashes, MAX_PROBLEMS))
    if problems:
        raise Refused("two rules meet on one tensor", problems)
    _expand_drops(expansion, config)
    _expand_duplicates(expansion, config)
    return expansion


def _per_expert(pattern: str) -> bool:
    return "expert" in placeholders(pattern)


def _numbers(pattern: str, config: ModelConfig) -> Iterator[tuple[int | None, int | None]]:
    """Every (layer, expert) that a name pattern stands for; None where it has no such placeholder."""
    layers = range(config.layers) if "layer" in placeholders(pattern) else [None]
    for layer in layers:
        yield from ((layer, expert) for expert in (range(config.experts) if _per_expert(pattern) else [None]))


def _check_sizes(expansion: Expansion, rules: Collection[Rule]) -> None:
    """Raises Refused for an axis of size 0, and for one that a rule takes apart into parts that do not make it up."""
    sizes, table = expansion.sizes, expansion.table
    problems: dict[str, Problem] = {}
    for rule in rules:
        for label, ms in rule.ms:
            atoms = {*rule.hf_axes.atoms(label), *table.parameters[ms].axes.atoms()}
            for atom in sorted(atom for atom in atoms if sizes[atom] < 1):
                problems[atom] = Problem(f"the axis {atom} has the size {sizes[atom]} in this model", table.where, "check config.json")
            for atom in sorted(atoms & set(REFINEMENTS)):
                parts = REFINEMENTS[atom]
                if atoms & set(parts) and sizes[atom] != math.prod(sizes[part] for part in parts):
                    made_of = " x ".join(f"{part} ({sizes[part]})" for part in parts)
                    what = f"{atom} is {sizes[atom]}, which is not {made_of}, as {rule.hf[0]} needs it"
                    problems[atom] = Problem(what, table.where, "check config.json")
    if problems:
        raise Refused("the sizes do not fit the rules", list(problems.values()))


def axis_sizes(table: FamilyTable, config: ModelConfig, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """The model's axis sizes with the table's own. Raises Refused for a key that config.json lacks."""
    sizes = config.axis_sizes()
    problems = []
    for name, value in table.axis_sizes:
        size = hf_config.get(value) if isinstance(value, str) else value
        if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 1 << 40:
            problems.append(
                Problem(
                    f"axis {name!r} takes its size from {value!r}, which is {shown(size)}", table.where, "mend config.json or the table"
                )
            )
        else:
            sizes[name] = size
    if problems:
        raise Refused("an axis has no size", problems)
    return sizes


def _expand_rule(
    expansion: Expansion,
    rule: Rule,
    layers: Collection[int | None],
    experts: int,
    present: Collection[str],
    written: dict[tuple[str, int | None], str],
) -> Iterator[Problem]:
    where = expansion.table.where
    shape = rule.hf_axes.shape(expansion.sizes)
    ms_shapes = {label: expansion.table.parameters[ms].axes.shape(expansion.sizes) for label, ms in rule.ms}
    for layer in layers:
        for expert in range(experts) if _per_expert(rule.hf[0]) else [None]:
            hf = _spelling(rule, layer, expert, present)
            if hf in expansion.hf_shapes:
                yield Problem(f"{hf!r} is named by two rules", where, "let their conditions or layer ranges exclude each other")
            expansion.hf_shapes[hf] = shape
            for label, pattern in rule.ms:
                ms = fill(pattern, layer=layer, expert=expert)
                stacked = expert if not _per_expert(pattern) else None
                if (ms, stacked) in written:
                    yield Problem(f"{ms!r} is written from {written[ms, stacked]!r} and from {hf!r}", where, "let one rule write it")
                written[ms, stacked] = hf
                expansion.pairings.append(Pairing(hf, ms, rule, label, stacked))
                if ms not in expansion.parameters:
                    expansion.parameters[ms] = ParameterOfModel(ms, expansion.table.parameters[pattern], ms_shapes[label], layer)
            _check_count(expansion)


def _check_count(expansion: Expansion) -> None:
    if len(expansion.pairings) + len(expansion.drops) + len(expansion.duplicates) > MAX_NAMES:
        problem = Problem(f"more than {MAX_NAMES} names", expansion.table.where, "check layers and experts in config.json")
        raise Refused("the model has too many tensors", [problem])


def _layers(rule: Rule, config: ModelConfig, hf_config: Mapping[str, Any], table: FamilyTable) -> Collection[int | None]:
    if not rule.per_layer:
        return [None]
    limits = (rule.from_layer, config.layers if rule.to_layer is None else rule.to_layer)
    return range(*(_layer_number(limit, rule, config, hf_config, table) for limit in limits))


def _layer_number(limit: int | str, rule: Rule, config: ModelConfig, hf_config: Mapping[str, Any], table: FamilyTable) -> int:
    number = hf_config.get(limit) if isinstance(limit, str) else limit
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= config.layers:
        said = f"{limit!r} is {shown(number)}" if isinstance(limit, str) else f"layer {limit}"
        problem = Problem(f"{said}: the model has {config.layers} layers", f"{table.where}, {rule.hf[0]}", "mend the table")
        raise Refused("a rule's layer range is not in the model", [problem])
    return number


def _spelling(rule: Rule, layer: int | None, expert: int | None, present: Collection[str]) -> str:
    names = [fill(pattern, layer=layer, expert=expert) for pattern in rule.hf]
    return next((name for name in names if name in present), names[0])


def _expand_drops(expansion: Expansion, config: ModelConfig) -> None:
    for drop in expansion.table.drops:
        for layer, expert in _numbers(drop.hf, config):
            name = fill(drop.hf, layer=layer, expert=expert)
            if name not in expansion.hf_shapes:
                expansion.drops[name] = drop
                _check_count(expansion)


def _expand_duplicates(expansion: Expansion, config: ModelConfig) -> None:
    table = expansion.table
    spellings = {name: rule.hf for rule in table.rules for name in rule.hf}
    pairs = [(duplicate.hf, spellings[duplicate.of]) for duplicate in table.duplicates]
    if config.tied:
        embedding = next((rule.hf for rule in table.rules_with_role("embedding")), ())
        pairs += [(name, embedding) for rule in table.rules_with_role("head") for name in rule.hf]
    for pattern, originals in pairs:
        for layer, expert in _numbers(pattern, config):
            names = (fill(original, layer=layer, expert=expert) for original in originals)
            original = next((name for name in names if name in expansion.hf_shapes), None)
            if original is not None:
                expansion.duplicates[fill(pattern, layer=layer, expert=expert)] = original
                _check_count(expansion)


def expert_stride(pairing: Pairing, expansion: Expansion, ms_strides: tuple[int, ...]) -> int:
    """How far one expert's slice lies from the next in the stacked parameter (elements)."""
    atom = PLACEHOLDER_ATOM["expert"]
    _, ms = expansion.views(pairing, _no_strides(pairing.rule.hf_axes), ms_strides)
    return next(place.stride for place in ms.atoms if place.name == atom)


def _no_strides(axes: Axes) -> tuple[int, ...]:
    return (0,) * len(axes.items)


def restore_prefix(table: FamilyTable, names: Collection[str]) -> dict[str, str]:
    """Each name in the file -> its whole name in the table: base models are published without the prefix.

    Done once, before the rules. A name that the table knows as it stands is left alone, and so is one that it does not know at all.
    """
    known = {number_free(pattern) for pattern in table.hf_patterns}
    whole = {}
    for name in names:
        as_it_stands = number_free(name)
        lacks_prefix = as_it_stands not in known and number_free(table.prefix + name) in known
        whole[name] = table.prefix + name if lacks_prefix else name
    return whole
