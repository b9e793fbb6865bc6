"""Reading a rank tree: the manifest, and the headers of the rank files, which must be what the manifest says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.ckpt_format import read_ckpt
from converter.hf_folder import check_inside
from converter.layout import ParallelLayout
from converter.manifest import Manifest, RankFileRecord, read_manifest
from converter.safetensors_format import read_header
from converter.tensors import StoredTensor
from mappings.errors import Problem, Refused
from mappings.expand import Expansion, expand, restore_prefix
from mappings.tables import FamilyTable, parse_table

MAX_PROBLEMS = 40


@dataclass(frozen=True)
class RankTree:
    """A rank tree whose files agree with its manifest. `slices[rank][name]` is where a rank's slice of a parameter lies."""

    path: Path
    manifest: Manifest
    layout: ParallelLayout
    table: FamilyTable
    expansion: Expansion
    names: Mapping[str, str]
    slices: Mapping[int, Mapping[str, StoredTensor]]


def read_rank_tree(folder: Path) -> RankTree:
    """Read manifest and headers. Raises Refused, naming every file that is missing, foreign or not as recorded."""
    manifest = read_manifest(folder)
    table = parse_table(manifest.table, f"{folder / 'manifest.json'}: table {manifest.table_name}")
    originals = [tensor.name for file in manifest.source.files for tensor in file.tensors]
    names = restore_prefix(table, originals)
    expansion = expand(table, manifest.model, manifest.source.config, set(names.values()))
    problems: list[Problem] = []
    slices = {}
    for record in manifest.files:
        found, wrong = _read_rank_file(folder, record, manifest)
        problems += wrong
        slices[record.rank] = found
    if problems:
        raise Refused("the rank files do not agree with the manifest", problems[:MAX_PROBLEMS])
    return RankTree(folder, manifest, manifest.layout.layout(), table, expansion, names, slices)


def _read_rank_file(folder: Path, record: RankFileRecord, manifest: Manifest) -> tuple[dict[str, StoredTensor], list[Problem]]:
    path = folder / record.path
    mend = "restore it, or run hf2ms again"
    if not path.is_file():
        return {}, [Problem("missing", record.path, mend)]
    check_inside(path, folder)
    if path.stat().st_size != record.size:
        return {}, [Problem(f"{path.stat().st_size} bytes, the manifest says {record.size}", record.path, mend)]
    tensors, metadata = read_header(path) if manifest.format == "safetensors" else (read_ckpt(path), {})
    if manifest.format == "safetensors" and metadata.get("ms_convert_run") != manifest.run:
        return {}, [Problem("a file from another run", record.path, mend)]
    found = {tensor.name: tensor for tensor in tensors}
    expected = {tensor.name: tensor for tensor in record.tensors}
    if set(found) != set(expected) or len(tensors) != len(found):
        return {}, [Problem("other tensors than the manifest lists", record.path, mend)]
    wrong = [name for name, tensor in found.items() if (tensor.dtype, tensor.shape) != (expected[name].dtype, expected[name].shape)]
    return found, [Problem(f"{name}: another dtype or shape than the manifest says", record.path, mend) for name in wrong[:5]]


def recorded_checksums(manifest: Manifest) -> dict[tuple[int, str], str]:
    """(rank, parameter) -> xxh3 as the manifest has it."""
    return {(file.rank, tensor.name): tensor.xxh3 for file in manifest.files for tensor in file.tensors}


def index_text(weight_map: Mapping[str, str], total_size: int) -> str:
    """`model.safetensors.index.json` as transformers writes it."""
    return (
        json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}, indent=2, ensure_ascii=False)
        + "\n"
    )
