"""From a pairing of views and a rank's slice to strided copies, for either direction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from converter.layout import Slice
from converter.plan import StridedCopy
from converter.regions import Ranges, Region
from converter.tensors import StoredTensor, contiguous_strides
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
    """The boxes that the slice `piece` of parameter `pairing.ms` shares with the HF tensor, whose axes have `hf_strides`."""
    return paired_boxes_of_region(expansion, pairing, Region.of(piece, expansion.parameters[pairing.ms].shape), hf_strides)


def paired_boxes_of_region(expansion: Expansion, pairing: Pairing, region: Region, hf_strides: tuple[int, ...]) -> tuple[PairedBox, ...]:
    """The boxes that a region of parameter `pairing.ms` shares with the HF tensor, whose axes have `hf_strides`.

    Usually one box; a cut inside a composite axis can need up to three for each of its atoms. None when the region is all padding.
    Every layer and expert of a rule has the same boxes, but for an expert's place in the stack: they are worked out once.
    """
    key = (id(pairing.rule), pairing.label, region, hf_strides)
    if key not in expansion.boxes:
        boxes_of_rule = tuple(_boxes_of_rule(expansion, pairing, region, hf_strides))
        expansion.boxes[key] = (boxes_of_rule, *_experts_of_region(expansion, pairing, region))
    boxes: tuple[PairedBox, ...]
    boxes, experts, stride = expansion.boxes[key]
    if pairing.expert is None:
        return boxes
    if pairing.expert not in experts:
        return ()
    shift = (pairing.expert - experts.start) * stride
    return tuple(PairedBox(box.hf_offset, box.hf_strides, box.ms_offset + shift, box.ms_strides, box.shape) for box in boxes)


def _experts_of_region(expansion: Expansion, pairing: Pairing, region: Region) -> tuple[range, int]:
    """Which experts of a stacked parameter the region holds, and how far one lies from the next (elements)."""
    if pairing.expert is None:
        return range(0), 0
    item = expansion.parameters[pairing.ms]
    stride = expert_stride(pairing, expansion, contiguous_strides(region.stored))
    axis = item.parameter.cut_axis
    if axis is None or item.parameter.cut != EXPERTS:
        return range(expansion.sizes[EXPERTS]), stride
    per_expert = item.shape[axis] // expansion.sizes[EXPERTS]
    return range(region.start[axis] // per_expert, region.stop[axis] // per_expert), stride


def _boxes_of_rule(expansion: Expansion, pairing: Pairing, region: Region, hf_strides: tuple[int, ...]) -> Iterator[PairedBox]:
    """The boxes of a rule's first layer and, in a stack of experts, of the first expert that the region holds."""
    ms_strides = contiguous_strides(region.stored)
    hf, ms = expansion.views(pairing, hf_strides, ms_strides)
    places = {place.name: place for place in hf.atoms}
    stacked = next(
        (axis for axis, atoms in enumerate(ms.axes) for atom in atoms if pairing.expert is not None and atom.name == EXPERTS), None
    )
    cut = sum(start * stride for axis, (start, stride) in enumerate(zip(region.start, ms_strides, strict=True)) if axis != stacked)
    for box in _atom_boxes(expansion, pairing, region, hf_strides):
        kept = [(place, start, length) for place, (start, length) in zip(ms.atoms, box, strict=True) if place.name in places]
        dims = [(place, length) for place, _, length in kept if length > 1]
        yield PairedBox(
            hf.offset + sum(start * places[place.name].stride for place, start, _ in kept),
            tuple(places[place.name].stride for place, _ in dims),
            ms.offset + sum(start * place.stride for place, start, _ in kept) - cut,
            tuple(place.stride for place, _ in dims),
            tuple(length for _, length in dims),
        )


def _atom_boxes(expansion: Expansion, pairing: Pairing, region: Region, hf_strides: tuple[int, ...]) -> Iterator[Ranges]:
    """The region as boxes of the atoms of the pairing's part, each axis looked at by itself."""
    count = len(region.start)
    views = [expansion.views(pairing, hf_strides, tuple(int(axis == other) for other in range(count)))[1] for axis in range(count)]
    return region.boxes([view.axes[axis] for axis, view in enumerate(views)], [view.offset for view in views])
