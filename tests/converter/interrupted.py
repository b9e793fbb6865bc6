"""`python -m tests.converter.interrupted KILL 17 hf2ms ...`: ms-convert that sends itself a signal at its 17th change of a file or lock.

So a test meets the moments between two changes, however short they are. Of a write that is struck one half is done.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CHANGES = ("pwrite", "replace", "link", "unlink", "mkdir", "rmdir", "fsync", "ftruncate")


def interrupted(signal_name: str, change: int, *arguments: object) -> subprocess.Popen[str]:
    """The command in a process of its own, which sends itself SIGKILL or SIGSTOP at this change (1 is the first)."""
    command = [sys.executable, "-m", "tests.converter.interrupted", signal_name, str(change), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=REPOSITORY)


def killed(change: int, *arguments: object) -> bool:
    """Runs the command and kills it at this change; False when it had done all before."""
    process = interrupted("KILL", change, *arguments)
    _, err = process.communicate(timeout=300)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode != 0


def stopped(change: int, *arguments: object) -> subprocess.Popen[str]:
    """Starts the command and returns when it has stopped itself at this change; a SIGCONT lets it go on."""
    process = interrupted("STOP", change, *arguments)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "it ended before that change"
    return process


def changes(*arguments: object) -> int:
    """How many changes the whole command makes."""
    process = interrupted("KILL", 0, *arguments)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return int(err.splitlines()[-1])


class _Counter:
    def __init__(self, signal_name: str, change: int) -> None:
        self.signal, self.change = signal.Signals[f"SIG{signal_name}"], change
        self.count = 0
        self.lock = threading.Lock()

    def watch(self, module: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                self.count += 1
                struck = self.count == self.change
                if struck and name == "pwrite":
                    descriptor, data, offset = arguments
                    original(descriptor, data[: len(data) // 2], offset)
                if struck:
                    os.kill(os.getpid(), self.signal)
            return original(*arguments, **options)

        setattr(module, name, call)


def main() -> None:
    """Counts from the first change that the command itself makes."""
    from converter import execute, hf2ms, ms2hf  # noqa: F401 (imports make no changes that count)
    from converter.cli import run

    counter = _Counter(sys.argv[1], int(sys.argv[2]))
    for name in CHANGES:
        counter.watch(os, name)
    counter.watch(fcntl, "lockf")
    code = run(sys.argv[3:])
    print(counter.count, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
