"""Timing whole processes: wall time and peak memory of each, run in turn so that a machine's moods meet all alike."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Contender:
    """A command to be timed. `output` is removed before each run; `before` (a command) runs untimed, `input` folders are read once."""

    name: str
    command: Sequence[str]
    output: Path | None = None


@dataclass
class Times:
    """The runs of one contender: seconds, and peak resident bytes of its process."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_once(command: Sequence[str]) -> tuple[float, int]:
    """Wall seconds and peak resident bytes of one process. Raises CalledProcessError when it fails."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        errors = process.stderr.read() if process.stderr else b""
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, list(command), stderr=errors)
    return seconds, usage.ru_maxrss * 1024


def in_turn(contenders: Sequence[Contender], rounds: int) -> Mapping[str, Times]:
    """Run every contender once to warm up, then all of them in turn, `rounds` times. Dirty pages are written out before each run."""
    times = {contender.name: Times() for contender in contenders}
    for round_number in range(rounds + 1):
        for contender in contenders:
            if contender.output is not None:
                shutil.rmtree(contender.output, ignore_errors=True)
            os.sync()
            seconds, peak = run_once(contender.command)
            if round_number > 0:
                times[contender.name].seconds.append(seconds)
                times[contender.name].peak_bytes.append(peak)
    return times


def machine() -> str:
    """The machine in a line: processor, cores, memory."""
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {memory / 1e9:.0f} GB"
