"""Executing plans: numpy assigns the same views, torch makes the same casts; faults of disks, sources and users leave nothing half done."""

from __future__ import annotations

import os
from itertools import combinations, pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converter import gather
from converter.dtypes import item_size, word_type
from converter.execute import execute, fill, read_blocks
from converter.plan import Plan, TargetFile
from converter.strided import refuse_holes
from converter.tensors import StoredTensor
from mappings.errors import Refused
from tests.converter.executing import (
    LAYOUTS,
    TORCH,
    Array,
    Sources,
    check_files,
    contents,
    new_target,
    plans,
)


@given(
    data=st.data(),
    workers=st.integers(1, 3),
    buffer=st.sampled_from([64, 200, 4096]),
    call=st.sampled_from([0, 30, 1 << 20]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_file_holds_what_numpy_assigns_whatever_the_buffers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, workers: int, buffer: int, call: int
) -> None:
    folder = tmp_path_factory.mktemp("source")
    output = tmp_path_factory.mktemp("output")
    plan, expected = data.draw(plans(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "CALL_BYTES", call)
        results = execute(plan, output, workers=workers, layouts=LAYOUTS, buffer_bytes=buffer)
    check_files(plan, output, expected, results)
    for file in plan.files:
        for tensor in file.tensors:
            words = np.full(tensor.shape, 77, word_type(tensor.dtype))
            fill(tensor, words)
            assert words.tobytes() == expected[file.path, tensor.name]
            blocks = [(first, bytes(block)) for first, block in read_blocks(tensor)]
            assert b"".join(block for _, block in blocks) == expected[file.path, tensor.name]
            lengths = [len(block) // item_size(tensor.dtype) for _, block in blocks]
            assert [first for first, _ in blocks] == [sum(lengths[:index]) for index in range(len(lengths))]


def row_parallel_plan(
    folder: Path, ranks: int, rows: int = 700, columns: int = 4096, dtype: str = "BF16"
) -> tuple[Plan, StoredTensor, Array]:
    sources = Sources(folder)
    source = sources.add("down_proj", (rows, columns), dtype)
    base = sources.arrays["down_proj"]
    width = columns // ranks
    files = []
    for rank in range(ranks):
        target = new_target("down_proj.weight", (rows, width), dtype, "down_proj.weight")
        target.assign(target.array, source, base[:, rank * width : (rank + 1) * width], base)
        files.append(TargetFile(f"rank_{rank}/checkpoint.torn", "torn", (target.tensor,)))
    return Plan(tuple(files)), source, base


@pytest.mark.parametrize("ranks", [2, 16])
def test_each_source_byte_is_read_once_for_all_ranks_of_a_row_parallel_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    plan, source, base = row_parallel_plan(tmp_path, ranks)
    counts = np.zeros(source.path.stat().st_size, int)
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        counts[offset : offset + count] += 1
        return count

    monkeypatch.setattr(os, "preadv", counting)
    execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS, buffer_bytes=1 << 20)
    extent = source.extents[0]
    assert (counts[extent.offset : extent.offset + extent.length] == 1).all()
    width = base.shape[1] // ranks
    for rank, file in enumerate(plan.files):
        written = contents(tmp_path / "out" / file.path, file)["down_proj.weight"]
        assert written == base[:, rank * width : (rank + 1) * width].tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F64"])
@pytest.mark.parametrize("buffer", [1 << 16, 1 << 22])
def test_a_large_matrix_is_transposed_in_small_buffers(tmp_path: Path, dtype: str, buffer: int) -> None:
    sources = Sources(tmp_path)
    source = sources.add("c_attn", (700, 1300), dtype)
    base = sources.arrays["c_attn"]
    target = new_target("qkv.weight", (1300, 700), dtype, "qkv")
    target.assign(target.array, source, base.T, base)
    words = np.empty((1300, 700), word_type(dtype))
    fill(target.tensor, words)
    np.testing.assert_array_equal(words, base.T)
    plan = Plan((TargetFile("a.torn", "torn", (target.tensor,)),))
    results = execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS, buffer_bytes=buffer)
    check_files(plan, tmp_path / "out", {("a.torn", "qkv.weight"): base.T.tobytes()}, results)


def test_ranks_that_share_a_target_get_the_same_bytes_from_one_reading(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    source = sources.add("norm", (3000,), "F32")
    target = new_target("norm.gamma", (3000,), "F32", "norm")
    target.assign(target.array, source, sources.arrays["norm"], sources.arrays["norm"])
    tensor = target.tensor
    plan = Plan(tuple(TargetFile(f"{rank}.torn", "torn", (tensor,)) for rank in range(4)))
    results = execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS)
    check_files(plan, tmp_path / "out", {(f"{rank}.torn", "norm.gamma"): target.array.tobytes() for rank in range(4)}, results)


def test_rows_of_a_strided_buffer_that_ends_within_its_last_row_are_read(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    source = sources.add("view", (25,), "F32")
    base = sources.arrays["view"]
    rows = np.lib.stride_tricks.as_strided(base[1:], (3, 4), (40, 4))  # rows of 10 words, of which the buffer holds 2.5
    halves = [new_target("half", (3, 2), "F32", "view") for _ in range(2)]
    for index, target in enumerate(halves):
        target.assign(target.array, source, rows[:, 2 * index : 2 * index + 2], base)
    plan = Plan(tuple(TargetFile(f"{index}.torn", "torn", (target.tensor,)) for index, target in enumerate(halves)))
    results = execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    check_files(plan, tmp_path / "out", {(f"{index}.torn", "half"): target.array.tobytes() for index, target in enumerate(halves)}, results)


@pytest.mark.parametrize("target_dtype", ["F32", "BF16"])
@pytest.mark.parametrize("expanded", [axes for count in (1, 2, 3) for axes in combinations(range(3), count)])
@pytest.mark.parametrize(("buffer", "call"), [(64, 0), (1024, 1 << 20), (1 << 22, 16 << 10)])
def test_expanded_axes_without_a_stride_are_repeated_in_every_order_of_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int, call: int, expanded: tuple[int, ...], target_dtype: str
) -> None:
    monkeypatch.setattr(gather, "CALL_BYTES", call)
    shape = (5, 7, 40)
    values = torch.from_numpy(np.random.default_rng(3).standard_normal([1 if axis in expanded else shape[axis] for axis in range(3)]))
    source = Sources(tmp_path)
    stored = source.add("norm", tuple(values.shape), "F32", 2, words_of(values.float()))
    base = source.arrays["norm"]
    for order in permutations(range(3)):
        expected = values.float().expand(shape).permute(order).to(TORCH[target_dtype]).contiguous()
        view = np.broadcast_to(base, shape).transpose(order)
        for cuts in ([0, view.shape[0]], [0, 2, view.shape[0]]):
            halves = []
            for low, high in pairwise(cuts):
                target = new_target("norm", (high - low, *view.shape[1:]), target_dtype, "norm")
                target.assign(target.array, stored, view[low:high], base)
                halves.append(target.tensor)
            plan = Plan(tuple(TargetFile(f"{index}.torn", "torn", (half,)) for index, half in enumerate(halves)))
            refuse_holes(plan)
            execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS, buffer_bytes=buffer)
            written = b"".join(contents(tmp_path / "out" / file.path, file)["norm"] for file in plan.files)
            assert written == words_of(expected).tobytes()


