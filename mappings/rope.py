"""Rotary embeddings in config.json: transformers 4 and 5 spell them differently, and files in the wild mix both.

    transformers 4   rope_theta and partial_rotary_factor beside the other keys, rope_scaling = {type or rope_type, factor, ...} or null
    transformers 5   rope_parameters = {rope_theta, rope_type, partial_rotary_factor, factor, ...}

Whatever is given twice must agree. What is computed from it is in transformers/modeling_rope_utils.py, release 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mappings.config_values import real_number, same, shown, shown_key, whole_number
from mappings.errors import Problem
from model.config import Rope, RopeScaling, RopeScalingKind

MAX_POSITIONS = 10**9
KINDS: Mapping[str, RopeScalingKind] = {"linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn"}
NEEDS_ORIGINAL = ("llama3", "yarn")
# Field of RopeScaling -> its bounds; which kind reads which, and which of them it cannot do without.
NUMBERS: Mapping[str, tuple[float, float]] = {
    "factor": (1e-6, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
READS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
REQUIRES: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeKeys:
    """How a family spells its rope; the options of `rope = { reader = "rope", ... }`.

    theta_key        the key of the base, beside or inside the rope tables
    partial_key      the key of the rotated share of each head; without it whole heads are rotated, and a share other than 1 is refused
    unwritten_theta  { value, before_transformers }: releases before that one knew no theta and always used `value`, so a file that such a
                     release wrote and that is silent means it; any other silent file is refused
    """

    theta_key: tuple[str, ...] = ("rope_theta",)
    partial_key: tuple[str, ...] = ()
    unwritten_theta: float | None = None
    before_transformers: tuple[int, int] = (0, 0)

    def every(self) -> tuple[str, ...]:
        """All keys of config.json that the reader looks at."""
        return (
            *self.theta_key,
            *(self.partial_key or ("partial_rotary_factor",)),
            "rope_scaling",
            "rope_parameters",
            "original_max_position_embeddings",
        )


def parse_rope_keys(options: dict[str, Any]) -> RopeKeys:
    """The options in a rule table. Raises ValueError with what is wrong."""
    unknown = sorted(set(options) - {"theta_key", "partial_key", "unwritten_theta"})
    if unknown:
        raise ValueError(
            f"the rope reader has no option {', '.join(map(shown_key, unknown))}; known: theta_key, partial_key, unwritten_theta"
        )
    theta_key, partial_key = (_names(options.get(name, ()), name) for name in ("theta_key", "partial_key"))
    unwritten = options.get("unwritten_theta")
    if unwritten is None:
        return RopeKeys(theta_key or ("rope_theta",), partial_key)
    if not isinstance(unwritten, dict) or set(unwritten) != {"value", "before_transformers"}:
        raise ValueError('unwritten_theta must look like { value = 10000.0, before_transformers = "4.33" }')
    release = _release(unwritten["before_transformers"])
    if release is None:
        raise ValueError(f'before_transformers must look like "4.33", not {shown(unwritten["before_transformers"])}')
    return RopeKeys(theta_key or ("rope_theta",), partial_key, real_number(unwritten["value"], 1.0, 1e15), release)


def _names(value: object, option: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{option} must be a key of config.json or a list of them")
    return tuple(str(name) for name in names)


def _release(text: object) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", text) if isinstance(text, str) else None
    return (int(match[1]), int(match[2])) if match else None


@dataclass
class RopeReading:
    """`rope` is None when a problem stopped the reading."""

    rope: Rope | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_rope(config: Mapping[str, Any], keys: RopeKeys, *, head_dim: int, max_positions: int, where: str) -> RopeReading:
    """The Rope of a config.json; every problem is collected. `head_dim` and `max_positions` are those of the model."""
    reader = _RopeReader(config, keys, head_dim, max_positions, where)
    reading = reader.reading
    values = reader.gather()
    kind = reader.kind(values)
    theta = reader.theta(values)
    rotary_dim = reader.rotary_dim(values)
    scaling = reader.scaling(kind, values) if kind is not None else None
    if kind == "dynamic" and rotary_dim == 2:
        reader.wrong("dynamic rope needs more than two rotated elements", "the formula divides by the rotated size - 2")
    if not reading.problems and theta is not None and rotary_dim is not None:
        reading.rope = Rope(theta=theta, rotary_dim=rotary_dim, scaling=scaling)
    return reading


class _RopeReader:
    def __init__(self, config: Mapping[str, Any], keys: RopeKeys, head_dim: int, max_positions: int, where: str) -> None:
        self.config, self.keys, self.head_dim, self.max_positions, self.where = config, keys, head_dim, max_positions, where
        self.reading = RopeReading()

    def wrong(self, what: str, mend: str) -> None:
        self.reading.problems.append(Problem(what, self.where, mend))

    def gather(self) -> dict[str, Any]:
        """All that the file says about its rope, under one name each: what is given twice must agree."""
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for name, value, origin in self.statements():
            if name in values and not same(values[name], value):
                self.wrong(
                    f"contradiction: {origins[name]} says {shown(values[name])}, {origin} says {shown(value)}",
                    "keep the one that the model was trained with in config.json and delete the other",
                )
            values.setdefault(name, value)
            origins.setdefault(name, origin)
        return values

    def statements(self) -> Iterator[tuple[str, Any, str]]:
        """(canonical name, value, where it stands) of every key that is not null."""
        beside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *self.keys.theta_key, *self.keys.partial_key)
        for key in dict.fromkeys(beside):
            if key in self.keys.every() and self.config.get(key) is not None:
                yield self.canonical(key), self.config[key], shown_key(key)
        for table in ("rope_scaling", "rope_parameters"):
            entries = self.config.get(table)
            if entries is None:
                continue
            if not isinstance(entries, Mapping):
                self.wrong(f"{table} must be a table, not {shown(entries)}", f"mend {table} in config.json")
                continue
            for key, value in entries.items():
                if value is not None:
                    yield self.canonical(key), value, f"{table}.{shown_key(key)}"

    def canonical(self, key: str) -> str:
        if key in self.keys.theta_key:
            return "rope_theta"
        if key in self.keys.partial_key:
            return "partial_rotary_factor"
        return "rope_type" if key == "type" else key

    def kind(self, values: Mapping[str, Any]) -> str | None:
        if any(isinstance(value, Mapping) for value in values.values()):
            self.wrong("rope_parameters holds a rope per layer type", "only models with one rope for all layers are supported")
            return None
        kind = values.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in READS:
            self.wrong(f"rope type {shown(kind)} is not supported", f"supported: {', '.join(READS)}")
            return None
        return kind

    def theta(self, values: Mapping[str, Any]) -> float | None:
        key, value = self.keys.theta_key[0], values.get("rope_theta")
        if value is not None:
            try:
                return real_number(value, 1.0 + 1e-9, 1e15)
            except ValueError as error:
                self.wrong(f"{key} {error}", f"mend {key} in config.json")
                return None
        written_by = _release(self.config.get("transformers_version"))
        if self.keys.unwritten_theta is not None and written_by is not None and written_by < self.keys.before_transformers:
            writer = f"transformers {written_by[0]}.{written_by[1]}, which wrote it, always used {self.keys.unwritten_theta:g}"
            self.reading.notes.append(f"{key} is not in config.json; {writer}")
            return self.keys.unwritten_theta
        self.wrong(
            f"{key} is missing: neither beside the other keys nor in rope_parameters",
            f'add "{key}" to config.json with the value that the model was trained with (transformers would assume 10000)',
        )
        return None

    def rotary_dim(self, values: Mapping[str, Any]) -> int | None:
        share = values.get("partial_rotary_factor")
        name = (self.keys.partial_key or ("partial_rotary_factor",))[0]
        if share is None:
            if self.keys.partial_key:
                self.wrong(f"{name} is missing", f'add "{name}" to config.json')
                return None
            share = 1
        try:
            rotary_dim = int(self.head_dim * real_number(share, 1e-6, 1.0))
        except ValueError as error:
            self.wrong(f"{name} {error}", f"mend {name} in config.json")
            return None
        if not self.keys.partial_key and rotary_dim != self.head_dim:
            self.wrong(
                f"{name} is {shown(share)}, but this family rotates whole heads",
                f'if it rotates a part, say so in its table: rope = {{ reader = "rope", partial_key = "{name}" }}; if not, delete the key',
            )
            return None
        if rotary_dim < 2 or rotary_dim % 2:
            self.wrong(
                f"{rotary_dim} elements of each head would be rotated; they go in pairs", "check head_dim, hidden size and number of heads"
            )
            return None
        return rotary_dim

    def scaling(self, kind: str, values: Mapping[str, Any]) -> RopeScaling | None:
        known = {
            "rope_type",
            "rope_theta",
            "partial_rotary_factor",
            "original_max_position_embeddings",
            *READS[kind],
            *(("truncate",) if kind == "yarn" else ()),
        }
        for key in sorted(set(values) - known, key=str):
            self.wrong(
                f"rope type {kind!r} with the key {shown_key(key)} = {shown(values[key])} is not supported",
                f"{kind} reads {', '.join(READS[kind]) or 'no further keys'}",
            )
        numbers = {name: self.number(name, values) for name in READS[kind]}
        original = self.original(kind, values)
        truncate = self.truncate(values) if kind == "yarn" else None
        for name in REQUIRES.get(kind, ()):
            if values.get(name) is None:
                self.wrong(
                    f"rope type {kind!r} needs {name}, which is missing", f"add {name} to rope_scaling or rope_parameters in config.json"
                )
        if kind == "default" or self.reading.problems:
            return None
        if kind == "yarn":
            numbers["factor"] = self.yarn_factor(numbers["factor"], original)
        if kind == "llama3" and (numbers["high_freq_factor"] or 0) <= (numbers["low_freq_factor"] or 0):
            self.wrong("high_freq_factor must be greater than low_freq_factor", "mend the rope table in config.json")
        if kind == "yarn" and (numbers["beta_fast"] or 32) < (numbers["beta_slow"] or 1):
            self.wrong("beta_fast (32 if not given) must not be less than beta_slow (1 if not given)", "mend the rope table in config.json")
        factor = numbers.pop("factor")
        assert factor is not None
        return RopeScaling(kind=KINDS[kind], factor=factor, original_max_positions=original, truncate=truncate, **numbers)

    def number(self, name: str, values: Mapping[str, Any]) -> float | None:
        if values.get(name) is None:
            return None
        try:
            return real_number(values[name], *NUMBERS[name])
        except ValueError as error:
            self.wrong(f"{name} of the rope {error}", f"mend {name} in config.json")
            return None

    def truncate(self, values: Mapping[str, Any]) -> bool | None:
        value = values.get("truncate")
        if value is None or isinstance(value, bool):
            return value
        self.wrong(f"truncate of the rope must be true or false, not {shown(value)}", "mend truncate in config.json")
        return None

    def original(self, kind: str, values: Mapping[str, Any]) -> int | None:
        """Transformers takes max_position_embeddings where the file is silent, and looks at it for llama3 and yarn only."""
        value = values.get("original_max_position_embeddings")
        if kind not in NEEDS_ORIGINAL:
            if value is not None:
                self.reading.notes.append(f"original_max_position_embeddings = {shown(value)} has no effect with rope type {kind!r}")
            return None
        if value is None:
            return self.max_positions
        try:
            return whole_number(value, 1, MAX_POSITIONS)
        except ValueError as error:
            self.wrong(f"original_max_position_embeddings {error}", "mend it in config.json")
            return None

    def yarn_factor(self, factor: float | None, original: int | None) -> float:
        """An explicit factor counts (transformers 5); some releases of transformers 4 used the ratio of the two lengths instead."""
        ratio = self.max_positions / original if original else 1.0
        lengths = f"max_position_embeddings / original_max_position_embeddings = {ratio:g}"
        if factor is None:
            self.reading.notes.append(f"yarn without a factor: {lengths} is used, as in transformers")
            return ratio
        if ratio not in (1.0, factor):
            self.reading.notes.append(
                f"yarn factor {factor:g} is used as written, not {lengths}, which some releases of transformers 4 use"
            )
        return factor
