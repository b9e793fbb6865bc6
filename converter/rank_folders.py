"""A rank tree that MindFormers or MindSpore wrote, without a manifest: what each rank's file holds is placed by the strategy files.

    <folder>/rank_{r}/…     or   <folder>/checkpoint_network/rank_{r}/…   or   <folder>/checkpoint/rank_{r}/…
    <folder>/strategy/ckpt_strategy_rank_{r}.ckpt          one of each pipeline stage is enough, or one file merged from all

Stage s of n ranks holds the ranks from s * n / stages on. Where a rank's folder has several checkpoints, `meta.json` names the last.
Source: mindformers core/callback/callback.py, utils/load_checkpoint_utils.py; mindspore/parallel/_tensor.py for the optimizer's cut.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from converter.chunked import Chunk, ChunkedTensor, ForeignCheckpoint, check_chunks
from converter.formats import READERS
from converter.hf_folder import check_inside, read_json_object
from converter.strategy_files import read_strategy_file
from converter.strategy_format import ParameterLayout
from converter.tensors import StoredTensor
from converter.untrusted import quoted
from mappings.dialect_table import NotWeight
from mappings.errors import Problem, Refused, refuse

KIND = "rank tree without a manifest"
PLACES = ("", "checkpoint_network", "checkpoint")
STRATEGY = "strategy"
MAX_META_BYTES = 1 << 20
MAX_STRATEGY_FILES = 1 << 16
_RANK = re.compile(r"rank_([0-9]{1,7})")


@dataclass(frozen=True)
class RankFolders:
    """The checkpoint, and into how many each tensor is cut by tensor parallelism (without the optimizer's cut)."""

    checkpoint: ForeignCheckpoint
    cuts: Mapping[str, tuple[int, ...]]


def has_rank_folders(folder: Path) -> bool:
    """Whether a folder is such a tree."""
    return folder.is_dir() and any(_rank_folders(folder / place) for place in PLACES)


def read_rank_folders(folder: Path, strategy: Path | None, not_weights: Sequence[NotWeight]) -> RankFolders:
    """Read the headers of every rank and the strategy files (`strategy`: their folder, or one file).

    Raises Refused for ranks that are missing, weights that no strategy places, and slices that do not make a whole.
    """
    home = next((folder / place for place in PLACES if _rank_folders(folder / place)), folder)
    ranks = _rank_folders(home)
    if sorted(ranks) != list(range(len(ranks))):
        raise refuse(f"the folders of the ranks {', '.join(map(str, sorted(ranks)[:20]))} are there", str(home), "give all ranks from 0 on")
    files = [_checkpoint_of(ranks[rank]) for rank in range(len(ranks))]
    ignored: dict[str, set[str]] = defaultdict(set)
    weights: list[dict[str, StoredTensor]] = []
    for file in files:
        found = {tensor.name: tensor for tensor in READERS[file.suffix.removeprefix(".")](file)}
        reasons = {name: next((item.why for item in not_weights if item.names(name)), None) for name in found}
        weights.append({name: tensor for name, tensor in found.items() if reasons[name] is None})
        for name, why in reasons.items():
            if why is not None:
                ignored[why].add(name)
    layouts = _layouts(_strategy_place(folder, home, strategy), len(ranks)) if len(ranks) > 1 else None
    tensors, replicas, cuts = _placed(weights, layouts, home)
    check_chunks(tensors.values())
    named = {why: tuple(sorted(names)) for why, names in ignored.items()}
    return RankFolders(ForeignCheckpoint(KIND, home, tensors, named, tuple(files), replicas), cuts)


def _rank_folders(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    matches = [(match, folder / name) for name in os.listdir(folder) if (match := _RANK.fullmatch(name))]
    return {int(match[1]): path for match, path in matches if path.is_dir()}


def _checkpoint_of(folder: Path) -> Path:
    """The one checkpoint of a rank; the last of several, if meta.json names it."""
    names = sorted(name for name in os.listdir(folder) if name.rpartition(".")[2] in READERS)
    if len(names) != 1 and (folder / "meta.json").is_file():
        last = read_json_object(folder / "meta.json", MAX_META_BYTES, folder).get("last_ckpt_file")
        if last in names:
            names = [str(last)]
    if len(names) != 1:
        what = f"{len(names)} checkpoints ({', '.join(map(quoted, names[:5]))})" if names else "no .ckpt or .safetensors file"
        raise refuse(what, str(folder), "leave the one that is meant in each rank's folder")
    check_inside(folder / names[0], folder)
    return folder / names[0]


def _strategy_place(folder: Path, home: Path, given: Path | None) -> Path:
    for place in (given,) if given is not None else (folder / STRATEGY, home / STRATEGY, home.parent / STRATEGY):
        if place.exists():
            return place
    mend = "say --strategy FOLDER: the ckpt_strategy_rank_*.ckpt files of the run, or one file merged from them"
    raise refuse("no strategy files: nothing says how the ranks' slices lie", str(given or folder), mend)


def _layouts(place: Path, ranks: int) -> list[Mapping[str, ParameterLayout]]:
    """For each pipeline stage, how each parameter is cut."""
    paths = sorted(path for path in place.iterdir() if path.suffix in (".ckpt", ".json")) if place.is_dir() else [place]
    if not paths or len(paths) > MAX_STRATEGY_FILES:
        raise refuse(f"{len(paths)} strategy files", str(place), "give the folder with the run's ckpt_strategy_rank_*.ckpt files")
    stages: dict[int, dict[str, ParameterLayout]] = {}
    for path in paths:
        if place.is_dir():
            check_inside(path, place)
        for stage, layouts in read_strategy_file(path).stages.items():
            named = {layout.name: layout for layout in layouts}
            if stages.setdefault(stage, named) != named:
                raise refuse(f"it cuts the parameters of stage {stage} otherwise than another file", str(path), "give the files of one run")
    if sorted(stages) != list(range(len(stages))) or ranks % len(stages):
        what = f"strategy files of the stages {', '.join(map(str, sorted(stages)))}, and {ranks} ranks"
        raise refuse(what, str(place), "give one strategy file for each pipeline stage")
    return [stages[stage] for stage in range(len(stages))]


def _placed(
    weights: Sequence[Mapping[str, StoredTensor]], layouts: Sequence[Mapping[str, ParameterLayout]] | None, home: Path
) -> tuple[dict[str, ChunkedTensor], tuple[tuple[StoredTensor, ...], ...], dict[str, tuple[int, ...]]]:
    """Each tensor with its chunks, the replicas, and the cuts."""
    if layouts is None:
        whole = {name: ChunkedTensor.whole(tensor) for name, tensor in weights[0].items()}
        return whole, (), {name: (1,) * len(tensor.shape) for name, tensor in whole.items()}
    held: dict[str, dict[tuple[int, ...], list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    shapes: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    cuts: dict[str, tuple[int, ...]] = {}
    problems: dict[str, Problem] = {}
    per_stage = len(weights) // len(layouts)
    for rank, tensors in enumerate(weights):
        stage, device = divmod(rank, per_stage)
        for name, tensor in tensors.items():
            layout = layouts[stage].get(name)
            what = "no strategy file says how it is cut" if layout is None else _unread(layout, tensor, per_stage)
            if layout is None or what:
                problems.setdefault(name, Problem(f"{name}: {what}", str(tensor.path), "give the strategy files of the run that saved it"))
                continue
            cut, start, shape = _place(layout, tensor, device)
            cuts[name] = cut
            shapes[name].add(shape)
            held[name][start].append(tensor)
    problems |= {name: Problem(f"{name} is of several shapes", str(home)) for name, found in shapes.items() if len(found) > 1}
    if problems:
        raise Refused("slices that cannot be placed", list(problems.values())[:20])
    chunked = {
        name: ChunkedTensor(name, next(iter(places.values()))[0].dtype, next(iter(shapes[name])), _chunks(places))
        for name, places in held.items()
    }
    return chunked, tuple(tuple(group) for places in held.values() for group in places.values() if len(group) > 1), cuts


def _chunks(places: Mapping[tuple[int, ...], Sequence[StoredTensor]]) -> tuple[Chunk, ...]:
    return tuple(Chunk(start, holders[0]) for start, holders in sorted(places.items(), key=lambda item: item[0]))


def _unread(layout: ParameterLayout, tensor: StoredTensor, devices: int) -> str | None:
    """Why a layout does not say where a slice lies."""
    matrix = layout.device_matrix
    if len(layout.tensor_map) != len(tensor.shape) or math.prod(matrix) != devices:
        shown = f"{list(layout.tensor_map)} over devices {list(matrix)}"
        return f"its layout {shown} does not fit its {len(tensor.shape)} axes and {devices} ranks"
    if not layout.opt_weight_shard_size or not layout.opt_weight_shard_step:
        return None
    free = _free_axes(layout)
    simple = len(free) == 1 and math.prod(matrix[free[0] + 1 :]) == layout.opt_weight_shard_step
    if not tensor.shape or not (simple or (len(free) == len(matrix) and layout.opt_weight_shard_step == 1)):
        return "the optimizer cuts it in a way that is not read here; merge it with mindspore.unified_safetensors first"
    return None


def _free_axes(layout: ParameterLayout) -> list[int]:
    """The axes of the devices that do not cut the parameter and are more than one device."""
    used = {len(layout.device_matrix) - 1 - axis for axis in layout.tensor_map if axis != -1}
    return [axis for axis, count in enumerate(layout.device_matrix) if axis not in used and count > 1]


def _place(layout: ParameterLayout, tensor: StoredTensor, device: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Into how many the tensor is cut, where this device's slice begins, and the whole shape."""
    matrix = layout.device_matrix
    coordinates = [device // math.prod(matrix[axis + 1 :]) % count for axis, count in enumerate(matrix)]
    along = [len(matrix) - 1 - axis if axis != -1 else None for axis in layout.tensor_map]
    cut = [matrix[axis] if axis is not None else 1 for axis in along]
    index = [coordinates[axis] if axis is not None else 0 for axis in along]
    counts = list(cut)
    if layout.opt_weight_shard_size and layout.opt_weight_shard_step:
        size = layout.opt_weight_shard_size if layout.opt_weight_shard_size > 0 else math.prod(matrix) // math.prod(cut)
        counts[0] *= size
        index[0] = index[0] * size + device // layout.opt_weight_shard_step % size
    start = tuple(number * length for number, length in zip(index, tensor.shape, strict=True))
    return tuple(cut), start, tuple(count * length for count, length in zip(counts, tensor.shape, strict=True))
