"""Reading an output of hf2ms: the manifest, and the headers of the weight files, which must be what the manifest says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.ckpt_format import read_ckpt
from converter.hf_folder import check_inside
from converter.layout import ParallelLayout, blockers, cut_axes, cutting_of, slice_of
from converter.manifest import MANIFEST, Manifest, RankFileRecord, TensorRecord, read_manifest
from converter.safetensors_format import read_header
from converter.tensors import StoredTensor
from converter.untrusted import quoted
from mappings.composition import compose
from mappings.dialect_table import Dialect
from mappings.errors import Problem, Refused
from mappings.expand import Expansion, expand, restore_prefix
from mappings.names import fold_names
from mappings.tables import FamilyTable, parse_table

CHECKPOINT_SUFFIXES = (".safetensors", ".ckpt")
_MEND = "restore it, or run hf2ms again"


@dataclass(frozen=True)
class RankTree:
    """A rank tree whose files agree with its manifest, each rank holding what the layout gives it.

    `slices[rank][name]` is where a rank's slice of a parameter lies; it has the shape of its slice. The parameters of `expansion` are those
    of the files, in the names of `dialect` (None: the canonical ones); `canonical` is the same model in canonical names.
    """

    path: Path
    manifest: Manifest
    layout: ParallelLayout
    table: FamilyTable
    expansion: Expansion
    names: Mapping[str, str]
    slices: Mapping[int, Mapping[str, StoredTensor]]
    canonical: Expansion
    dialect: Dialect | None

    @property
    def cut_for(self) -> ParallelLayout:
        """The ranks that fused tensors are laid out for: of a unified folder those of its strategy files, else those of the files."""
        return ranks_of(self.manifest)

    def path_of(self, rank: int, name: str) -> str:
        """The file that holds a rank's slice of a parameter, relative to the folder; the rank's first file where it has none."""
        stored = self.slices.get(rank, {}).get(name)
        if stored is not None:
            return stored.path.relative_to(self.path).as_posix()
        return next(file.path for file in self.manifest.files if file.rank == rank)


def ranks_of(manifest: Manifest) -> ParallelLayout:
    """The ranks that load the files: of a unified folder those of its strategy files."""
    return (manifest.strategy or manifest.layout).layout()


def read_rank_tree(folder: Path) -> RankTree:
    """Read manifest and headers. Raises Refused, naming every file and slice that is missing, foreign or not as recorded."""
    manifest = read_manifest(folder)
    table = parse_table(manifest.table, f"{folder / 'manifest.json'}: table {quoted(manifest.table_name)}")
    originals = [tensor.name for file in manifest.source.files for tensor in file.tensors]
    names = restore_prefix(table, originals)
    dialect = manifest.target.read(str(folder / MANIFEST)) if manifest.target is not None else None
    canonical = expand(table, manifest.model, manifest.source.config, set(names.values()))
    layout = manifest.layout.layout()
    cut_for = ranks_of(manifest)
    _check_divides(folder, canonical, cut_for, dialect)
    expansion = compose(canonical, dialect, cutting_of(cut_for), manifest.family)
    _check_recorded_slices(folder, manifest, expansion)
    problems: list[Problem] = []
    slices: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
    paths = {record.path for record in manifest.files}
    for record in manifest.files:
        found, wrong = _read_rank_file(folder, record, manifest, paths)
        problems += wrong
        slices[record.rank] |= found
    if problems:
        raise Refused("the rank files do not agree with the manifest", problems)
    return RankTree(folder, manifest, layout, table, expansion, names, slices, canonical, dialect)


def check_dialect(folder: Path, dialect: Dialect | None, *, versioned: bool) -> None:
    """Raises Refused where the manifest says another dialect than the one that somebody names, or (`versioned`) another layout version."""
    target = read_manifest(folder).target
    names = ("ms-convert" if target is None else target.dialect, None if target is None else target.version)
    wanted = ("ms-convert" if dialect is None else dialect.table.dialect, None if dialect is None else dialect.version)
    if names[0] != wanted[0] or (versioned and names != wanted):
        said = names[0] if names[1] is None else f"{names[0]}@{names[1]}"
        problem = Problem(f"its manifest says {said}, not {dialect or wanted[0]}", str(folder), "leave --from out: the manifest knows")
        raise Refused("another dialect or layout version", [problem])


def _check_divides(folder: Path, expansion: Expansion, layout: ParallelLayout, dialect: Dialect | None) -> None:
    blocked = blockers(cut_axes(expansion), layout.tp, dialect is None or dialect.table.shares_kv_heads)
    if blocked:
        problems = [Problem(f"{count} cannot be divided among {layout.tp} tensor-parallel ranks") for count in blocked]
        raise Refused(f"{folder / MANIFEST} does not hold the model that it describes", problems)


def _check_recorded_slices(folder: Path, manifest: Manifest, expansion: Expansion) -> None:
    """Raises Refused unless every rank is recorded with the slices that the layout gives it, of one dtype for each parameter."""
    layout = manifest.layout.layout()
    recorded: dict[int, dict[str, TensorRecord]] = defaultdict(dict)
    for file in manifest.files:
        recorded[file.rank] |= {tensor.name: tensor for tensor in file.tensors}
    wrong: dict[str, list[str]] = defaultdict(list)
    for item in expansion.parameters.values():
        stages = layout.stages_of(item.parameter, item.layer, manifest.model.tied)
        shapes = [slice_of(item.parameter, item.shape, expansion.sizes, layout, rank).shape(item.shape) for rank in range(layout.tp)]
        dtypes = set()
        for rank in (layout.rank(stage, data, tensor) for stage in stages for data in range(layout.dp) for tensor in range(layout.tp)):
            slice_record = recorded[rank].get(item.name)
            if slice_record is None:
                wrong[f"is missing from rank {rank}"].append(item.name)
            elif slice_record.shape != shapes[layout.coordinates(rank).tensor]:
                wrong[f"has a shape on rank {rank} that is not its slice's"].append(item.name)
            else:
                dtypes.add(slice_record.dtype)
        if len(dtypes) > 1:
            wrong[f"has the dtypes {', '.join(sorted(dtypes))}"].append(item.name)
    problems = [Problem(f"{name} {what}", mend=_MEND) for what, names in wrong.items() for name in fold_names(names)]
    if problems:
        raise Refused(f"{folder / MANIFEST} does not hold the model that it describes", problems)


def _read_rank_file(
    folder: Path, record: RankFileRecord, manifest: Manifest, recorded: Collection[str]
) -> tuple[dict[str, StoredTensor], list[Problem]]:
    path = folder / record.path
    if not path.is_file():
        return {}, [Problem("missing", record.path, _MEND)]
    check_inside(path, folder)
    if path.stat().st_size != record.size:
        return {}, [Problem(f"{path.stat().st_size} bytes, the manifest says {record.size}", record.path, _MEND)]
    tensors, metadata = read_header(path) if manifest.format == "safetensors" else (read_ckpt(path), {})
    if manifest.format == "safetensors" and metadata.get("ms_convert_run") != manifest.run:
        return {}, [Problem("a file from another run", record.path, _MEND)]
    beside = [other for other in path.parent.iterdir() if other.suffix in CHECKPOINT_SUFFIXES]
    others = sorted(other.name for other in beside if other.relative_to(folder).as_posix() not in recorded)
    if others:
        what = f"{', '.join(others[:5])} lies beside it: MindSpore's tools would read one for the other"
        return {}, [Problem(what, record.path, "leave no other checkpoint in its folder")]
    if not _is_of_rank(metadata.get("rank"), record, manifest):
        return {}, [Problem(f"the file of rank {quoted(metadata['rank'])} stands in the place of rank {record.rank}", record.path, _MEND)]
    found = {tensor.name: tensor for tensor in tensors}
    expected = {tensor.name: tensor for tensor in record.tensors}
    if set(found) != set(expected) or len(tensors) != len(found):
        return {}, [Problem("other tensors than the manifest lists", record.path, _MEND)]
    wrong = [name for name, tensor in found.items() if (tensor.dtype, tensor.shape) != (expected[name].dtype, expected[name].shape)]
    return found, [Problem(f"{name}: another dtype or shape than the manifest says", record.path, _MEND) for name in wrong[:5]]


def _is_of_rank(written: str | None, record: RankFileRecord, manifest: Manifest) -> bool:
    """Whether a file's own word about its rank fits its place; a data-parallel rank may hold a link to another's file."""
    if written is None:
        return True
    if not (written.isascii() and written.isdigit() and len(written) < 8):
        return False
    place = manifest.layout.layout().coordinates(int(written))
    return (place.stage, place.tensor) == (record.stage, record.tensor)


def recorded_checksums(manifest: Manifest) -> dict[tuple[int, str], str]:
    """(rank, parameter) -> xxh3 as the manifest has it."""
    return {(file.rank, tensor.name): tensor.xxh3 for file in manifest.files for tensor in file.tensors}


def index_text(weight_map: Mapping[str, str], total_size: int) -> str:
    """`model.safetensors.index.json` as transformers writes it."""
    return (
        json.dumps({"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}, indent=2, ensure_ascii=False)
        + "\n"
    )
