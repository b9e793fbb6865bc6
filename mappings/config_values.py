"""What a value of a ModelConfig field may be: its type and its bounds, for rule tables and for config.json files of strangers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from model.config import ModelConfig

# Far above any model that exists, low enough that no product of sizes and no list of layers becomes a burden.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "layers": (1, 10_000),
    "hidden": (1, 10**6),
    "heads": (1, 100_000),
    "kv_heads": (1, 100_000),
    "head_dim": (1, 100_000),
    "ffn": (1, 10**7),
    "vocab": (1, 10**8),
    "max_positions": (1, 10**9),
    "norm_eps": (0.0, 1.0),
    "norm_offset": (-10.0, 10.0),
    "attention_scale": (0.0, 1e4),
    "token_types": (0, 100_000),
    "experts": (0, 100_000),
    "experts_per_token": (0, 100_000),
    "expert_ffn": (0, 10**7),
    "embedding_dropout": (0.0, 1.0),
    "attention_dropout": (0.0, 1.0),
    "hidden_dropout": (0.0, 1.0),
    "initializer_range": (0.0, 100.0),
}
MAX_SPECIAL_IDS = 1000

_HINTS: Mapping[str, Any] = get_type_hints(ModelConfig)
REQUIRED = tuple(field.name for field in fields(ModelConfig) if field.default is MISSING and field.name not in ("family", "padded_vocab"))
ID_FIELDS = ("bos_ids", "eos_ids", "pad_id")
READ_BY_READERS = {"rope": "rope", "sliding_window": "window"}
SETTABLE = tuple(name for name in _HINTS if name not in ("family", "padded_vocab", "sliding_layers", *READ_BY_READERS))


def shown(value: object) -> str:
    """A short, safe text of a value that came from a file: no control characters, no huge numbers, no walk through nested data."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a huge integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}..."
    if isinstance(value, Mapping):
        return f"a table of {len(value)} keys"
    if isinstance(value, Sequence):
        return f"a list of {len(value)} values"
    return type(value).__name__


def shown_key(key: object) -> str:
    """A key of a file as it may stand in a message."""
    return key if isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_.\-]{1,80}", key) else shown(key)


def whole_number(value: object, low: float, high: float) -> int:
    """`value` as an int within the bounds. Raises ValueError with the reason."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"must be from {low:g} to {high:g}, not {shown(value)}")
    return value


def real_number(value: object, low: float, high: float) -> float:
    """`value` as a float within the bounds, which are finite. Raises ValueError with the reason."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, not {shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"must be from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def token_ids(value: object) -> tuple[int, ...]:
    """A special id or a list of them. -1, an old spelling of "none", is left out. Raises ValueError with the reason."""
    values = value if isinstance(value, list) else [value]
    if len(values) > MAX_SPECIAL_IDS:
        raise ValueError(f"is a list of {len(values)} ids; at most {MAX_SPECIAL_IDS} are read")
    ids = tuple(whole_number(item, -1, BOUNDS["vocab"][1]) for item in values)
    return tuple(item for item in ids if item >= 0)


def field_value(field: str, value: object) -> Any:
    """`value` as the ModelConfig field's type. Raises ValueError with the reason; null is no value here."""
    if field in ID_FIELDS:
        ids = token_ids(value)
        if field != "pad_id":
            return ids
        if len(ids) > 1:
            raise ValueError(f"must be one id, not {shown(value)}")
        return ids[0] if ids else None
    return _typed(_without_none(_HINTS[field]), value, field)


def _typed(hint: Any, value: object, field: str) -> Any:
    if get_origin(hint) is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise ValueError(f"must be one of {', '.join(get_args(hint))}, not {shown(value)}")
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {shown(value)}")
        return value
    return whole_number(value, *BOUNDS[field]) if hint is int else real_number(value, *BOUNDS[field])


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        return next(part for part in get_args(hint) if part is not NoneType)
    return hint


def same(one: object, other: object) -> bool:
    """Equal as JSON scalars: 1 equals 1.0, but true is not 1; tables and lists equal nothing."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return isinstance(one, (int, float, str)) and isinstance(other, (int, float, str)) and one == other
