"""A Hugging Face config.json becomes a ModelConfig, as a table's [config] part says.

Every key of the file must be accounted for: read into a field, fixed to a supported value, or ignored with a reason. A key that is in none
of these may change what the model computes, so it is refused by name, never passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mappings.common_config import common_config
from mappings.config_section import (
    ConfigSection,
    Entries,
    Formula,
    FromArchitecture,
    FromFormula,
    FromKey,
    FromReader,
    FromTensor,
    FromValue,
    Source,
    parse_config_section,
    word,
)
from mappings.config_values import BOUNDS, ID_FIELDS, field_value, same, shown, shown_key, token_ids
from mappings.errors import Problem, Refused
from mappings.rope import RopeKeys, read_rope
from mappings.window import WindowKeys, read_window
from model.config import ModelConfig

__all__ = ["ConfigReading", "ConfigSection", "check_special_ids", "parse_config_section", "read_model_config"]

MAX_LISTED_KEYS = 20


@dataclass(frozen=True)
class ConfigReading:
    """A config and what its reader should know about how it was read."""

    config: ModelConfig
    notes: tuple[str, ...] = ()


def read_model_config(
    config: Mapping[str, Any],
    section: ConfigSection,
    *,
    family: str,
    architecture: str,
    tensors: Collection[str],
    where: str,
    vocab_rows: int | None = None,
    other_keys: Collection[str] = (),
) -> ConfigReading:
    """Read a parsed config.json.

    `tensors` are the names in the weights' headers, spelled with the family's prefix. `vocab_rows` is the number of rows of the token
    embedding: it counts before the file's vocabulary size. `other_keys` are keys that the table reads outside [config].
    Raises Refused with every problem found, whatever the file holds.
    """
    if not isinstance(config, Mapping):
        raise Refused(
            f"{where} is no model configuration", [Problem(f"it holds {shown(config)}", where, "give the config.json of the model")]
        )
    reader = _ConfigReader(config, section.entries_for(architecture), architecture, tensors, where)
    reader.account_for_keys(other_keys)
    fields = reader.fields(vocab_rows)
    reader.check_ids(fields.get("vocab"))
    reader.check_sizes(fields)
    if reader.problems:
        raise Refused(f"{where} cannot be read as the family {family} ({architecture})", reader.problems)
    return ConfigReading(ModelConfig(family=family, padded_vocab=fields["vocab"], **fields), tuple(reader.notes))


def check_special_ids(ids: Mapping[str, tuple[int, ...]], vocab_rows: int, where: str) -> list[Problem]:
    """A problem for each special id that is not a row of the token embedding. `ids` maps a key of the file to its ids."""
    return [
        Problem(
            f"{shown_key(key)} {number} is outside the vocabulary: the token embedding has {vocab_rows} rows",
            where,
            "the config or the tokenizer does not belong to these weights; give the right id, or null for none",
        )
        for key, numbers in ids.items()
        for number in numbers
        if number >= vocab_rows
    ]


class _ConfigReader:
    """Reads one file; collects problems and notes."""

    def __init__(self, config: Mapping[str, Any], entries: Entries, architecture: str, tensors: Collection[str], where: str) -> None:
        self.config, self.entries, self.architecture, self.tensors, self.where = config, entries, architecture, tensors, where
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.values: dict[str, Any] = {}

    def wrong(self, what: str, mend: str) -> None:
        self.problems.append(Problem(what, self.where, mend))

    # Keys

    def account_for_keys(self, other_keys: Collection[str]) -> None:
        """Refuse every key that nothing in the table or in the common list speaks of. A key without a value says nothing."""
        common = common_config()
        read = {*self.entries.keys_read(), *other_keys}
        unknown = []
        for key, value in self.config.items():
            if value is None or key in read or key in self.entries.ignored:
                continue
            if key in self.entries.fixed:
                self.check_fixed(key, value, self.entries.fixed[key])
            elif value in ({}, [], "") or key in common.ignored or key in common.special_ids:
                continue
            elif key in common.fixed:
                self.check_fixed(key, value, common.fixed[key])
            elif key in common.refused:
                refused = common.refused[key]
                detail = value.get(refused.show) if refused.show and isinstance(value, Mapping) else None
                self.wrong(f"{key}{f' ({refused.show} {shown(detail)})' if detail is not None else ''}: {refused.why}", refused.mend)
            else:
                unknown.append(f"{shown_key(key)} = {shown(value)}")
        self.refuse_unknown(unknown)

    def check_fixed(self, key: str, value: object, supported: tuple[Any, ...]) -> None:
        if not any(same(value, one) for one in supported):
            self.wrong(f"{shown_key(key)} = {shown(value)} is not supported", f"supported: {', '.join(shown(one) for one in supported)}")

    def refuse_unknown(self, unknown: list[str]) -> None:
        for text in unknown[:MAX_LISTED_KEYS]:
            self.wrong(
                f"unknown key {text}: it may change what the model computes",
                "if it does not, name it with the reason under [config.ignored] of a table of your own (--rules)",
            )
        if len(unknown) > MAX_LISTED_KEYS:
            self.wrong(f"and {len(unknown) - MAX_LISTED_KEYS} more unknown keys", "is this the config.json of the model?")

    # Fields

    def fields(self, vocab_rows: int | None) -> dict[str, Any]:
        """ModelConfig field -> value, for all fields of the table that could be read."""
        for name, source in self.entries.sources.items():
            if not isinstance(source, FromReader):
                self.field(name, vocab_rows)
        for source in self.entries.sources.values():
            if isinstance(source, FromReader):
                self.read_together(source.options)
        fields = {name: value for name, value in self.values.items() if value is not None}
        if vocab_rows is not None:
            self.compare_vocab(fields.get("vocab"), vocab_rows)
            fields["vocab"] = vocab_rows
        if fields.get("tied"):
            fields["tied"] = bool(fields.get("mlm_head") if fields.get("kind") == "encoder" else fields.get("head", True))
        return fields

    def field(self, name: str, vocab_rows: int | None = None) -> Any:
        """The value of one field, None if the file has none or a problem was found. Each is read once, in the order of need."""
        if name not in self.values:
            self.values[name] = None
            self.values[name] = self.read_field(name, self.entries.sources[name], vocab_rows)
        return self.values[name]

    def read_field(self, name: str, source: Source, vocab_rows: int | None) -> Any:
        if isinstance(source, FromValue):
            return source.value
        if isinstance(source, FromTensor):
            return source.tensor in self.tensors
        if isinstance(source, FromArchitecture):
            return self.architecture in source.architectures
        if isinstance(source, FromFormula):
            return self.computed(name, source.formula)
        assert isinstance(source, FromKey)
        key, value = self.stated(source)
        if value is not None:
            return self.checked(name, source, key, value)
        if source.default is not None:
            return self.checked(name, source, key, source.default)
        if source.formula is not None:
            return self.computed(name, source.formula)
        if name not in ID_FIELDS and not (name == "vocab" and vocab_rows is not None):
            self.wrong(f"{key} is missing", f'add "{key}" to config.json with the value that the model was trained with')
        return None

    def stated(self, source: FromKey) -> tuple[str, Any]:
        """The key that the file uses and its value; None if it is silent. Several names for one thing must agree."""
        given = [(key, self.config[key]) for key in source.keys if self.config.get(key) is not None]
        for key, value in given[1:]:
            if not same(value, given[0][1]):
                self.wrong(
                    f"contradiction: {given[0][0]} is {shown(given[0][1])}, {key} is {shown(value)}",
                    "these keys mean the same thing: delete the wrong one from config.json",
                )
        return given[0] if given else (source.keys[0], None)

    def checked(self, name: str, source: FromKey, key: str, value: Any) -> Any:
        if source.words is not None:
            if not isinstance(value, (str, bool)) or word(value) not in source.words:
                self.wrong(f"{key} = {shown(value)} is not supported", f"supported: {', '.join(source.words)}")
                return None
            value = source.words[word(value)]
        try:
            return field_value(name, value)
        except ValueError as error:
            self.wrong(f"{key} {error}", f"mend {key} in config.json")
            return None

    def computed(self, name: str, formula: Formula) -> Any:
        result: Any = 1
        for operator, term in formula.terms:
            value = self.field(term) if isinstance(term, str) else term
            if not value:
                return None
            if operator == "/" and result % value:
                self.wrong(
                    f"{name} would be {formula.text}, which does not divide: {shown(result)} / {shown(value)}",
                    "mend these sizes in config.json",
                )
                return None
            result = result // value if operator == "/" else result * value
        try:
            return field_value(name, result)
        except ValueError as error:
            self.wrong(f"{name} = {formula.text} {error}", "mend these sizes in config.json")
            return None

    def read_together(self, options: RopeKeys | WindowKeys) -> None:
        if isinstance(options, RopeKeys):
            # Sizes that could not be read are a problem of their own already; 128 lets the rest of the rope be checked too.
            sizes = {"head_dim": self.values.get("head_dim") or 128, "max_positions": self.values.get("max_positions") or 1}
            rope = read_rope(self.config, options, where=self.where, **sizes)
            self.problems += rope.problems
            self.notes += rope.notes
            self.values["rope"] = rope.rope
        elif self.values.get("layers"):
            window = read_window(self.config, options, layers=self.values["layers"], where=self.where)
            self.problems += window.problems
            self.values["sliding_window"], self.values["sliding_layers"] = window.window, window.layers

    # Checks across fields

    def compare_vocab(self, stated: int | None, rows: int) -> None:
        low, high = BOUNDS["vocab"]
        if not low <= rows <= high:
            self.wrong(f"the token embedding has {shown(rows)} rows", f"from {low:g} to {high:g} are supported")
        elif stated is not None and stated != rows:
            self.notes.append(f"config.json says vocab_size {stated}, the token embedding has {rows} rows: the rows count")

    def check_ids(self, vocab: int | None) -> None:
        """Every special id must be a row of the embedding, those that no field holds too."""
        ids: dict[str, tuple[int, ...]] = {}
        for key, from_field in self.special_keys():
            value = self.config.get(key)
            if value is None:
                continue
            try:
                ids[key] = token_ids(value)
            except ValueError as error:
                if not from_field:
                    self.wrong(f"{key} {error}", f"give the id in config.json, or null for none: {key}")
                continue
            if value == -1:
                self.notes.append(f"{key} is -1, which is no id: read as none")
        if vocab is not None:
            self.problems += check_special_ids(ids, vocab, self.where)

    def special_keys(self) -> Iterator[tuple[str, bool]]:
        """Each key that holds special ids, and whether a field is read from it (its type is checked there)."""
        read = {key for name in ID_FIELDS if isinstance(source := self.entries.sources.get(name), FromKey) for key in source.keys}
        yield from ((key, True) for key in sorted(read))
        yield from ((key, False) for key in common_config().special_ids if key not in read and key not in self.entries.ignored)

    def check_sizes(self, fields: Mapping[str, Any]) -> None:
        heads, kv_heads = fields.get("heads"), fields.get("kv_heads")
        if heads and kv_heads and heads % kv_heads:
            self.wrong(f"{heads} heads cannot share {kv_heads} KV heads evenly", "mend the numbers of heads in config.json")
        if fields.get("experts_per_token", 0) > fields.get("experts", 0):
            self.wrong(
                f"{fields['experts_per_token']} experts per token, but there are {fields.get('experts', 0)}",
                "mend the numbers of experts in config.json",
            )
        if fields.get("positions", "rope") == "rope" and "rope" not in self.entries.sources:
            self.wrong("the positions are rotary, but the table has no entry for rope", 'add rope = { reader = "rope" } to [config]')
