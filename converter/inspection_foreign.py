"""`inspect` of checkpoints without a manifest: unified safetensors, MindFormers 2.x, ranks with their strategies, loose files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from converter.chunked import ForeignCheckpoint
from converter.folder_kinds import MINDFORMERS2, RANK_FOLDER, UNIFIED
from converter.found_checkpoints import FoundCheckpoint, find_checkpoints
from converter.hf_folder import check_inside, read_json_object
from converter.mindformers2_folder import COMMON, read_mindformers2
from converter.strategy_files import read_strategy_file
from converter.tensor_facts import tensor_facts
from converter.unified_folder import read_unified
from mappings.errors import Refused

READERS_OF_FOLDERS: Mapping[str, Callable[[Path], ForeignCheckpoint]] = {UNIFIED: read_unified, MINDFORMERS2: read_mindformers2}
"""How folders of whole tensors that have no manifest are read, by their kind."""

MAX_COMMON_BYTES = 1 << 20
STRATEGY_FOLDERS = ("strategy", "../strategy")


def checkpoint_facts(checkpoint: ForeignCheckpoint) -> dict[str, Any]:
    """What a reader without a manifest found, whole tensors by name."""
    count = Counter(len(tensor.chunks) for tensor in checkpoint.tensors.values())
    holding = Counter(chunk.stored.path for tensor in checkpoint.tensors.values() for chunk in tensor.chunks)
    nbytes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        nbytes[tensor.dtype] += sum(chunk.stored.nbytes for chunk in tensor.chunks)
    return {
        "path": str(checkpoint.folder), "kind": checkpoint.kind, "form": "safetensors",
        "files": [{"name": path.name, "bytes": path.stat().st_size, "tensors": holding[path]} for path in checkpoint.files],
        "chunks": {str(number): tensors for number, tensors in sorted(count.items())},
        "ignored": {why: len(names) for why, names in checkpoint.ignored.items()},
        "tensors": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "file": tensor.chunks[0].stored.path.name}
            for tensor in checkpoint.tensors.values()
        ],
        "elements": sum(chunk.stored.elements for tensor in checkpoint.tensors.values() for chunk in tensor.chunks),
        "bytes_by_dtype": dict(nbytes),
    } | _training(checkpoint.folder)  # fmt: skip


def _training(folder: Path) -> dict[str, Any]:
    """The state of the training that a MindFormers 2.x checkpoint tells."""
    if not (folder / COMMON).is_file():
        return {}
    state = read_json_object(folder / COMMON, MAX_COMMON_BYTES, folder)
    return {"training": {key: value for key, value in state.items() if value is None or isinstance(value, (int, float))}}


def ranks_facts(path: Path) -> dict[str, Any]:
    """Folders of ranks, as MindFormers 1.x and MindSpore's tools leave them: the files, the first rank's tensors, the strategies."""
    found = find_checkpoints(path)
    by_rank: dict[int, list[FoundCheckpoint]] = {}
    for checkpoint in found.checkpoints:
        match = RANK_FOLDER.fullmatch(checkpoint.path.partition("/")[0])
        if match is not None:
            by_rank.setdefault(int(match[1]), []).append(checkpoint)
    files = [(rank, checkpoint) for rank in sorted(by_rank) for checkpoint in by_rank[rank]]
    forms = sorted({checkpoint.place.suffix[1:] for _, checkpoint in files})
    missing = sorted(set(range(max(by_rank, default=0) + 1)) - set(by_rank))
    facts: dict[str, Any] = {
        "path": str(path), "kind": "folders of ranks (MindFormers 1.x, or MindSpore's tools)", "form": ", ".join(forms),
        "files": [
            {"name": item.path, "bytes": item.place.stat().st_size, "tensors": len(item.tensors), "rank": rank} for rank, item in files
        ],
        "ranks": len(by_rank), "notes": [f"no folder for rank {', '.join(map(str, missing[:20]))}"] if missing else [],
    }  # fmt: skip
    several = [rank for rank, checkpoints in by_rank.items() if len(checkpoints) > 1]
    if several:
        facts["notes"] += [f"rank {several[0]} has {len(by_rank[several[0]])} checkpoints, of several steps: tools want one"]
    first = tuple(by_rank[min(by_rank)][-1].tensors) if by_rank else ()
    return facts | {"strategy": _strategy_beside(path), **tensor_facts(first)}


def _strategy_beside(path: Path) -> dict[str, Any] | None:
    """The stages and layouts of the strategy files that lie where MindFormers puts them; None where there are none."""
    for name in STRATEGY_FOLDERS:
        files = sorted((path / name).glob("*.ckpt")) if (path / name).is_dir() else []
        stages: dict[int, int] = {}
        for file in files[:4096]:
            try:
                check_inside(file, file.parent)
                strategy = read_strategy_file(file)
            except Refused as error:
                return {"folder": name, "problem": error.title}
            stages |= {stage: len(layouts) for stage, layouts in strategy.stages.items()}
        if files:
            return {"folder": name, "files": len(files), "stages": dict(sorted(stages.items()))}
    return None


def loose_facts(path: Path) -> dict[str, Any]:
    """Checkpoint files in a folder that says nothing more about them."""
    found = find_checkpoints(path)
    tensors = [tensor for checkpoint in found.checkpoints for tensor in checkpoint.tensors]
    return {
        "path": str(path), "kind": "checkpoint files in a folder",
        "files": [
            {"name": item.path, "bytes": item.place.stat().st_size, "tensors": len(item.tensors)} for item in found.checkpoints
        ],
        "strategies": list(found.strategies),
    } | tensor_facts(tensors)  # fmt: skip
