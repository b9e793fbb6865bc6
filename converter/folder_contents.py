"""What stands in an output folder: whose it is, what is in the way of a run, and removing files by name, never a whole folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from converter.folder_lock import PROGRESS_FOLDER
from converter.partial_files import temporaries

MAX_LISTED = 1000


def leading_out(folder: Path, paths: Iterable[str]) -> list[str]:
    """The folders of these paths that are, or lie behind, links out of `folder`."""
    home = os.path.realpath(folder)
    parents = sorted({path.rpartition("/")[0] for path in paths} - {""})
    return [parent for parent in parents if not Path(os.path.realpath(folder / parent)).is_relative_to(home)]


def in_the_way(folder: Path, paths: Iterable[str], owned: Collection[str], *, files_too: bool) -> list[str]:
    """The paths that cannot be written: a folder has the name, or a file stands where a folder must be.

    With `files_too` also a file that is not `owned` (nor the temporary of one that is) and would be replaced.
    """
    found = []
    for path in paths:
        place = folder / path
        if place.is_dir() and not place.is_symlink():
            found.append(path)
        elif files_too and path not in owned:
            found += [taken.relative_to(folder).as_posix() for taken in (place, *temporaries(place)) if os.path.lexists(taken)]
    found += [parent for parent in _folders_of(paths) if os.path.lexists(folder / parent) and not (folder / parent).is_dir()]
    return found


def listed(folder: Path, names: Iterable[str]) -> list[str]:
    """The files in these folders of `folder` (the names themselves where they are no folders), the first thousand of them."""

    def walk() -> Iterator[str]:
        for name in sorted(names):
            place = folder / name
            if place.is_symlink() or not place.is_dir():
                yield name
            else:
                yield from sorted(
                    path.relative_to(folder).as_posix() for path in place.rglob("*") if path.is_symlink() or not path.is_dir()
                )

    return list(islice(walk(), MAX_LISTED))


def others(folder: Path, paths: Iterable[str]) -> list[str]:
    """What a folder holds besides these files and the progress folder: files, and folders as a whole where none of the files is in them."""
    wanted = set(paths)
    shared = {path.partition("/")[0] for path in wanted}
    found = []
    for entry in sorted(folder.iterdir()):
        if entry.name == PROGRESS_FOLDER:
            continue
        if entry.is_symlink() or not entry.is_dir():
            found.append(entry.name)
        elif entry.name in shared:
            found += listed(folder, [entry.name])
        else:
            found.append(f"{entry.name}/")
    return [path for path in found if path not in wanted]


def remove_files(folder: Path, paths: Iterable[str]) -> None:
    """Remove files and their temporaries, and the folders that are empty then. Nothing behind a link that leads out is touched."""
    home = os.path.realpath(folder)
    wanted = list(paths)
    for path in sorted(wanted):
        place = folder / path
        if not Path(os.path.realpath(place.parent)).is_relative_to(home):
            continue
        for file in (place, *temporaries(place)):
            if file.is_symlink() or not file.is_dir():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    file.unlink()
    remove_empty_folders(folder, wanted)


def remove_empty_folders(folder: Path, paths: Iterable[str]) -> None:
    """Remove the folders on the way to these paths that hold nothing."""
    for parent in sorted(_folders_of(paths), reverse=True):
        if not (folder / parent).is_symlink():
            with contextlib.suppress(OSError):  # not there, or not empty
                (folder / parent).rmdir()


def _folders_of(paths: Iterable[str]) -> set[str]:
    """Every folder on the way to these paths, relative as they are."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")[:-1]
        found.update("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return found
