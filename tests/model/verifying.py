"""Running `verify` as a user does, and rule tables with one mistake each."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from tests.converter.command_line import done, ms_convert

SCHEMA = json.loads(files("model").joinpath("verify_schema.json").read_text(encoding="utf-8"))


def convert(source: Path, folder: Path, *options: object) -> Path:
    """The rank tree of a Hugging Face folder."""
    done("hf2ms", source, "-o", folder, *options)
    return folder


def verify(source: Path, target: Path, *options: object) -> dict[str, Any]:
    """The facts of one `verify`, which must fit the schema, as must the exit code the verdict."""
    ran = ms_convert("verify", source, target, *options, "--json", "-")
    assert ran.out, ran.err
    facts: dict[str, Any] = ran.facts
    jsonschema.validate(facts, SCHEMA)
    assert ran.code == (0 if facts["holds"] else 1)
    assert facts["holds"] == all(check["holds"] for check in facts["checks"])
    return facts


def outcome(facts: dict[str, Any]) -> dict[str, bool]:
    """Whether each check holds, by its name."""
    return {check["name"]: check["holds"] for check in facts["checks"]}


def state(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """The worst error of one state over all probes."""
    found: dict[str, Any] = next(item for item in facts["forward"]["states"] if item["name"] == name)
    return found


def table_text(family: str) -> str:
    return files("mappings").joinpath("families").joinpath(f"{family}.toml").read_text(encoding="utf-8")


def replaced(text: str, old: str, new: str, times: int = 1) -> str:
    """`text` with `old` replaced, which must stand there so many times: a mistake that was not made proves nothing."""
    assert text.count(old) == times, (old, text.count(old))
    return text.replace(old, new)


def swapped(text: str, first: str, second: str) -> str:
    """`text` with two phrases exchanged, each of which must stand there once."""
    marked = replaced(text, first, "\0")
    return replaced(replaced(marked, second, first), "\0", second)


def rule(hf: str, ms: str, *lines: str) -> str:
    """A rule's text."""
    return "\n".join(["[[rule]]", f'hf = "{hf}"', f'ms = "{ms}"', *lines, ""])


def write_table(folder: Path, text: str) -> Path:
    path = folder / "table.toml"
    path.write_text(text, encoding="utf-8")
    return path
