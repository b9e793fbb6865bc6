"""Planning hf2ms: from an understood Hugging Face folder to every file of a rank tree, from headers alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from converter.copies import PairedBox, paired_boxes
from converter.layout import ParallelLayout, Slice, slice_of
from converter.plan import Plan, TargetFile, TargetTensor
from converter.source_model import SourceModel
from converter.tensors import StoredTensor, contiguous_strides
from mappings.errors import Problem, Refused, refuse
from mappings.expand import Pairing, ParameterOfModel
from mappings.names import fold_names

FLOATS = {"F64", "F32", "F16", "BF16"}
DTYPE_OPTIONS = {"keep": None, "bf16": "BF16", "fp16": "F16", "fp32": "F32"}
RANK_FORMATS = ("safetensors", "ckpt")


@dataclass(frozen=True)
class RankTreePlan:
    """The plan of a rank tree. `links` are (rank file, file that it is a hard link to): data-parallel copies.

    `files_of_rank` gives each planned rank's file, written or linked; of a unified folder, which has one rank, each part's.
    """

    plan: Plan
    layout: ParallelLayout
    links: tuple[tuple[str, str], ...]
    files_of_rank: Mapping[int, str]


def rank_file(rank: int, file_format: str) -> str:
    """The path of a rank's file in the output folder, as MindSpore's tools look for it: one file in `rank_{r}/`."""
    return f"rank_{rank}/checkpoint_{rank}.{file_format}"


def plan_rank_tree(
    source: SourceModel,
    layout: ParallelLayout,
    *,
    file_format: str,
    dtype: str = "keep",
    ranks: Collection[int] | None = None,
    run: str = "",
    path_of: Callable[[int], str] | None = None,
) -> RankTreePlan:
    """Plan the files of `ranks` (all when None). `run` is the identity of this conversion, put in each safetensors header.

    `path_of` names a rank's file; `rank_file` by default.

    Raises Refused when parts of one parameter differ in dtype, or a rank is not in the layout.
    """
    wanted = sorted(range(layout.ranks) if ranks is None else set(ranks))
    _check_ranks(wanted, layout)
    slices = SlicePlanner(source, layout, DTYPE_OPTIONS[dtype])
    written: dict[tuple[int, int], str] = {}
    files, links, files_of_rank = [], [], {}
    for rank in wanted:
        place = layout.coordinates(rank)
        path = path_of(rank) if path_of is not None else rank_file(rank, file_format)
        files_of_rank[rank] = path
        if (place.stage, place.tensor) in written:
            links.append((path, written[place.stage, place.tensor]))
            continue
        written[place.stage, place.tensor] = path
        metadata = (("format", "ms"), ("ms_convert_run", run), ("rank", str(rank)), ("remove_redundancy", "False"))
        files.append(
            TargetFile(
                path, file_format, tuple(slices.tensors_of(place.stage, place.tensor)), metadata if file_format == "safetensors" else ()
            )
        )
    return RankTreePlan(Plan(tuple(files)), layout, tuple(links), files_of_rank)


def _check_ranks(wanted: list[int], layout: ParallelLayout) -> None:
    outside = [rank for rank in wanted if not 0 <= rank < layout.ranks]
    if outside or not wanted:
        mend = f"this layout has the ranks 0-{layout.ranks - 1}"
        raise Refused("--ranks does not fit the layout", [Problem(f"no rank {', '.join(map(str, outside[:10])) or 'named'}", mend=mend)])


class SlicePlanner:
    """Plans each rank's slice of each parameter, sharing what ranks have in common."""

    def __init__(self, source: SourceModel, layout: ParallelLayout, dtype: str | None) -> None:
        self.source, self.layout, self.dtype = source, layout, dtype
        self.pairings: dict[str, list[Pairing]] = defaultdict(list)
        for pairing in source.expansion.pairings:
            self.pairings[pairing.ms].append(pairing)
        self.dtypes = self._dtypes()
        self.of_stage: dict[int, list[ParameterOfModel]] = defaultdict(list)
        for parameter in _in_file_order(source.expansion.parameters.values()):
            for stage in layout.stages_of(parameter.parameter, parameter.layer, source.config.tied):
                self.of_stage[stage].append(parameter)
        self.shared: dict[tuple[str, Slice], TargetTensor] = {}

    def tensors_of(self, stage: int, tensor_rank: int) -> list[TargetTensor]:
        sizes = self.source.expansion.sizes
        return [self.target(item, slice_of(item.parameter, item.shape, sizes, self.layout, tensor_rank)) for item in self.of_stage[stage]]

    def target(self, item: ParameterOfModel, piece: Slice) -> TargetTensor:
        key = (item.name, piece)
        if key not in self.shared:
            copies = tuple(box.forward(source) for pairing in self.pairings[item.name] for source, box in self.boxes(pairing, piece))
            shape = piece.shape(item.shape)
            target = TargetTensor(item.name, self.dtypes[item.name], shape, copies, item.name, piece.padding(item.shape))
            filled = sum(copy.elements for copy in copies)
            if filled + target.padding != target.elements:
                what = f"{filled} of {target.elements - target.padding} elements have a source"
                raise refuse(what, item.name, f"mend the rules of {self.source.table.where} that name it")
            self.shared[key] = target
        return self.shared[key]

    def boxes(self, pairing: Pairing, piece: Slice) -> list[tuple[StoredTensor, PairedBox]]:
        stored = self.source.tensors[pairing.hf]
        strides = stored.strides or contiguous_strides(stored.shape)
        return [(stored, box) for box in paired_boxes(self.source.expansion, pairing, piece, strides)]

    def _dtypes(self) -> dict[str, str]:
        mixed = []
        dtypes = {}
        for name, pairings in self.pairings.items():
            found = {self.source.tensors[pairing.hf].dtype for pairing in pairings}
            cast = self.dtype is not None and found <= FLOATS
            if len(found) > 1 and not cast:
                mixed.append(name)
            dtypes[name] = self.dtype if cast and self.dtype is not None else min(found)
        if mixed:
            problems = [
                Problem(f"{name} is made of tensors of different dtypes", mend="choose one with --dtype") for name in fold_names(mixed)
            ]
            raise Refused("parts of one parameter differ in dtype", problems)
        return dtypes


def _in_file_order(parameters: Collection[ParameterOfModel]) -> list[ParameterOfModel]:
    """First-stage parameters, then layer by layer, then the last stage's; in the table's order within each."""
    place = {"first": (0, 0), "last": (2, 0)}
    return sorted(parameters, key=lambda item: place.get(item.parameter.stage, (1, item.layer or 0)))
