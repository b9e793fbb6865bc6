"""Plans with random copies, what numpy says they should write, and reading what was written: shared by the tests of the executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from hypothesis import strategies as st

from converter.dtypes import item_size, word_type
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.tensors import Extent, FileLayout, StoredTensor

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
