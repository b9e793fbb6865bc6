"""The checkpoints of a folder, or a single one, whoever wrote them: `.ckpt` and `.safetensors` files, and MindSpore's strategy files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from converter.ckpt_format import read_ckpt
from converter.folder_lock import PROGRESS_FOLDER
from converter.manifest import is_plain_relative
from converter.partial_files import is_reserved
from converter.recognise import KINDS, recognise
from converter.safetensors_format import read_header
from converter.tensors import StoredTensor
from converter.untrusted import quoted
from mappings.errors import Problem, Refused, refuse

SUFFIXES = (".ckpt", ".safetensors")
MAX_FILES = 1 << 20


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint: its path relative to the folder that was searched, where it is, and what its header says."""

    path: str
    place: Path
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]

    @property
    def file(self) -> tuple[int, int]:
        """By what two hard links are known to be one file."""
        status = self.place.stat()
        return status.st_dev, status.st_ino


@dataclass(frozen=True)
class FoundFiles:
    """What a folder holds: checkpoints, strategy files (relative paths), and the rest (relative paths)."""

    checkpoints: tuple[FoundCheckpoint, ...]
    strategies: tuple[str, ...]
    others: tuple[str, ...]


def find_checkpoints(source: Path) -> FoundFiles:
    """Read the headers of a checkpoint, or of all in a folder and the folders below it. A file's first bytes tell what it is.

    Raises Refused for a folder without checkpoints, for links out of it, and for files that are named like a checkpoint and are none.
    """
    if not source.is_dir():
        return FoundFiles((_read(source.name, source, recognise(source)),), (), ())
    checkpoints, strategies, others, problems = [], [], [], []
    for path in _files(source):
        place = source / path
        if not path.endswith(SUFFIXES):
            others.append(path)
        elif (problem := _path_problem(source, path)) is not None:
            problems.append(problem)
        elif (kind := recognise(place)) == "strategy":
            strategies.append(path)
        else:
            checkpoints.append(_read(path, place, kind))
    if problems:
        raise Refused("files that cannot be taken along", problems[:20])
    if not checkpoints:
        raise refuse(f"no {' or '.join(SUFFIXES)} file with weights", str(source), "give a checkpoint, or a folder of them")
    return FoundFiles(tuple(checkpoints), tuple(strategies), tuple(others))


def _files(folder: Path) -> Iterator[str]:
    """The relative paths of all files below a folder, sorted; links to folders are not followed."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=_unreadable):
        if PROGRESS_FOLDER in folders:
            raise refuse("an unfinished run of ms-convert", parent, "let it finish: the same command continues it")
        folders.sort()
        found += [(Path(parent) / name).relative_to(folder).as_posix() for name in names]
        if len(found) > MAX_FILES:
            raise refuse(f"over {MAX_FILES} files", str(folder), "give a smaller folder")
    yield from sorted(found, key=_natural)


def _unreadable(error: OSError) -> None:
    raise error


def _natural(path: str) -> list[tuple[int, int, str]]:
    """rank_2 before rank_10."""
    return [(0, int(part[:18]), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", path)]


def _path_problem(source: Path, path: str) -> Problem | None:
    place = source / path
    if not is_plain_relative(path) or is_reserved(path):
        return Problem(f"the file name {quoted(path)} cannot be written again", str(source), "rename it")
    if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(source)):
        return Problem("a link leads out of the folder", str(place), "put the file itself there")
    return None


def _read(path: str, place: Path, kind: str) -> FoundCheckpoint:
    if kind == "safetensors":
        tensors, metadata = read_header(place)
        return FoundCheckpoint(path, place, tuple(tensors), metadata)
    if kind == "ckpt":
        return FoundCheckpoint(path, place, tuple(read_ckpt(place)), {})
    raise refuse(f"{KINDS[kind].phrase}, not a checkpoint", str(place), KINDS[kind].mend)


def renamed(path: str, file_format: str) -> str:
    """A checkpoint's path with the ending of another format."""
    plain = PurePosixPath(path)
    return plain.with_suffix(f".{file_format}").as_posix() if plain.suffix in SUFFIXES else f"{path}.{file_format}"
