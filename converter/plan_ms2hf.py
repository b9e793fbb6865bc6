"""Planning ms2hf: from a rank tree to the weight files of the Hugging Face folder it came from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from converter.copies import paired_boxes
from converter.layout import distinct_slices, slice_of
from converter.manifest import TensorRecord, WeightFileRecord
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.plan_hf2ms import DTYPE_OPTIONS, FLOATS
from converter.rank_tree import RankTree
from converter.tensors import StoredTensor, contiguous_strides
from mappings.errors import Problem, Refused
from mappings.expand import Pairing
from mappings.names import fold_names


@dataclass(frozen=True)
class Replicas:
    """The same slice of a parameter in several rank files; they must hold the same bytes."""

    name: str
    tensors: tuple[tuple[int, StoredTensor], ...]


@dataclass(frozen=True)
class HFFolderPlan:
    """The plan of the weight files. `renamed` maps a source file's name to the one written (torch files come back as safetensors)."""

    plan: Plan
    renamed: dict[str, str]
    dropped: tuple[str, ...]


def plan_hf_folder(tree: RankTree, dtype: str = "original") -> HFFolderPlan:
    """Plan every weight file. `dtype` "original" restores each tensor's own. Raises Refused when the tree lacks a part of a tensor."""
    pairings: dict[str, list[Pairing]] = defaultdict(list)
    for pairing in tree.expansion.pairings:
        pairings[pairing.hf].append(pairing)
    source = tree.manifest.source
    renamed = {file.name: _safetensors_name(file.name) for file in source.files}
    files: list[TargetFile] = []
    problems: list[Problem] = []
    for file in source.files:
        kept = [tensor for tensor in file.tensors if tensor.name not in source.dropped]
        try:
            tensors = tuple(_target(tree, pairings, tensor, dtype) for tensor in kept)
        except Refused as error:
            problems += error.problems
            continue
        files.append(TargetFile(renamed[file.name], "safetensors", tensors, tuple(_metadata(file))))
    if problems:
        raise Refused("the rank tree does not hold what the manifest promises", problems[:40])
    return HFFolderPlan(Plan(tuple(files)), renamed, tuple(sorted(source.dropped)))


def _metadata(file: WeightFileRecord) -> list[tuple[str, str]]:
    """The header's metadata as it was; `format: pt` where a torch file had none, since transformers asks for it."""
    return list(file.metadata.items()) if file.name.endswith(".safetensors") else [("format", "pt")]


def _safetensors_name(name: str) -> str:
    if name.startswith("pytorch_model") and name.endswith(".bin"):
        return "model" + name.removeprefix("pytorch_model").removesuffix(".bin") + ".safetensors"
    return name


def _target(tree: RankTree, pairings: dict[str, list[Pairing]], record: TensorRecord, dtype: str) -> TargetTensor:
    whole = tree.names[record.name]
    wanted = pairings.get(tree.expansion.duplicates.get(whole, whole), [])
    strides = contiguous_strides(record.shape)
    copies = tuple(copy for pairing in wanted for copy in _copies(tree, pairing, strides))
    cast = dtype != "original" and DTYPE_OPTIONS[dtype] is not None and record.dtype in FLOATS
    target = TargetTensor(
        record.name, str(DTYPE_OPTIONS[dtype]) if cast else record.dtype, record.shape, copies, group=wanted[0].ms if wanted else whole
    )
    covered = sum(copy.elements for copy in copies)
    if covered != target.elements:
        raise Refused(
            "incomplete",
            [Problem(f"{record.name}: {covered} of {target.elements} elements are in the rank files", str(tree.path), "run hf2ms again")],
        )
    return target


def _copies(tree: RankTree, pairing: Pairing, hf_strides: tuple[int, ...]) -> list[StridedCopy]:
    item = tree.expansion.parameters[pairing.ms]
    stage = tree.layout.stages_of(item.parameter, item.layer, tree.manifest.model.tied)[0]
    copies = []
    for tensor_rank, piece in distinct_slices(item.parameter, item.shape, tree.expansion.sizes, tree.layout):
        stored = tree.slices[tree.layout.rank(stage, 0, tensor_rank)].get(pairing.ms)
        if stored is None or stored.shape != piece.shape(item.shape):
            found = "missing" if stored is None else f"of shape {list(stored.shape)}"
            what = f"{pairing.ms} of rank {tree.layout.rank(stage, 0, tensor_rank)} is {found}, not {list(piece.shape(item.shape))}"
            raise Refused("a slice does not fit", [Problem(what, str(tree.path), "run hf2ms again")])
        copies += [box.backward(stored) for box in paired_boxes(tree.expansion, pairing, piece, hf_strides)]
    return copies


def replicas_of(tree: RankTree) -> list[Replicas]:
    """Every slice that several files hold: tensor-parallel replicas, replicated KV heads, a tied embedding's two ends, data-parallel
    ranks (hard links of one file are one copy).
    """
    found = []
    for item in tree.expansion.parameters.values():
        stages = tree.layout.stages_of(item.parameter, item.layer, tree.manifest.model.tied)
        for first, piece in distinct_slices(item.parameter, item.shape, tree.expansion.sizes, tree.layout):
            ranks = [
                tree.layout.rank(stage, data, tensor_rank)
                for stage in stages
                for data in range(tree.layout.dp)
                for tensor_rank in range(first, first + piece.replicas)
            ]
            holders = _distinct_files(tree, item.name, ranks)
            if len(holders) > 1:
                found.append(Replicas(item.name, tuple(holders)))
    return found


def _distinct_files(tree: RankTree, name: str, ranks: list[int]) -> list[tuple[int, StoredTensor]]:
    holders: dict[tuple[int, int], tuple[int, StoredTensor]] = {}
    for rank in ranks:
        tensor = tree.slices[rank].get(name)
        if tensor is not None:
            status = tensor.path.stat()
            holders.setdefault((status.st_dev, status.st_ino), (rank, tensor))
    return list(holders.values())


def missing_from_ranks(tree: RankTree) -> list[str]:
    """Parameters that a rank should hold and does not, folded; empty for a whole tree."""
    missing = []
    for item in tree.expansion.parameters.values():
        for stage in tree.layout.stages_of(item.parameter, item.layer, tree.manifest.model.tied):
            for data in range(tree.layout.dp):
                for tensor_rank in range(tree.layout.tp):
                    rank = tree.layout.rank(stage, data, tensor_rank)
                    stored = tree.slices[rank].get(item.name)
                    piece = slice_of(item.parameter, item.shape, tree.expansion.sizes, tree.layout, tensor_rank)
                    if stored is None or stored.shape != piece.shape(item.shape):
                        missing.append(item.name)
    return fold_names(dict.fromkeys(missing))
