"""MindSpore strategy files: how each parameter of a pipeline stage is cut over devices.

Source: mindspore/train/node_strategy_pb2.py, read by mindspore/parallel/_parallel_serialization.py:

    ParallelStrategyMap  { current_stage = 1; repeated ParallelStrategyItem = 2; repeated ParallelLayoutItem = 3 }
    ParallelStrategyItem { node_name = 1; ParallelStrategys = 2 { stage = 1; ... } }
    ParallelLayoutItem   { param_name = 1; ParallelLayouts = 2 { dev_matrix = 1; tensor_map = 2; param_split_shape = 3; indices_offset = 4;
                           field = 5; opt_weight_shard_step = 6; opt_weight_shard_size = 7 } }

The first four of a layout are repeated messages { repeated dim = 1 }. MindSpore writes one of each; two tensor_maps would mean an axis
that is cut along two axes of the devices, which is not supported here.
`merge_pipeline_strategys` takes a file's stage from its first ParallelStrategyItem, so that there must be one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from converter.protobuf_wire import (
    LENGTH,
    VARINT,
    BytesSource,
    Field,
    WireError,
    bytes_field,
    fields,
    integer_field,
    integer_fields,
    read_integers,
)
from converter.untrusted import name_problem, quoted, shape_problem
from mappings.errors import Problem, Refused, refuse

_BROKEN = "take the file that the training run wrote, or convert again"
_CURRENT_STAGE = 1  # MindSpore's own writer counts its checkpoints here; its readers ignore it
_INT32 = 2**31
MAX_STRATEGY_FILE = 64 * 2**20  # bytes; a parameter takes about a hundred


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How one parameter is cut over the devices of its stage.

    `device_matrix` is the arrangement of the devices; `tensor_map` tells for each axis of the parameter along which axis of the arrangement
    it is cut, counted from the right, -1 for none. `opt_weight_shard_size` is into how many the optimizer cuts axis 0 once more
    (0: not at all, -1: over all replicas), `opt_weight_shard_step` the distance of two such ranks.
    """

    name: str
    device_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0


def write_strategy(layouts: Sequence[ParameterLayout], stage: int) -> bytes:
    """The strategy file of pipeline stage `stage`. Every parameter of the stage needs a layout: MindSpore drops others without a word.

    Raises Refused for layouts that contradict themselves, names with a dash, and no layout at all: MindSpore cannot use such files.
    """
    _check_writable(layouts)
    return integer_field(1, _CURRENT_STAGE) + _stage_item(stage) + b"".join(bytes_field(3, _layout_item(layout)) for layout in layouts)


def write_merged(stages: Mapping[int, Sequence[ParameterLayout]]) -> bytes:
    """What `merge_pipeline_strategys` makes of the strategy files of these stages: each name after its stage's number and a dash.

    Raises Refused as `write_strategy` does.
    """
    for layouts in stages.values():
        _check_writable(layouts)
    items = [
        bytes_field(3, _layout_item(replace(layout, name=f"{stage}-{layout.name}")))
        for stage, layouts in stages.items()
        for layout in layouts
    ]
    return integer_field(1, _CURRENT_STAGE) + b"".join(map(_stage_item, stages)) + b"".join(items)


def _check_writable(layouts: Sequence[ParameterLayout]) -> None:
    where = "the strategy file to be written"
    check_layouts(layouts, where)
    dashed = [layout.name for layout in layouts if "-" in layout.name]
    if dashed:
        what = "a name with a dash, which MindSpore's tools take for the end of a pipeline stage's number"
        raise Refused(what, [Problem(what, f"{where}: {quoted(name)}", "rename the parameter") for name in dashed[:20]])


def _stage_item(stage: int) -> bytes:
    return bytes_field(2, bytes_field(1, f"stage_{stage}".encode()) + bytes_field(2, integer_field(1, stage)))


def _layout_item(layout: ParameterLayout) -> bytes:
    message = b"".join(
        [
            bytes_field(1, integer_fields(1, layout.device_matrix)),
            bytes_field(2, integer_fields(1, layout.tensor_map)),
            bytes_field(3, b""),
            bytes_field(4, b""),
            integer_field(5, 0),
            integer_field(6, layout.opt_weight_shard_step),
            integer_field(7, layout.opt_weight_shard_size),
        ]
    )
    return bytes_field(1, layout.name.encode()) + bytes_field(2, message)


def read_strategy(data: bytes, where: str = "strategy file") -> tuple[int, list[ParameterLayout]]:
    """The stage and the layouts of a strategy file, `where` being its name for messages; a merged file gives the first of its stages.

    Raises Refused for what is no strategy file, has no layout, contradicts itself, or cuts a parameter unevenly or one axis of it twice.
    """
    stages, layouts = read_stages(data, where)
    return stages[0], layouts


