"""Continuing an unfinished run: which files are there already, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from converter.formats import READERS
from converter.output_folder import FileRecord, OutputFolder
from converter.partial_files import SUFFIX
from converter.plan import TargetFile
from converter.stored_bytes import checksum
from mappings.errors import Problem, Refused


def unfinished_files(files: Iterable[TargetFile], folder: OutputFolder, workers: int) -> tuple[TargetFile, ...]:
    """The files that are still to be written: those without a record, and those whose bytes are no longer what was recorded.

    What a killed run had begun of them is removed: it takes room on the disk.
    """
    planned = tuple(files)
    recorded = [file for file in planned if file.path in folder.records]
    with ThreadPoolExecutor(workers) as pool:
        whole = list(pool.map(lambda file: _is_as_recorded(folder, folder.records[file.path], file.path, file.format), recorded))
    for file, is_whole in zip(recorded, whole, strict=True):
        if not is_whole:
            folder.notes.append(f"{file.path} is not as it was written: writing it again")
            folder.forget(file.path)
    remaining = tuple(file for file in planned if file.path not in folder.records)
    for file in remaining:
        (folder.path / (file.path + SUFFIX)).unlink(missing_ok=True)
    return remaining


def check_recorded(paths: Iterable[str], file_format: str, folder: OutputFolder, workers: int) -> None:
    """Raises Refused, naming each recorded file whose bytes are not what was recorded when it was written."""
    recorded = tuple(paths)
    with ThreadPoolExecutor(workers) as pool:
        whole = list(pool.map(lambda path: _is_as_recorded(folder, folder.records[path], path, file_format), recorded))
    problems = [
        Problem("not as it was written", str(folder.path / path), "run the same command for this rank again: it is written anew")
        for path, is_whole in zip(recorded, whole, strict=True)
        if not is_whole
    ]
    if problems:
        raise Refused("files of an earlier run have changed since", problems)


def _is_as_recorded(folder: OutputFolder, record: FileRecord, path: str, file_format: str) -> bool:
    try:
        stored = READERS[file_format](folder.path / path)
        return {tensor.name: checksum(tensor) for tensor in stored} == record.checksums
    except (Refused, OSError):
        return False
