"""Executing plans: numpy assigns the same views, torch makes the same casts; faults of disks, sources and users leave nothing half done."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from converter import gather, open_files
from converter.dtypes import item_size, word_type
from converter.execute import execute, fill, read_blocks
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.strided import refuse_holes
from converter.tensors import Extent, FileIdentity, FileLayout, StoredTensor
from mappings.errors import Refused

Array = np.ndarray[Any, np.dtype[Any]]

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def torn_layout(file: TargetFile) -> FileLayout:
    """A made-up format: each tensor in three pieces with a mark before each, and the pieces in reverse order in the file."""
    literals, extents, position = [], [], 0
    for tensor in file.tensors:
        cuts = [0, tensor.nbytes // 3, tensor.nbytes // 2, tensor.nbytes]
        pieces = []
        for low, high in reversed(list(pairwise(cuts))):
            literals.append((position, b"MARK"))
            pieces.append(Extent(position + 4, high - low))
            position += 4 + high - low
        extents.append(tuple(reversed(pieces)))
    return FileLayout(position, tuple(literals), tuple(extents))


LAYOUTS = {"torn": torn_layout}


def contents(path: Path, file: TargetFile) -> dict[str, bytes]:
    """Each tensor's bytes in a written file, every other byte checked."""
    data, layout = path.read_bytes(), torn_layout(file)
    assert len(data) == layout.size
    assert all(data[offset : offset + len(literal)] == literal for offset, literal in layout.literals)
    return {
        tensor.name: b"".join(data[piece.offset : piece.offset + piece.length] for piece in pieces)
        for tensor, pieces in zip(file.tensors, layout.extents, strict=True)
    }


