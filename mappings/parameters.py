"""The catalogue of canonical parameters (`parameters.toml`): name, layout, tensor-parallel cut, pipeline stage and role of each.

This is the one statement of how a parameter is laid out and cut. The rule tables name these parameters; the converter slices by it; the
bundled model and the trainer declare their layers by it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from mappings.axes import Atom, Axes, AxesError, Composite, Item, Parts, parse_axes
from mappings.errors import Problem, Refused
from mappings.names import MAX_NAME_LENGTH, PLACEHOLDERS, placeholders

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Stage = Literal["first", "last", "layer"]
Role = Literal["", "embedding", "head"]
REPLICATED = "replicated"
KEYS = {"name", "axes", "cut", "stage", "role"}

# MindSpore's tools take a dash in a parameter's name for the end of a pipeline stage's number
_NAME = re.compile(r"(?:[A-Za-z0-9_]+|\{[a-z]+\})(?:\.(?:[A-Za-z0-9_]+|\{[a-z]+\}))*")


@dataclass(frozen=True)
class Parameter:
    """A canonical parameter (of every layer, when its name has `{layer}`).

    `cut` is the atom that tensor parallelism divides, the outermost of its axis, or "replicated".
    """

    name: str
    axes: Axes
    cut: str
    stage: Stage
    role: Role = ""

    @property
    def cut_axis(self) -> int | None:
        """The index of the tensor axis that is cut, or None."""
        if self.cut == REPLICATED:
            return None
        return next(index for index, item in enumerate(self.axes.items) if outermost(item) == self.cut)


def outermost(item: Item) -> str:
    """The atom that varies slowest in an item; "" where parts lie side by side."""
    while isinstance(item, Composite):
        item = item.items[0]
    return item.name if isinstance(item, Atom) else ""


def name_mistake(name: str) -> str:
    """What a parameter's name pattern must be, where this is none; "" for one."""
    good = _NAME.fullmatch(name) and len(name) <= MAX_NAME_LENGTH
    return "" if good else "use letters, digits and _, {layer} and {expert}, with dots between"


def parse_parameter(data: Mapping[str, Any], where: str) -> tuple[Parameter | None, list[Problem]]:
    """Read one [[parameter]] entry; either the parameter or what is wrong with it."""
    problems = [Problem(f"unknown key {key!r}", where, f"known: {', '.join(sorted(KEYS))}") for key in sorted(set(data) - KEYS)]
    texts = {}
    for key in ("name", "axes", "cut", "stage"):
        value = data.get(key)
        if isinstance(value, str) and value:
            texts[key] = value
        else:
            problems.append(Problem(f"{key!r} is missing or not a text", where, f'write {key} = "..."'))
    if problems:
        return None, problems
    try:
        axes = parse_axes(texts["axes"])
    except AxesError as error:
        return None, [Problem(str(error), where, 'for example axes = "(heads head_dim) hidden"')]
    parameter = Parameter(texts["name"], axes, texts["cut"], texts["stage"], data.get("role", ""))  # type: ignore[arg-type]
    return parameter, _problems_of(parameter, where)


def _problems_of(parameter: Parameter, where: str) -> list[Problem]:
    problems = []
    if mend := name_mistake(parameter.name):
        problems.append(Problem(f"{parameter.name[:80]!r} is no parameter's name", where, mend))
    if parameter.stage not in ("first", "last", "layer"):
        problems.append(Problem(f"stage {parameter.stage!r} is unknown", where, 'use "first", "last" or "layer"'))
    if parameter.role not in ("", "embedding", "head"):
        problems.append(Problem(f"role {parameter.role!r} is unknown", where, 'use "embedding", "head", or leave it out'))
    used = placeholders(parameter.name)
    if any(name not in PLACEHOLDERS for name in used):
        problems.append(Problem(f"{parameter.name!r} has an unknown placeholder", where, "use {layer} or {expert}"))
    if ("layer" in used) != (parameter.stage == "layer"):
        problems.append(
            Problem('stage = "layer" goes with a name that has {layer}, and only with one', where, f"mend {parameter.name!r} or its stage")
        )
    if any(isinstance(item, Parts) or _has_parts(item) for item in parameter.axes.items):
        problems.append(
            Problem("a canonical parameter is a single tensor: [ ] is for the HF side of a rule", where, "name each part as a parameter")
        )
    elif parameter.cut != REPLICATED and parameter.cut not in (outermost(item) for item in parameter.axes.items):
        mend = f"use one of {', '.join(outermost(item) for item in parameter.axes.items)}, or {REPLICATED!r}"
        problems.append(
            Problem(f"cut {parameter.cut!r} is not the outermost axis of any dimension of {str(parameter.axes)!r}", where, mend)
        )
    return problems


def _has_parts(item: Item) -> bool:
    return isinstance(item, Parts) or (isinstance(item, Composite) and any(_has_parts(inner) for inner in item.items))


def scoped(parameter: Parameter, scope: str) -> Parameter:
    """The same parameter below a scope, `bert.` for example."""
    return Parameter(scope + parameter.name, parameter.axes, parameter.cut, parameter.stage, parameter.role)


@functools.cache
def catalogue() -> dict[str, Parameter]:
    """Every canonical parameter by its name pattern. Raises Refused when parameters.toml has a mistake."""
    text = files("mappings").joinpath("parameters.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    found: dict[str, Parameter] = {}
    problems: list[Problem] = []
    for index, entry in enumerate(data["parameter"], start=1):
        parameter, wrong = parse_parameter(entry, f"parameters.toml, parameter {index} ({entry.get('name', '?')})")
        problems += wrong
        if parameter is not None:
            found.update({scope + parameter.name: scoped(parameter, scope) for scope in data["scopes"]})
    if problems:
        raise Refused("the catalogue of canonical parameters has mistakes", problems)
    return found
