"""MindSpore strategy files against MindSpore's own messages, and against its tools that cut and merge checkpoints by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.ckpt_format import ckpt_layout, read_ckpt
from converter.protobuf_wire import bytes_field, integer_field
from converter.safetensors_format import library_order, read_header, safetensors_layout
from converter.strategy_format import ParameterLayout, read_strategy, write_strategy
from mappings.errors import Refused
from tests.converter.stored_bytes import damaged, read_words, write_layout


@pytest.fixture(scope="module", autouse=True)
def _mindspore() -> None:
    """Imported before Hypothesis watches: MindSpore raises the recursion limit."""
    import mindspore  # noqa: F401


NAMES = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="-"), min_size=1, max_size=12)


@st.composite
def parameter_layouts(draw: st.DrawFn) -> list[ParameterLayout]:
    matrix = tuple(draw(st.lists(st.integers(1, 200), min_size=1, max_size=4)))
    layouts = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=6, unique=True)):
        axes = draw(st.permutations(range(len(matrix))))
        cut = draw(st.lists(st.booleans(), max_size=len(axes)))
        tensor_map = tuple(axis if used else -1 for axis, used in zip(axes, cut, strict=False))
        layouts.append(ParameterLayout(name, matrix, tensor_map, draw(st.integers(0, 2**31 - 1)), draw(st.integers(-1, 2**31 - 1))))
    return layouts


def _message(layouts: Sequence[ParameterLayout], stage: int) -> Any:
    """The same strategy as a message of MindSpore's."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap(current_stage=1)
    message.parallel_strategy_item.add(node_name=f"stage_{stage}").parallel_strategys.stage = stage
    for layout in layouts:
        item = message.parallel_layout_item.add(param_name=layout.name).parallel_layouts
        item.dev_matrix.add().dim.extend(layout.device_matrix)
        item.tensor_map.add().dim.extend(layout.tensor_map)
        item.param_split_shape.add()
        item.indices_offset.add()
        item.field = 0
        item.opt_weight_shard_step = layout.opt_weight_shard_step
        item.opt_weight_shard_size = layout.opt_weight_shard_size
    return message


@given(parameter_layouts(), st.integers(0, 1000))
def test_the_bytes_are_those_of_mindspores_own_message(layouts: list[ParameterLayout], stage: int) -> None:
    assert write_strategy(layouts, stage) == _message(layouts, stage).SerializeToString()


@given(parameter_layouts(), st.integers(0, 1000))
def test_what_mindspore_writes_is_read(layouts: list[ParameterLayout], stage: int) -> None:
    message = _message(layouts, stage)
    message.current_stage = 37
    other = message.parallel_strategy_item.add(node_name="MatMul-op1").parallel_strategys
    other.stage = stage
    other.parallel_strategy.add().dim.extend([1, 2])
    assert read_strategy(message.SerializeToString()) == (stage, layouts)


TP, PP = 2, 2
SHAPES: dict[int, dict[str, tuple[str, tuple[int, ...], int | None]]] = {  # by stage: dtype, shape, axis that tensor parallelism cuts
    0: {
        "embedding.tokens.embedding_table": ("F32", (16, 6), 0),
        "layers.0.attention.q_proj.weight": ("BF16", (8, 6), 0),
        "layers.0.attention.o_proj.weight": ("BF16", (6, 8), 1),
        "layers.0.attention_norm.gamma": ("F32", (6,), None),
        "adam_m.layers.0.mlp.down_proj.weight": ("F32", (6, 4), 1),
        "layers.0.mlp.down_proj.weight": ("F16", (6, 4), 1),
    },
    1: {
        "layers.1.attention.o_proj.weight": ("F32", (6, 8), 1),
        "layers.1.mlp.experts.down_proj": ("BF16", (4, 6, 8), 2),
        "layers.1.attention.q_proj.bias": ("BF16", (8,), 0),
        "final_norm.gamma": ("BF16", (6,), None),
        "lm_head.weight": ("F32", (16, 6), 0),
    },
}


def _full() -> dict[str, np.ndarray[Any, Any]]:
    """Random tensors as words, std 0.5 in every type."""
    generator = np.random.default_rng(5)
    full: dict[str, np.ndarray[Any, Any]] = {}
    for name, (dtype, shape, _) in (item for stage in SHAPES.values() for item in stage.items()):
        values = (generator.normal(size=shape) * 0.5).astype(np.float16 if dtype == "F16" else np.float32)
        # The upper half of a little-endian float32 is a bfloat16
        full[name] = values.view(np.uint16)[..., 1::2].copy() if dtype == "BF16" else values.view(f"u{values.itemsize}")
    return full