@dataclass
class Sources:
    """Source tensors in files, each with its array of words."""

    folder: Path
    seed: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], dtype: str = "BF16", pieces: int = 1, values: Array | None = None) -> StoredTensor:
        """A tensor in a file of its own, in `pieces` extents that lie apart in the file."""
        rng = np.random.default_rng([self.seed, len(self.arrays)])
        word = word_type(dtype)
        words = rng.integers(0, np.iinfo(word).max, shape, word, endpoint=True) if values is None else values.view(word)
        data, item = words.tobytes(), item_size(dtype)
        cuts = [index * words.size // pieces * item for index in range(pieces + 1)]
        path = self.folder / f"{name}.bin"
        extents = []
        with path.open("wb") as file:
            for low, high in pairwise(cuts):
                file.write(rng.bytes(int(rng.integers(1, 50))))
                extents.append(Extent(file.tell(), high - low))
                file.write(data[low:high])
        self.arrays[name] = words
        return StoredTensor(name, path, dtype, shape, tuple(extents))


@dataclass
class Target:
    """A target being planned: what numpy makes of it, and the copies."""

    name: str
    array: Array
    dtype: str
    group: str
    copies: list[StridedCopy] = field(default_factory=list)
    padding: int = 0

    def assign(self, target: Array, source: StoredTensor, view: Array, base: Array) -> None:
        """`target[...] = view`, planned and done; `target` is a view of this array, `view` one of the source's."""
        item, source_item = self.array.itemsize, base.itemsize
        offset = (target.__array_interface__["data"][0] - self.array.__array_interface__["data"][0]) // item
        source_offset = (view.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // source_item
        self.copies.append(
            StridedCopy(
                source,
                source_offset,
                tuple(stride // source_item for stride in view.strides),
                offset,
                tuple(stride // item for stride in target.strides),
                view.shape,
            )
        )
        if source.dtype == self.dtype:
            target[...] = view

    @property
    def tensor(self) -> TargetTensor:
        return TargetTensor(self.name, self.dtype, self.array.shape, tuple(self.copies), self.group, self.padding)


def new_target(name: str, shape: tuple[int, ...], dtype: str, group: str) -> Target:
    return Target(name, np.zeros(shape, word_type(dtype)), dtype, group)


def check_files(plan: Plan, output: Path, expected: dict[tuple[str, str], bytes], results: list[Any]) -> None:
    assert [result.path for result in results] == [file.path for file in plan.files]
    for file, result in zip(plan.files, results, strict=True):
        written = contents(output / file.path, file)
        assert written == {tensor.name: expected[file.path, tensor.name] for tensor in file.tensors}
        assert result.size == (output / file.path).stat().st_size
        assert result.checksums == {name: xxhash.xxh3_64_hexdigest(data) for name, data in written.items()}
    assert sorted(path for path in output.rglob("*") if path.is_file()) == sorted(output / file.path for file in plan.files)


def cut(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    return [0, *sorted(draw(st.integers(0, size)) for _ in range(parts - 1)), size]


def sliced(array: Array, axis: int, low: int, high: int) -> Array:
    return array[(slice(None),) * axis + (slice(low, high),)]


@st.composite
def plans(draw: st.DrawFn, folder: Path) -> tuple[Plan, dict[tuple[str, str], bytes]]:
    """Random parameters, each fused or stacked from permuted sources and cut for the ranks, or put together from such cuts (backwards)."""
    sources = Sources(folder, draw(st.integers(0, 2**32)))
    ranks = draw(st.integers(1, 4))
    files: list[list[Target]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(["BF16", "F32", "I64", "U8"]))
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
        order = tuple(draw(st.permutations(range(len(shape)))))
        axis = draw(st.integers(0, len(shape) - 1))
        bounds = cut(draw, shape[axis], ranks)
        pieces = draw(st.integers(1, 3))
        group = f"parameter {number}"
        if draw(st.booleans()):  # forward: each rank takes its slice of every source and stacks or joins them
            count = draw(st.integers(1, 3))
            stored = [sources.add(f"{number}.{part}", tuple(shape[a] for a in order), dtype, pieces) for part in range(count)]
            for rank in range(ranks):
                size = bounds[rank + 1] - bounds[rank]
                local = (*shape[:axis], size, *shape[axis + 1 :])
                padding = draw(st.integers(0, 2))
                target = new_target(f"p{number}", (count, *local[:-1], local[-1] + padding), dtype, group)
                target.padding = target.array.size - count * int(np.prod(local))
                for part, source in enumerate(stored):
                    base = sources.arrays[source.name]
                    view = sliced(base.transpose([order.index(a) for a in range(len(shape))]), axis, bounds[rank], bounds[rank + 1])
                    target.assign(sliced(target.array[part], len(shape) - 1, 0, local[-1]), source, view, base)
                files[rank].append(target)
        else:  # backward: one whole tensor from the ranks' slices
            target = new_target(f"p{number}", tuple(shape[a] for a in order), dtype, group)
            whole = target.array.transpose([order.index(a) for a in range(len(shape))])
            for rank in range(ranks):
                local = (*shape[:axis], bounds[rank + 1] - bounds[rank], *shape[axis + 1 :])
                source = sources.add(f"{number}.{rank}", local, dtype, pieces)
                base = sources.arrays[source.name]
                target.assign(sliced(whole, axis, bounds[rank], bounds[rank + 1]), source, base, base)
            files[draw(st.integers(0, ranks - 1))].append(target)
    plan = Plan(tuple(TargetFile(f"rank_{r}/c.torn", "torn", tuple(t.tensor for t in targets)) for r, targets in enumerate(files)))
    return plan, {(f"rank_{r}/c.torn", t.name): t.array.tobytes() for r, targets in enumerate(files) for t in targets}


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


def many_files_plan(folder: Path, files: int = 6, elements: int = 50_000) -> tuple[Plan, dict[tuple[str, str], bytes]]:
    sources = Sources(folder)
    planned, expected = [], {}
    for number in range(files):
        source = sources.add(f"w{number}", (elements,), "F32")
        target = new_target("weight", (elements,), "F32", f"w{number}")
        target.assign(target.array, source, sources.arrays[source.name], sources.arrays[source.name])
        planned.append(TargetFile(f"rank_{number}/a.torn", "torn", (target.tensor,)))
        expected[f"rank_{number}/a.torn", "weight"] = target.array.tobytes()
    return Plan(tuple(planned)), expected


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_is_refused_with_file_and_mend_and_leaves_only_complete_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    plan, expected = many_files_plan(tmp_path)
    pwrite, written = os.pwrite, [0]

    def failing(descriptor: int, data: memoryview, offset: int) -> int:
        written[0] += len(data)
        if written[0] > plan.nbytes // 2:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, buffer_bytes=4096)
    problem = refused.value.problems[0]
    assert problem.where.endswith(".torn.partial")
    assert os.strerror(code) in problem.what
    assert problem.mend
    assert written[0] < plan.nbytes // 2 + 20 * 4096  # the others stopped too
    for path in files_in(tmp_path / "out"):
        file = next(file for file in plan.files if file.path == path)
        assert contents(tmp_path / "out" / path, file) == {"weight": expected[path, "weight"]}


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, expected = many_files_plan(tmp_path, 2)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:777]], offset))
    results = execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS)
    check_files(plan, tmp_path / "out", expected, results)


