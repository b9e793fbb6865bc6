"""Reading files that come from strangers: what they may say, and how their words are shown.

Every number in such a file is checked against these limits before it is used, every name before it is printed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mappings.errors import Problem, Refused, refuse

MAX_NAME = 4096  # characters of a tensor's name
MAX_AXES = 32  # numpy's own limit (NPY_MAXDIMS before numpy 2)
MAX_SIZE = 2**63 - 1  # of one axis: what every format stores it in
MAX_PROBLEMS = 20  # shown in one refusal; a hostile file may hold millions


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """A regular file open for reading: its descriptor and its size in bytes.

    Raises Refused for a missing or irregular file (a FIFO would block for ever), and for every OSError while it is open.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise refuse("a folder, not a file" if stat.S_ISDIR(status.st_mode) else "not a regular file", str(path))
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refuse(f"the file cannot be read: {error.strerror or error}", str(path)) from error


def changed_files(paths: Iterable[str | Path]) -> Refused:
    """The refusal of files that changed between two looks at them: their headers no longer say what their bytes are."""
    mend = "nobody may write to them meanwhile; start again when they are at rest"
    problems = [Problem("changed since its header was read", str(path), mend) for path in paths]
    return Refused("files changed while they were being read", problems)


def quoted(text: str) -> str:
    """`text` in quotes for a message: control characters escaped, and at most 80 characters of it."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def name_problem(name: str) -> str | None:
    """Why `name` is not accepted as a tensor's name, or None. Unprintable characters could drive the terminal that shows them."""
    if len(name) > MAX_NAME:
        return f"a name of {len(name)} characters ({MAX_NAME} at most)"
    if not name or not name.isprintable():
        return "a name that is empty or holds unprintable characters"
    return None


def shape_problem(shape: Sequence[object]) -> str | None:
    """Why `shape` is not accepted as a tensor's shape, or None. JSON's true and 1.0 are not sizes."""
    if len(shape) > MAX_AXES:
        return f"{len(shape)} axes ({MAX_AXES} at most)"
    for axis in shape:
        if type(axis) is not int or not 0 <= axis <= MAX_SIZE:
            return f"a shape that holds something else than sizes from 0 to {MAX_SIZE}"
    return None


class Problems:
    """The problems found in one file: the first few in full, the rest counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[Problem] = []
        self._count = 0

    def add(self, name: str, what: str, mend: str = "") -> None:
        """One more problem, with the tensor called `name`."""
        self._count += 1
        if self._count <= MAX_PROBLEMS:
            self._found.append(Problem(what, f"{self._path.name}: {quoted(name)}", mend))

    def raise_if_any(self, title: str) -> None:
        """Raises Refused with `title` if there was a problem."""
        if not self._count:
            return
        more = self._count - len(self._found)
        rest = [Problem(f"and {more} more problems of this kind", self._path.name)] if more else []
        raise Refused(f"{self._path}: {title}", [*self._found, *rest])
