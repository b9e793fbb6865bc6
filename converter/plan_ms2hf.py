"""Planning ms2hf: from a rank tree to the weight files of the Hugging Face folder it came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from converter.casts import can_cast
from converter.copies import paired_boxes
from converter.layout import distinct_slices
from converter.manifest import TensorRecord, WeightFileRecord
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.plan_hf2ms import DTYPE_OPTIONS, FLOATS
from converter.rank_tree import RankTree
from converter.tensors import StoredTensor, contiguous_strides
from mappings.errors import Problem, Refused, refuse
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
    """Plan every weight file. `dtype` "original" restores each tensor's own.

    Raises Refused, naming every tensor that cannot be restored.
    """
    source = tree.manifest.source
    pairings: dict[str, list[Pairing]] = defaultdict(list)
    for pairing in tree.expansion.pairings:
        pairings[pairing.hf].append(pairing)
    _check_restorable(tree, pairings)
    renamed = {file.name: _safetensors_name(file.name) for file in source.files}
    files = []
    for file in source.files:
        tensors = tuple(_target(tree, pairings, tensor, dtype) for tensor in file.tensors if tensor.name not in source.dropped)
        files.append(TargetFile(renamed[file.name], "safetensors", tensors, tuple(_metadata(file))))
    return HFFolderPlan(Plan(tuple(files)), renamed, tuple(sorted(source.dropped)))


def _check_restorable(tree: RankTree, pairings: Mapping[str, list[Pairing]]) -> None:
    """Raises Refused for a recorded tensor that the rules do not make, or not so, and for one that they make and that is not recorded."""
    source, expansion = tree.manifest.source, tree.expansion
    dtypes = {tensor.name: tensor.dtype for slices in tree.slices.values() for tensor in slices.values()}
    wrong: dict[str, list[str]] = defaultdict(list)
    for record in (tensor for file in source.files for tensor in file.tensors if tensor.name not in source.dropped):
        whole = _original(tree, record)
        if whole not in expansion.hf_shapes:
            wrong["is of no rule, and is not recorded as dropped"].append(record.name)
        elif record.shape != expansion.hf_shapes[whole]:
            wrong[f"is recorded with the shape {list(record.shape)}; the model has {list(expansion.hf_shapes[whole])}"].append(record.name)
        for dtype in sorted({dtypes[pairing.ms] for pairing in pairings.get(whole, ())}):
            if not can_cast(dtype, record.dtype):
                wrong[f"is recorded as {record.dtype}, its slices are {dtype}"].append(record.name)
    wrong["is recorded as dropped, and no rule drops it"] += [
        name for name in source.dropped if tree.names.get(name) not in expansion.drops
    ]
    absent = expansion.hf_shapes.keys() - {tree.names[tensor.name] for file in source.files for tensor in file.tensors}
    wrong["is of the model, and is not recorded"] += sorted(absent)
    problems = [Problem(f"{name} {what}", str(tree.path), "run hf2ms again") for what, names in wrong.items() for name in fold_names(names)]
    if problems:
        raise Refused("the rank tree does not hold what the manifest promises", problems)


def _original(tree: RankTree, record: TensorRecord) -> str:
    """The whole name of the tensor that holds a recorded tensor's values: its own, or that of the one it repeats."""
    whole = tree.names[record.name]
    return tree.expansion.duplicates.get(whole, whole)


def _metadata(file: WeightFileRecord) -> list[tuple[str, str]]:
    """The header's metadata as it was; `format: pt` where a torch file had none, since transformers asks for it."""
    return list(file.metadata.items()) if file.name.endswith(".safetensors") else [("format", "pt")]


def _safetensors_name(name: str) -> str:
    if name.startswith("pytorch_model") and name.endswith(".bin"):
        return "model" + name.removeprefix("pytorch_model").removesuffix(".bin") + ".safetensors"
    return name


def _target(tree: RankTree, pairings: dict[str, list[Pairing]], record: TensorRecord, dtype: str) -> TargetTensor:
    wanted = pairings[_original(tree, record)]
    strides = contiguous_strides(record.shape)
    copies = tuple(copy for pairing in wanted for copy in _copies(tree, pairing, strides))
    cast = dtype != "original" and DTYPE_OPTIONS[dtype] is not None and record.dtype in FLOATS
    return TargetTensor(record.name, str(DTYPE_OPTIONS[dtype]) if cast else record.dtype, record.shape, copies, group=wanted[0].ms)


def _copies(tree: RankTree, pairing: Pairing, hf_strides: tuple[int, ...]) -> Iterator[StridedCopy]:
    item = tree.expansion.parameters[pairing.ms]
    stage = tree.layout.stages_of(item.parameter, item.layer, tree.manifest.model.tied)[0]
    for tensor_rank, piece in distinct_slices(item.parameter, item.shape, tree.expansion.sizes, tree.layout):
        stored = tree.slices[tree.layout.rank(stage, 0, tensor_rank)][pairing.ms]
        yield from (box.backward(stored) for box in paired_boxes(tree.expansion, pairing, piece, hf_strides))


def assembled(tree: RankTree) -> dict[str, TargetTensor]:
    """Every tensor of the Hugging Face model by its whole name, put together in the type that its slices have. Raises Refused for two."""
    pairings: dict[str, list[Pairing]] = defaultdict(list)
    for pairing in tree.expansion.pairings:
        pairings[pairing.hf].append(pairing)
    found = {}
    for name, wanted in pairings.items():
        shape = tree.expansion.hf_shapes[name]
        copies = tuple(copy for pairing in wanted for copy in _copies(tree, pairing, contiguous_strides(shape)))
        dtypes = {copy.source.dtype for copy in copies}
        if len(dtypes) != 1:
            raise refuse(f"{name} is made of slices of the types {', '.join(sorted(dtypes))}", str(tree.path), "convert again with --dtype")
        found[name] = TargetTensor(name, dtypes.pop(), shape, copies, group=wanted[0].ms)
    return found


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
        tensor = tree.slices[rank][name]
        status = tensor.path.stat()
        holders.setdefault((status.st_dev, status.st_ino), (rank, tensor))
    return list(holders.values())
