"""The facts of a plan, for a person (`--dry-run`) and for machines (`--json`): one dictionary, shown in two ways."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from converter.layout import ParallelLayout, slice_of
from converter.manifest import RANK
from converter.memory import peak_memory
from converter.plan import Plan
from converter.source_model import SourceModel
from converter.vocabulary import vocabulary_notes
from mappings.composition import RANK_AXIS
from mappings.dialect_table import CANONICAL, Dialect
from mappings.names import fold_names

if TYPE_CHECKING:  # one direction need not wait for the other's modules
    from converter.foreign2hf import ForeignRestoration
    from converter.hf2ms import Conversion
    from converter.ms2hf import Restoration


def conversion_facts(conversion: Conversion) -> dict[str, Any]:
    """What hf2ms would do, from headers alone. Sizes in bytes; names folded over layers."""
    source, layout, folder = conversion.source, conversion.layout, conversion.source.folder
    return {
        "command": "hf2ms",
        "model": str(folder.path),
        "family": source.table.family,
        "table": source.table.where,
        "target": target_facts(source.dialect, source.table.family),
        "layout": layout.to_json(),
        "disk": conversion.options.disk,
        "format": conversion.options.file_format,
        "dtype": conversion.options.dtype,
        "parameters": sum(tensor.elements for name, tensor in source.tensors.items() if name in source.expansion.hf_shapes),
        "source": {
            "files": len(folder.files),
            "tensors": len(source.tensors),
            "bytes": sum(file.size for file in folder.files),
            "dtypes": dict(Counter(tensor.dtype for tensor in source.tensors.values())),
        },
        "ranks": _rank_facts(conversion),
        **fate_facts(source, conversion.whole.layout),
        "side_files": [side.name for side in folder.side_files],
        "left": [{"name": name, "why": why} for name, why in folder.left],
        "notes": [*source.notes, *vocabulary_notes(source), *dialect_notes(source.dialect, source.table.family), *_fused_notes(conversion)],
        "needs": _needs(conversion.mine.plan, conversion.options.workers, sum(side.size for side in folder.side_files)),
        "bytes_by_dtype": dtype_bytes(conversion.mine.plan),
    }


def restoration_facts(restoration: Restoration) -> dict[str, Any]:
    """What ms2hf would do."""
    tree, plan = restoration.tree, restoration.planned.plan
    return {
        "command": "ms2hf",
        "rank_tree": str(tree.path),
        "family": tree.manifest.family,
        "target": target_facts(tree.dialect, tree.manifest.family),
        "layout": tree.layout.to_json(),
        "files": [
            {"path": file.path, "tensors": len(file.tensors), "bytes": sum(tensor.nbytes for tensor in file.tensors)} for file in plan.files
        ],
        "not_restored": [
            {"name": name, "why": tree.manifest.source.dropped[first]}
            for why in sorted(set(tree.manifest.source.dropped.values()))
            for names in [[name for name, reason in tree.manifest.source.dropped.items() if reason == why]]
            for first in names[:1]
            for name in fold_names(names)
        ],
        "side_files": [record.name for record in tree.manifest.source.side_files],
        "renamed": {old: new for old, new in restoration.planned.renamed.items() if old != new},
        "needs": _needs(plan, restoration.options.workers, sum(record.size for record in tree.manifest.source.side_files)),
        "bytes_by_dtype": dtype_bytes(plan),
    }


def foreign_facts(restoration: ForeignRestoration) -> dict[str, Any]:
    """What ms2hf would do with a checkpoint that has no manifest."""
    model, plan = restoration.model, restoration.plan
    return {
        "command": "ms2hf",
        "checkpoint": str(restoration.source.folder),
        "kind": model.checkpoint.kind,
        "family": model.table.family,
        "target": target_facts(model.dialect, model.table.family),
        "checkpoint_files": len(model.checkpoint.files),
        "fused_for": model.fused_for,
        "files": [
            {"path": file.path, "tensors": len(file.tensors), "bytes": sum(tensor.nbytes for tensor in file.tensors)} for file in plan.files
        ],
        "ignored": [{"why": why, "count": len(names), "names": fold_names(names)} for why, names in model.ignored.items()],
        "side_files": [side.name for side in restoration.side_files],
        "notes": [*model.notes, *dialect_notes(model.dialect, model.table.family), *_alike(model.dialect, model.table.family)],
        "needs": _needs(plan, restoration.options.workers, sum(side.size for side in restoration.side_files)),
        "bytes_by_dtype": dtype_bytes(plan),
    }


def target_facts(dialect: Dialect | None, family: str) -> dict[str, Any]:
    """Whose names and layouts the MindSpore files have. By analogy: the dialect's own code has no such network."""
    if dialect is None:
        return {"dialect": CANONICAL, "version": None, "by_analogy": False}
    return {"dialect": dialect.table.dialect, "version": dialect.version, "by_analogy": dialect.by_analogy(family)}


