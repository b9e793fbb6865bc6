"""What the tests of the config reader share: the bundled [config] parts, straight from the TOML, and public configs with changes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from mappings.errors import Refused
from mappings.hf_config import ConfigReading, ConfigSection, parse_config_section, read_model_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.mappings.public_configs import PUBLIC

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "bert")


def table(family: str) -> dict[str, Any]:
    return tomllib.loads(files("mappings").joinpath("families").joinpath(f"{family}.toml").read_text(encoding="utf-8"))


@cache
def section(family: str) -> ConfigSection:
    data = table(family)
    return parse_config_section(data["config"], f"{family}.toml", data["architectures"])


def read(config: Any, family: str, architecture: str, tensors: Collection[str] = (), **options: Any) -> ConfigReading:
    return read_model_config(
        config, section(family), family=family, architecture=architecture, tensors=tensors, where="config.json", **options
    )


def problems(config: Any, family: str = "llama", architecture: str = "LlamaForCausalLM", **options: Any) -> str:
    """The message of the refusal."""
    with pytest.raises(Refused) as refusal:
        read(config, family, architecture, **options)
    return str(refusal.value)


def public(name: str, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(PUBLIC[name].config), **changes}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}
