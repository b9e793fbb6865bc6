"""Output files that have their final name only when every byte of them is there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import xxhash

from converter.dtypes import item_size
from converter.folder_lock import PROGRESS_FOLDER
from converter.open_files import OpenFiles
from converter.plan import TargetFile
from converter.tensors import FileLayout
from mappings.errors import Refused, refuse

SUFFIX = ".partial"

# A durable file is sent to the disk whenever so much was written, while other blocks are gathered: little is left to wait for at its end.
WRITEBACK_BYTES = 32 << 20

# Of one write call. Linux takes page cache for a call in pieces as large as the call, and large free pieces are often memory that was not
# touched for long: on virtual machines that give it back to their host, calls of 4 MiB took up to three times as long as these.
WRITE_BYTES = 256 << 10

_MENDS = {
    errno.ENOSPC: "free space there or choose another output folder, then start again: finished files are kept",
    errno.EDQUOT: "your quota is used up: free space or choose another output folder, then start again",
    errno.EFBIG: "the file system does not take files of this size: choose another output folder",
    errno.EROFS: "the file system is read-only: choose another output folder",
    errno.EACCES: "choose an output folder that you may write to",
}
_MEND = "see that the disk and its mount are well, or choose another output folder"


@dataclass(frozen=True, slots=True)
class FileResult:
    """A finished file: its path in the output folder, its size in bytes and the xxh3_64 of each tensor's bytes in hexadecimal."""

    path: str
    size: int
    checksums: dict[str, str]


class PartialFile:
    """A file being written as `<path>.partial`. Several threads may write different tensors of it at a time.

    A `durable` file gets its name only when its bytes are on the disk, so that after a loss of power too a name never stands for less.
    """

    def __init__(
        self, file: TargetFile, folder: Path, layout: Callable[[TargetFile], FileLayout], open_files: OpenFiles, durable: bool
    ) -> None:
        self.file = file
        self.path = folder / _inside(file.path)
        self._folder = folder
        self._partial = os.fspath(self.path) + SUFFIX
        self._layout_of = layout
        self._layout: FileLayout | None = None
        self._open_files = open_files
        self._durable = durable
        self._unsent = 0
        self._lock = threading.Lock()
        self._unfinished = len(file.tensors)
        self._checksums: dict[int, str] = {}

    def write(self, index: int, start: int, data: memoryview) -> None:
        """Write `data` at byte `start` of tensor `index`. Raises Refused if it cannot be written."""
        layout = self._layout or self._begin()
        try:
            descriptor = self._open_files.acquire(self._partial)
            try:
                for piece in layout.extents[index]:
                    here = min(len(data), piece.length - start)
                    if here > 0:
                        _write_all(descriptor, data[:here], piece.offset + start)
                        data = data[here:]
                        self._send(descriptor, here)
                    start = max(0, start - piece.length)
            finally:
                self._open_files.release(self._partial)
        except OSError as error:
            raise write_refusal(error, self._partial) from error

    def _send(self, descriptor: int, nbytes: int) -> None:
        """Let the disk take what was written, and the page cache let go of what the disk has taken.

        The next blocks then go into the same memory, which is faster than to fill all that is free, and others keep what they have cached.
        """
        if not self._durable or not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            self._unsent += nbytes
            due = self._unsent >= WRITEBACK_BYTES
            if due:
                self._unsent = 0
        if due:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def tensor_done(self, index: int, checksum: str) -> bool:
        """Note that every byte of tensor `index` was written. True when that was the file's last tensor."""
        with self._lock:
            self._checksums[index] = checksum
            self._unfinished -= 1
            return not self._unfinished

    def finish(self) -> FileResult:
        """Give the complete file its name.

        Raises Refused if the system reports that it could not write what it had accepted.
        """
        layout = self._layout or self._begin()
        with _refusing(self._partial):
            if self._durable:
                descriptor = self._open_files.acquire(self._partial)
                try:
                    os.fsync(descriptor)
                finally:
                    self._open_files.release(self._partial)
            self._open_files.close(self._partial)
            os.replace(self._partial, self.path)
            if self._durable:
                sync_folder(self.path.parent)
        checksums = {tensor.name: self._checksums[index] for index, tensor in enumerate(self.file.tensors)}
        return FileResult(self.file.path, layout.size, checksums)

    def discard(self) -> None:
        """Remove what was written so far; nobody may be writing."""
        if self._layout is not None:
            self._open_files.close(self._partial)
            with contextlib.suppress(OSError):  # the error that led here is the one to be told
                os.unlink(self._partial)

    def _begin(self) -> FileLayout:
        """Make the file in its full size, so that a full disk shows at once, with everything in it that is not a tensor."""
        with self._lock:
            if self._layout is None:
                layout = self._layout_of(self.file)
                _check_layout(self.file, layout)
                with _refusing(self._partial):
                    check_place(self.path, self._folder)
                    _create(self._partial, layout)
                self._layout = layout
            return self._layout


