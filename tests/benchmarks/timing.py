"""Timing whole processes: wall time and peak memory of each, run in turn so that a machine's moods meet all alike."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Contender:
    """A command to be timed. `output` is removed before each run."""

    name: str
    command: Sequence[str]
    output: Path | None = None


@dataclass(frozen=True)
class Usage:
    """One run of a process: wall and processor seconds, and peak resident bytes."""

    seconds: float
    processor_seconds: float
    peak_bytes: int


@dataclass
class Times:
    """The runs of one contender."""

    runs: list[Usage] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def processor_median(self) -> float:
        return statistics.median(run.processor_seconds for run in self.runs)

    @property
    def peak(self) -> int:
        return max(run.peak_bytes for run in self.runs)

    @property
    def spread(self) -> str:
        return f"{min(run.seconds for run in self.runs):.2f}-{max(run.seconds for run in self.runs):.2f}"


def run_once(command: Sequence[str]) -> Usage:
    """Run one process to its end. Raises RuntimeError with what it printed when it fails."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        watch = _PeakMemory(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        errors = process.stderr.read() if process.stderr else b""
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}:\n{errors.decode(errors='replace')}")
    return Usage(seconds, usage.ru_utime + usage.ru_stime, watch.stop())


class _PeakMemory(threading.Thread):
    """Reads a process's high-water mark again and again: what wait4 reports also counts the parent that it was forked from."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status, self._peak, self._over = Path(f"/proc/{pid}/status"), 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.01):
            try:
                lines = self._status.read_text().splitlines()
            except OSError:
                return
            self._peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), self._peak)

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self._peak


def in_turn(contenders: Sequence[Contender], rounds: int) -> Mapping[str, Times]:
    """Run every contender once to warm up, then all of them `rounds` times, in another order each round.

    Each finds the same machine: no output of an earlier run, dirty pages written out, and the memory that it will fill touched before.
    """
    times = {contender.name: Times() for contender in contenders}
    order = list(contenders)
    for round_number in range(rounds + 1):
        random.Random(round_number).shuffle(order)
        for contender in order:
            for other in contenders:
                if other.output is not None:
                    shutil.rmtree(other.output, ignore_errors=True)
            os.sync()
            touch_memory()
            usage = run_once(contender.command)
            if round_number > 0:
                times[contender.name].runs.append(usage)
    return times


def touch_memory(nbytes: int = 3 << 30) -> None:
    """Write to so much free memory and give it back.

    A virtual machine may have lent idle pages to its host, and getting one back is slow.
    """
    np.empty(nbytes, np.uint8)[:: mmap.PAGESIZE] = 1


def machine() -> str:
    """The machine in a line: processor, cores, memory."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory / 1e9:.0f} GB"
