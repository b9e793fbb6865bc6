"""`inspect`: what a folder or file is, as facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from converter.ckpt_format import read_ckpt
from converter.folder_lock import PROGRESS_FOLDER
from converter.hf_folder import read_hf_folder
from converter.manifest import MANIFEST
from converter.output_folder import RUN_RECORD, finished_files, recorded_run
from converter.plan_report import target_facts
from converter.rank_tree import read_rank_tree
from converter.recognise import KINDS, recognise
from converter.safetensors_format import read_header
from converter.source_model import understand
from converter.strategy_files import is_json_strategy, read_strategy_file
from converter.tensors import StoredTensor
from converter.torch_format import read_torch_bin
from converter.vocabulary import vocabulary_notes, vocabulary_sizes
from mappings.errors import Refused, refuse


def inspect_path(path: Path) -> dict[str, Any]:
    """Facts about a folder or file. Raises Refused for something that is neither a checkpoint nor a part of one."""
    if not path.is_dir():
        return _inspect_file(path)
    if (path / MANIFEST).is_file():
        return _inspect_rank_tree(path)
    if (path / PROGRESS_FOLDER / RUN_RECORD).is_file():
        return _inspect_unfinished(path)
    if (path / "config.json").is_file():
        return _inspect_hf_folder(path)
    what = "neither a Hugging Face folder (no config.json) nor a rank tree of ms-convert (no manifest.json)"
    raise refuse(what, str(path), "give one of these, or a single weight file")


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
    return facts | _tensor_facts(folder.tensors.values())


def _texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _inspect_rank_tree(path: Path) -> dict[str, Any]:
    tree = read_rank_tree(path)
    manifest = tree.manifest
    facts = {
        "path": str(path), "kind": "rank tree of MindSpore slices", "form": manifest.format,
        "family": manifest.family, "target": target_facts(tree.dialect, manifest.family), "dtype": manifest.dtype,
        "layout": tree.layout.to_json(), "tool_version": manifest.tool_version, "source": manifest.source.name,
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
    return facts | _tensor_facts(tensor for rank in first_of_stage for tensor in tree.slices[rank].values())


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
        return facts | {"metadata": metadata} | _tensor_facts(tensors)
    if kind == "ckpt":
        return facts | _tensor_facts(read_ckpt(path))
    if kind == "torch_zip":
        return facts | _tensor_facts(read_torch_bin(path))
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


def _tensor_facts(tensors: Iterable[StoredTensor]) -> dict[str, Any]:
    listed = list(tensors)
    dtypes: Counter[str] = Counter()
    for tensor in listed:
        dtypes[tensor.dtype] += tensor.nbytes
    return {
        "tensors": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "file": tensor.path.name} for tensor in listed
        ],
        "elements": sum(tensor.elements for tensor in listed),
        "bytes_by_dtype": dict(dtypes),
    }