def test_padding_is_zero_and_empty_tensors_and_files_are_written(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    noise = sources.add("noise", (1000,), "U8")
    source = sources.add("embedding", (100, 8), "F32")
    first = new_target("noise", (1000,), "U8", "noise")
    first.assign(first.array, noise, sources.arrays["noise"], sources.arrays["noise"])
    padded = new_target("embedding", (128, 8), "F32", "embedding")
    padded.assign(padded.array[:100], source, sources.arrays["embedding"], sources.arrays["embedding"])
    padded.padding = 28 * 8
    empty = new_target("empty", (0, 8), "F32", "empty")
    files = (TargetFile("a.torn", "torn", (first.tensor, padded.tensor, empty.tensor)), TargetFile("sub/none.torn", "torn", ()))
    results = execute(Plan(files), tmp_path / "out", workers=1, layouts=LAYOUTS, buffer_bytes=1024)
    expected = {("a.torn", target.name): target.array.tobytes() for target in (first, padded, empty)}
    check_files(Plan(files), tmp_path / "out", expected, results)


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 6e-8, 5.9e-8, 65504.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-11, 1.0 + 3 * 2**-11]


def cast_values(dtype: str) -> torch.Tensor:
    """Values of all magnitudes, with halves between two neighbours of the narrower types and a little more and less than that."""
    rng = np.random.default_rng(7)
    wide = rng.standard_normal(5000) * 2.0 ** rng.integers(-30, 16, 5000)
    short = wide.astype(np.float32).view(np.uint32)
    halves = [
        (short & 0xFFFF0000 | 0x8000).view(np.float32).astype(np.float64),
        (short & 0xFFFFE000 | 0x1000).view(np.float32).astype(np.float64),
    ]
    near = [value * (1 + sign * 2.0**-40) for value in halves for sign in (-1, 0, 1)]
    return torch.from_numpy(np.concatenate([np.array(SPECIAL), wide, *near])).to(TORCH[dtype])


