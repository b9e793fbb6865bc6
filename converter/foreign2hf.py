"""ms2hf of a checkpoint without a manifest: a Hugging Face folder that Transformers loads, config.json last."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from converter.canonical import stored_parameters
from converter.casts import can_cast
from converter.chunked import Chunk, ChunkedTensor, ForeignCheckpoint
from converter.copies import paired_boxes_of_region
from converter.execute import execute
from converter.foreign_model import ForeignModel, config_file, understand_checkpoint
from converter.hf_folder import SideFile, check_inside
from converter.manifest import write_atomically
from converter.mindformers2_folder import METADATA, MODEL_FILE, TRACKER, read_mindformers2, step_folders
from converter.ms2hf import CONFIG, INDEX, HFOptions
from converter.outcome import OnProgress, Outcome, counted_from, refuse_inside, refuse_overlap
from converter.output_folder import HF_FOLDER, FileRecord, OutputFolder, Run, finish_interrupted, missing_space
from converter.partial_files import sync_files
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.plan_hf2ms import DTYPE_OPTIONS, FLOATS
from converter.rank_folders import has_rank_folders, read_rank_folders
from converter.rank_tree import index_text
from converter.regions import Region
from converter.resume import unfinished_files
from converter.side_files import copy_side_files
from converter.stored_bytes import checksum
from converter.strided import refuse_holes
from converter.tensors import StoredTensor, contiguous_strides
from converter.unified_folder import read_unified, safetensors_files
from mappings.dialect_table import Dialect
from mappings.errors import Problem, Refused, refuse
from mappings.expand import Pairing, ParameterOfModel
from mappings.names import fold_names

MAX_SHARD_BYTES = 5_000_000_000  # as Transformers divides a model
SIDE_NAMES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class ForeignSource:
    """What to read, and what the checkpoint does not say itself. `fused_for`: see `understand_checkpoint`."""

    folder: Path
    dialect: Dialect | None
    config: Path
    strategy: Path | None = None
    fused_for: int | None = None


@dataclass(frozen=True)
class ForeignRestoration:
    """A planned way back. `side_files` are those beside config.json that a model folder has."""

    source: ForeignSource
    model: ForeignModel
    plan: Plan
    side_files: tuple[SideFile, ...]
    run: Run
    options: HFOptions

    @property
    def config(self) -> Path:
        """The file config.json."""
        return config_file(self.source.config)

    @property
    def sharded(self) -> bool:
        return len(self.plan.files) > 1


def plan_foreign(source: ForeignSource, options: HFOptions, *, one_file: bool = False) -> ForeignRestoration:
    """Plan from headers alone: a rank tree with its strategy files, a unified folder, or a MindFormers 2.x one. Raises Refused.

    Weights go into files of at most 5 GB, or into `one_file`.
    """
    config = config_file(source.config)
    not_weights = source.dialect.table.not_weights if source.dialect is not None else ()
    if has_rank_folders(source.folder):
        ranks = read_rank_folders(source.folder, source.strategy, not_weights)
        model = understand_checkpoint(ranks.checkpoint, source.dialect, config, ranks.cuts, source.fused_for)
    else:
        model = understand_checkpoint(_whole_tensors(source.folder), source.dialect, config, None, source.fused_for)
    plan = _plan(model, options.dtype, None if one_file else MAX_SHARD_BYTES)
    names = [name for name in SIDE_NAMES if (config.parent / name).is_file()]
    for name in (*names, config.name):
        check_inside(config.parent / name, config.parent)
    side_files = tuple(SideFile(name, config.parent / name, (config.parent / name).stat().st_size) for name in names)
    restoration = ForeignRestoration(source, model, plan, side_files, _identity(source, model, config, options), options)
    return replace(restoration, run=replace(restoration.run, paths=tuple(_paths(restoration))))


def _whole_tensors(path: Path) -> ForeignCheckpoint:
    """A checkpoint whose own files say how its tensors lie: a MindFormers 2.x folder, a unified folder, a single file."""
    if path.is_file():
        tensors = stored_parameters(path)
        return ForeignCheckpoint("file", path.parent, {name: ChunkedTensor.whole(tensor) for name, tensor in tensors.items()}, {}, (path,))
    if not path.is_dir():
        raise refuse("no such file or folder", str(path), "give a checkpoint of MindFormers or MindSpore")
    named = any(MODEL_FILE.fullmatch(name) for name in safetensors_files(path))
    native = named or (path / TRACKER).is_file() or (path / METADATA).is_file() or step_folders(path)
    return read_mindformers2(path) if native else read_unified(path)


def _identity(source: ForeignSource, model: ForeignModel, config: Path, options: HFOptions) -> Run:
    files = {
        str(path.relative_to(model.checkpoint.folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in model.checkpoint.files
    }
    shown = {
        "checkpoint": str(source.folder.resolve()), "--from": str(source.dialect or "ms-convert"), "--config": str(config.resolve()),
        "--dtype": options.dtype, "--allow-overflow": str(options.allow_overflow), "ranks of fused tensors": str(model.fused_for),
    }  # fmt: skip
    decisive = [files, shown, xxhash.xxh3_128_hexdigest(config.read_bytes())]
    return Run(xxhash.xxh3_128_hexdigest(json.dumps(decisive, sort_keys=True).encode()), shown)


def _paths(restoration: ForeignRestoration) -> Iterator[str]:
    yield from (file.path for file in restoration.plan.files)
    yield from (side.name for side in restoration.side_files)
    if restoration.sharded:
        yield INDEX
    yield CONFIG


def _plan(model: ForeignModel, dtype: str, most: int | None) -> Plan:
    """The weight files: tensors layer by layer, in files of at most `most` bytes."""
    pairings: dict[str, list[Pairing]] = defaultdict(list)
    for pairing in model.expansion.pairings:
        pairings[pairing.hf].append(pairing)
    place = {"first": (0, 0), "last": (2, 0)}

    def order(name: str) -> tuple[int, int]:
        item = model.expansion.parameters[pairings[name][0].ms]
        return place.get(item.parameter.stage, (1, item.layer or 0))

    targets = [_target(model, name, pairings[name], dtype) for name in sorted(model.expansion.hf_shapes, key=order)]
    shards: list[list[TargetTensor]] = [[]]
    size = 0
    for target in targets:
        if most is not None and shards[-1] and size + target.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += target.nbytes
    names = (
        ["model.safetensors"] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    metadata = (("format", "pt"),)
    return Plan(tuple(TargetFile(name, "safetensors", tuple(shard), metadata) for name, shard in zip(names, shards, strict=True)))


def _target(model: ForeignModel, name: str, pairings: Sequence[Pairing], dtype: str) -> TargetTensor:
    shape = model.expansion.hf_shapes[name]
    stored = {model.tensors[pairing.ms].dtype for pairing in pairings}
    cast = dtype != "original" and stored <= FLOATS
    if len(stored) > 1 and not cast:
        raise Refused(
            "parts of one tensor differ in dtype", [Problem(f"{name} is made of {', '.join(sorted(stored))}", mend="say --dtype")]
        )
    wanted = str(DTYPE_OPTIONS[dtype]) if cast else min(stored)
    copies = tuple(copy for pairing in pairings for copy in _copies(model, pairing, contiguous_strides(shape)))
    if not all(can_cast(kind, wanted) for kind in stored):
        raise Refused("a dtype that is not converted", [Problem(f"{name} is stored as {', '.join(sorted(stored))}")])
    return TargetTensor(name, wanted, shape, copies, group=pairings[0].ms)


def _copies(model: ForeignModel, pairing: Pairing, hf_strides: tuple[int, ...]) -> Iterator[StridedCopy]:
    item = model.expansion.parameters[pairing.ms]
    for chunk in model.tensors[pairing.ms].chunks:
        region = region_of_chunk(item, chunk)
        yield from (box.backward(chunk.stored) for box in paired_boxes_of_region(model.expansion, pairing, region, hf_strides))


def region_of_chunk(item: ParameterOfModel, chunk: Chunk) -> Region:
    """Where a chunk lies in the true parameter: rows of a padded vocabulary are beyond it."""
    true = [min(begin, size) for begin, size in zip(chunk.start, item.shape, strict=True)]
    ends = [min(begin + length, size) for begin, length, size in zip(chunk.start, chunk.stored.shape, item.shape, strict=True)]
    return Region(tuple(true), tuple(ends), chunk.stored.shape)


def restore_foreign(restoration: ForeignRestoration, output: Path, on_progress: OnProgress | None = None) -> Outcome:
    """Write the Hugging Face folder: weights, index, files beside config.json, and that last. Continues an unfinished run.

    Raises Refused when replicas of a slice differ.
    """
    options, plan = restoration.options, restoration.plan
    refuse_overlap(restoration.source.folder, output)
    refuse_inside(restoration.config, output)
    if restoration.source.strategy is not None:
        refuse_inside(restoration.source.strategy, output)
    outcome = Outcome(output)
    if finish_interrupted(output, HF_FOLDER, restoration.run) and not options.overwrite:
        outcome.notes.append("this conversion is finished already: nothing to do")
        return outcome
    side_bytes = sum(side.size for side in restoration.side_files)
    folder = OutputFolder(output, HF_FOLDER, restoration.run, overwrite=options.overwrite, lock_places=[0])
    folder.check()
    check_replicas(restoration.model.checkpoint.replicas, options.workers)
    with folder:
        remaining = unfinished_files(plan.files, folder, options.workers)
        outcome.notes += folder.notes
        rest = Plan(remaining)
        missing_space(output, rest.nbytes + side_bytes)
        refuse_holes(rest)
        results = execute(
            rest, output, workers=options.workers, on_progress=counted_from(plan.nbytes - rest.nbytes, on_progress),
            on_file_done=lambda result: folder.record(FileRecord(result.path, result.size, dict(result.checksums))),
            allow_overflow=options.allow_overflow, durable=options.durable,
        )  # fmt: skip
        outcome.files, outcome.bytes_written = len(results), sum(result.size for result in results)
        _finish(restoration, folder)
    return outcome


def _finish(restoration: ForeignRestoration, folder: OutputFolder) -> None:
    if restoration.sharded:
        weight_map = {tensor.name: file.path for file in restoration.plan.files for tensor in file.tensors}
        write_atomically(folder.path / INDEX, index_text(weight_map, restoration.plan.nbytes))
    copy_side_files(restoration.side_files, folder.path)
    if restoration.options.durable:
        sync_files(folder.path, [path for path in restoration.run.paths if path != CONFIG])
    copy_side_files([SideFile(CONFIG, restoration.config, restoration.config.stat().st_size)], folder.path)
    if restoration.options.durable:
        sync_files(folder.path, [CONFIG])
    folder.finish()


def check_replicas(replicas: Sequence[Sequence[StoredTensor]], workers: int) -> None:
    """Raises Refused, naming each tensor whose slices on several ranks should be the same and are not."""
    files: dict[Path, tuple[int, int]] = {}

    def file_of(tensor: StoredTensor) -> tuple[int, int]:
        if tensor.path not in files:
            status = tensor.path.stat()
            files[tensor.path] = (status.st_dev, status.st_ino)
        return files[tensor.path]

    distinct = [list({file_of(tensor): tensor for tensor in group}.values()) for group in replicas]
    wanted = [tensor for group in distinct if len(group) > 1 for tensor in group]
    with ThreadPoolExecutor(workers) as pool:
        sums = dict(zip(map(id, wanted), pool.map(checksum, wanted), strict=True))
    differing = [group[0].name for group in distinct if len(group) > 1 and len({sums[id(tensor)] for tensor in group}) > 1]
    if differing:
        mend = "a run that broke synchronisation wrote this: choose another checkpoint"
        raise Refused(
            "slices that should be the same differ",
            [Problem(f"{name} differs between its replicas", mend=mend) for name in fold_names(differing)],
        )
