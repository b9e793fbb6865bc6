"""Sliding-window attention in config.json: which layers use it, and how far they see.

A window of w lets a token see w positions, itself included (transformers/masking_utils.py: key > query - w).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mappings.config_values import shown, shown_key, whole_number
from mappings.errors import Problem

MAX_WINDOW = 10**9
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowKeys:
    """How a family spells its window; the options of `sliding_window = { reader = "window", ... }`.

    key         the key of the window's size; null means no window. Silence is refused: the size varies within a family
    switch      a key that must be true for the window to be used (silent or null: false); without it the size alone decides
    from_layer  the key of the first layer that uses the window; without it every layer does
    types       the key of a list with one of "full_attention", "sliding_attention" per layer; it counts before from_layer
    """

    key: str
    switch: str | None = None
    from_layer: str | None = None
    types: str | None = None

    def every(self) -> tuple[str, ...]:
        """All keys of config.json that the reader looks at."""
        return tuple(key for key in (self.key, self.switch, self.from_layer, self.types) if key)


def parse_window_keys(options: dict[str, Any]) -> WindowKeys:
    """The options in a rule table. Raises ValueError with what is wrong."""
    unknown = sorted(set(options) - {"key", "switch", "from_layer", "types"})
    if unknown:
        raise ValueError(f"the window reader has no option {', '.join(map(shown_key, unknown))}; known: key, switch, from_layer, types")
    if "key" not in options:
        raise ValueError('the window reader needs the option key = "sliding_window"')
    for name, value in options.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a key of config.json, not {shown(value)}")
    return WindowKeys(**options)


@dataclass
class WindowReading:
    """`window` is None and `layers` empty when no layer uses a window."""

    window: int | None = None
    layers: tuple[int, ...] = ()
    problems: list[Problem] = field(default_factory=list)


def read_window(config: Mapping[str, Any], keys: WindowKeys, *, layers: int, where: str) -> WindowReading:
    """The window of a config.json with this many layers; every problem is collected."""
    reader = _WindowReader(config, keys, layers, where)
    window = reader.window()
    types = reader.types()
    reading = reader.reading
    if reading.problems:
        return reading
    if window is None:
        if types is not None and SLIDING in types:
            reader.wrong(f"contradiction: {keys.types} has sliding layers, but no window is in use", reader.mend(keys.switch or keys.key))
        return reading
    chosen = (
        tuple(index for index, name in enumerate(types) if name == SLIDING)
        if types is not None
        else tuple(range(reader.first_layer(), layers))
    )
    if chosen and not reading.problems:
        reading.window, reading.layers = window, chosen
    return reading


class _WindowReader:
    def __init__(self, config: Mapping[str, Any], keys: WindowKeys, layers: int, where: str) -> None:
        self.config, self.keys, self.layers, self.where = config, keys, layers, where
        self.reading = WindowReading()

    def wrong(self, what: str, mend: str) -> None:
        self.reading.problems.append(Problem(what, self.where, mend))

    @staticmethod
    def mend(key: str) -> str:
        return f"mend {key} in config.json"

    def window(self) -> int | None:
        """The size of the window in use, None without one."""
        if self.keys.switch is not None:
            switch = self.config.get(self.keys.switch)
            if switch is not None and not isinstance(switch, bool):
                self.wrong(f"{self.keys.switch} must be true or false, not {shown(switch)}", self.mend(self.keys.switch))
            if switch is not True:
                return None
        if self.keys.key not in self.config:
            self.wrong(
                f"{self.keys.key} is missing",
                f'add "{self.keys.key}" to config.json: the window that the model was trained with, or null for none',
            )
            return None
        return self.number(self.keys.key, 1)

    def types(self) -> list[str] | None:
        types = self.config.get(self.keys.types) if self.keys.types else None
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != self.layers:
            self.wrong(
                f"{self.keys.types} must be a list with one entry for each of the {self.layers} layers, not {shown(types)}",
                self.mend(str(self.keys.types)),
            )
            return None
        other = next((name for name in types if name not in (FULL, SLIDING)), None)
        if other is not None:
            self.wrong(f"{self.keys.types} has {shown(other)}, which is not supported", f"supported: {FULL}, {SLIDING}")
            return None
        return types

    def first_layer(self) -> int:
        if self.keys.from_layer is None:
            return 0
        first = self.number(self.keys.from_layer, 0)
        if first is None and not self.reading.problems:
            self.wrong(
                f"{self.keys.from_layer} is missing", f'add "{self.keys.from_layer}" to config.json: the first layer that uses the window'
            )
        return first or 0

    def number(self, key: str, low: int) -> int | None:
        value = self.config.get(key)
        if value is None:
            return None
        try:
            return whole_number(value, low, MAX_WINDOW)
        except ValueError as error:
            self.wrong(f"{key} {error}", self.mend(key))
            return None