def _layouts(stage: int, tp: int) -> list[ParameterLayout]:
    """Tensor parallelism over `tp` devices; in the arrangement there is a data-parallel axis of one before it."""
    return [
        ParameterLayout(name, (1, tp), tuple(0 if axis == cut else -1 for axis in range(len(shape))))
        for name, (_, shape, cut) in SHAPES[stage].items()
    ]


def _slice(words: np.ndarray[Any, Any], cut: int | None, tp: int, rank: int) -> np.ndarray[Any, Any]:
    return words if cut is None else np.array_split(words, tp, cut)[rank]


def _write_rank_tree(root: Path, form: str) -> None:
    full = _full()
    for stage, rank in product(SHAPES, range(TP)):
        path = root / f"rank_{stage * TP + rank}" / f"checkpoint_{stage * TP + rank}.{form}"
        path.parent.mkdir(parents=True)
        slices = {name: (dtype, _slice(full[name], cut, TP, rank)) for name, (dtype, _, cut) in SHAPES[stage].items()}
        items = [(name, dtype, words.shape) for name, (dtype, words) in slices.items()]
        items = [items[index] for index in library_order(items)]
        layout = ckpt_layout(items) if form == "ckpt" else safetensors_layout(items, {"format": "ms", "remove_redundancy": "False"})
        write_layout(path, layout, [slices[name][1].tobytes() for name, _, _ in items])


def _merged_strategy(folder: Path, stages: Mapping[int, Sequence[ParameterLayout]]) -> Path:
    """One strategy file per stage, merged by MindSpore."""
    import mindspore as ms

    folder.mkdir()
    for stage, layouts in stages.items():
        (folder / f"ckpt_strategy_rank_{stage * TP}.ckpt").write_bytes(write_strategy(layouts, stage))
    merged = folder.parent / f"{folder.name}.ckpt"
    ms.merge_pipeline_strategys(str(folder), str(merged))
    return merged


def test_mindspore_merges_the_files_of_the_stages(tmp_path: Path) -> None:
    stages = {stage: _layouts(stage, TP) for stage in SHAPES}
    merged = _merged_strategy(tmp_path / "strategy", stages)
    _, layouts = read_strategy(merged.read_bytes())
    expected = {f"{stage}-{layout.name}": layout for stage in stages for layout in stages[stage]}
    assert {layout.name: layout for layout in layouts} == {name: replace(layout, name=name) for name, layout in expected.items()}


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
@pytest.mark.parametrize("target_tp", [1, 2, 4])
def test_mindspore_reshards_a_tree_of_ours_by_our_strategies_without_a_wrong_tensor(form: str, target_tp: int, tmp_path: Path) -> None:
    import mindspore as ms

    _write_rank_tree(tmp_path / "tree", form)
    source = _merged_strategy(tmp_path / "source", {stage: _layouts(stage, TP) for stage in SHAPES})
    target = tmp_path / "target.ckpt"
    target.write_bytes(write_strategy([layout for stage in SHAPES for layout in _layouts(stage, target_tp)], 0))
    # To .ckpt from both: safetensors 0.8 writes wrong bytes for the strided slices that MindSpore hands to it
    ms.transform_checkpoints(str(tmp_path / "tree"), str(tmp_path / "out"), "full", str(source), str(target), output_format="ckpt")
    full = _full()
    for rank in range(target_tp):
        (path,) = (tmp_path / "out" / f"rank_{rank}").glob("*.ckpt")
        made = {tensor.name: (tensor.dtype, read_words(tensor)) for tensor in read_ckpt(path)}
        expected = {name: entry for stage in SHAPES.values() for name, entry in stage.items()}
        assert made.keys() == expected.keys()
        for name, (dtype, _, cut) in expected.items():
            assert made[name][0] == dtype
            np.testing.assert_array_equal(made[name][1], _slice(full[name], cut, target_tp, rank), name)