def read_stages(data: bytes, where: str) -> tuple[tuple[int, ...], list[ParameterLayout]]:
    """All stages that a strategy file names, in its order, and its layouts. Raises Refused as `read_strategy` does."""
    if len(data) > MAX_STRATEGY_FILE:
        raise refuse(f"a strategy file of {len(data)} bytes ({MAX_STRATEGY_FILE} at most)", where, _BROKEN)
    source = BytesSource(data)
    stages: list[int] = []
    layouts = []
    try:
        for field in fields(source, 0, len(data)):
            if field.number == 2:
                _text(source, _one(source, field, 1))
                stages.append(_integer(source, _one(source, field, 2), 1))
            elif field.number == 3:
                layouts.append(_read_layout(source, field))
            elif field.number != 1:
                raise WireError(f"field {field.number} at byte {field.start} is not of a strategy file")
        if not stages or not all(0 <= stage < _INT32 for stage in stages):
            raise WireError("it does not say its pipeline stage")
    except WireError as error:
        raise refuse(f"not a MindSpore strategy file, or a damaged one: {error}", where, _BROKEN) from error
    check_layouts(layouts, where)
    return tuple(dict.fromkeys(stages)), layouts


def _read_layout(source: BytesSource, item: Field) -> ParameterLayout:
    name = _text(source, _one(source, item, 1))
    layouts = _one(source, item, 2)
    if layouts.wire != LENGTH:
        raise WireError(f"the layout at byte {item.start} is malformed")
    several = [field.number for field in fields(source, layouts.start, layouts.end)].count(2) > 1
    if several or any(_dims(source, layouts, number) for number in (3, 4)) or _integer(source, layouts, 5):
        raise WireError(f"{quoted(name)} is cut unevenly or twice (param_split_shape, indices_offset, field, tensor_map)")
    step, size = _integer(source, layouts, 6), _integer(source, layouts, 7)
    return ParameterLayout(name, _dims(source, layouts, 1), _dims(source, layouts, 2), step, size)


def _text(source: BytesSource, field: Field) -> str:
    if field.wire != LENGTH:
        raise WireError(f"no text at byte {field.start}")
    try:
        return source.read(field.start, field.end - field.start).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"the text at byte {field.start} is not UTF-8") from error


def _one(source: BytesSource, message: Field, number: int) -> Field:
    """The only field of this number in a message."""
    if message.wire != LENGTH:
        raise WireError(f"no message at byte {message.start}")
    found = [field for field in fields(source, message.start, message.end) if field.number == number]
    if len(found) != 1:
        raise WireError(f"field {number} is there {len(found)} times in the message at byte {message.start}, not once")
    return found[0]


def _dims(source: BytesSource, layouts: Field, number: int) -> tuple[int, ...]:
    message = _one(source, layouts, number)
    if message.wire != LENGTH:
        raise WireError(f"no message at byte {message.start}")
    dims: list[int] = []
    for field in fields(source, message.start, message.end):
        if field.number != 1:
            raise WireError(f"field {field.number} at byte {field.start} is not of a list of dims")
        dims.extend(read_integers(source, field))
    return tuple(dims)


def _integer(source: BytesSource, message: Field, number: int) -> int:
    field = _one(source, message, number)
    if field.wire != VARINT:
        raise WireError(f"no integer at byte {field.start}")
    return next(iter(read_integers(source, field)))


def check_layouts(layouts: Sequence[ParameterLayout], where: str) -> None:
    """Raises Refused for no layout at all, two of one name, and those that contradict themselves."""
    if not layouts:
        raise refuse("a strategy without a single layout", where, _BROKEN)
    names: set[str] = set()
    problems = []
    for layout in layouts:
        problem = "two layouts have this name" if layout.name in names else _layout_problem(layout)
        names.add(layout.name)
        if problem:
            problems.append(Problem(problem, f"{where}: {quoted(layout.name)}", _BROKEN))
    if problems:
        raise Refused("layouts that contradict themselves", problems[:20])


def _layout_problem(layout: ParameterLayout) -> str | None:
    matrix, cuts = layout.device_matrix, [axis for axis in layout.tensor_map if axis != -1]
    if problem := name_problem(layout.name) or shape_problem(matrix) or shape_problem([axis + 1 for axis in layout.tensor_map]):
        return problem
    if not matrix or 0 in matrix or math.prod(matrix) >= _INT32:
        return f"the device matrix {_shown(matrix)} is not one"
    if any(axis >= len(matrix) for axis in cuts) or len(set(cuts)) != len(cuts):
        return f"the tensor map {_shown(layout.tensor_map)} does not point to different axes of the device matrix {_shown(matrix)}"
    if not 0 <= layout.opt_weight_shard_step < _INT32 or not -1 <= layout.opt_weight_shard_size < _INT32:
        return f"the optimizer shard step {layout.opt_weight_shard_step} and size {layout.opt_weight_shard_size}"
    return None


def _shown(values: Iterable[int]) -> str:
    return f"[{', '.join(map(str, values))}]"
