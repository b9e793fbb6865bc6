"""What every family shares about config.json, from common_config.toml beside this file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class RefusedKey:
    """A key that no family supports. `show` names the part of its value that the message quotes."""

    why: str
    mend: str
    show: str | None = None


@dataclass(frozen=True)
class CommonConfig:
    """Keys of config.json that mean the same in every family, and maps that several families use."""

    ignored: Mapping[str, str]
    fixed: Mapping[str, tuple[Any, ...]]
    refused: Mapping[str, RefusedKey]
    special_ids: tuple[str, ...]
    maps: Mapping[str, Mapping[str, str]]


@cache
def common_config() -> CommonConfig:
    """The content of common_config.toml."""
    data = tomllib.loads(files("mappings").joinpath("common_config.toml").read_text(encoding="utf-8"))
    return CommonConfig(
        ignored={key: why for part in data["ignored"].values() for key, why in part.items()},
        fixed={key: tuple(values) for key, values in data["fixed"].items()},
        refused={key: RefusedKey(**entry) for key, entry in data["refused"].items()},
        special_ids=tuple(data["special_ids"]["keys"]),
        maps=data["map"],
    )
