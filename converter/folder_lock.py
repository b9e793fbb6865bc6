"""The lock of an output folder, which several runs, on several hosts too, may share if they write different ranks.

Byte `n` of the lock file stands for place `n` (a rank) and is held by the run that writes it. One byte beyond is the gate: whoever begins
or ends a run holds it for that moment. The system releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from mappings.errors import refuse

PROGRESS_FOLDER = ".ms-convert"  # where a run keeps its lock and its records
_GATE = 1 << 30  # beyond every rank


def check_progress_folder(folder: Path) -> None:
    """Raises Refused when the progress folder of an output folder is a link, or no folder: what it leads to is somebody else's."""
    path = folder / PROGRESS_FOLDER
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise refuse("a link or a file where ms-convert keeps its records", str(path), "remove it, or give another -o")


class FolderLock:
    """POSIX record locks (they work over NFS): `open`, then, inside `gate`, `take` one's places or be `alone`."""

    def __init__(self, path: Path, places: Sequence[int]) -> None:
        self._path, self._places = path, places
        self._descriptor = -1

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def open(self) -> None:
        """Make the lock file if need be. Raises OSError, and Refused for a link in its place or in that of its folder."""
        check_progress_folder(self._path.parent.parent)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_symlink():
            raise refuse("a link in the place of a lock", str(self._path), "remove it")
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def close(self) -> None:
        """Release everything."""
        if self.is_open:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        """Shut the gate, waiting until no other run is in it. The lock file is then the one that others find."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, _GATE)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _GATE)

    def take(self) -> None:
        """Take one's places. Raises Refused when another run has one of them."""
        while self._is_outdated():
            # a run that ended while we waited at the gate took the lock file away with its records
            self.close()
            self.open()
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, _GATE)
        for place in self._places:
            self._lock(1, place)

    def alone(self) -> None:
        """Make sure that no other run has a place; they stay free for later ones. Raises Refused."""
        self._lock(0, 0)
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, _GATE, 0)
        for place in self._places:
            self._lock(1, place)

    def _lock(self, length: int, place: int) -> None:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, place)
        except OSError as error:
            where = str(self._path.parent.parent)
            raise refuse("another ms-convert is writing here", where, "wait for it, or stop it and run this again") from error

    def _is_outdated(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return True
