"""Rule tables: a model family as data. Loaded from TOML, validated whole, with the file, the rule and the mend of each mistake.

A table has
    family, description, architectures, prefix       what it serves; `prefix` is what a base model's file lacks ("transformer.")
    [config]                                         how config.json becomes a ModelConfig (mappings/hf_config.py)
    [axes]                                           sizes of axes of its own: a number, or { key = "a key of config.json" }
    [[parameter]]                                    canonical parameters of its own, as in parameters.toml
    [[rule]]                                         hf tensor = ms parameter(s)
    [[drop]]                                         an hf tensor that is not carried, and why it may be dropped
    [[duplicate]]                                    an hf tensor that must equal another; restored from it on the way back
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from mappings.axes import Axes
from mappings.config_values import shown
from mappings.errors import Problem, Refused
from mappings.hf_config import ConfigSection, parse_config_section
from mappings.names import PLACEHOLDERS, fill, placeholders
from mappings.parameters import Parameter, catalogue, parse_parameter
from mappings.rules import PLACEHOLDER_ATOM, Drop, Duplicate, Rule, contradictions
from mappings.table_reader import KNOWN_ATOMS, TableReader, parse_toml, read_text
from model.config import ModelConfig

CHECKS = ("inv_freq", "arange", "causal_mask", "masked_bias", "none")
TABLE_KEYS = {"family", "description", "architectures", "prefix", "config", "axes", "parameter", "rule", "drop", "duplicate"}
RULE_KEYS = {"hf", "hf_axes", "ms", "when", "from_layer", "to_layer"}
CONDITIONS = {field.name for field in fields(ModelConfig) if field.type == "bool"}


@dataclass(frozen=True)
class FamilyTable:
    """A validated table. `text` is its TOML, which travels in the manifest; `parameters` is the catalogue with the table's own."""

    family: str
    description: str
    architectures: tuple[str, ...]
    prefix: str
    config: ConfigSection
    axis_sizes: tuple[tuple[str, int | str], ...]
    rules: tuple[Rule, ...]
    drops: tuple[Drop, ...]
    duplicates: tuple[Duplicate, ...]
    parameters: Mapping[str, Parameter]
    text: str
    where: str

    def holds(self, rule: Rule, config: ModelConfig) -> bool:
        """Whether the rule's conditions hold for this model. A tied head is no parameter of its own."""
        if config.tied and any(self.parameters[name].role == "head" for _, name in rule.ms):
            return False
        return all(getattr(config, name.removeprefix("not ")) != name.startswith("not ") for name in rule.when)

    @property
    def hf_patterns(self) -> tuple[str, ...]:
        """Every HF name pattern of the table, dropped and duplicate ones too."""
        return (
            *(name for rule in self.rules for name in rule.hf),
            *(drop.hf for drop in self.drops),
            *(item.hf for item in self.duplicates),
        )

    @property
    def config_keys(self) -> set[str]:
        """The keys of config.json that sizes and layer ranges are taken from, beside those of [config]."""
        layers = (limit for rule in self.rules for limit in (rule.from_layer, rule.to_layer))
        return {value for value in (*dict(self.axis_sizes).values(), *layers) if isinstance(value, str)}

    def rules_with_role(self, role: str) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if any(self.parameters[name].role == role for _, name in rule.ms))


def load_table(path: Path) -> FamilyTable:
    """Read a user's table, which must be a regular file. Raises Refused with every mistake."""
    return parse_table(read_text(path, "the rule table", "give a TOML rule table with --rules FILE"), str(path))


def bundled_families() -> tuple[str, ...]:
    """The names of the families that come with the package."""
    return tuple(
        sorted(
            entry.name.removesuffix(".toml") for entry in files("mappings").joinpath("families").iterdir() if entry.name.endswith(".toml")
        )
    )


def bundled_table(family: str) -> FamilyTable:
    """The bundled table of a family. Raises Refused for an unknown one."""
    if family not in bundled_families():
        raise Refused(
            f"no bundled rule table {family!r}",
            [Problem(f"known: {', '.join(bundled_families())}", mend="or give your own with --rules FILE")],
        )
    return parse_table(_bundled_text(family), f"families/{family}.toml")


def bundled_table_for(architecture: str) -> FamilyTable | None:
    """The bundled table that serves an architecture. Reading a table takes longer than planning a model: only one that names it is read."""
    for family in bundled_families():
        if architecture in _bundled_text(family):
            table = bundled_table(family)
            if architecture in table.architectures:
                return table
    return None


def _bundled_text(family: str) -> str:
    return files("mappings").joinpath("families").joinpath(f"{family}.toml").read_text(encoding="utf-8")


def parse_table(text: str, where: str) -> FamilyTable:
    """Validate the text of a table. Raises Refused with every mistake: file, rule, mend."""
    return _TableReader(parse_toml(text, where, "rule table"), text, where).read()