def words_of(tensor: torch.Tensor) -> Array:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    array: Array = tensor.view(kind).numpy()
    return array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[tensor.element_size()])


@pytest.mark.parametrize("target_dtype", TORCH)
@pytest.mark.parametrize("source_dtype", TORCH)
def test_casts_round_as_torch_does_and_keep_nan(tmp_path: Path, source_dtype: str, target_dtype: str) -> None:
    values = cast_values(source_dtype)
    values = values[: len(values) // 6 * 6].reshape(6, -1)
    sources = Sources(tmp_path)
    source = sources.add("weight", tuple(values.shape), source_dtype, 2, words_of(values))
    base = sources.arrays["weight"]
    straight = new_target("straight", tuple(values.shape), target_dtype, "w")
    straight.assign(straight.array, source, base, base)
    turned = new_target("turned", tuple(values.shape)[::-1], target_dtype, "w")
    turned.assign(turned.array, source, base.T, base)
    for target, expected in ((straight, values.to(TORCH[target_dtype])), (turned, values.to(TORCH[target_dtype]).T.contiguous())):
        words = np.empty(target.array.shape, target.array.dtype)
        fill(target.tensor, words)
        got = torch.from_numpy(words.view({2: np.int16, 4: np.int32, 8: np.int64}[words.itemsize])).view(TORCH[target_dtype])
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(nan=0.0).signbit(), expected.nan_to_num(nan=0.0).signbit())
        assert torch.equal(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def overflow_plan(folder: Path) -> Plan:
    sources = Sources(folder)
    files = []
    for number, large in enumerate([[70000.0, -1e30, np.inf, np.nan], [3.0, np.inf, -np.inf, 65504.0]]):
        values = np.array(large, np.float32)
        source = sources.add(f"w{number}", (4,), "F32", 1, values)
        target = new_target(f"layers.{number}.weight", (4,), "F16", f"w{number}")
        target.assign(target.array, source, sources.arrays[source.name], sources.arrays[source.name])
        files.append(TargetFile(f"{number}.torn", "torn", (target.tensor,)))
    return Plan(tuple(files))


def test_a_cast_that_makes_finite_values_infinite_is_refused_by_tensor_with_their_number(tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        execute(overflow_plan(tmp_path), tmp_path / "out", workers=2, layouts=LAYOUTS)
    assert [(problem.where, problem.what.split()[0]) for problem in refused.value.problems] == [("layers.0.weight", "2")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["1.torn"]


def test_overflow_is_written_as_infinity_where_that_is_allowed(tmp_path: Path) -> None:
    plan = overflow_plan(tmp_path)
    execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS, allow_overflow=True)
    values = np.frombuffer(contents(tmp_path / "out" / "0.torn", plan.files[0])["layers.0.weight"], np.float16)
    np.testing.assert_array_equal(values, np.array([np.inf, -np.inf, np.inf, np.nan], np.float16))


def test_integers_are_never_cast(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    source = sources.add("position_ids", (8,), "I64")
    target = new_target("position_ids", (8,), "I32", "p")
    target.assign(target.array, source, sources.arrays["position_ids"], sources.arrays["position_ids"])
    with pytest.raises(Refused, match="cannot become I32"):
        execute(Plan((TargetFile("a.torn", "torn", (target.tensor,)),)), tmp_path / "out", workers=1, layouts=LAYOUTS)
