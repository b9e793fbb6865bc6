"""How the machine is asked: files below a root, an environment, command-line tools and name resolution. Tests give their own."""

from __future__ import annotations

import os
import platform
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MAX_BYTES = 4 << 20
TOOL_SECONDS = 5.0
NAME_SECONDS = 0.5
TOOL_FOLDERS = ("usr/local/sbin", "usr/local/Ascend/driver/tools", "usr/local/bin", "usr/bin", "usr/sbin")


@dataclass(frozen=True)
class Ran:
    """What a tool did: its exit code, and all that it printed."""

    code: int
    output: str


def run_tool(command: Sequence[str]) -> Ran:
    """Run a tool that only tells. A tool that hangs or cannot be started has failed with code -1."""
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TOOL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Ran(-1, f"no answer in {TOOL_SECONDS:.0f} s")
    except OSError as error:
        return Ran(-1, error.strerror or str(error))
    return Ran(done.returncode, done.stdout[:MAX_BYTES].decode("utf-8", errors="replace"))


def resolve_name(name: str) -> tuple[str, ...]:
    """The addresses of a host name, () if it has none or the name service does not answer in half a second."""
    return within(NAME_SECONDS, lambda: tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})), ())


def within(seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """The answer, or `otherwise` if it fails with an OSError (an unknown name does) or takes longer. The asking thread is left behind."""
    answers: list[T] = []

    def fetch() -> None:
        try:
            answers.append(ask())
        except OSError:
            return

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else otherwise


def read_small(path: Path) -> bytes | None:
    """The first 4 MiB of a regular file, None where there is none that can be read. A FIFO is not waited for."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            return file.read(MAX_BYTES) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (OSError, ValueError):
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK)


@dataclass(frozen=True)
class System:
    """Everything outside this process that a probe reads. `search_path` is where Python looks for packages."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    search_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    folder: Path = field(default_factory=Path.cwd)
    python: str = field(default_factory=platform.python_version)
    prefix: str = sys.prefix
    architecture: str = field(default_factory=platform.machine)
    hostname: str = field(default_factory=socket.gethostname)
    run: Callable[[Sequence[str]], Ran] = run_tool
    resolve: Callable[[str], tuple[str, ...]] = resolve_name
    free_bytes: Callable[[Path], int] = _free_bytes
    may_write: Callable[[Path], bool] = _may_write

    def path(self, path: str) -> Path:
        """Where an absolute path of the machine is."""
        return self.root / path.lstrip("/")

    def place(self, path: str) -> Path:
        """Where a path is that a person gave: absolute on the machine, or from the working directory."""
        return self.path(path) if path.startswith("/") else self.folder / path

    def text(self, path: str) -> str | None:
        """A small text file of the machine, None where there is none that can be read."""
        content = read_small(self.path(path))
        return None if content is None else content.decode("utf-8", errors="replace")

    def names(self, path: str) -> list[str]:
        """The names in a folder of the machine, [] where there is none."""
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def tool(self, name: str) -> str | None:
        """Where a command-line tool stands: in PATH or where the driver installs it."""
        folders = [folder for folder in self.environment.get("PATH", "").split(os.pathsep) if folder.startswith("/")]
        for folder in (*folders, *TOOL_FOLDERS):
            path = self.path(f"{folder}/{name}")
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return str(path)
        return None
