"""From a pairing of views and a rank's slice to strided copies, for either direction."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from converter.layout import Slice
from converter.plan import StridedCopy
from converter.tensors import StoredTensor, contiguous_strides
from mappings.axes import AtomPlace, View
from mappings.expand import Expansion, Pairing, expert_stride
from mappings.rules import PLACEHOLDER_ATOM

EXPERTS = PLACEHOLDER_ATOM["expert"]


@dataclass(frozen=True, slots=True)
class PairedBox:
    """Equal elements of an HF tensor and of a rank's slice of a parameter.

    A box of `shape`, with its offset and strides on each side (elements).
    """

    hf_offset: int
    hf_strides: tuple[int, ...]
    ms_offset: int
    ms_strides: tuple[int, ...]
    shape: tuple[int, ...]

    def forward(self, source: StoredTensor) -> StridedCopy:
        """HF -> MindSpore, from the HF tensor `source`."""
        return StridedCopy(source, self.hf_offset, self.hf_strides, self.ms_offset, self.ms_strides, self.shape)

    def backward(self, source: StoredTensor) -> StridedCopy:
        """MindSpore -> HF, from the rank's slice `source`."""
        return StridedCopy(source, self.ms_offset, self.ms_strides, self.hf_offset, self.hf_strides, self.shape)


def paired_boxes(expansion: Expansion, pairing: Pairing, piece: Slice, hf_strides: tuple[int, ...]) -> tuple[PairedBox, ...]:
    """The boxes that the slice `piece` of parameter `pairing.ms` shares with the HF tensor, whose axes have `hf_strides`.

    Usually one box; a cut inside a composite axis can need up to three for each of its atoms. None when the slice is all padding.
    Every layer and expert of a rule has the same boxes, but for an expert's place in the stack: they are worked out once.
    """
    key = (id(pairing.rule), pairing.label, piece, hf_strides)
    if key not in expansion.boxes:
        boxes_of_rule = tuple(_boxes_of_rule(expansion, pairing, piece, hf_strides))
        expansion.boxes[key] = (boxes_of_rule, *_experts_of_slice(expansion, pairing, piece))
    boxes: tuple[PairedBox, ...]
    boxes, experts, stride = expansion.boxes[key]
    if pairing.expert is None:
        return boxes
    if pairing.expert not in experts:
        return ()
    shift = (pairing.expert - experts.start) * stride
    return tuple(PairedBox(box.hf_offset, box.hf_strides, box.ms_offset + shift, box.ms_strides, box.shape) for box in boxes)


def _experts_of_slice(expansion: Expansion, pairing: Pairing, piece: Slice) -> tuple[range, int]:
    """Which experts of a stacked parameter the slice holds, and how far one lies from the next (elements)."""
    if pairing.expert is None:
        return range(0), 0
    item = expansion.parameters[pairing.ms]
    stride = expert_stride(pairing, expansion, contiguous_strides(piece.shape(item.shape)))
    experts = expansion.sizes[EXPERTS]
    if piece.axis is None or item.parameter.cut != EXPERTS:
        return range(experts), stride
    per_expert = item.shape[piece.axis] // experts
    return range(piece.start // per_expert, piece.stop // per_expert), stride


def _boxes_of_rule(expansion: Expansion, pairing: Pairing, piece: Slice, hf_strides: tuple[int, ...]) -> Iterator[PairedBox]:
    """The boxes of a rule's first layer and, in a stack of experts, of the first expert that the slice holds."""
    item = expansion.parameters[pairing.ms]
    ms_strides = contiguous_strides(piece.shape(item.shape))
    hf, ms = expansion.views(pairing, hf_strides, ms_strides)
    places = {place.name: place for place in hf.atoms}
    picked = pairing.expert is not None and item.parameter.cut == EXPERTS
    cut = 0 if piece.axis is None or picked else piece.start * ms_strides[piece.axis]
    for box in _boxes_of_slice(ms, piece, item.shape):
        kept = [(place, start, length) for place, start, length in box if place.name in places]
        dims = [(place, length) for place, _, length in kept if length > 1]
        yield PairedBox(
            hf.offset + sum(start * places[place.name].stride for place, start, _ in kept),
            tuple(places[place.name].stride for place, _ in dims),
            ms.offset + sum(start * place.stride for place, start, _ in kept) - cut,
            tuple(place.stride for place, _ in dims),
            tuple(length for _, length in dims),
        )


def _boxes_of_slice(ms: View, piece: Slice, shape: tuple[int, ...]) -> Iterator[list[tuple[AtomPlace, int, int]]]:
    """The slice as boxes: (atom, start, length) for every atom of the part `ms` of a parameter with this shape.

    A slice takes the same share of each of the parts that lie side by side in its axis.
    """
    whole = [(place, 0, place.size) for index, axis in enumerate(ms.axes) if index != piece.axis for place in axis]
    if piece.axis is None:
        yield whole
        return
    if piece.start >= piece.stop:
        return
    cut = ms.axes[piece.axis]
    sizes = tuple(place.size for place in cut)
    start, stop = (bound * math.prod(sizes) // shape[piece.axis] for bound in (piece.start, piece.stop))
    ranges = boxes_of_range(sizes, start, stop)
    for box in ranges:
        yield [*whole, *((place, start, length) for place, (start, length) in zip(cut, box, strict=True))]


def boxes_of_range(sizes: tuple[int, ...], start: int, stop: int) -> list[tuple[tuple[int, int], ...]]:
    """The flat indices [start, stop) of an axis with these factors (row-major) as boxes of (start, length) per factor."""
    if not sizes:
        return [()]
    inner = math.prod(sizes[1:])
    first, last = start // inner, (stop - 1) // inner
    if start % inner == 0 and stop % inner == 0:
        return [((first, stop // inner - first), *((0, size) for size in sizes[1:]))]
    if first == last:
        return [((first, 1), *rest) for rest in boxes_of_range(sizes[1:], start - first * inner, stop - first * inner)]
    middle = (first + 1) * inner if start % inner else start
    end = stop - stop % inner
    boxes = boxes_of_range(sizes, start, middle) if start < middle else []
    boxes += boxes_of_range(sizes, middle, end) if middle < end else []
    return boxes + (boxes_of_range(sizes, end, stop) if end < stop else [])