class _TableReader(TableReader):
    """Collects the problems of one table while reading it."""

    def __init__(self, data: dict[str, Any], text: str, where: str) -> None:
        super().__init__(data, where)
        self.text = text
        self.parameters: dict[str, Parameter] = dict(catalogue())
        self.own_axes: dict[str, int | str] = {}

    def read(self) -> FamilyTable:
        for key in sorted(set(self.data) - TABLE_KEYS):
            self.wrong(f"unknown key {key!r}", f"known: {', '.join(sorted(TABLE_KEYS))}")
        family = self.string("family", required=True)
        architectures = self.strings(self.data.get("architectures"), "architectures", "", 'write architectures = ["LlamaForCausalLM"]')
        config = self.config_section(architectures)
        self.read_axes()
        self.each("parameter", self.parameter)
        rules = self.each("rule", self.rule)
        drops = self.each("drop", self.drop)
        duplicates = self.each("duplicate", self.duplicate)
        for what, mend in contradictions(rules, drops, duplicates):
            self.wrong(what, mend)
        if self.problems or config is None:
            raise Refused(
                f"the rule table {self.where} has {len(self.problems)} mistake{'s' if len(self.problems) != 1 else ''}", self.problems
            )
        return FamilyTable(
            family, self.string("description"), architectures, self.string("prefix"), config, tuple(self.own_axes.items()),
            tuple(rules), tuple(drops), tuple(duplicates), self.parameters, self.text, self.where,
        )  # fmt: skip

    def config_section(self, architectures: tuple[str, ...]) -> ConfigSection | None:
        section = self.data.get("config")
        if not isinstance(section, dict):
            self.wrong("[config] is missing", "say how config.json becomes a ModelConfig, as the bundled tables do")
            return None
        try:
            return parse_config_section(section, self.where, architectures or None)
        except Refused as error:
            self.problems += error.problems
            return None

    def read_axes(self) -> None:
        entries = self.data.get("axes", {})
        if not isinstance(entries, dict):
            self.wrong("[axes] is not a table", 'write [axes] and then name = 128 or name = { key = "..." }')
            return
        for name, value in entries.items():
            size = value["key"] if isinstance(value, dict) and set(value) == {"key"} and isinstance(value["key"], str) else value
            if name in KNOWN_ATOMS:
                self.wrong(f"axis {name!r} has its size from ModelConfig", "take another name", "[axes]")
            elif isinstance(size, bool) or not (isinstance(size, int) or size is not value) or (isinstance(size, int) and size < 1):
                self.wrong(
                    f"axis {name[:80]!r} has no size",
                    f'write {name[:80]} = 128 or {name[:80]} = {{ key = "a_key_of_config_json" }}',
                    "[axes]",
                )
            else:
                self.own_axes[name] = size

    def parameter(self, entry: dict[str, Any], place: str) -> Parameter | None:
        parameter, problems = parse_parameter(entry, f"{self.where}, {place}")
        self.problems += problems
        if parameter is None:
            return None
        if parameter.name in self.parameters:
            self.wrong("this parameter is in the catalogue already", "take another name, or leave the entry out", place)
        self.check_atoms(parameter.axes, KNOWN_ATOMS | set(self.own_axes), place)
        self.parameters[parameter.name] = parameter
        return parameter

    def hf_names(self, value: Any, key: str, place: str) -> tuple[str, ...]:
        names = self.strings(value, key, place, f'write {key} = "model.layers.{{layer}}.mlp.up_proj.weight"')
        for name in names:
            for placeholder in placeholders(name):
                if placeholder not in PLACEHOLDERS:
                    self.wrong(f"unknown placeholder {{{placeholder}}} in {name!r}", "use {layer} or {expert}", place)
            if {"{", "}"} & set(fill(name, **dict.fromkeys(placeholders(name), 0))):
                self.wrong(f"{name!r} has a brace without its partner", "use {layer} or {expert}", place)
        if len({frozenset(placeholders(name)) for name in names}) > 1:
            self.wrong(f"the spellings of {key} have different placeholders", "let every spelling have the same", place)
        return names

    def hf_name(self, entry: dict[str, Any], key: str, place: str) -> str | None:
        names = self.hf_names(entry.get(key), key, place)
        if len(names) > 1:
            self.wrong(f"{key!r} is a list of names", f"write an entry for each {key}", place)
        return names[0] if len(names) == 1 else None

    def rule(self, entry: dict[str, Any], place: str) -> Rule | None:
        before = len(self.problems)
        self.check_keys(entry, RULE_KEYS, place)
        names = self.hf_names(entry.get("hf"), "hf", place)
        targets = self.targets(entry.get("ms"), self.parameters, place)
        when = self.conditions(entry.get("when", []), place)
        layers = self.layer_range(entry, any("layer" in placeholders(name) for name in names), place)
        if len(self.problems) > before:
            return None
        axes = self.rule_axes(entry.get("hf_axes"), names, targets, place)
        if axes is None:
            return None
        self.check_placeholders(names[0], targets, place)
        self.check_pairing(axes, names[0], targets, place)
        return Rule(names, axes, tuple(targets.items()), when, *layers)

    def conditions(self, value: Any, place: str) -> tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.wrong("'when' is not a condition", 'write when = "qkv_bias" or when = ["qkv_bias", "not tied"]', place)
            return ()
        for name in names:
            if name.removeprefix("not ") not in CONDITIONS:
                self.wrong(f"unknown condition {name!r}", f"use a yes/no field of ModelConfig: {', '.join(sorted(CONDITIONS))}", place)
        return tuple(names)

    def layer_range(self, entry: dict[str, Any], per_layer: bool, place: str) -> tuple[int | str, int | str | None]:
        start, stop = entry.get("from_layer", 0), entry.get("to_layer")
        for value in (start, stop):
            if isinstance(value, bool) or not isinstance(value, (int, str, type(None))) or (isinstance(value, int) and value < 0):
                self.wrong(f"{shown(value)} is no layer number", 'write from_layer = 3, or from_layer = "a_key_of_config_json"', place)
                return 0, None
        if isinstance(start, int) and isinstance(stop, int) and start >= stop:
            self.wrong(
                f"no layer is from {start} to {stop}", "let from_layer be less than to_layer, which is the first layer without", place
            )
        if not per_layer and (start, stop) != (0, None):
            self.wrong("a layer range for a tensor outside the layers", "leave from_layer and to_layer out, or use {layer} in hf", place)
        return start, stop

    def rule_axes(self, text: Any, names: tuple[str, ...], targets: dict[str, str], place: str) -> Axes | None:
        if text is None and set(targets) == {""}:
            axes = self.parameters[targets[""]].axes
            fixed = _fixed_atoms(names[0], targets[""])
            return Axes(tuple(item for item in axes.items if str(item) not in fixed))
        if not isinstance(text, str):
            self.wrong(
                "'hf_axes' is missing: it says how the parts lie in the hf tensor",
                'for example hf_axes = "hidden [q: heads head_dim | k: ...]"',
                place,
            )
            return None
        return self.axes(text, KNOWN_ATOMS | set(self.own_axes), place, 'for example hf_axes = "hidden (heads head_dim)"')

    def check_placeholders(self, hf: str, targets: dict[str, str], place: str) -> None:
        for ms in targets.values():
            stacked = {name for name, atom in PLACEHOLDER_ATOM.items() if atom in self.parameters[ms].axes.all_atoms()}
            for name in sorted((set(placeholders(hf)) ^ set(placeholders(ms))) - (stacked - set(placeholders(ms)))):
                self.wrong(f"{{{name}}} is not on both sides", f"let {hf!r} and {ms!r} have the same placeholders", place)

    def check_pairing(self, axes: Axes, hf: str, targets: dict[str, str], place: str) -> None:
        if set(axes.labels) != set(targets):
            self.wrong(f"hf_axes has the labels {axes.labels}, ms has {tuple(targets)}", "name every part on both sides", place)
            return
        for label, ms in targets.items():
            fixed = _fixed_atoms(hf, ms)
            ours = set(self.parameters[ms].axes.refined(set(axes.atoms(label))).all_atoms()) - fixed
            if ours != set(axes.refined(ours).atoms(label)):
                theirs, mine = (
                    " ".join(name for name in side if name not in fixed) for side in (axes.atoms(label), self.parameters[ms].axes.atoms())
                )
                what = f"the hf side has the axes {theirs}, the ms side ({ms}) has {mine}"
                self.wrong(what, f"let both name the same axes; {ms} is {str(self.parameters[ms].axes)!r}", place)

    def drop(self, entry: dict[str, Any], place: str) -> Drop | None:
        self.check_keys(entry, {"hf", "why", "check"}, place)
        name = self.hf_name(entry, "hf", place)
        why, check = entry.get("why"), entry.get("check", "none")
        if not isinstance(why, str) or not why.strip():
            self.wrong("'why' is missing: nothing is dropped without a reason", 'write why = "derived from rope_theta"', place)
        if check not in CHECKS:
            self.wrong(f"unknown check {shown(check)}", f"known: {', '.join(CHECKS)}", place)
        return Drop(name, str(why), str(check)) if name is not None else None

    def duplicate(self, entry: dict[str, Any], place: str) -> Duplicate | None:
        self.check_keys(entry, {"hf", "of"}, place)
        name, of = self.hf_name(entry, "hf", place), self.hf_name(entry, "of", place)
        if name is None or of is None:
            return None
        if set(placeholders(name)) != set(placeholders(of)):
            self.wrong("hf and of have different placeholders", f"let {name!r} and {of!r} have the same", place)
        return Duplicate(name, of)


def _fixed_atoms(hf: str, ms: str) -> set[str]:
    """Atoms of the ms side whose index the hf tensor's name gives: `{expert}` in the name picks one of `experts`."""
    return {PLACEHOLDER_ATOM[name] for name in placeholders(hf) if name in PLACEHOLDER_ATOM and name not in placeholders(ms)}
