"""A bounded number of open files, shared by threads: a conversion may touch thousands, a process may hold about a thousand open."""

from __future__ import annotations

import os
import resource
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from converter.tensors import FileIdentity, StoredTensor
from converter.untrusted import changed_files
from mappings.errors import refuse

MOST_OPEN = 256  # of each kind (sources, targets); less where the process may open less


def open_limit() -> int:
    """How many files of one kind may be open: a quarter of what the process may open, from 8 to `MOST_OPEN`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_OPEN if soft == resource.RLIM_INFINITY else max(8, min(MOST_OPEN, soft // 4))


@dataclass(slots=True)
class _Open:
    descriptor: int
    users: int = 0


class OpenFiles:
    """Descriptors by path, the longest unused closed first. A descriptor in use is never closed.

    So more than `limit` are open only while more than `limit` threads use one each.
    """

    def __init__(self, flags: int, limit: int | None = None) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._limit = limit or open_limit()
        self._files: dict[str, _Open] = {}
        self._lock = threading.Lock()

    def acquire(self, path: str) -> int:
        """The descriptor of `path`, opened if need be; to be given back with `release`. Raises OSError."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is None:
                self._close_unused()
                file = _Open(self._open(path))
            self._files[path] = file  # the last in the order is the last used
            file.users += 1
            return file.descriptor

    def release(self, path: str) -> None:
        """Give back what `acquire` returned."""
        with self._lock:
            self._files[path].users -= 1

    def close(self, path: str) -> None:
        """Close `path` if it is open; nobody may be using it."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is not None:
                os.close(file.descriptor)

    def close_all(self) -> None:
        """Close every file; nobody may be using one."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1].descriptor)

    def _open(self, path: str) -> int:
        return os.open(path, self._flags)

    def _close_unused(self) -> None:
        excess = len(self._files) + 1 - self._limit
        for path in [path for path, file in self._files.items() if not file.users][: max(0, excess)] if excess > 0 else ():
            os.close(self._files.pop(path).descriptor)


class SourceFiles(OpenFiles):
    """The files that a conversion reads. Each must stay as it was when its header was read, or else when it was first opened."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(os.O_RDONLY | os.O_NONBLOCK, limit)  # a FIFO would block for ever
        self._identities: dict[str, FileIdentity] = {}

    def _open(self, path: str) -> int:
        descriptor = super()._open(path)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise refuse("not a regular file", path)
            self._check(path, FileIdentity.of(status))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, source: StoredTensor, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill each buffer of the (first byte in the tensor's buffer, buffer) pieces.

        Raises Refused for a file that cannot be read, has become shorter or has changed.
        """
        path = os.fspath(source.path)
        if source.identity is not None:
            self._check(path, source.identity)
        try:
            descriptor = self.acquire(path)
            try:
                for start, buffer in pieces:
                    _read_piece(descriptor, source, start, buffer)
            finally:
                self.release(path)
        except OSError as error:
            raise refuse(f"the file cannot be read: {error.strerror or error}", path, "see that the disk and its mount are well") from error

    def _check(self, path: str, identity: FileIdentity) -> None:
        if self._identities.setdefault(path, identity) != identity:
            raise changed_files([path])

    def check_unchanged(self, paths: Iterable[str] | None = None) -> None:
        """Raises Refused for those of `paths` (all, without) that were read and are not any more what they were."""
        changed = []
        for path in list(self._identities) if paths is None else paths:
            before = self._identities.get(path)
            try:
                if before is not None and before != FileIdentity.of(os.stat(path)):
                    changed.append(path)
            except OSError:
                changed.append(path)
        if changed:
            raise changed_files(changed)


def _read_piece(descriptor: int, source: StoredTensor, start: int, buffer: memoryview) -> None:
    wanted = len(buffer)
    for extent in source.extents:
        here = min(wanted, extent.length - start)
        if here > 0:
            _read_exactly(descriptor, extent.offset + start, buffer if here == len(buffer) else buffer[:here], source)
            wanted -= here
            if not wanted:
                return
            buffer = buffer[here:]
        start = max(0, start - extent.length)
    if wanted:
        raise ValueError(f"a read of {wanted} bytes past what is stored of {source.name}")


def _read_exactly(descriptor: int, offset: int, buffer: memoryview, source: StoredTensor) -> None:
    while (count := os.preadv(descriptor, [buffer], offset)) != len(buffer):
        if not count:
            what = f"truncated: it ends at byte {offset}, inside {source.name}, and was longer when the conversion was planned"
            raise refuse(what, str(source.path), "nobody may write to the source during a conversion; restore the file and start again")
        buffer = buffer[count:]
        offset += count