def test_a_truncated_source_is_refused_by_name(tmp_path: Path) -> None:
    plan, _ = many_files_plan(tmp_path, 2)
    source = plan.files[1].tensors[0].copies[0].source
    os.truncate(source.path, source.path.stat().st_size - 1)
    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    assert refused.value.problems[0].where == str(source.path)
    assert "truncated" in refused.value.problems[0].what
    assert files_in(tmp_path / "out") == ["rank_0/a.torn"]


def test_a_missing_source_is_refused_by_name(tmp_path: Path) -> None:
    plan, _ = many_files_plan(tmp_path, 1)
    source = plan.files[0].tensors[0].copies[0].source
    source.path.unlink()
    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    assert refused.value.problems[0].where == str(source.path)
    assert files_in(tmp_path / "out") == []


def test_a_source_that_changes_during_the_run_is_refused_and_its_file_gets_no_name(tmp_path: Path) -> None:
    plan, _ = many_files_plan(tmp_path, 1, 1_000_000)
    source = plan.files[0].tensors[0].copies[0].source

    def touch(done: int) -> None:
        assert done < plan.nbytes or source.path.stat().st_size > plan.nbytes + 100
        with source.path.open("ab") as file:
            file.write(b"more" * 100)

    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS, on_progress=touch, buffer_bytes=1 << 18)
    assert [problem.where for problem in refused.value.problems] == [str(source.path)]
    assert "changed" in refused.value.title
    assert files_in(tmp_path / "out") == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_source_that_changed_before_it_was_first_opened_is_refused_by_its_name(tmp_path: Path, number: int) -> None:
    sources = Sources(tmp_path)
    files = []
    for name in ("first", "second"):
        stored = sources.add(name, (50_000,), "F32")
        source = replace(stored, identity=FileIdentity.of(stored.path.stat()))
        target = new_target(name, (50_000,), "F32", name)
        target.assign(target.array, source, sources.arrays[name], sources.arrays[name])
        files.append(TargetFile(f"{name}.torn", "torn", (target.tensor,)))
    path = files[number].tensors[0].copies[0].source.path
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(0, path.stat().st_mtime_ns))
    copy.replace(path)  # as long, and as old
    with pytest.raises(Refused, match="changed") as refused:
        execute(Plan(tuple(files)), tmp_path / "out", workers=1, layouts=LAYOUTS)
    assert [problem.where for problem in refused.value.problems] == [str(path)]
    assert files_in(tmp_path / "out") == ["first.torn"][:number]
    for read in (lambda tensor: fill(tensor, np.empty(tensor.shape, np.uint32)), lambda tensor: list(read_blocks(tensor))):
        with pytest.raises(Refused, match="changed"):
            read(files[number].tensors[0])
        read(files[1 - number].tensors[0])


def test_progress_counts_every_byte_and_files_are_complete_when_they_are_reported(tmp_path: Path) -> None:
    plan, expected = many_files_plan(tmp_path)
    progress: list[int] = []
    reported = []

    def done(result: Any) -> None:
        file = next(file for file in plan.files if file.path == result.path)
        assert contents(tmp_path / "out" / result.path, file) == {"weight": expected[result.path, "weight"]}
        reported.append(result.path)

    execute(plan, tmp_path / "out", workers=3, layouts=LAYOUTS, on_progress=progress.append, on_file_done=done)
    assert progress == sorted(progress)
    assert progress[-1] == plan.nbytes
    assert sorted(reported) == [file.path for file in plan.files]


def test_with_durable_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = many_files_plan(tmp_path, 2)
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recording_replace(before: str, after: Path) -> None:
        events.append(("replace", os.fspath(after)))
        replace(before, after)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, durable=True)
    for file in plan.files:
        path = tmp_path / "out" / file.path
        order = [events.index(event) for event in (("fsync", f"{path}.partial"), ("replace", str(path)), ("fsync", str(path.parent)))]
        assert order == sorted(order)


def test_ctrl_c_stops_the_workers_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    plan, expected = many_files_plan(tmp_path, 2, 1_000_000)
    seen: list[int] = []

    def interrupt(done: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, on_progress=interrupt, buffer_bytes=1024)
    assert threading.active_count() == before
    assert seen[-1] < plan.nbytes
    assert all(
        expected[path, "weight"] == contents(tmp_path / "out" / path, file)["weight"]
        for path in files_in(tmp_path / "out")
        for file in plan.files
        if file.path == path
    )
    assert not [path for path in files_in(tmp_path / "out") if path.endswith(".partial")]


