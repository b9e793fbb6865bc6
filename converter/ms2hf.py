"""ms2hf: a rank tree back to the Hugging Face folder that it came from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from converter.execute import execute
from converter.manifest import MANIFEST, SIDE_FOLDER, SideFileRecord, write_atomically
from converter.outcome import OnProgress, Outcome, counted_from, refuse_overlap
from converter.output_folder import HF_FOLDER, FileRecord, OutputFolder, Run, finish_interrupted, missing_space, recorded_run
from converter.partial_files import sync_files
from converter.plan import Plan
from converter.plan_ms2hf import HFFolderPlan, plan_hf_folder, replicas_of
from converter.rank_tree import RankTree, index_text, read_rank_tree, recorded_checksums
from converter.resume import unfinished_files
from converter.side_files import check_side_files, restore_side_files
from converter.stored_bytes import checksum
from converter.strided import refuse_holes
from converter.tensors import StoredTensor
from mappings.errors import Problem, Refused
from mappings.names import fold_names

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HFOptions:
    """What a user may choose for the way back; `dtype` "original" restores each tensor's own."""

    dtype: str = "original"
    allow_overflow: bool = False
    durable: bool = False
    workers: int = 2
    overwrite: bool = False


@dataclass(frozen=True)
class Restoration:
    """A planned ms2hf."""

    tree: RankTree
    planned: HFFolderPlan
    run: Run
    options: HFOptions


def plan_restoration(folder: Path, options: HFOptions) -> Restoration:
    """Plan ms2hf from the manifest and the headers of the slices. Raises Refused with everything that does not fit."""
    tree = read_rank_tree(folder)
    planned = plan_hf_folder(tree, options.dtype)
    manifest = (folder / MANIFEST).read_bytes()
    decisive = [xxhash.xxh3_128(manifest).hexdigest(), options.dtype, str(options.allow_overflow)]
    identity = xxhash.xxh3_128(json.dumps(decisive).encode()).hexdigest()
    shown = {"rank tree": str(folder.resolve()), "--dtype": options.dtype, "--allow-overflow": str(options.allow_overflow)}
    restoration = Restoration(tree, planned, Run(identity, shown), options)
    return replace(restoration, run=replace(restoration.run, paths=tuple(_paths(restoration))))


def _paths(restoration: Restoration) -> Iterable[str]:
    """Every file of the Hugging Face folder, `config.json` last."""
    yield from (file.path for file in restoration.planned.plan.files)
    yield from (record.name for record in _kept(restoration))
    if _index_to_write(restoration) is not None:
        yield INDEX
    yield CONFIG


def _kept(restoration: Restoration) -> list[SideFileRecord]:
    """The side files that come back as they are, without `config.json`, which is the last."""
    source = restoration.tree.manifest.source
    new_index = _index_to_write(restoration) is not None
    return [record for record in source.side_files if record.name != CONFIG and not (new_index and record.name == source.index)]


def restore(restoration: Restoration, output: Path, on_progress: OnProgress | None = None) -> Outcome:
    """Write the Hugging Face folder: weights, then index and side files, `config.json` last. Continues an unfinished run.

    Raises Refused when slices disagree with each other or with the manifest's checksums.
    """
    tree, options = restoration.tree, restoration.options
    refuse_overlap(tree.path, output)
    outcome = Outcome(output)
    if finish_interrupted(output, HF_FOLDER, restoration.run) and not options.overwrite:
        outcome.notes.append("this conversion is finished already: nothing to do")
        return outcome
    folder = OutputFolder(output, HF_FOLDER, restoration.run, overwrite=options.overwrite, lock_places=[0])
    folder.check()
    check_side_files(tree.manifest.source.side_files, tree.path / SIDE_FOLDER)
    begun = recorded_run(output) is not None
    side_bytes = sum(record.size for record in tree.manifest.source.side_files)
    if options.overwrite:  # before anything is replaced
        missing_space(output, restoration.planned.plan.nbytes + side_bytes, restoration.run.paths)
    if not begun:
        check_slices(tree, restoration.planned.plan, options.workers)
    with folder:
        remaining = unfinished_files(restoration.planned.plan.files, folder, options.workers)
        outcome.notes += folder.notes
        plan = Plan(remaining)
        missing_space(output, plan.nbytes + side_bytes)
        refuse_holes(plan)
        if begun:
            check_slices(tree, plan, options.workers)
        results = execute(
            plan, output, workers=options.workers, on_progress=counted_from(restoration.planned.plan.nbytes - plan.nbytes, on_progress),
            on_file_done=lambda result: folder.record(FileRecord(result.path, result.size, dict(result.checksums))),
            allow_overflow=options.allow_overflow, durable=options.durable,
        )  # fmt: skip
        outcome.files, outcome.bytes_written = len(results), sum(result.size for result in results)
        _finish(restoration, folder)
    cast = tree.manifest.dtype
    if options.dtype == "original" and cast not in ("keep", "fp32"):
        outcome.notes.append(f"hf2ms cast the weights to {cast}: they come back in their own dtypes with the values that the cast left")
    if options.dtype != "original":
        outcome.notes.append(f"the weights are {options.dtype}; config.json came back as it was, mend its dtype by hand")
    return outcome


