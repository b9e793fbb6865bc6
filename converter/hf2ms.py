"""hf2ms: a Hugging Face folder to a rank tree of MindSpore slices."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import xxhash

from converter import __version__
from converter.derived import check_not_carried
from converter.disk_layouts import companion_files, companion_paths, weight_path
from converter.execute import execute
from converter.hf_folder import HFFolder, SideFile, read_hf_folder
from converter.joined_copies import joined_plan
from converter.layout import ParallelLayout, cutting_of, make_layout
from converter.manifest import (
    LAYOUT_VERSION,
    MANIFEST,
    RANK,
    SIDE_FOLDER,
    UNIFIED,
    LayoutRecord,
    Manifest,
    RankFileRecord,
    SideFileRecord,
    SourceRecord,
    TargetRecord,
    TensorRecord,
    WeightFileRecord,
    read_manifest,
    side_name_problem,
    weight_name_problem,
    write_manifest,
    write_whole,
)
from converter.outcome import OnProgress, Outcome, counted_from, refuse_inside, refuse_overlap
from converter.output_folder import CONVERSIONS, FileRecord, OutputFolder, Run, missing_space, remove_records
from converter.partial_files import SUFFIX, check_place, open_new, sync_files
from converter.plan import Plan, TargetTensor
from converter.plan_hf2ms import RankTreePlan, plan_rank_tree
from converter.plan_unified import MAX_FILE_BYTES, plan_unified
from converter.resume import check_recorded, unfinished_files
from converter.side_files import changed_side_files, copy_side_files
from converter.source_model import SourceModel, understand
from converter.strided import refuse_holes
from converter.tensors import StoredTensor
from converter.untrusted import quoted
from mappings.dialect_table import CANONICAL, target_named
from mappings.errors import Problem, Refused, refuse
from mappings.tables import FamilyTable

COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class RankTreeOptions:
    """What a user may choose for a rank tree; the defaults are the command's."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    vocab_multiple: int | None = None
    target: str = CANONICAL
    disk: str = RANK
    max_file_bytes: int | None = None
    file_format: str = "safetensors"
    dtype: str = "keep"
    ranks: tuple[int, ...] | None = None
    tied: bool | None = None
    allow_overflow: bool = False
    durable: bool = False
    workers: int = 2
    overwrite: bool = False

    def shown(self) -> dict[str, str]:
        """The options that change what is written, for telling two runs apart."""
        stages = ",".join(map(str, self.layers_per_stage)) if self.layers_per_stage else "even"
        return {
            "--tp": str(self.tp), "--pp": str(self.pp), "--dp": str(self.dp), "--layers-per-stage": stages, "--format": self.file_format,
            "--vocab-multiple": str(self.vocab_multiple or "default"), "--dtype": self.dtype, "tied": str(self.tied),
            "--allow-overflow": str(self.allow_overflow), "--target": self.target, "--layout": self.disk,
            "--max-file-size": str(self.max_file_bytes or "default"),
        }  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """A checkpoint in the place of the Hugging Face folder, whose tensors `made` tells how to put together (converter/translate.py).

    `record` and `dtype` go into the manifest as they came, `identity` tells one checkpoint from another, `check` refuses a damaged one.
    """

    made: Mapping[str, TargetTensor]
    record: Callable[[tuple[SideFileRecord, ...]], SourceRecord]
    dtype: str
    identity: str
    check: Callable[[Plan], None]


@dataclass(frozen=True)
class Conversion:
    """A planned hf2ms: `whole` is the plan of all ranks, `mine` that of the ranks asked for. `layout` is that of the ranks.

    Where the files hold whole parameters, `whole.layout` is another: that of one rank.
    """

    source: SourceModel
    layout: ParallelLayout
    whole: RankTreePlan
    mine: RankTreePlan
    run: Run
    options: RankTreeOptions
    origin: Origin | None = None

    def rank_of(self, number: int) -> int:
        """The rank of a planned file: its number, but that all parts of a unified folder are of the one rank that holds everything."""
        return 0 if self.options.disk == UNIFIED else number


def plan_conversion(model: Path, options: RankTreeOptions, table: FamilyTable | None = None) -> Conversion:
    """Plan hf2ms from headers alone. Raises Refused with everything that stands in the way."""
    folder = read_hf_folder(model)
    _check_names(folder)
    return conversion_of(understand(folder, table, options.tied), options)