@pytest.mark.parametrize("failing", ["on_progress", "on_file_done"])
def test_an_error_of_the_callers_callback_ends_the_run_with_that_error(tmp_path: Path, failing: str) -> None:
    plan, _ = many_files_plan(tmp_path)

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    callbacks: dict[str, Callable[[Any], None]] = {failing: fail}
    with pytest.raises(ZeroDivisionError):
        execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, **callbacks)  # type: ignore[arg-type]


def test_no_more_files_are_open_than_allowed_and_none_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MOST_OPEN", 8)
    sources = Sources(tmp_path)
    ranks, slices = 20, 30
    stored = [sources.add(f"w{number}", (ranks, 50), "F32") for number in range(slices)]
    files, expected = [], {}
    for rank in range(ranks):
        target = new_target("weight", (slices, 50), "F32", "weight")
        for number, source in enumerate(stored):
            base = sources.arrays[source.name]
            target.assign(target.array[number], source, base[rank], base)
        files.append(TargetFile(f"{rank}.torn", "torn", (target.tensor,)))
        expected[f"{rank}.torn", "weight"] = target.array.tobytes()
    own = len(os.listdir("/proc/self/fd"))
    most = [0]
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")) - own)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    plan = Plan(tuple(files))
    results = execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, buffer_bytes=400)
    check_files(plan, tmp_path / "out", expected, results)
    assert 8 < most[0] <= 2 * 8 + 2
    assert len(os.listdir("/proc/self/fd")) == own


def test_what_a_killed_run_left_is_overwritten_and_links_in_its_place_are_not_followed(tmp_path: Path) -> None:
    plan, expected = many_files_plan(tmp_path, 2)
    (tmp_path / "out" / "rank_0").mkdir(parents=True)
    (tmp_path / "out" / "rank_1").mkdir()
    (tmp_path / "out" / "rank_0" / "a.torn.partial").write_bytes(b"half" * 1_000_000)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "out" / "rank_1" / "a.torn.partial").symlink_to(precious)
    results = execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    check_files(plan, tmp_path / "out", expected, results)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("path", ["../a.torn", "/tmp/a.torn", "", "a/../../b.torn"])
def test_a_file_outside_the_output_folder_is_not_written(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="output folder"):
        execute(Plan((TargetFile(path, "torn", ()),)), tmp_path / "out", workers=1, layouts=LAYOUTS)


def test_two_files_of_the_same_path_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        execute(Plan((TargetFile("a", "torn", ()), TargetFile("./a", "torn", ()))), tmp_path / "out", workers=1, layouts=LAYOUTS)


def test_a_written_safetensors_file_is_what_the_library_reads(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    source = sources.add("c_proj", (40, 60), "F32", 1, np.random.default_rng(3).standard_normal((40, 60)).astype(np.float32))
    base = sources.arrays["c_proj"]
    target = new_target("o_proj.weight", (60, 20), "F32", "o")
    target.assign(target.array, source, base.T[:, 20:], base)
    execute(Plan((TargetFile("m.safetensors", "safetensors", (target.tensor,), (("format", "ms"),)),)), tmp_path / "out", workers=1)
    loaded = load_file(tmp_path / "out" / "m.safetensors")
    np.testing.assert_array_equal(loaded["o_proj.weight"].view(np.uint32), base.T[:, 20:])


_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.converter.test_execute import LAYOUTS, many_files_plan
from converter.execute import execute
plan, _ = many_files_plan(Path({folder!r}), 8, 400_000)
print("ready", flush=True)
execute(plan, Path({folder!r}) / "out", workers=2, layouts=LAYOUTS, buffer_bytes=1024, on_progress=lambda done: print(done, flush=True))
"""


@pytest.mark.parametrize("progress", [1, 5])
def test_a_killed_run_leaves_no_incomplete_file_with_a_final_name(tmp_path: Path, progress: int) -> None:
    script = _KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(1 + progress):
            assert process.stdout.readline()
        process.kill()
    plan, expected = many_files_plan(tmp_path, 8, 400_000)
    left = files_in(tmp_path / "out")
    assert [path for path in left if path.endswith(".partial")]
    for file in plan.files:
        if file.path in left:
            assert contents(tmp_path / "out" / file.path, file) == {"weight": expected[file.path, "weight"]}
