"""Checkpoints: a rank tree as hf2ms writes it (so `ms-convert ms2hf` exports it), and beside it the optimizer's state.

    FOLDER/step_00000010/manifest.json                          the rank tree's
                         rank_{r}/checkpoint_{r}.safetensors    weights
                         optimizer/rank_{r}.safetensors         adam_m.*, adam_v.*, and master.* where the weights are not their own
                         training.json                          step, updates, loss scale, schedule, sample offset, seed, optimizer files
                         huggingface/  strategy/                as hf2ms writes them
    FOLDER/latest                                               the newest one's name

A checkpoint is written under `step_….partial` and gets its name when every byte of it is on the disk; `latest` is written last. All
ranks see one file system. Each rank writes its own slices; rank 0 gathers the records and finishes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from mindspore import Parameter, Tensor

from converter import __version__
from converter.hf2ms import link_file, side_files_of, source_record
from converter.hf_folder import SideFile, read_json_object
from converter.manifest import (
    LAYOUT_VERSION,
    SIDE_FOLDER,
    LayoutRecord,
    Manifest,
    RankFileRecord,
    SourceRecord,
    TensorRecord,
    write_atomically,
    write_manifest,
    write_whole,
)
from converter.partial_files import sync_folder
from converter.plan_hf2ms import rank_file
from converter.records import decode, encode
from converter.safetensors_format import read_header
from converter.side_files import copy_side_files
from converter.strategies import strategy_files
from mappings.errors import Problem, Refused, refuse
from train.loss_scale import LossScale
from train.semi_auto import AnyTrainer
from train.slice_files import Array, read_arrays, record_of, write_arrays
from train.start import Start
from train.training_state import (
    CHECKPOINT_NAME,
    LATEST,
    REPLACED,
    STATE_VERSION,
    Progress,
    StateFileRecord,
    TrainingState,
    latest_checkpoint,
    read_state,
    write_state,
)

PARTIAL = ".partial"
RECORDS = "records"
MAX_RECORD_BYTES = 64 << 20
KEPT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class RankRecord:
    """What one rank tells rank 0. `size` of the weight file is 0 for a data-parallel replica, which writes none."""

    rank: int
    size: int
    weights: tuple[TensorRecord, ...]
    optimizer: StateFileRecord | None


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint; names sort by step."""
    return f"step_{step:08}"


def save_checkpoint(
    trainer: AnyTrainer, folder: Path, progress: Progress, *, keep: int, file_format: str = "safetensors", writers: int = 0
) -> Path:
    """Write a checkpoint; called by all ranks at once, and all return when it is there. The newest `keep` stay (0: all).

    Every rank writes its own slices, `writers` of them at a time (0: all), so that a shared file system is not asked for all at once.

    Raises Refused on rank 0 when replicas of a parameter differ: the ranks are out of step, and neither copy can be trusted.
    """
    name = checkpoint_name(progress.step)
    partial, final = folder / (name + PARTIAL), folder / name
    place = trainer.groups.place
    if place.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / RECORDS).mkdir(parents=True)
    trainer.wait_for_all()
    run = _identity(trainer, progress)
    weights = _in_file_order(trainer.start, place.rank, {name: host(value) for name, value in trainer.weights().items()})
    ranks = trainer.start.layout.ranks
    for first in range(0, ranks, writers or ranks):
        if first <= place.rank < first + (writers or ranks):
            record = _write_rank(trainer, weights, partial, run, file_format)
            write_whole(partial / RECORDS / f"rank_{place.rank}.json", json.dumps(encode(record)).encode(), durable=True)
        trainer.wait_for_all()
    if place.rank == 0:
        _finish(trainer, partial, run, progress, file_format)
        _publish(partial, final)
        _remove_old(folder, keep, final)
    trainer.wait_for_all()
    return final


def _publish(partial: Path, final: Path) -> None:
    """Give a checkpoint its name and let `latest` say it. One that has the name already stays, aside, until then."""
    aside = final.with_name(final.name + REPLACED)
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        os.replace(final, aside)
    os.replace(partial, final)
    sync_folder(final.parent)
    write_atomically(final.parent / LATEST, final.name + "\n")


