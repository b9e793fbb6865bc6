"""The files that a MindFormers 2.x checkpoint has beside its weights: the index of chunks, the state of the training, the step.

Source: mindformers 2.0 and 2.1, `save_metadata` in checkpoint/metadata.py, `get_sharded_tensor_from_strategy_metadata` in
checkpoint/sharded_tensor.py and `CommonInfo` in checkpoint/checkpoint.py; the form is described in converter/mindformers2_folder.py.
The order of a layout's keys counts: `_deserialize_sharded_tensor_layout` unpacks the values as they come.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from converter.ckpt_format import MINDSPORE_TYPES
from converter.mindformers2_folder import chunk_key
from converter.strategy_format import ParameterLayout

STEP = 0
_ALIASES = {1: ("tp",), 2: ("dp", "tp"), 3: ("dp", "kv", "replica")}
"""Names for the axes of the devices, by their number: axes of one are left out. MindFormers only wants one for each."""


@dataclass(frozen=True)
class StageWeights:
    """A pipeline stage: its ranks in order, how each parameter is cut over them, and a rank's slices: (dtype, shape) by name.

    `files` are the file names of the ranks. `layouts` is empty where there is one rank in all.
    """

    ranks: Sequence[int]
    files: Sequence[str]
    layouts: Sequence[ParameterLayout]
    slices: Mapping[str, tuple[str, tuple[int, ...]]]


def common_text() -> str:
    """`common.json` of a training that has not begun. The keys are those that all versions of 2.x take.

    The size of a batch is 1 because MindFormers scales the steps that were done, none, by it.
    """
    state = {"epoch_num": 0, "step_num": 0, "global_step": STEP, "loss_scale": None, "global_batch_size": 1, "ckpt_status": 0}
    return json.dumps(state, indent=4)


def metadata_text(stages: Iterable[StageWeights]) -> str:
    """`metadata.json` of these stages. A parameter of two stages (a tied embedding) is described as the first has it."""
    described: dict[str, Any] = {}
    storage: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for stage in stages:
        layouts = {layout.name: layout for layout in stage.layouts}
        for name, (dtype, shape) in stage.slices.items():
            cut = _Cut.of(layouts.get(name), len(shape), len(stage.ranks))
            described.setdefault(name, _entry(cut, dtype, shape, stage.ranks, layouts.get(name)))
            for rank, file, place in zip(stage.ranks, stage.files, cut.places, strict=True):
                storage[chunk_key(name, place)].append({"file_name": file, "storage_rank": rank})
    for stores in storage.values():
        group = [store["storage_rank"] for store in stores]
        for store in stores:
            store["rank_group"] = group
    return json.dumps({"state_dict_metadata": described, "storage_data": storage}, ensure_ascii=False)


@dataclass(frozen=True)
class _Cut:
    """Into how many parts each axis is cut, and for each rank of the stage the place of its part in row-major order."""

    counts: tuple[int, ...]
    places: tuple[int, ...]

    @staticmethod
    def of(layout: ParameterLayout | None, axes: int, ranks: int) -> _Cut:
        if layout is None:
            return _Cut((1,) * axes, (0,) * ranks)
        matrix, mapping = layout.device_matrix, layout.tensor_map
        counts = tuple(1 if device == -1 else matrix[-1 - device] for device in mapping)
        places = []
        for coordinates in product(*map(range, matrix)):
            place = 0
            for device, count in zip(mapping, counts, strict=True):
                place = place * count + (0 if device == -1 else coordinates[-1 - device])
            places.append(place)
        return _Cut(counts, tuple(places))

    @property
    def replicas(self) -> list[int]:
        """For each rank, how many before it hold the same part."""
        return [self.places[:index].count(place) for index, place in enumerate(self.places)]


def _entry(cut: _Cut, dtype: str, shape: tuple[int, ...], ranks: Sequence[int], layout: ParameterLayout | None) -> dict[str, Any]:
    return {
        "properties": {
            "dtype": MINDSPORE_TYPES.get(dtype, dtype),
            "replica_id": cut.replicas if layout is not None else 0,
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": [size * count for size, count in zip(shape, cut.counts, strict=True)],
        "axis_fragmentations": list(cut.counts),
        "layout": None if layout is None else _layout(layout, ranks),
        "chunk": [{"global_offset": [place], "local_shape": list(shape)} for place in dict.fromkeys(cut.places)],
    }


def _layout(layout: ParameterLayout, ranks: Sequence[int]) -> dict[str, Any]:
    return {
        "device_matrix": list(layout.device_matrix),
        "tensor_map": list(layout.tensor_map),
        "interleaved_parallel": False,
        "alias_name": list(_ALIASES[len(layout.device_matrix)]),
        "rank_list": list(ranks),
    }
