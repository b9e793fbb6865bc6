"""reformat: any MindSpore checkpoint as .ckpt or as safetensors, tensor by tensor as it is: names, order, types and bits.

A plan of copies like any other: it streams, whatever the files' sizes (MindSpore's own `ckpt_to_safetensors` holds each file in memory
twice). Strategy files go along byte for byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from converter import __version__
from converter.execute import LAYOUTS, execute
from converter.found_checkpoints import FoundCheckpoint, FoundFiles, find_checkpoints, renamed
from converter.hf2ms import link_file
from converter.hf_folder import SideFile
from converter.manifest import MANIFEST, SideFileRecord, TensorRecord, write_atomically
from converter.outcome import OnProgress, Outcome, counted_from, refuse_overlap
from converter.output_folder import FileRecord, FolderKind, OutputFolder, Run, missing_space, remove_records
from converter.partial_files import check_place, sync_files
from converter.plan import Plan, StridedCopy, TargetFile, TargetTensor
from converter.records import RecordError, decode, encode
from converter.resume import unfinished_files
from converter.side_files import copy_side_files
from converter.tensors import StoredTensor, contiguous_strides
from converter.untrusted import quoted
from mappings.errors import Problem, Refused, refuse

RECORD = "reformat.json"
MAX_RECORD_BYTES = 512 << 20
_INT4 = "Int4"  # what MindSpore puts in a safetensors header for a tensor of packed 4-bit numbers (`safetensors_to_mstype`)
_CHECKSUM = "crc_num"  # of the tensors in the order in which MindSpore writes them


@dataclass(frozen=True)
class ReformatOptions:
    """What a user may choose."""

    file_format: str
    durable: bool = False
    workers: int = 2
    overwrite: bool = False


@dataclass(frozen=True)
class ReformattedFile:
    """A checkpoint that was written, and which it was made of."""

    path: str
    source: str
    size: int
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class ReformatRecord:
    """`reformat.json`, written last: what is in the folder and where it came from."""

    tool_version: str
    run: str
    source: str
    files: tuple[ReformattedFile, ...]
    strategies: tuple[SideFileRecord, ...]


@dataclass(frozen=True)
class Reformatting:
    """A planned reformat. `links` are (path, path that it is a hard link to), `sources` (path written: path read)."""

    source: Path
    found: FoundFiles
    plan: Plan
    links: tuple[tuple[str, str], ...]
    sources: Mapping[str, str]
    run: Run
    options: ReformatOptions
    notes: tuple[str, ...]


def _record_of(folder: Path) -> ReformatRecord | None:
    """The record of a finished folder; None where there is none that can be read."""
    path = folder / RECORD
    try:
        if path.is_symlink() or path.stat().st_size > MAX_RECORD_BYTES:
            return None
        return decode(ReformatRecord, json.loads(path.read_text(encoding="utf-8")), RECORD)
    except (OSError, ValueError, RecursionError, RecordError):
        return None


def _written_before(folder: Path) -> Iterable[str]:
    """Every file that the record of a finished folder names."""
    record = _record_of(folder)
    if record is not None:
        yield from (RECORD, *(file.path for file in record.files), *(file.name for file in record.strategies))


REFORMATTED = FolderKind(RECORD, None, work="reformatting", catalogue=_written_before)


def plan_reformatting(source: Path, options: ReformatOptions) -> Reformatting:
    """Plan from headers alone. Raises Refused with everything that the other format cannot hold."""
    found = find_checkpoints(source)
    _check_names(found, options.file_format)
    first: dict[tuple[int, int], str] = {}
    files, links, sources = [], [], {}
    for checkpoint in found.checkpoints:
        path = renamed(checkpoint.path, options.file_format)
        sources[path] = checkpoint.path
        if first.setdefault(checkpoint.file, path) != path:
            links.append((path, first[checkpoint.file]))
        else:
            files.append(_target(checkpoint, path, options.file_format))
    _check_content(found, options.file_format)
    for file in files:
        LAYOUTS[file.format](file)  # refuses what the format cannot hold
    paths = (*sources, *found.strategies, RECORD)
    run = Run(_identity(found, options), {"source": str(source.resolve()), "--format": options.file_format}, paths)
    return Reformatting(source, found, Plan(tuple(files)), tuple(links), sources, run, options, tuple(_notes(found, options.file_format)))


def _target(checkpoint: FoundCheckpoint, path: str, file_format: str) -> TargetFile:
    metadata = {name: text for name, text in checkpoint.metadata.items() if name != _CHECKSUM} or {"format": "ms"}
    tensors = tuple(whole_copy(tensor, f"{path}:{tensor.name}") for tensor in checkpoint.tensors)
    return TargetFile(path, file_format, tensors, tuple(metadata.items()) if file_format == "safetensors" else ())


def whole_copy(stored: StoredTensor, group: str) -> TargetTensor:
    """A stored tensor as a target of its own, as it is."""
    strides = contiguous_strides(stored.shape)
    copies = (StridedCopy(stored, 0, strides, 0, strides, stored.shape),) if stored.elements else ()
    return TargetTensor(stored.name, stored.dtype, stored.shape, copies, group)


def _check_names(found: FoundFiles, file_format: str) -> None:
    """Raises Refused where two files would get one name."""
    count = Counter(renamed(checkpoint.path, file_format) for checkpoint in found.checkpoints) + Counter(found.strategies)
    problems = [
        Problem(f"{checkpoint.path} would get the name of another file", str(checkpoint.place), "give the folders one by one, or rename it")
        for checkpoint in found.checkpoints
        if count[renamed(checkpoint.path, file_format)] > 1
    ]
    if problems:
        raise Refused("two files would have one name", problems[:20])


def _check_content(found: FoundFiles, file_format: str) -> None:
    """Raises Refused for files without tensors, which MindSpore does not load, and for 4-bit tensors, which a .ckpt says otherwise."""
    problems = [
        Problem("it holds no tensor", str(checkpoint.place), "leave it out") for checkpoint in found.checkpoints if not checkpoint.tensors
    ]
    for checkpoint in found.checkpoints if file_format == "ckpt" else ():
        packed = [tensor.name for tensor in checkpoint.tensors if checkpoint.metadata.get(tensor.name) == _INT4]
        problems += [
            Problem(f"{quoted(name)} is packed 4-bit numbers", str(checkpoint.place), "keep it as safetensors") for name in packed[:5]
        ]
    if problems:
        raise Refused("checkpoints that cannot be written in this format", problems[:20])


def _notes(found: FoundFiles, file_format: str) -> Iterable[str]:
    if found.others:
        names = ", ".join(found.others[:8]) + (", ..." if len(found.others) > 8 else "")
        yield f"not taken along, being no checkpoints: {len(found.others)} file(s) ({names})"
    if MANIFEST in found.others:
        yield "the manifest is not taken along either: ms2hf goes on reading the folder that has it"
    said = {name for checkpoint in found.checkpoints for name in checkpoint.metadata} - {"format"}
    lost = sorted(said if file_format == "ckpt" else said & {_CHECKSUM})
    if lost:
        yield f"left out of the headers: {', '.join(lost[:8])}" + (", ..." if len(lost) > 8 else "")


def _identity(found: FoundFiles, options: ReformatOptions) -> str:
    """A digest of everything that decides what is written."""
    digest = xxhash.xxh3_128(json.dumps([options.file_format, *found.strategies]).encode())
    for checkpoint in found.checkpoints:
        status = checkpoint.place.stat()
        digest.update(f"{checkpoint.path} {status.st_size} {status.st_mtime_ns} {sorted(checkpoint.metadata.items())}\n".encode())
        for tensor in checkpoint.tensors:
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.extents}\n".encode())
    return digest.hexdigest()


def reformat(planned: Reformatting, output: Path, on_progress: OnProgress | None = None) -> Outcome:
    """Write the files. Continues an unfinished run of the same files. Raises Refused; a kill leaves nothing that looks finished."""
    options, outcome = planned.options, Outcome(output, notes=list(planned.notes))
    refuse_overlap(planned.source, output)
    if not options.overwrite and _finished_before(planned, output):
        outcome.notes.append("this was finished already: nothing to do")
        return outcome
    if options.overwrite:  # before anything is replaced
        missing_space(output, planned.plan.nbytes, planned.run.paths)
    with OutputFolder(output, REFORMATTED, planned.run, overwrite=options.overwrite, lock_places=[0]) as folder:
        plan = Plan(unfinished_files(planned.plan.files, folder, options.workers))
        outcome.notes += folder.notes
        missing_space(output, plan.nbytes)
        results = execute(
            plan, output, workers=options.workers, on_progress=counted_from(planned.plan.nbytes - plan.nbytes, on_progress),
            on_file_done=lambda result: folder.record(FileRecord(result.path, result.size, dict(result.checksums))),
            durable=options.durable,
        )  # fmt: skip
        _finish(planned, folder)
        outcome.files, outcome.bytes_written = len(results), sum(result.size for result in results)
    return outcome


def _finished_before(planned: Reformatting, output: Path) -> bool:
    """Whether the same files were written here earlier and are all still there. Raises Refused when some are gone."""
    record = _record_of(output)
    if record is None or record.run != planned.run.identity:
        return False
    remove_records(output)
    sizes = {file.path: file.size for file in record.files} | {file.name: file.size for file in record.strategies}
    gone = [path for path, size in sizes.items() if not (output / path).is_file() or (output / path).stat().st_size != size]
    if gone:
        raise refuse(f"the finished folder has lost {gone[0]}", str(output), "run again with --overwrite")
    return True


def _finish(planned: Reformatting, folder: OutputFolder) -> None:
    """Links and strategy files, and the record last."""
    for path, target in planned.links:
        check_place(folder.path / path, folder.path)
        link_file(folder.path / target, folder.path / path)
        folder.record(replace(folder.records[target], path=path))
    strategies = copy_side_files(
        [SideFile(path, planned.source / path, (planned.source / path).stat().st_size) for path in planned.found.strategies], folder.path
    )
    if planned.options.durable:
        sync_files(folder.path, [path for path in planned.run.paths if path != RECORD])
    record = ReformatRecord(__version__, planned.run.identity, planned.source.resolve().name, tuple(_records(planned, folder)), strategies)
    write_atomically(folder.path / RECORD, json.dumps(encode(record), separators=(",", ":")))
    folder.finish()


def _records(planned: Reformatting, folder: OutputFolder) -> Iterable[ReformattedFile]:
    targets = {file.path: file for file in planned.plan.files}
    targets |= {path: targets[target] for path, target in planned.links}
    for path, source in planned.sources.items():
        record = folder.records[path]
        tensors = tuple(TensorRecord(item.name, item.dtype, item.shape, record.checksums[item.name]) for item in targets[path].tensors)
        yield ReformattedFile(path, source, record.size, tensors)