def conversion_of(source: SourceModel, options: RankTreeOptions, origin: Origin | None = None) -> Conversion:
    """Plan the conversion of a model that is understood. Raises Refused."""
    _check_disk(options)
    dialect = target_named(options.target)
    layout = make_layout(
        source.config, source.expansion, tp=options.tp, pp=options.pp, dp=options.dp,
        layers_per_stage=options.layers_per_stage, vocab_multiple=options.vocab_multiple, dialect=dialect,
    )  # fmt: skip
    source = source.in_dialect(dialect, cutting_of(layout))
    run = _identity(source, layout, options, origin.identity if origin is not None else "")
    made = origin.made if origin is not None else None
    whole = _plan(source, layout, options, run.identity, None, made)
    mine = whole if options.ranks is None else _plan(source, layout, options, run.identity, options.ranks, made)
    run = replace(run, paths=tuple(_paths(source, layout, options, whole)))
    return Conversion(source, layout, whole, mine, run, options, origin)


def _check_disk(options: RankTreeOptions) -> None:
    """Raises Refused for options that another disk layout has."""
    problems = []
    if options.disk != RANK and options.file_format != "safetensors":
        problems.append(Problem(f"--layout {options.disk} is of safetensors files", mend="leave --format out, or say --layout rank"))
    if options.disk == UNIFIED and options.ranks is not None:
        problems.append(Problem("unified files are of no rank: --ranks has no meaning", mend="leave --ranks out"))
    if options.disk != UNIFIED and options.max_file_bytes is not None:
        problems.append(Problem("each rank has one file: --max-file-size has no meaning", mend="leave it out, or say --layout unified"))
    if problems:
        raise Refused("options that do not go together", problems)


def _plan(
    source: SourceModel, layout: ParallelLayout, options: RankTreeOptions, run: str, ranks: Collection[int] | None,
    made: Mapping[str, TargetTensor] | None,
) -> RankTreePlan:  # fmt: skip
    if options.disk == UNIFIED:
        planned = plan_unified(source, layout, max_file_bytes=options.max_file_bytes or MAX_FILE_BYTES, dtype=options.dtype, run=run)
    else:
        planned = plan_rank_tree(
            source, layout, file_format=options.file_format, dtype=options.dtype, ranks=ranks, run=run,
            path_of=lambda rank: weight_path(options.disk, rank, layout.ranks, options.file_format),
        )  # fmt: skip
    return planned if made is None else replace(planned, plan=joined_plan(planned.plan, made))


def _paths(source: SourceModel, layout: ParallelLayout, options: RankTreeOptions, whole: RankTreePlan) -> Iterable[str]:
    """Every file of the output."""
    yield from whole.files_of_rank.values()
    yield from companion_paths(options.disk, layout)
    yield from (f"{SIDE_FOLDER}/{side.name}" for side in side_files_of(source.folder))
    yield MANIFEST


def _check_names(folder: HFFolder) -> None:
    """The manifest's reader accepts no name that could play a trick on a path or a terminal, so none is written either."""
    found = [(file.name, weight_name_problem(file.name)) for file in folder.files]
    found += [(side.name, side_name_problem(side.name)) for side in folder.side_files]
    problems = [Problem(f"the file name {quoted(name)}: {what}", str(folder.path), "rename it") for name, what in found if what is not None]
    if problems:
        raise Refused("names that cannot travel", problems)


def _identity(source: SourceModel, layout: ParallelLayout, options: RankTreeOptions, origin: str) -> Run:
    """A digest of everything that decides what is written: equal identities write equal files."""
    files = {file.name: [file.size, file.modified, _header_digest(file.tensors)] for file in source.folder.files}
    decisive = {
        "files": files, "config": source.folder.config, "table": source.table.text, "layout": layout.to_json(),
        "options": options.shown(), "layout_version": LAYOUT_VERSION,
        "target": None if source.dialect is None else [str(source.dialect), source.dialect.table.text],
        "origin": origin,
    }  # fmt: skip
    digest = xxhash.xxh3_128(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    shown = options.shown() | {"model": str(source.folder.path.resolve()), "table": source.table.where}
    shown["source config.json"] = f"xxh3 {xxhash.xxh3_64_hexdigest(json.dumps(source.folder.config, sort_keys=True).encode())}"
    for file in source.folder.files:
        shown[f"source {file.name}"] = (
            f"{file.size:,} bytes of {datetime.fromtimestamp(file.modified // 10**9, timezone.utc):%F %T}.{file.modified % 10**9:09} UTC"
        )
    return Run(digest, shown)


def _header_digest(tensors: Iterable[StoredTensor]) -> str:
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.extents}\n".encode())
    return digest.hexdigest()


