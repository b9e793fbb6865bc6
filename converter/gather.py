"""Filling target tensors block by block, each source byte read once, with two small buffers whatever the tensors' sizes.

A *block* is a range of a target's elements. Where a copy is contiguous on both sides, the file is read straight into the block. Otherwise
either each contiguous run of the source is read by itself (long runs), or the *span* of source bytes around all of them is read at once,
kept, and picked apart: the other targets of the group find their runs in the same span, because the group is advanced in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from converter.boxes import Box, across, in_order, run_of
from converter.casts import can_cast
from converter.dtypes import item_size, word_type
from converter.open_files import SourceFiles
from converter.plan import StridedCopy, TargetTensor
from converter.span_cache import SpanCache
from converter.strided import coalesce, extent, is_contiguous, restrict, target_end
from converter.tensors import contiguous_strides
from converter.word_copy import WordCopier, Words
from mappings.errors import refuse

BUFFER_BYTES = 4 << 20  # of each of a worker's two buffers: the block and the memory for spans
WIDENING = 4  # times larger are the buffers of a worker that transposes a large matrix: its runs get longer by as much
CALL_BYTES = 16 << 10  # a read call costs as much time as reading this many bytes


class Gatherer:
    """Fills blocks of target tensors. For one thread; several may share the source files.

    It needs twice `buffer_bytes` of memory, and `WIDENING` times more from the first large matrix on that is to be transposed.

    `overflows` counts, by target name, the finite values that casts made infinite.
    """

    def __init__(self, sources: SourceFiles, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._sources = sources
        self._narrow: tuple[Words, SpanCache] = np.empty(buffer_bytes, np.uint8), SpanCache(sources, buffer_bytes)
        self._wide: tuple[Words, SpanCache] | None = None
        self._block, self._spans = self._narrow
        self._copier = WordCopier()
        self._reads: dict[int, _Read] = {}
        self.overflows: dict[str, int] = {}

    def blocks(self, group: Sequence[TargetTensor]) -> Iterator[tuple[int, int, memoryview]]:
        """The blocks of the targets as (index in the group, first element, bytes), ascending for each target and complete.

        The bytes are valid until the next block is asked for. Raises Refused for a source that cannot be read or a cast of integers.
        """
        if len(group) == 1 and group[0].nbytes <= len(self._block) and _is_plain(group[0]):
            copy, data = group[0].copies[0], self._block.data[: group[0].nbytes]
            self._sources.read(copy.source, [(copy.source_offset * item_size(copy.source.dtype), data)])
            yield 0, 0, data
            return
        targets = self._start(group)
        steps = self._steps(targets)
        lows = [0] * len(targets)
        while any(low < target.elements for low, target in zip(lows, targets, strict=True)):
            for index, target in enumerate(targets):
                low, high = lows[index], min(lows[index] + steps[index], target.elements)
                if low < high:
                    words = self._block[: (high - low) * target.item].view(target.word)
                    yield index, low, self._fill(target, words, low)
                    lows[index] = high

    def fill(self, tensor: TargetTensor, words: Words) -> None:
        """Fill `words` (unsigned, C-contiguous, of the tensor's item size and shape) with the whole tensor. Raises as `blocks` does."""
        if words.dtype != word_type(tensor.dtype) or words.shape != tensor.shape or not words.flags.c_contiguous:
            raise ValueError(f"{tensor.name} needs a C-contiguous array {tensor.shape} of {word_type(tensor.dtype)}")
        targets = self._start([tensor])
        flat, step = words.reshape(-1), self._steps(targets)[0]
        for low in range(0, tensor.elements, step):
            self._fill(targets[0], flat[low : low + step], low)

    def _start(self, group: Sequence[TargetTensor]) -> list[_Target]:
        self._reads.clear()
        targets = [_Target(tensor) for tensor in group]
        strided = [copy for target in targets for copy in target.copies if not is_contiguous(copy)]
        if strided:
            for copy in (copy for target in targets for copy in target.copies):
                self._reads.setdefault(id(copy.source), _Read()).add(copy)
        boxes = [Box.of(copy) for copy in strided]
        self._choose_buffers(any(across(box.dims) and self._reads[id(box.source)].nbytes > self._narrow[1].nbytes for box in boxes))
        for box in boxes:
            if in_order(box.dims) and not self._apart(box, direct=False):
                self._reads[id(box.source)].spanned = True
        return targets

    def _choose_buffers(self, wide: bool) -> None:
        if wide and self._wide is None:
            nbytes = WIDENING * self._narrow[1].nbytes
            self._wide = np.empty(nbytes, np.uint8), SpanCache(self._sources, nbytes)
        self._block, self._spans = self._wide if wide and self._wide else self._narrow
        self._spans.forget()

    def _steps(self, targets: list[_Target]) -> list[int]:
        """Elements of each target in one block: the same number of rows for all, so that they meet in the same spans."""
        widest = max(target.row * target.item for target in targets)
        if widest > len(self._block):
            return [len(self._block) // target.item for target in targets]
        rows = len(self._block) // widest
        spanned = sum(read.nbytes for read in self._reads.values() if read.spanned)
        if spanned:
            longest = max(target.elements // target.row for target in targets)
            rows = max(1, min(rows, self._spans.nbytes * longest // spanned))
        return [rows * target.row for target in targets]

    def _fill(self, target: _Target, words: Words, first: int) -> memoryview:
        """Fill `words` with the target's elements from `first` on; returns their bytes."""
        data = words.view(np.uint8).data
        parts = target.within(first, first + len(words))
        if sum(part.elements for part in parts) < len(words):
            words[:] = 0
        for part in parts:
            place = part.target_offset - first
            if not is_contiguous(part) or part.source.dtype != target.tensor.dtype:
                self._pick(target.tensor, words, data, Box.of(part).moved(-first))
            else:
                item = target.item
                self._sources.read(part.source, [(part.source_offset * item, data[place * item : (place + part.elements) * item])])
        return data

    def _pick(self, tensor: TargetTensor, words: Words, data: memoryview, box: Box) -> None:
        """Copy a box that is strided on a side or is cast."""
        outer, run = run_of(box.dims)
        inner = box.dims[outer:]
        direct = len(inner) == 1 and inner[0].target == 1 and box.source.dtype == tensor.dtype
        if not outer or not self._apart(box, direct):
            self._pick_from_span(tensor, words, box)
        elif direct:
            item = words.itemsize
            places = box.offsets(outer)
            self._sources.read(box.source, ((source * item, data[place * item : (place + run) * item]) for source, place in places))
        else:
            self._pick_packed(tensor, words, box)

    def _apart(self, box: Box, direct: bool) -> bool:
        """Whether it costs less to read each run of the source by itself than the span around them.

        What the group reads from a span shares its cost. Not so when the target runs across the source's order and the span does not
        stay until the target comes back to it.
        """
        outer, run = run_of(box.dims)
        if not outer:
            return False
        item = item_size(box.source.dtype)
        read = self._reads[id(box.source)]
        stays = in_order(box.dims) or read.nbytes <= self._spans.nbytes
        used = read.share if stays else min(1.0, run / max(1, box.dims[outer - 1].source))  # an expanded axis has no stride
        unpacked = 0 if direct else run * item / 2
        return CALL_BYTES + run * item + unpacked < run * item / used + run * item / 2

    def _pick_from_span(self, tensor: TargetTensor, words: Words, box: Box) -> None:
        size, stride, _ = box.dims[0]
        inner = box.rows_extent
        exact = box.source_offset, box.source_offset + (size - 1) * stride + inner
        low, high = self._whole_rows(box, exact)
        capacity = self._spans.capacity(box.source.dtype)
        if high - low > capacity:
            low, high = exact
        if high - low <= capacity:
            span, place = self._spans.span(box.source, low, high)
            self._put(tensor, words, box, span, place + box.source_offset - low)
            return
        rows = max(1, min(capacity // stride, (capacity - inner) // stride + 1)) if inner <= capacity else 0
        for part in box.split(rows) if rows else box.rows():
            self._pick_from_span(tensor, words, part)

    def _whole_rows(self, box: Box, exact: tuple[int, int]) -> tuple[int, int]:
        """The exact span widened to whole rows of the source, as far as the group reads it: its other targets find their parts there."""
        size, stride, _ = box.dims[0]
        read = self._reads.get(id(box.source))
        if read is None or not stride:
            return exact
        low = exact[0] - exact[0] % stride
        return max(low, read.low), max(exact[1], min(low + size * stride, read.high))

    def _pick_packed(self, tensor: TargetTensor, words: Words, box: Box) -> None:
        """Read the runs of the source one after the other, packed, and copy from there."""
        outer, run = run_of(box.dims)
        capacity = self._spans.capacity(box.source.dtype)
        if not outer or run > capacity:
            self._pick_from_span(tensor, words, box)
            return
        row = math.prod(dim.size for dim in box.dims[1:])
        if row * box.dims[0].size <= capacity:
            packed, data = self._spans.scratch(box.source.dtype)
            item = packed.itemsize
            places = zip(box.offsets(outer), range(0, len(data), run * item), strict=False)
            self._sources.read(box.source, ((source * item, data[place : place + run * item]) for (source, _), place in places))
            self._put(tensor, words, box.packed(outer), packed, 0)
            return
        for part in box.split(capacity // row) if row <= capacity else box.rows():
            self._pick_packed(tensor, words, part)

    def _put(self, tensor: TargetTensor, words: Words, box: Box, span: Words, place: int) -> None:
        """Copy a box whose source starts at `place` of `span`, into `words`."""
        shape = tuple(dim.size for dim in box.dims)
        item = words.itemsize
        target: Words = np.ndarray(shape, words.dtype, words, box.target_offset * item, tuple(dim.target * item for dim in box.dims))
        item = span.itemsize
        source: Words = np.ndarray(shape, span.dtype, span, place * item, tuple(dim.source * item for dim in box.dims))
        overflows = self._copier.copy(target, source, tensor.dtype, box.source.dtype)
        if overflows:
            self.overflows[tensor.name] = self.overflows.get(tensor.name, 0) + overflows


def _is_plain(tensor: TargetTensor) -> bool:
    """Whether the whole tensor is one run of one source, as it is. Most tensors of a plan with very many are."""
    if len(tensor.copies) != 1:
        return False
    copy = tensor.copies[0]
    strides = contiguous_strides(copy.shape)
    return copy.elements == tensor.elements and copy.source_strides == strides == copy.target_strides and copy.source.dtype == tensor.dtype


class _Target:
    """A target and those of its copies that are still to be done, handed out for ascending ranges of elements."""

    def __init__(self, tensor: TargetTensor) -> None:
        self.tensor = tensor
        self.elements = tensor.elements
        self.item = item_size(tensor.dtype)
        self.word = word_type(tensor.dtype)
        self.row = max(1, tensor.shape[-1]) if len(tensor.shape) > 1 else 1
        self.copies = [coalesce(copy) for copy in tensor.copies]
        for copy in self.copies:
            if not can_cast(copy.source.dtype, tensor.dtype):
                what = f"{copy.source.name} is {copy.source.dtype} and cannot become {tensor.dtype}: only floating-point types are cast"
                raise refuse(what, tensor.name, "keep the type of this tensor")
        self._waiting = sorted(self.copies, key=lambda copy: copy.target_offset, reverse=True)
        self._begun: list[StridedCopy] = []

    def within(self, low: int, high: int) -> list[StridedCopy]:
        """The parts of the copies in [low, high); `low` is where the last call's `high` was."""
        while self._waiting and self._waiting[-1].target_offset < high:
            self._begun.append(self._waiting.pop())
        parts = [part for copy in self._begun for part in restrict(copy, low, high)]
        self._begun = [copy for copy in self._begun if target_end(copy) > high]
        return parts


class _Read:
    """What the group reads of one source: elements in all, between which bounds, and whether in spans, in the source's order."""

    def __init__(self) -> None:
        self.elements = 0
        self.low = -1
        self.high = 0
        self.item = 1
        self.spanned = False

    def add(self, copy: StridedCopy) -> None:
        if 0 in copy.shape:
            return
        self.elements += copy.elements
        self.item = item_size(copy.source.dtype)
        self.low = copy.source_offset if self.low < 0 else min(self.low, copy.source_offset)
        self.high = max(self.high, copy.source_offset + extent(copy.shape, copy.source_strides))

    @property
    def nbytes(self) -> int:
        return (self.high - self.low) * self.item

    @property
    def share(self) -> float:
        """The share of what lies between the bounds that the group uses."""
        return min(1.0, self.elements / (self.high - self.low))
