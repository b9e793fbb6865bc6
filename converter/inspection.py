"""`inspect`: what a folder or file is, as facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from converter.ckpt_format import read_ckpt
from converter.folder_kinds import (
    CONVERSION,
    HUGGING_FACE,
    RANKS,
    SAFETENSORS,
    UNFINISHED,
    folder_kind,
    places_below,
)
from converter.hf_folder import read_hf_folder
from converter.inspection_foreign import READERS_OF_FOLDERS, checkpoint_facts, loose_facts, ranks_facts
from converter.output_folder import finished_files, recorded_run
from converter.plan_report import target_facts
from converter.rank_tree import read_rank_tree
from converter.recognise import KINDS, recognise
from converter.safetensors_format import read_header
from converter.source_model import understand
from converter.strategy_files import is_json_strategy, read_strategy_file
from converter.tensor_facts import tensor_facts
from converter.torch_format import read_torch_bin
from converter.vocabulary import vocabulary_notes, vocabulary_sizes
from mappings.errors import Refused, refuse


def inspect_path(path: Path) -> dict[str, Any]:
    """Facts about a folder or file. Raises Refused for something that is neither a checkpoint nor a part of one."""
    if not path.is_dir():
        return _inspect_file(path)
    look = _LOOKS.get(kind := folder_kind(path))
    if look is not None:
        return look(path)
    if (foreign := READERS_OF_FOLDERS.get(kind)) is not None:
        return checkpoint_facts(foreign(path))
    what = "neither a Hugging Face folder (no config.json) nor an output of ms-convert (no manifest.json) nor a checkpoint of MindSpore"
    below = places_below(path)
    mend = f"give the folder with the checkpoint: {', '.join(below)}" if below else "give one of these, or a single weight file"
    raise refuse(what, str(path), mend)


def _inspect_hf_folder(path: Path) -> dict[str, Any]:
    folder = read_hf_folder(path)
    facts: dict[str, Any] = {
        "path": str(path), "kind": "Hugging Face folder", "form": folder.form.name,
        "files": [{"name": file.name, "bytes": file.size, "tensors": len(file.tensors)} for file in folder.files],
        "side_files": [side.name for side in folder.side_files], "left": [name for name, _ in folder.left],
        "architectures": _texts(folder.config.get("architectures")),
    }  # fmt: skip
    try:
        source = understand(folder)
        facts |= {
            "family": source.table.family,
            "model": source.config.to_json(),
            "notes": [*source.notes, *vocabulary_notes(source)],
            "problem": None,
        }
        facts |= {"vocabulary": vocabulary_sizes(source)}
    except Refused as error:
        facts |= {"family": None, "model": None, "notes": [], "problem": str(error)}
    return facts | tensor_facts(folder.tensors.values())


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _inspect_rank_tree(path: Path) -> dict[str, Any]:
    tree = read_rank_tree(path)
    manifest = tree.manifest
    facts = {
        "path": str(path), "kind": _CONVERSIONS[manifest.disk], "form": manifest.format, "disk": manifest.disk,
        "family": manifest.family, "target": target_facts(tree.dialect, manifest.family), "dtype": manifest.dtype,
        "layout": tree.layout.to_json(), "strategy": manifest.strategy.layout().to_json() if manifest.strategy is not None else None,
        "tool_version": manifest.tool_version, "source": manifest.source.name,
        "files": [
            {
                "name": file.path, "bytes": file.size, "tensors": len(file.tensors), "rank": file.rank, "stage": file.stage,
                "data": file.data, "tensor": file.tensor, "layers": list(file.layers),
            }
            for file in manifest.files
        ],
        "side_files": [side.name for side in manifest.source.side_files], "model": manifest.model.to_json(),
    }  # fmt: skip
    first_of_stage = [tree.layout.rank(stage, 0, 0) for stage in range(tree.layout.pp)]
    return facts | tensor_facts(tensor for rank in first_of_stage for tensor in tree.slices[rank].values())


def _inspect_unfinished(path: Path) -> dict[str, Any]:
    run = recorded_run(path)
    if run is None:
        raise refuse("an unfinished run whose record is damaged", str(path), "start again with --overwrite")
    return {
        "path": str(path),
        "kind": "unfinished run of ms-convert: the same command continues it",
        "options": run.options,
        "finished_files": sorted(finished_files(path)),
    }


def _inspect_file(path: Path) -> dict[str, Any]:
    kind = recognise(path)
    facts: dict[str, Any] = {"path": str(path), "kind": KINDS[kind].phrase, "bytes": path.stat().st_size}
    if kind == "safetensors":
        tensors, metadata = read_header(path)
        return facts | {"metadata": metadata} | tensor_facts(tensors)
    if kind == "ckpt":
        return facts | tensor_facts(read_ckpt(path))
    if kind == "torch_zip":
        return facts | tensor_facts(read_torch_bin(path))
    if kind == "strategy" or (kind == "json" and is_json_strategy(path)):
        return facts | strategy_facts(path)
    raise refuse(f"{KINDS[kind].phrase}, not a checkpoint that ms-convert reads", str(path), KINDS[kind].mend)


def strategy_facts(path: Path) -> dict[str, Any]:
    """What a strategy file says, of one stage or merged, as protobuf or JSON."""
    strategy = read_strategy_file(path)
    parameters = [
        {
            "name": item.name, "stage": stage, "device_matrix": list(item.device_matrix), "tensor_map": list(item.tensor_map),
            "optimizer_shards": item.opt_weight_shard_size, "optimizer_shard_step": item.opt_weight_shard_step,
        }
        for stage, layouts in strategy.stages.items()
        for item in layouts
    ]  # fmt: skip
    kind = f"{KINDS['strategy'].phrase}, " + ("merged" if strategy.merged else "of one pipeline stage")
    stages = list(strategy.stages)
    return {"kind": kind, "form": strategy.form, "stage": stages[0], "stages": stages, "merged": strategy.merged, "parameters": parameters}


_CONVERSIONS = {
    "rank": "rank tree of MindSpore slices",
    "unified": "unified safetensors of whole MindSpore parameters",
    "mindformers2": "MindFormers 2.x checkpoint",
}
_LOOKS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    CONVERSION: _inspect_rank_tree,
    UNFINISHED: _inspect_unfinished,
    HUGGING_FACE: _inspect_hf_folder,
    RANKS: ranks_facts,
    SAFETENSORS: loose_facts,
}
