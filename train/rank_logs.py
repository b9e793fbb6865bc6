"""The ranks' logs: following one as it grows, and finding in one why its rank failed."""

from __future__ import annotations

import os
import re
from pathlib import Path

_TAIL_BYTES = 64 << 10
_SHOWN_LINES = 20
_NOISE = re.compile(r"\[(INFO|WARNING|DEBUG)\] ")
_OWN_ERROR = re.compile(r"refused: |a defect of ms-train: ")
_TRACEBACK = "Traceback (most recent call last):"


class LogTail:
    """Gives the complete lines of a file that is being written. It may not exist yet, and may be replaced by a new one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._rest = -1, 0, b""

    def lines(self, ended: bool = False) -> list[str]:
        """The lines since the last call; with `ended` also a last one without a line end."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset, self._rest = status.st_ino, 0, b""
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        if ended and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


def last_error(path: Path) -> list[str]:
    """The lines of a log that say why its process failed, the last ones at most; empty if there is no log or nothing in it."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _NOISE.match(line)]
    starts = [number for number, line in enumerate(lines) if _OWN_ERROR.match(line)]
    if starts:
        return lines[starts[-1] :][:_SHOWN_LINES]
    starts = [number for number, line in enumerate(lines) if line == _TRACEBACK]
    return lines[starts[-1] if starts else 0 :][-_SHOWN_LINES:]


def looks_failed(path: Path) -> bool:
    """Whether a log ends with an error of Python's or of ours."""
    return any(_OWN_ERROR.match(line) or line == _TRACEBACK for line in last_error(path))