def _inside(path: str) -> PurePosixPath:
    """The path of a target file, sure to stay in the output folder. Raises ValueError if it does not."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or not relative.parts or ".." in relative.parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the output folder")
    return relative


def _check_layout(file: TargetFile, layout: FileLayout) -> None:
    lengths = [sum(piece.length for piece in pieces) for pieces in layout.extents]
    if lengths != [tensor.elements * item_size(tensor.dtype) for tensor in file.tensors]:
        raise ValueError(f"the layout of {file.path} does not have room for each tensor's bytes")


def _create(path: str, layout: FileLayout) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = _open_new(path)
    try:
        _allocate(descriptor, layout.size)
        for offset, literal in layout.literals:
            _write_all(descriptor, memoryview(literal), offset)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _allocate(descriptor: int, size: int) -> None:
    """Give the file its size, with disk space reserved where the file system can do so at once.

    Not `os.posix_fallocate`: where the file system cannot, glibc writes into every block of the file instead.
    """
    if _fallocate is not None and size and _fallocate(descriptor, 0, 0, size):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
            raise OSError(code, os.strerror(code))
    os.ftruncate(descriptor, size)


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):
        return None  # not Linux with glibc
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = function
    return call


_fallocate = _load_fallocate()


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data[:WRITE_BYTES], offset)
        data = data[count:]
        offset += count


def _open_new(path: str) -> int:
    """A descriptor of a new file, in the place of one that an earlier run left; a link that waits there is removed, never followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def open_new(path: Path) -> BinaryIO:
    """A new file to be written. Raises OSError."""
    return os.fdopen(_open_new(os.fspath(path)), "wb")


def hidden_temporary(place: Path) -> Path:
    """Where a file is written before it gets its name: no file that travels may be called so (`is_reserved`), and it is short enough."""
    return place.with_name(f"{PROGRESS_FOLDER}-{xxhash.xxh3_64_hexdigest(os.fsencode(place.name))}{SUFFIX}")


def temporaries(place: Path) -> tuple[Path, ...]:
    """Every name that a file of an output folder may have while it is written, by whichever function writes it."""
    return place.with_name(place.name + SUFFIX), place.with_name(f".{place.name}{SUFFIX}"), hidden_temporary(place)


def is_reserved(name: str) -> bool:
    """Whether a relative path has a part that is named like a temporary or like the progress folder."""
    return any(part.endswith(SUFFIX) or part.startswith(PROGRESS_FOLDER) for part in name.casefold().split("/"))


def check_place(place: Path, folder: Path) -> None:
    """Raises Refused when a link on the way to `place` leads out of the output folder."""
    real, home = os.path.realpath(place.parent), os.path.realpath(folder)
    if not Path(real).is_relative_to(home):
        raise refuse(f"a link leads out of the output folder, to {real}", str(place), "remove the link, or give another -o")


def sync_files(folder: Path, paths: Iterable[str]) -> None:
    """Bring files of an output folder, and the names of them, to the disk. Raises Refused when the system could not."""
    folders: set[Path] = set()
    for path in paths:
        place = folder / path
        with _refusing(os.fspath(place)):
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        folders.update(place.parents[: len(PurePosixPath(path).parts)])
    for parent in sorted(folders, reverse=True):
        with _refusing(os.fspath(parent)):
            sync_folder(parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turns an OSError of writing into Refused with the file and a mend."""
    try:
        yield
    except OSError as error:
        raise write_refusal(error, path) from error


def write_refusal(error: OSError, path: str) -> Refused:
    """The refusal for a failed write to `path`."""
    return refuse(f"cannot be written: {error.strerror or error}", path, _MENDS.get(error.errno or 0, _MEND))