def test_mindspore_merges_a_safetensors_tree_of_ours_into_whole_tensors(tmp_path: Path) -> None:
    import mindspore as ms

    _write_rank_tree(tmp_path / "tree", "safetensors")
    source = _merged_strategy(tmp_path / "source", {stage: _layouts(stage, TP) for stage in SHAPES})
    ms.unified_safetensors(str(tmp_path / "tree"), str(source), str(tmp_path / "unified"))
    made = {
        tensor.name: (tensor.dtype, read_words(tensor))
        for path in (tmp_path / "unified").glob("*.safetensors")
        for tensor in read_header(path)[0]
    }
    full = _full()
    assert made.keys() == full.keys()
    for stage in SHAPES.values():
        for name, (dtype, _, _) in stage.items():
            assert made[name][0] == dtype
            np.testing.assert_array_equal(made[name][1], full[name], name)


GOOD = ParameterLayout("w", (2, 4), (0, -1))


@pytest.mark.parametrize(
    ("layouts", "fault"),
    [
        ([], "without a single layout"),
        ([GOOD, GOOD], "two layouts have this name"),
        ([replace(GOOD, tensor_map=(2, -1))], "does not point to different axes"),
        ([replace(GOOD, tensor_map=(0, 0))], "does not point to different axes"),
        ([replace(GOOD, tensor_map=(-2, 0))], "something else than sizes"),
        ([replace(GOOD, tensor_map=(-1,) * 33)], "33 axes"),
        ([replace(GOOD, device_matrix=())], "device matrix"),
        ([replace(GOOD, device_matrix=(0, 4))], "device matrix"),
        ([replace(GOOD, device_matrix=(2**16, 2**16))], "device matrix"),
        ([replace(GOOD, opt_weight_shard_size=-2)], "optimizer shard"),
        ([replace(GOOD, name="w\n")], "unprintable"),
        ([replace(GOOD, name="block-0.weight")], "a name with a dash"),
    ],
)
def test_layouts_that_mindspore_could_not_use_are_not_written(layouts: list[ParameterLayout], fault: str) -> None:
    with pytest.raises(Refused, match=fault):
        write_strategy(layouts, 0)


def _unusual(change: str) -> bytes:
    message = _message([GOOD], 0)
    item = message.parallel_layout_item[0].parallel_layouts
    match change:
        case "field":
            item.field = 4
        case "param_split_shape":
            item.param_split_shape[0].dim.extend([3, 5])
        case "indices_offset":
            item.indices_offset[0].dim.append(1)
        case "tensor_map":
            item.tensor_map.add().dim.extend([1, -1])
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("change", ["field", "param_split_shape", "indices_offset", "tensor_map"])
def test_cuts_that_are_not_understood_are_refused_and_not_guessed(change: str) -> None:
    with pytest.raises(Refused, match="'w' is cut unevenly or twice"):
        read_strategy(_unusual(change))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "does not say its pipeline stage"),
        (integer_field(1, 1) + bytes_field(2, bytes_field(1, b"n") + bytes_field(2, integer_field(1, 0))), "without a single layout"),
        (write_strategy([GOOD], 0)[:-3], "after the message around it"),
        (write_strategy([GOOD], 0) + integer_field(9, 1), "field 9"),
        (bytes_field(2, b"") + write_strategy([GOOD], 0), "is there 0 times"),
        (b"<html>not found</html>", "not a MindSpore strategy file"),
    ],
)
def test_a_damaged_strategy_file_is_refused_with_its_fault(data: bytes, fault: str) -> None:
    with pytest.raises(Refused, match=fault):
        read_strategy(data)


@settings(max_examples=200)
@given(damaged(write_strategy([GOOD, ParameterLayout("v.bias", (2, 4), (1,), 2, -1)], 3), 200))
def test_damage_is_refused_or_means_what_protobuf_reads(data: bytes) -> None:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    try:
        stage, layouts = read_strategy(data)
    except Refused:
        return
    parsed = ParallelStrategyMap()
    parsed.MergeFromString(data)
    assert parsed.parallel_strategy_item[0].parallel_strategys.stage == stage
    for item, layout in zip(parsed.parallel_layout_item, layouts, strict=True):
        assert item.param_name == layout.name
        assert tuple(item.parallel_layouts.dev_matrix[0].dim) == layout.device_matrix
        assert tuple(item.parallel_layouts.tensor_map[0].dim) == layout.tensor_map
        assert math.prod(layout.device_matrix) > 0


@given(st.binary(max_size=200))
def test_random_bytes_are_no_strategy(data: bytes) -> None:
    with pytest.raises(Refused):
        read_strategy(data)