def dialect_notes(dialect: Dialect | None, family: str) -> list[str]:
    """What a person should see of a dialect."""
    if dialect is None or not dialect.by_analogy(family):
        return []
    like = dialect.network(family).families[0]
    return [f"{dialect.table.dialect} has no {family} network of its own: names and layouts are by analogy with {like}"]


def _alike(dialect: Dialect | None, family: str) -> list[str]:
    """Files do not tell versions apart that have equal names: somebody who knows the run must."""
    alike = dialect.alike(family) if dialect is not None else ()
    if dialect is None or not alike:
        return []
    return [f"read as layout version {dialect.version}; {', '.join(alike)} would have the same names and shapes, and other contents"]


def _fused_notes(conversion: Conversion) -> list[str]:
    """What is put together within each rank, and so is right for that many ranks only, where the files may be cut anew."""
    expansion = conversion.source.expansion
    tp = expansion.sizes.get(RANK_AXIS, 1)
    fused = [item.name for item in expansion.parameters.values() if item.parameter.cut == RANK_AXIS]
    if conversion.options.disk == RANK or tp == 1 or not fused:
        return []
    return [f"fused within each of {tp} tensor-parallel ranks, so not to be cut for another tp: {', '.join(fold_names(fused))}"]


def dtype_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of each dtype that the plan writes."""
    total: Counter[str] = Counter()
    for file in plan.files:
        for tensor in file.tensors:
            total[tensor.dtype] += tensor.nbytes
    return dict(total)


def _needs(plan: Plan, workers: int, side_bytes: int) -> dict[str, int]:
    return {"disk": plan.nbytes + side_bytes, "memory": peak_memory(plan, workers), "workers": workers}


def _rank_facts(conversion: Conversion) -> list[dict[str, Any]]:
    planned = {file.path: file for file in conversion.mine.plan.files}
    linked = dict(conversion.mine.links)
    layout = conversion.whole.layout
    facts = []
    for number, path in conversion.mine.files_of_rank.items():
        place, file = layout.coordinates(conversion.rank_of(number)), planned[linked.get(path, path)]
        layers = layout.layers_of(place.stage)
        facts.append(
            {
                "rank": place.rank, "stage": place.stage, "data": place.data, "tensor": place.tensor,
                "layers": [layers[0], layers[-1]], "file": path, "link_to": linked.get(path),
                "tensors": len(file.tensors), "bytes": sum(tensor.nbytes for tensor in file.tensors),
            }
        )  # fmt: skip
    return facts


def fate_facts(source: SourceModel, layout: ParallelLayout) -> dict[str, Any]:
    """What is not carried as it is: dropped, a duplicate, padded, or held by several ranks. Names folded over layers."""
    return {
        "dropped": _dropped(source),
        "duplicates": [{"name": name, "of": of} for name, of in source.duplicates.items()],
        "padded": _padded(source, layout),
        "replicated": _replicated(source, layout),
    }


def _dropped(source: SourceModel) -> list[dict[str, str]]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, drop in source.dropped.items():
        by_reason[drop.why].append(name)
    return [{"name": name, "why": why} for why, names in by_reason.items() for name in fold_names(names)]


def _padded(source: SourceModel, layout: ParallelLayout) -> list[dict[str, Any]]:
    if layout.padded_vocab == layout.vocab:
        return []
    names = [item.name for item in source.expansion.parameters.values() if item.parameter.cut == "vocab"]
    return [{"name": name, "axis": "vocab", "from": layout.vocab, "to": layout.padded_vocab} for name in names]


def _replicated(source: SourceModel, layout: ParallelLayout) -> list[dict[str, Any]]:
    """Parameters that several ranks hold whole or share a head of; and the tied embedding's two places."""
    copies: dict[tuple[str, int], list[str]] = defaultdict(list)
    for item in source.expansion.parameters.values():
        piece = slice_of(item.parameter, item.shape, source.expansion.sizes, layout, 0)
        stages = layout.stages_of(item.parameter, item.layer, source.config.tied)
        if layout.tp > 1 and piece.replicas > 1:
            why = "whole on every tensor-parallel rank" if piece.axis is None else f"KV heads shared by {piece.replicas} ranks each"
            copies[why, piece.replicas].append(item.name)
        if len(stages) > 1:
            copies["tied: on the first and on the last stage", len(stages)].append(item.name)
    return [{"name": name, "copies": count, "why": why} for (why, count), names in copies.items() for name in fold_names(names)]
