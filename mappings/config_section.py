"""The [config] part of a rule table: where each ModelConfig field comes from, as data. Read and validated here, applied by `hf_config`.

[config]
layers     = { key = "num_hidden_layers" }                        a key of config.json; a missing key is refused
hidden     = { key = ["n_embd", "hidden_size"] }                  the same thing under several names: those present must agree
attention_dropout = { key = "attention_dropout", default = 0.0 }  what a silent file means
kv_heads   = { key = "num_key_value_heads", from = "heads" }      ... computed from other fields (* and /, which must divide exactly)
head_dim   = { from = "hidden / heads" }                          never in the file
activation = { key = "hidden_act", map = { silu = "silu" } }      other words; map = "activation" is the shared map of common_config.toml
norm       = { value = "rms_norm" }                               the same for the whole family
pooler     = { present = "bert.pooler.dense.weight" }             true if the file has this tensor
head       = { architecture = ["LlamaForCausalLM"] }              true for these architectures
rope       = { reader = "rope" }                                  several keys that belong together: mappings/rope.py, mappings/window.py

[config.fixed]                                                    keys that change the computation, with the only values that are supported
[config.ignored]                                                  keys that do not change it, each with the reason
[[config.variant]]                                                entries, fixed and ignored that hold for some `architectures` only
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from mappings.common_config import common_config
from mappings.config_values import READ_BY_READERS, REQUIRED, SETTABLE, field_value, shown, shown_key
from mappings.errors import Problem, Refused
from mappings.rope import RopeKeys, parse_rope_keys
from mappings.window import WindowKeys, parse_window_keys


@dataclass(frozen=True)
class Formula:
    """`4 * hidden`, `hidden / heads`: terms are ModelConfig fields or whole numbers, applied from left to right."""

    text: str
    terms: tuple[tuple[str, int | str], ...]

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(term for _, term in self.terms if isinstance(term, str))


@dataclass(frozen=True)
class FromValue:
    value: Any


@dataclass(frozen=True)
class FromKey:
    """The first of `keys` that the file has; else `default` (in the file's words), else `formula`, else the config is refused."""

    keys: tuple[str, ...]
    default: Any = None
    formula: Formula | None = None
    words: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FromFormula:
    formula: Formula


@dataclass(frozen=True)
class FromTensor:
    tensor: str


@dataclass(frozen=True)
class FromArchitecture:
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class FromReader:
    options: RopeKeys | WindowKeys


Source = FromValue | FromKey | FromFormula | FromTensor | FromArchitecture | FromReader
READERS: Mapping[str, Callable[[dict[str, Any]], RopeKeys | WindowKeys]] = {"rope": parse_rope_keys, "window": parse_window_keys}


@dataclass(frozen=True)
class Entries:
    """What holds for one architecture."""

    sources: Mapping[str, Source]
    fixed: Mapping[str, tuple[Any, ...]]
    ignored: Mapping[str, str]

    def keys_read(self) -> set[str]:
        """Every key of config.json that a field is read from."""
        return {key for source in self.sources.values() for key in _keys(source)}

    def with_changes(self, changes: Entries) -> Entries:
        """These entries, overridden by those of a variant."""
        fixed = {key: value for key, value in self.fixed.items() if key not in changes.ignored} | dict(changes.fixed)
        ignored = {key: why for key, why in self.ignored.items() if key not in changes.fixed} | dict(changes.ignored)
        return Entries({**self.sources, **changes.sources}, fixed, ignored)


@dataclass(frozen=True)
class ConfigSection:
    """A validated [config] part. `where` names its file."""

    where: str
    base: Entries
    variants: tuple[tuple[tuple[str, ...], Entries], ...] = field(default=())

    def entries_for(self, architecture: str) -> Entries:
        """The entries that hold for this architecture: the common ones, overridden by its variants in the order of the file."""
        entries = self.base
        for architectures, changes in self.variants:
            if architecture in architectures:
                entries = entries.with_changes(changes)
        return entries


def parse_config_section(data: dict[str, Any], where: str, architectures: Collection[str] | None = None) -> ConfigSection:
    """Validate the [config] part of a table.

    `architectures`, if given, are those that the table serves: others named in [config] are mistakes. Raises Refused with every
    mistake: file, entry, mend.
    """
    reader = _SectionReader(where, architectures)
    base = reader.read_entries(data, "[config]", ("variant",))
    variants = tuple(reader.variants(data.get("variant", []) if isinstance(data, dict) else []))
    section = ConfigSection(where, base, variants)
    for architecture in ("", *(name for names, _ in variants for name in names)):
        reader.check_whole(section.entries_for(architecture), f"[config] for {architecture}" if architecture else "[config]")
    if reader.problems:
        raise Refused(f"the [config] of {where} has {len(reader.problems)} mistakes", tuple(dict.fromkeys(reader.problems)))
    return section


def _keys(source: Source) -> tuple[str, ...]:
    if isinstance(source, FromKey):
        return source.keys
    return source.options.every() if isinstance(source, FromReader) else ()


class _SectionReader:
    """Collects the mistakes of one [config] part."""

    def __init__(self, where: str, architectures: Collection[str] | None) -> None:
        self.where = where
        self.architectures = architectures
        self.problems: list[Problem] = []

    def wrong(self, what: str, mend: str, place: str) -> None:
        self.problems.append(Problem(what, f"{self.where}, {place}", mend))

    def read_entries(self, data: object, place: str, other_keys: tuple[str, ...]) -> Entries:
        if not isinstance(data, dict):
            self.wrong(f"{shown(data)} is not a table", "write the entries under [config]", place)
            return Entries({}, {}, {})
        sources: dict[str, Source] = {}
        for name, entry in data.items():
            if name in ("fixed", "ignored", *other_keys):
                continue
            source = self.source(name, entry, f"{place} {shown_key(name)}")
            if source is not None:
                sources[name] = source
        return Entries(
            sources,
            self.fixed(data.get("fixed", {}), f"{place[:-1]}.fixed]"),
            self.ignored(data.get("ignored", {}), f"{place[:-1]}.ignored]"),
        )

    def variants(self, entries: object) -> list[tuple[tuple[str, ...], Entries]]:
        if not isinstance(entries, list):
            self.wrong("'variant' is not a list of tables", "write [[config.variant]] before each", "[config]")
            return []
        found = []
        for index, entry in enumerate(entries, start=1):
            place = f"[config.variant {index}]"
            changes = self.read_entries(entry, place, ("architectures",))
            names = self.names(entry.get("architectures") if isinstance(entry, dict) else None, "architectures", place)
            found.append((self.served(names, place), changes))
        return found

    def names(self, value: object, key: str, place: str) -> tuple[str, ...]:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            self.wrong(f"{key!r} is missing or not a name", f'write {key} = ["..."]', place)
            return ()
        return tuple(names)

    def served(self, names: tuple[str, ...], place: str) -> tuple[str, ...]:
        for name in names:
            if self.architectures is not None and name not in self.architectures:
                self.wrong(
                    f"{shown(name)} is not among the table's architectures", f"the table serves {', '.join(self.architectures)}", place
                )
        return names

    def fixed(self, entries: object, place: str) -> dict[str, tuple[Any, ...]]:
        found = {}
        for key, values in self.table(entries, place).items():
            if isinstance(values, list) and values and not any(isinstance(value, (list, dict)) for value in values):
                found[key] = tuple(values)
            else:
                self.wrong(f"{shown_key(key)} has no list of supported values", f"write {shown_key(key)} = [1]", place)
        return found

    def ignored(self, entries: object, place: str) -> dict[str, str]:
        found = {}
        for key, why in self.table(entries, place).items():
            if isinstance(why, str) and why.strip():
                found[key] = why
            else:
                self.wrong(
                    f"{shown_key(key)} is ignored without a reason", f'write {shown_key(key)} = "why it does not change the result"', place
                )
        return found

    def table(self, entries: object, place: str) -> dict[str, Any]:
        if isinstance(entries, dict):
            return entries
        self.wrong(f"{shown(entries)} is not a table", f"write the keys under {place}", place)
        return {}

    def source(self, name: str, entry: object, place: str) -> Source | None:
        if name not in SETTABLE and name not in READ_BY_READERS:
            self.wrong("there is no such field in ModelConfig", f"known: {', '.join(sorted((*SETTABLE, *READ_BY_READERS)))}", place)
            return None
        kinds = ("reader", "value", "present", "architecture", "key", "from")
        kind = next((kind for kind in kinds if isinstance(entry, dict) and kind in entry), None)
        if not isinstance(entry, dict) or kind is None:
            self.wrong(
                "the entry does not say where the field comes from",
                f'write {shown_key(name)} = {{ key = "..." }}, or one of {", ".join(kinds)}',
                place,
            )
            return None
        if kind == "reader":
            return self.from_reader(name, entry, place)
        if name in READ_BY_READERS:
            self.wrong("this field is read by a reader only", f'write {name} = {{ reader = "{READ_BY_READERS[name]}" }}', place)
            return None
        allowed = {"key": {"key", "default", "from", "map"}}.get(kind, {kind})
        for other in sorted(set(entry) - allowed):
            self.wrong(f"{shown_key(other)!r} does not go with {kind!r}", f"allowed: {', '.join(sorted(allowed))}", place)
        read: Callable[[str, dict[str, Any], str], Source | None] = getattr(self, f"from_{kind}" if kind != "from" else "from_formula")
        return read(name, entry, place)

    def from_value(self, name: str, entry: dict[str, Any], place: str) -> Source | None:
        try:
            return FromValue(field_value(name, entry["value"]))
        except ValueError as error:
            self.wrong(f"value {error}", "give a value of the field's type", place)
            return None

    def from_present(self, name: str, entry: dict[str, Any], place: str) -> Source | None:
        if self.is_flag(name, "present", place) and self.names(entry["present"], "present", place):
            return FromTensor(str(entry["present"]))
        return None

    def from_architecture(self, name: str, entry: dict[str, Any], place: str) -> Source | None:
        names = self.served(self.names(entry["architecture"], "architecture", place), place)
        return FromArchitecture(names) if self.is_flag(name, "architecture", place) and names else None

    def is_flag(self, name: str, kind: str, place: str) -> bool:
        try:
            return isinstance(field_value(name, True), bool)
        except ValueError:
            self.wrong(f"{kind!r} gives true or false, which {name} cannot be", "use key or value", place)
            return False

    def from_formula(self, name: str, entry: dict[str, Any], place: str) -> Source | None:
        formula = self.formula(entry["from"], place)
        return FromFormula(formula) if formula else None

    def from_key(self, name: str, entry: dict[str, Any], place: str) -> Source | None:
        keys = self.names(entry["key"], "key", place)
        words = self.words(name, entry.get("map"), place)
        formula = self.formula(entry["from"], place) if "from" in entry else None
        default = entry.get("default")
        if default is not None and formula is not None:
            self.wrong("'default' and 'from' exclude each other", "keep one", place)
        if default is not None:
            self.check_default(name, default, words, place)
        return FromKey(keys, default, formula, words) if keys else None

    def check_default(self, name: str, default: object, words: Mapping[str, Any] | None, place: str) -> None:
        if words is not None and word(default) in words:
            return
        if words is not None:
            self.wrong(f"default {shown(default)} is not in the map", f"use one of {', '.join(words)}", place)
            return
        try:
            field_value(name, default)
        except ValueError as error:
            self.wrong(f"default {error}", "give a default of the field's type", place)

    def words(self, name: str, value: object, place: str) -> Mapping[str, Any] | None:
        if value is None:
            return None
        shared = common_config().maps
        words = shared.get(value) if isinstance(value, str) else value
        if not isinstance(words, Mapping) or not words:
            self.wrong(
                f"map {shown(value)} is neither a table nor a shared map",
                f'write map = {{ theirs = "ours" }}; shared maps: {", ".join(shared)}',
                place,
            )
            return None
        for theirs, ours in words.items():
            try:
                field_value(name, ours)
            except ValueError as error:
                self.wrong(f"map: {shown_key(theirs)} {error}", "map to a value of the field's type", place)
        return words

    def formula(self, text: object, place: str) -> Formula | None:
        parts = re.findall(r"[a-z_]+|\d+|\S", text) if isinstance(text, str) and len(text) <= 200 else []
        operands, operators = parts[::2], parts[1::2]
        good = (
            len(parts) % 2 == 1
            and set(operators) <= {"*", "/"}
            and all((len(part) < 10 and part.isdecimal()) or part in SETTABLE for part in operands)
        )
        if not isinstance(text, str) or not good:
            self.wrong(
                f"from = {shown(text)} is not a product of fields and numbers",
                'write from = "heads", "4 * hidden" or "hidden / heads"',
                place,
            )
            return None
        terms = tuple(int(part) if part.isdecimal() else part for part in operands)
        return Formula(text, tuple(zip(("*", *operators), terms, strict=True)))

    def from_reader(self, name: str, entry: dict[str, Any], place: str) -> Source | None:
        kind = entry["reader"]
        if READ_BY_READERS.get(name) != kind or not isinstance(kind, str):
            known = ", ".join(f"{field_name} = {{ reader = {reader!r} }}" for field_name, reader in READ_BY_READERS.items())
            self.wrong(f"there is no reader {shown(kind)} for this field", f"known: {known}", place)
            return None
        try:
            return FromReader(READERS[kind]({key: value for key, value in entry.items() if key != "reader"}))
        except ValueError as error:
            self.wrong(str(error), "see the reader's module for its options", place)
            return None

    def check_whole(self, entries: Entries, place: str) -> None:
        """Mistakes that show only when base and variant are put together."""
        for name in REQUIRED:
            if name not in entries.sources:
                self.wrong(f"the field {name!r} has no entry", f'write {name} = {{ key = "..." }} or {{ value = ... }}', place)
        keys = entries.keys_read()
        for key in sorted((keys & set(entries.fixed)) | (keys & set(entries.ignored)) | (set(entries.fixed) & set(entries.ignored))):
            self.wrong(f"the key {shown_key(key)} stands in more than one place", "keep it in an entry, in fixed or in ignored", place)
        for name, source in entries.sources.items():
            formula = source.formula if isinstance(source, (FromKey, FromFormula)) else None
            if formula is not None:
                self.check_formula(name, formula, entries, place)

    def check_formula(self, name: str, formula: Formula, entries: Entries, place: str) -> None:
        for used in formula.fields:
            if used not in entries.sources:
                self.wrong(f"{name}: {formula.text!r} needs the field {used!r}, which has no entry", f"add an entry for {used}", place)
        if name in _reachable(formula, entries.sources):
            self.wrong(f"{name}: {formula.text!r} leads back to itself", "compute it from fields that are in config.json", place)


def _reachable(formula: Formula, sources: Mapping[str, Source]) -> set[str]:
    seen: set[str] = set()
    waiting = list(formula.fields)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        source = sources.get(name)
        if isinstance(source, (FromKey, FromFormula)) and source.formula is not None:
            waiting += source.formula.fields
    return seen


def word(value: object) -> str:
    """A config value as a key of a map: texts as they are, true and false in JSON's spelling."""
    return value if isinstance(value, str) else shown(value)
