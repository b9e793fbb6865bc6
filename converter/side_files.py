"""Copying the files that travel beside the weights, with their checksums."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

from converter.hf_folder import SideFile, check_inside
from converter.manifest import SideFileRecord
from mappings.errors import Problem, Refused

BLOCK_BYTES = 1 << 20


def copy_side_files(files: Iterable[SideFile], target: Path) -> tuple[SideFileRecord, ...]:
    """Copy files below `target` under their relative names; each appears whole or not at all."""
    return tuple(_copy(file.path, target, file.name) for file in files)


def restore_side_files(records: Iterable[SideFileRecord], source: Path, target: Path) -> None:
    """Copy recorded files from `source` to `target`. Raises Refused, naming each that is missing or not as recorded."""
    problems = []
    for record in records:
        path = source / record.name
        if not path.is_file():
            problems.append(Problem("missing", f"{source.name}/{record.name}", "restore it, or run hf2ms again"))
            continue
        check_inside(path, source)
        copied = _copy(path, target, record.name)
        if copied != record:
            problems.append(Problem("not as the manifest recorded it", f"{source.name}/{record.name}", "restore it, or run hf2ms again"))
    if problems:
        raise Refused("the side files do not agree with the manifest", problems)


def _copy(path: Path, folder: Path, name: str) -> SideFileRecord:
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(place.name + ".partial")
    digest, size = xxhash.xxh3_64(), 0
    with open(path, "rb") as reader, open(temporary, "wb") as writer:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
            size += len(block)
    os.replace(temporary, place)
    return SideFileRecord(name, size, digest.hexdigest())