def convert(conversion: Conversion, output: Path, on_progress: OnProgress | None = None) -> Outcome:
    """Write the ranks asked for, and the manifest once all ranks are there. Continues an unfinished run of the same identity.

    Raises Refused before the first byte when something is wrong; a kill at any moment leaves nothing that looks finished.
    """
    options = conversion.options
    if conversion.origin is None:
        refuse_overlap(conversion.source.folder.path, output)
    else:  # config.json and the files beside it may lie anywhere but here
        refuse_inside(conversion.source.folder.path, output)
    if not options.overwrite and _finished_before(conversion, output):
        return Outcome(output, notes=["this conversion is finished already: nothing to do"])
    _refuse_partial_overwrite(conversion, output)
    if conversion.origin is None:
        check_not_carried(conversion.source)
    side_bytes = sum(side.size for side in conversion.source.folder.side_files)
    if options.overwrite:  # before anything is replaced
        missing_space(output, conversion.mine.plan.nbytes + side_bytes, conversion.run.paths)
    outcome = Outcome(output)
    with OutputFolder(
        output, CONVERSIONS[options.disk], conversion.run, overwrite=options.overwrite, lock_places=conversion.mine.files_of_rank
    ) as folder:
        remaining = unfinished_files(conversion.mine.plan.files, folder, options.workers)
        outcome.notes += folder.notes
        plan = Plan(remaining)
        refuse_holes(plan)
        missing_space(output, plan.nbytes + side_bytes)
        if conversion.origin is not None:
            conversion.origin.check(plan)
        results = execute(
            plan, output, workers=options.workers, on_progress=counted_from(conversion.mine.plan.nbytes - plan.nbytes, on_progress),
            on_file_done=lambda result: folder.record(FileRecord(result.path, result.size, dict(result.checksums))),
            allow_overflow=options.allow_overflow, durable=options.durable,
        )  # fmt: skip
        _link(conversion, folder)
        outcome.files, outcome.bytes_written = len(results), sum(result.size for result in results)
        _finish(conversion, folder, outcome, {result.path for result in results})
    return outcome


def _refuse_partial_overwrite(conversion: Conversion, output: Path) -> None:
    """Raises Refused where a finished conversion would go and only some of its ranks would come again."""
    options, whole = conversion.options, len(conversion.whole.files_of_rank)
    if options.overwrite and len(conversion.mine.files_of_rank) < whole and (output / MANIFEST).is_file():
        raise refuse(
            "--overwrite removes a finished conversion with all its ranks, and --ranks writes only some of them",
            str(output),
            "leave --ranks out to write all of them again, give another -o, or remove the folder first",
        )


def _finished_before(conversion: Conversion, output: Path) -> bool:
    """Whether the same conversion was finished earlier, is still whole, and has the side files that the source has now. Raises Refused."""
    if not (output / MANIFEST).is_file():
        return False
    try:
        manifest = read_manifest(output)
    except Refused:
        return False
    if manifest.run != conversion.run.identity:
        return False
    remove_records(output)
    sizes = {file.path: file.size for file in manifest.files}
    sizes |= {f"{SIDE_FOLDER}/{side.name}": side.size for side in manifest.source.side_files}
    gone = [path for path, size in sizes.items() if not (output / path).is_file() or (output / path).stat().st_size != size]
    if gone:
        raise refuse(f"the finished conversion has lost {gone[0]}", str(output), "run again with --overwrite")
    changed = changed_side_files(side_files_of(conversion.source.folder), manifest.source.side_files)
    if changed:
        problems = [
            Problem(what, str(conversion.source.folder.path), "run again with --overwrite to convert all again") for what in changed
        ]
        raise Refused("the conversion is finished, but files beside the weights are not those that it took along", problems)
    return True


def _link(conversion: Conversion, folder: OutputFolder) -> None:
    """Give every data-parallel rank its file: a hard link, or a copy where the file system has none."""
    for path, target in conversion.mine.links:
        place, original = folder.path / path, folder.path / target
        if not (place.exists() and place.samefile(original)):
            check_place(place, folder.path)
            link_file(original, place)
        folder.record(replace(folder.records[target], path=path))