def _identity(trainer: AnyTrainer, progress: Progress) -> str:
    """Equal on all ranks, and different for any two checkpoints of different runs or steps."""
    source = trainer.start.source
    origin = source.manifest.run if source.manifest is not None else str(source.path.resolve())
    facts = [origin, trainer.start.layout.to_json(), encode(progress), trainer.updates, trainer.token]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def _write_rank(trainer: AnyTrainer, weights: Sequence[tuple[str, Array]], folder: Path, run: str, file_format: str) -> RankRecord:
    place = trainer.groups.place
    metadata = {"format": "ms", "ms_convert_run": run, "rank": str(place.rank), "remove_redundancy": "False"}
    size = 0
    if place.data == 0:
        size = write_arrays(folder, rank_file(place.rank, file_format), file_format, weights, metadata)
    optimizer = None
    if place.data == 0 or trainer.settings.optimizer_sharding:
        states = [(state.name, host(state)) for state in trainer.optimizer.states()]
        path = f"optimizer/rank_{place.rank}.{file_format}"
        written = write_arrays(folder, path, file_format, states, metadata)
        records = tuple(record_of(name, array) for name, array in states)
        optimizer = StateFileRecord(path, place.stage, place.data, place.tensor, written, records)
    return RankRecord(place.rank, size, tuple(record_of(name, array) for name, array in weights), optimizer)


def host(value: Parameter | Tensor) -> Array:
    """A tensor's values on the host, bfloat16 as ml_dtypes'."""
    if str(value.dtype) == "BFloat16":
        return np.ascontiguousarray(value.float().asnumpy().astype(ml_dtypes.bfloat16))
    return np.ascontiguousarray(value.asnumpy())


def _in_file_order(start: Start, rank: int, arrays: dict[str, Array]) -> list[tuple[str, Array]]:
    return [(item.name, arrays[item.name]) for item, _ in start.slices(rank)]


def _finish(trainer: AnyTrainer, folder: Path, run: str, progress: Progress, file_format: str) -> None:
    """Rank 0's part: replicas, side files, strategies, training.json, and the manifest last."""
    start, layout = trainer.start, trainer.start.layout
    records = [
        decode(RankRecord, read_json_object(folder / RECORDS / f"rank_{rank}.json", MAX_RECORD_BYTES, folder))
        for rank in range(layout.ranks)
    ]
    _check_replicas(start, records)
    files = []
    for record in records:
        place = layout.coordinates(record.rank)
        first = records[layout.rank(place.stage, 0, place.tensor)]
        path = rank_file(record.rank, file_format)
        if place.data:
            link_file(folder / rank_file(first.rank, file_format), folder / path)
        layers = tuple(start.stage(record.rank).layers)
        files.append(RankFileRecord(path, record.rank, place.stage, place.data, place.tensor, layers, first.size, record.weights))
    for path, content in strategy_files(start, layout).items():
        (folder / path).parent.mkdir(exist_ok=True)
        write_whole(folder / path, content)
    scale = trainer.scale
    optimizer_files = tuple(record.optimizer for record in records if record.optimizer is not None)
    settings = trainer.settings
    write_state(
        folder,
        TrainingState(
            STATE_VERSION, run, progress, trainer.updates, scale.scale, scale.good, settings.optimizer_sharding, layout.dp, file_format,
            optimizer_files,
        ),
    )  # fmt: skip
    shutil.rmtree(folder / RECORDS)
    table, table_name, family, source = _origin(start, folder)
    write_manifest(
        folder,
        Manifest(
            LAYOUT_VERSION, __version__, run, family, table, table_name, start.recorded_model, LayoutRecord.of(layout),
            file_format, KEPT_DTYPES[settings.parameters], source, tuple(files),  # type: ignore[arg-type]
        ),
    )  # fmt: skip


def _origin(start: Start, folder: Path) -> tuple[str, str, str, SourceRecord]:
    """Table, its name, family, and the Hugging Face folder that the model came from, whose side files are copied along."""
    if start.source.manifest is not None:
        manifest = start.source.manifest
        side = _side_folder(start.source.path, folder.parent)
        copied = copy_side_files(
            (SideFile(file.name, side / file.name, file.size) for file in manifest.source.side_files), folder / SIDE_FOLDER
        )
        if copied != manifest.source.side_files:
            raise refuse("the side files are not what the manifest recorded", str(side), "restore them")
        return manifest.table, manifest.table_name, manifest.family, manifest.source
    source = start.source.hf
    assert source is not None, "a source is one of the two"
    side_records = copy_side_files(side_files_of(source.folder), folder / SIDE_FOLDER)
    return source.table.text, source.table.where, source.table.family, source_record(source, side_records)


def _side_folder(source: Path, checkpoints: Path) -> Path:
    """Where the side files are: in the source, or, if it was a checkpoint that newer ones have taken the place of, in the newest."""
    return (source if source.is_dir() else latest_checkpoint(checkpoints)) / SIDE_FOLDER


