"""Unified safetensors: MindSpore's form for exchange, whole tensors in `part{k}.safetensors` with `param_name_map.json` beside them.

Source: `unified_safetensors` and `_load_parallel_checkpoint` in mindspore/parallel/transform_safetensors.py. The map has the names under
`weight_map`, or is flat. `hyper_param.safetensors` holds what no strategy names (steps, loss scale).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from converter.chunked import ChunkedTensor, ForeignCheckpoint
from converter.hf_folder import check_inside, read_json_object
from converter.manifest import is_plain_relative
from converter.safetensors_format import read_header
from converter.tensors import StoredTensor
from converter.untrusted import quoted
from mappings.errors import Problem, Refused, refuse

NAME_MAP = "param_name_map.json"
HYPER_PARAMETERS = "hyper_param.safetensors"
MAX_MAP_BYTES = 256 << 20
KIND = "unified safetensors of MindSpore"
NOT_MAPPED = "not in param_name_map.json"


def name_map_text(weight_map: Mapping[str, str], total_size: int) -> str:
    """`param_name_map.json` as MindSpore writes it."""
    return json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, indent=4)


def read_unified(folder: Path) -> ForeignCheckpoint:
    """The tensors of a unified folder. The map says which file holds a tensor; without one there may be one file of weights only.

    Raises Refused for a map that names what is not there or lies outside, and for a name that is in two files.
    """
    files = [name for name in safetensors_files(folder) if name != HYPER_PARAMETERS]
    if not (folder / NAME_MAP).is_file():
        if len(files) != 1:
            what = f"{len(files)} .safetensors files and no {NAME_MAP}"
            raise refuse(what, str(folder), "give the folder that unified_safetensors wrote, map and all")
        weight_map = {tensor.name: files[0] for tensor in stored_tensors(folder, files[0])}
    else:
        weight_map = _read_map(folder)
    wanted = list(dict.fromkeys(weight_map.values()))
    stored = {(name, tensor.name): tensor for name in wanted for tensor in stored_tensors(folder, name)}
    missing = [f"{quoted(name)} in {file}" for name, file in weight_map.items() if (file, name) not in stored]
    if missing:
        problems = [Problem(f"{what} is not there", str(folder / NAME_MAP), "restore the file that belongs to it") for what in missing[:20]]
        raise Refused(f"{NAME_MAP} names tensors that its files do not hold", problems)
    tensors = {name: ChunkedTensor.whole(tensor) for (file, name), tensor in stored.items() if weight_map.get(name) == file}
    others = [name for file, name in stored if weight_map.get(name) != file]
    if (folder / HYPER_PARAMETERS).is_file():
        others += [tensor.name for tensor in stored_tensors(folder, HYPER_PARAMETERS) if tensor.name not in tensors]
    ignored = {NOT_MAPPED: tuple(others)} if others else {}
    return ForeignCheckpoint(KIND, folder, tensors, ignored, tuple(folder / name for name in wanted))


def safetensors_files(folder: Path) -> list[str]:
    """The names of the .safetensors files that lie in a folder itself."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".safetensors") and not entry.name.startswith("."))


def stored_tensors(folder: Path, name: str) -> Iterable[StoredTensor]:
    """The tensors of a file that some index names. Raises Refused for a name that is a path or leads outside."""
    if "/" in name or not is_plain_relative(name):
        raise refuse(f"{quoted(name)} is not the name of a file in the folder", str(folder), "get the folder from somebody whom you trust")
    if not (folder / name).is_file():
        raise refuse(f"{quoted(name)} is missing", str(folder), "restore it")
    check_inside(folder / name, folder)
    tensors, metadata = read_header(folder / name)
    packed = [tensor.name for tensor in tensors if metadata.get(tensor.name) == "Int4"]
    if packed:
        raise refuse(f"{quoted(packed[0])} is packed 4-bit numbers", str(folder / name), "dequantise it before")
    return tensors


def _read_map(folder: Path) -> dict[str, str]:
    content = read_json_object(folder / NAME_MAP, MAX_MAP_BYTES, folder)
    listed = content.get("weight_map", content)
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()) or not listed:
        raise refuse("it does not map names to files", str(folder / NAME_MAP), "give the folder that unified_safetensors wrote")
    return listed