def link_file(original: Path, place: Path) -> None:
    """Make `place` a hard link of `original`, or a copy where the file system has none."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(place.name + SUFFIX)
    temporary.unlink(missing_ok=True)
    try:
        os.link(original, temporary)
    except OSError:
        with original.open("rb") as reader, open_new(temporary) as writer:
            shutil.copyfileobj(reader, writer, COPY_BYTES)
    os.replace(temporary, place)


def _finish(conversion: Conversion, folder: OutputFolder, outcome: Outcome, written: Collection[str]) -> None:
    """Side files, companions and the manifest, once every rank of the layout is there and, bytes and all, as it was written."""
    options, mine = conversion.options, set(conversion.mine.files_of_rank.values())
    with folder.ending() as records:
        if records is None:
            outcome.notes.append("another run, for other ranks, has written the manifest meanwhile")
            return
        missing = tuple(rank for rank, path in conversion.whole.files_of_rank.items() if path not in records)
        if missing:
            outcome.finished, outcome.missing_ranks = False, missing
            return
        unseen = [path for path in conversion.whole.files_of_rank.values() if path not in mine]
        check_recorded(unseen, options.file_format, folder, options.workers)
        side_files = copy_side_files(side_files_of(conversion.source.folder), folder.path / SIDE_FOLDER)
        for path, content in companion_files(options.disk, conversion.source, conversion.layout, conversion.whole).items():
            place = folder.path / path
            check_place(place, folder.path)
            place.parent.mkdir(exist_ok=True)
            write_whole(place, content)
        if options.durable:
            sync_files(folder.path, [path for path in conversion.run.paths if path not in written and path != MANIFEST])
        write_manifest(folder.path, _manifest(conversion, records, side_files))
        folder.finish()


def side_files_of(folder: HFFolder) -> list[SideFile]:
    """What travels beside the weights: the index, if there is one, and every file that holds no weights."""
    index = [SideFile(folder.index, folder.path / folder.index, (folder.path / folder.index).stat().st_size)] if folder.index else []
    return [*index, *folder.side_files]


def _manifest(conversion: Conversion, records: Mapping[str, FileRecord], side_files: tuple[SideFileRecord, ...]) -> Manifest:
    source, options, layout, origin = conversion.source, conversion.options, conversion.whole.layout, conversion.origin
    recorded = source_record(source, side_files) if origin is None else origin.record(side_files)
    return Manifest(
        LAYOUT_VERSION, __version__, conversion.run.identity, source.table.family, source.table.text, source.table.where,
        replace(source.config, padded_vocab=layout.padded_vocab), LayoutRecord.of(layout), options.file_format,  # type: ignore[arg-type]
        options.dtype if origin is None else origin.dtype, recorded, tuple(_rank_records(conversion, records)),  # type: ignore[arg-type]
        TargetRecord.of(source.dialect), options.disk, LayoutRecord.of(conversion.layout) if options.disk == UNIFIED else None,  # type: ignore[arg-type]
    )  # fmt: skip


def source_record(source: SourceModel, side_files: tuple[SideFileRecord, ...]) -> SourceRecord:
    """The Hugging Face folder as a manifest keeps it."""
    original = {whole: name for name, whole in source.names.items()}
    files = tuple(
        WeightFileRecord(
            file.name, file.size, file.metadata, tuple(TensorRecord(item.name, item.dtype, item.shape) for item in file.tensors)
        )
        for file in source.folder.files
    )
    return SourceRecord(
        source.folder.path.resolve().name, source.folder.form.name, source.folder.index, files, side_files,  # type: ignore[arg-type]
        {original[name]: drop.why for name, drop in source.dropped.items()},
        {original[name]: original[of] for name, of in source.duplicates.items()},
        source.folder.config,
    )  # fmt: skip


def _rank_records(conversion: Conversion, records: Mapping[str, FileRecord]) -> Iterable[RankFileRecord]:
    planned = {file.path: file for file in conversion.whole.plan.files} | {
        path: next(file for file in conversion.whole.plan.files if file.path == target) for path, target in conversion.whole.links
    }
    layout = conversion.whole.layout
    for number, path in conversion.whole.files_of_rank.items():
        place, record = layout.coordinates(conversion.rank_of(number)), records[path]
        tensors = tuple(TensorRecord(item.name, item.dtype, item.shape, record.checksums[item.name]) for item in planned[path].tensors)
        layers = tuple(layout.layers_of(place.stage))
        yield RankFileRecord(path, place.rank, place.stage, place.data, place.tensor, layers, record.size, tensors)
