"""Strategy files as they are found: of one pipeline stage or merged from several, as protobuf or as JSON.

Source of the JSON form: `_build_json_strategy` and `_merge_json_strategy` in mindspore/parallel/_parallel_serialization.py:

    {"current_stage": 1, "parallel_strategy_item": {node: {"stage": 0, ...}},
     "parallel_layout_item": {parameter: {"dev_matrix": [..], "tensor_map": [..], "field": 0, "opt_weight_shard_step": 0,
                                          "opt_weight_shard_size": 0, "param_split_shape": [], "indices_offset": []}}}

In a merged file each parameter's name stands after its stage's number and a dash.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from converter.recognise import recognise_opening
from converter.strategy_format import MAX_STRATEGY_FILE, ParameterLayout, check_layouts, read_stages
from converter.untrusted import opened, quoted
from mappings.errors import refuse

_BROKEN = "take the file that the training run wrote, or convert again"
_MERGED_NAME = re.compile(r"([0-9]{1,9})-(.+)", re.DOTALL)
_LAYOUTS, _ITEMS = "parallel_layout_item", "parallel_strategy_item"
_UNUSUAL = ("param_split_shape", "indices_offset")


@dataclass(frozen=True)
class Strategy:
    """How each parameter of each pipeline stage is cut; names without their stage. `merged` from the files of single stages."""

    stages: Mapping[int, tuple[ParameterLayout, ...]]
    merged: bool
    form: str  # "protobuf" or "JSON"


def read_strategy_file(path: Path) -> Strategy:
    """Read a strategy file of either form. Raises Refused for what is none, contradicts itself, or cuts in a way that is not understood."""
    with opened(path) as (descriptor, size):
        if size > MAX_STRATEGY_FILE:
            raise refuse(f"a strategy file of {size} bytes ({MAX_STRATEGY_FILE} at most)", str(path), _BROKEN)
        with open(os.dup(descriptor), "rb") as file:
            data = file.read(MAX_STRATEGY_FILE)
    if recognise_opening(data[:4096], len(data)) == "json":
        stages, layouts = _from_json(data, str(path))
        return _by_stage(stages, layouts, "JSON", str(path))
    return _by_stage(*read_stages(data, str(path)), "protobuf", str(path))


def _by_stage(stages: Sequence[int], layouts: Sequence[ParameterLayout], form: str, where: str) -> Strategy:
    """The layouts by stage. A file of several stages must say for each parameter which it is of."""
    matches = [_MERGED_NAME.fullmatch(layout.name) for layout in layouts]
    if not all(matches):
        if len(stages) > 1:
            what = f"it speaks of the stages {', '.join(map(str, stages[:8]))} and does not say which each parameter is of"
            raise refuse(what, where, _BROKEN)
        return Strategy({stages[0]: tuple(layouts)}, False, form)
    found: dict[int, list[ParameterLayout]] = {}
    for layout, match in zip(layouts, matches, strict=True):
        assert match is not None
        found.setdefault(int(match[1]), []).append(replace(layout, name=match[2]))
    for of_stage in found.values():
        check_layouts(of_stage, where)
    return Strategy({stage: tuple(found[stage]) for stage in sorted(found)}, True, form)


def is_json_strategy(path: Path) -> bool:
    """Whether a small JSON file has what makes it a strategy file."""
    if path.stat().st_size > MAX_STRATEGY_FILE:
        return False
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and _LAYOUTS in data


def _from_json(data: bytes, where: str) -> tuple[tuple[int, ...], list[ParameterLayout]]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refuse(f"not readable as JSON: {str(error)[:200]}", where, _BROKEN) from error
    items, layouts = (content.get(key) if isinstance(content, dict) else None for key in (_ITEMS, _LAYOUTS))
    if not isinstance(items, dict) or not isinstance(layouts, dict):
        raise refuse(f"not a MindSpore strategy file: it has no {_ITEMS} or no {_LAYOUTS}", where, _BROKEN)
    said = [item.get("stage") if isinstance(item, dict) else None for item in items.values()]
    stages = [stage for stage in said if type(stage) is int and 0 <= stage < 2**31]
    if not stages or len(stages) != len(said):
        raise refuse("it does not say its pipeline stage", where, _BROKEN)
    found = [_json_layout(name, item, where) for name, item in layouts.items()]
    check_layouts(found, where)
    return tuple(dict.fromkeys(stages)), found


def _json_layout(name: str, item: Any, where: str) -> ParameterLayout:
    if not isinstance(item, dict):
        raise refuse(f"the layout of {quoted(name)} is no object", where, _BROKEN)
    matrix, tensor_map = item.get("dev_matrix"), item.get("tensor_map")
    step, size = item.get("opt_weight_shard_step", 0), item.get("opt_weight_shard_size", 0)
    numbers = [*matrix, *tensor_map, step, size] if isinstance(matrix, list) and isinstance(tensor_map, list) else [None]
    if not all(type(number) is int and abs(number) < 2**31 for number in numbers):
        raise refuse(f"the layout of {quoted(name)} holds something else than numbers", where, _BROKEN)
    if item.get("field") or any(item.get(key) for key in _UNUSUAL):
        raise refuse(f"{quoted(name)} is cut unevenly or twice ({', '.join(_UNUSUAL)}, field)", where, _BROKEN)
    return ParameterLayout(name, tuple(matrix), tuple(tensor_map), step, size)  # type: ignore[arg-type]
