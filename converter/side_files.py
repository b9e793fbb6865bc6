"""Copying the files that travel beside the weights, with their checksums."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import xxhash

from converter.hf_folder import SideFile, check_inside
from converter.manifest import SideFileRecord
from converter.partial_files import check_place, hidden_temporary, open_new
from mappings.errors import Problem, Refused, refuse

BLOCK_BYTES = 1 << 20
_MEND = "restore it, or run hf2ms again"


def copy_side_files(files: Iterable[SideFile], target: Path) -> tuple[SideFileRecord, ...]:
    """Copy files below `target` under their relative names; each appears whole or not at all."""
    return tuple(_copy(file.path, target, file.name) for file in files)


def changed_side_files(files: Iterable[SideFile], records: Iterable[SideFileRecord]) -> list[str]:
    """What a folder's side files are now that the records do not say: `README.md changed`, `notes.txt is new`, `LICENSE is gone`."""
    now, then = {file.name: file for file in files}, {record.name: record for record in records}
    found = [f"{name} {'is new' if name in now else 'is gone'}" for name in sorted(now.keys() ^ then.keys())]
    common = sorted(now.keys() & then.keys())
    return found + [
        f"{name} changed" for name in common if now[name].size != then[name].size or _copied(now[name].path, name) != then[name]
    ]


def check_side_files(records: Iterable[SideFileRecord], source: Path) -> None:
    """Raises Refused, naming each recorded file that is missing in `source` or not as recorded."""
    problems = []
    for record in records:
        path = source / record.name
        if not path.is_file():
            problems.append(Problem("missing", f"{source.name}/{record.name}", _MEND))
            continue
        check_inside(path, source)
        if _copied(path, record.name) != record:
            problems.append(Problem("not as the manifest recorded it", f"{source.name}/{record.name}", _MEND))
    if problems:
        raise Refused("the side files do not agree with the manifest", problems)


def restore_side_files(records: Iterable[SideFileRecord], source: Path, target: Path) -> None:
    """Copy recorded files from `source` to `target`. Raises Refused for one that is not as recorded; it does not appear in `target`."""
    for record in records:
        check_inside(source / record.name, source)
        _copy(source / record.name, target, record.name, record)


def _copy(path: Path, folder: Path, name: str, expected: SideFileRecord | None = None) -> SideFileRecord:
    place = folder / name
    check_place(place, folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = hidden_temporary(place)
    with open_new(temporary) as writer:
        copied = _copied(path, name, writer)
    if expected is not None and copied != expected:
        temporary.unlink()
        raise refuse("not as the manifest recorded it", str(path), _MEND)
    os.replace(temporary, place)
    return copied


def _copied(path: Path, name: str, writer: BinaryIO | None = None) -> SideFileRecord:
    """The record of a file as it is now; it is copied to `writer` on the way."""
    digest, size = xxhash.xxh3_64(), 0
    with open(path, "rb") as reader:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
            if writer is not None:
                writer.write(block)
    return SideFileRecord(name, size, digest.hexdigest())