def _check_replicas(start: Start, records: Sequence[RankRecord]) -> None:
    """Raises Refused, naming every parameter of which two ranks hold different copies."""
    holders: dict[tuple[str, int | None, int], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        sums = {tensor.name: tensor.xxh3 for tensor in record.weights}
        for item, piece in start.slices(record.rank):
            holders[item.name, piece.axis, piece.start][sums[item.name]].append(record.rank)
    problems = [
        Problem(f"{name} differs between the ranks {' and '.join(str(ranks[0]) for ranks in versions.values())}")
        for (name, _, _), versions in holders.items()
        if len(versions) > 1
    ]
    if problems:
        raise Refused("the ranks are out of step: copies of one parameter differ, so no checkpoint was written", problems[:20])


def _remove_old(folder: Path, keep: int, newest: Path) -> None:
    """Remove all but the newest `keep` finished checkpoints, and what killed runs left half-written."""
    names = sorted((path.name for path in folder.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)), key=lambda name: (len(name), name))
    for name in names[:-keep] if keep else []:
        if name != newest.name:
            # A checkpoint without its manifest is none: so it goes first, lest a kill leave half of one that looks finished
            (folder / name / "manifest.json").unlink(missing_ok=True)
            shutil.rmtree(folder / name)
    for path in list(folder.iterdir()):
        if path.suffix in (PARTIAL, REPLACED) and CHECKPOINT_NAME.fullmatch(path.stem):
            shutil.rmtree(path)


def resume(trainer: AnyTrainer, checkpoint: Path) -> TrainingState:
    """Put the optimizer, the loss scale and the counters of a trainer, whose weights came from this checkpoint, to where they were.

    Raises Refused for files that are missing, of another checkpoint or changed, and for state that was divided over another dp.
    """
    manifest = trainer.start.source.manifest
    assert manifest is not None, "the trainer's weights came from a checkpoint"
    state = read_state(checkpoint, manifest)
    _check_divided(trainer, state, checkpoint)
    place = trainer.groups.place
    data = place.data if state.optimizer_sharding else 0
    (record,) = (file for file in state.files if (file.stage, file.data, file.tensor) == (place.stage, data, place.tensor))
    path = checkpoint / record.path
    if state.format == "safetensors" and read_header(path)[1].get("ms_convert_run") != state.run:
        raise refuse("a file from another run", str(path), "choose another checkpoint")
    _fill_states(trainer, path, state.format, {tensor.name: tensor for tensor in record.tensors})
    trainer.updates = state.updates
    trainer.scale = replace(trainer.scale, scale=state.loss_scale, good=state.loss_scale_good) if trainer.scale.dynamic else LossScale()
    return state


def _check_divided(trainer: AnyTrainer, state: TrainingState, checkpoint: Path) -> None:
    dp, sharding = trainer.start.layout.dp, trainer.settings.optimizer_sharding
    if state.optimizer_sharding != sharding:
        what = f"is {str(sharding).lower()}, the checkpoint's state was written with {str(state.optimizer_sharding).lower()}"
        raise refuse(what, "parallel.optimizer_sharding", "resume with the same")
    if sharding and state.dp != dp:
        raise refuse(f"the optimizer's state is divided over dp {state.dp}, not {dp}", str(checkpoint), f"resume with dp {state.dp}")


def _fill_states(trainer: AnyTrainer, path: Path, file_format: str, recorded: dict[str, TensorRecord]) -> None:
    states = {state.name: state for state in trainer.optimizer.states()}
    problems = []
    for name, array in read_arrays(path, file_format):
        if name not in recorded or record_of(name, array) != recorded[name]:
            problems.append(Problem(f"{name} is not what was recorded", str(path), "choose another checkpoint"))
            continue
        target = states.pop(name, None)
        if target is None or tuple(target.shape) != array.shape:
            problems.append(Problem(f"{name} does not fit the run", str(path), "resume with the precision and layout of the checkpoint"))
            continue
        target.set_data(Tensor(array))
    problems += [Problem(f"{name} is missing", str(path), "resume with the precision of the checkpoint") for name in states]
    if problems:
        raise Refused("the optimizer's state cannot be restored", problems[:20])


def summary(state: TrainingState) -> dict[str, Any]:
    """What a log says of a checkpoint."""
    return {"step": state.progress.step, "updates": state.updates, "sample offset": state.progress.sample_offset}