def check_slices(tree: RankTree, plan: Plan, workers: int) -> None:
    """Compare every slice that the plan reads, and every replica, with the checksum that the manifest recorded for it.

    Raises Refused, naming file and parameter: bytes that changed, replicas that differ.
    """
    recorded = recorded_checksums(tree.manifest)
    ranks = {tensor.path: rank for rank, slices in tree.slices.items() for tensor in slices.values()}
    problems = []
    for replicas in replicas_of(tree):
        sums = {recorded[rank, replicas.name] for rank, _ in replicas.tensors}
        if len(sums) > 1:
            files = ", ".join(tree.path_of(rank, replicas.name) for rank, _ in replicas.tensors)
            problems.append(
                Problem(
                    f"{replicas.name} differs between its replicas",
                    files,
                    "a run that broke synchronisation wrote this: choose another checkpoint",
                )
            )
    wanted = {
        (ranks[copy.source.path], copy.source.name): copy.source for file in plan.files for tensor in file.tensors for copy in tensor.copies
    }
    wanted |= {(rank, replicas.name): tensor for replicas in replicas_of(tree) for rank, tensor in replicas.tensors}
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(checksum, wanted.values()))
    changed = [tensor for (key, tensor), xxh3 in zip(wanted.items(), found, strict=True) if xxh3 != recorded[key]]
    problems += _changed(tree, changed)
    if problems:
        raise Refused("the slices are not what was written", problems)


def _changed(tree: RankTree, tensors: Iterable[StoredTensor]) -> list[Problem]:
    """What to say of slices whose bytes are others, folded by file."""
    names: dict[str, list[str]] = {}
    for tensor in tensors:
        names.setdefault(tensor.path.relative_to(tree.path).as_posix(), []).append(tensor.name)
    return [
        Problem(f"{name} is not what the manifest recorded (checksum)", where, "restore the file, or run hf2ms again")
        for where, of_file in names.items()
        for name in fold_names(of_file)
    ]


def _finish(restoration: Restoration, folder: OutputFolder) -> None:
    """Side files and index; config.json last, because a folder without it cannot be loaded."""
    source = restoration.tree.manifest.source
    side = restoration.tree.path / SIDE_FOLDER
    index = _index_to_write(restoration)
    restore_side_files(_kept(restoration), side, folder.path)
    if index is not None:
        write_atomically(folder.path / INDEX, index)
    if restoration.options.durable:
        sync_files(folder.path, [path for path in restoration.run.paths if path != CONFIG])
    restore_side_files(_config_record(source.side_files), side, folder.path)
    if restoration.options.durable:
        sync_files(folder.path, [CONFIG])
    folder.finish()


def _config_record(records: Iterable[SideFileRecord]) -> list[SideFileRecord]:
    return [record for record in records if record.name == CONFIG]


def _index_to_write(restoration: Restoration) -> str | None:
    """A new index, or None when the original one is still right or there was none."""
    source, planned = restoration.tree.manifest.source, restoration.planned
    if source.index is None:
        return None
    unchanged = source.form == "safetensors" and not source.dropped and restoration.options.dtype == "original"
    if unchanged:
        return None
    weight_map = {tensor.name: file.path for file in planned.plan.files for tensor in file.tensors}
    return index_text(weight_map, planned.plan.nbytes)
