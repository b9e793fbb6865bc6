"""How the weights of one conversion lie on disk: `rank`, `unified` or `mindformers2`. Paths, and the files beside the weights.

    rank          rank_{r}/checkpoint_{r}.*  and strategy/: what MindSpore's own tools and MindFormers 1.x take
    unified       part{k}.safetensors with whole parameters, param_name_map.json, and strategy/ for the ranks that will load them
    mindformers2  iteration_{step}/model-{r}-{world}.safetensors with metadata.json: what the trainer of MindFormers 2.x resumes from

`manifest.json` and `huggingface/` lie beside them in each. No reader of MindSpore or MindFormers looks at those: their patterns, none of
which goes into folders, are `rank_*`, `*.safetensors`, `*.ckpt`, `*model.safetensors.index.json` and the plain names of their own files.
"""

from __future__ import annotations

from collections.abc import Iterable

from converter.layout import ParallelLayout
from converter.manifest import MINDFORMERS2, RANK, UNIFIED, Manifest
from converter.mindformers2_folder import COMMON, METADATA, TRACKER, iteration_folder
from converter.mindformers2_index import STEP, StageWeights, common_text, metadata_text
from converter.plan_hf2ms import RankTreePlan, rank_file
from converter.strategies import CutModel, merged_strategy, stage_layouts, strategy_files, strategy_path
from converter.unified_folder import NAME_MAP, name_map_text

DISK_LAYOUTS = (RANK, UNIFIED, MINDFORMERS2)
MERGED_STRATEGY = "merged_strategy/merged_ckpt_strategy.ckpt"


def weight_path(disk: str, rank: int, ranks: int, file_format: str) -> str:
    """The file of a rank, where each rank has one."""
    return f"{iteration_folder(STEP)}/model-{rank:07d}-{ranks:07d}.{file_format}" if disk == MINDFORMERS2 else rank_file(rank, file_format)


def companion_paths(disk: str, layout: ParallelLayout) -> list[str]:
    """The files beside the weights, in the order in which they are written. `layout` is that of the ranks, also for unified files."""
    if disk == MINDFORMERS2:
        return [f"{iteration_folder(STEP)}/{COMMON}", f"{iteration_folder(STEP)}/{METADATA}", TRACKER]
    strategies = [strategy_path(rank) for rank in range(layout.ranks)]
    return strategies if disk == RANK else [NAME_MAP, *strategies, MERGED_STRATEGY]


def companion_files(disk: str, source: CutModel, layout: ParallelLayout, planned: RankTreePlan) -> dict[str, bytes]:
    """Path -> content of the files beside the weights that `planned`, the plan of all ranks, writes."""
    if disk == MINDFORMERS2:
        texts = [common_text(), metadata_text(_stages(source, layout, planned)), str(STEP)]
        return {path: text.encode() for path, text in zip(companion_paths(disk, layout), texts, strict=True)}
    files = strategy_files(source, layout)
    if disk == UNIFIED:
        weight_map = {tensor.name: file.path for file in planned.plan.files for tensor in file.tensors}
        names = {NAME_MAP: name_map_text(weight_map, planned.plan.nbytes).encode()}
        return {**names, **files, MERGED_STRATEGY: merged_strategy(source, layout)}
    return files


def _stages(source: CutModel, layout: ParallelLayout, planned: RankTreePlan) -> Iterable[StageWeights]:
    """Each pipeline stage as the index of MindFormers 2.x describes it; a single rank is not cut."""
    files, links = {file.path: file for file in planned.plan.files}, dict(planned.links)
    of_stage = layout.ranks // layout.pp
    for stage in range(layout.pp):
        ranks = range(stage * of_stage, (stage + 1) * of_stage)
        paths = [planned.files_of_rank[rank] for rank in ranks]
        first = files[links.get(paths[0], paths[0])]
        slices = {tensor.name: (tensor.dtype, tensor.shape) for tensor in first.tensors}
        layouts = stage_layouts(source, layout, stage) if layout.ranks > 1 else []
        yield StageWeights(ranks, [path.rpartition("/")[2] for path in paths], layouts, slices)


def paths_of(manifest: Manifest) -> Iterable[str]:
    """Every file of a finished conversion but its side files and the manifest."""
    layout = (manifest.strategy or manifest.layout).layout()
    yield from (file.path for file in manifest.files)
    yield from companion_paths(manifest.disk, layout)
