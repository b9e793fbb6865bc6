"""Compiling a case with one process per rank, and what the compiler left: strategy files and the communication it put in."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from converter.strategy_format import ParameterLayout, read_strategy
from tests.semi_auto.cases import Case
from tests.semi_auto.stubs import build_stubs

SECONDS = 400
PASS = "*_validate_*.ir"
"""The dump after the last pass of the front end."""
_OPERATOR = re.compile(r"%\d+\([^)]*\) = (AllReduce|AllGather|ReduceScatter|Send|Receive|AlltoAll\w*|NeighborExchange\w*)\(")
_SCOPE = re.compile(r"# Fullname with scope: \((.*)\)")
_INSTANCE = re.compile(r"instance name: (\w+)")
_OF_WEIGHTS = re.compile(r"mirror|parallel_optimizer", re.IGNORECASE)
_KIND = re.compile(r'\bop: "(\w+)"')
_RANKS = re.compile(r"group_rank_ids: \(([^)]*)\)")


@dataclass(frozen=True)
class Communication:
    """One operator of one rank's graph: its kind ("AllReduce sum"), the ranks that take part, the cells that it stands in, outermost first,
    whether it is of the backward pass, and whether it moves weights or their gradients; activations otherwise.
    """

    kind: str
    ranks: tuple[int, ...]
    scope: tuple[str, ...]
    backward: bool
    weights: bool


@dataclass(frozen=True)
class Compiled:
    """By pipeline stage, of its first rank: the strategy file that MindSpore wrote, and the communication in the rank's graph."""

    strategies: Mapping[int, bytes]
    communication: Mapping[int, Counter[Communication]]


def can_compile() -> bool:
    """Whether the tools and the plugin that `stubs` needs are there."""
    spec = importlib.util.find_spec("mindspore")
    plugin = Path(spec.origin or "").parent / "lib/plugin/libmindspore_gpu.so.11.6" if spec is not None else None
    return bool(plugin and plugin.exists() and shutil.which("gcc") and shutil.which("nm"))


def compile_on_stubs(case: Case, folder: Path) -> Compiled:
    """Compile a case for all its ranks; logs and dumps go to `folder`. Raises RuntimeError with the end of a log when it fails."""
    spec = importlib.util.find_spec("mindspore")
    assert spec is not None and spec.origin is not None, "see can_compile"
    stubs = folder / "stubs"
    stubs.mkdir(parents=True)
    ranks = case.layout.ranks
    environment = os.environ | build_stubs(Path(spec.origin).parent, stubs)
    environment |= {
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "graphs"),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable, "-m", "mindspore.parallel.cluster.run", f"--worker_num={ranks}", f"--local_worker_num={ranks}",
        f"--master_port={_free_port()}", f"--log_dir={folder / 'logs'}", "--join=True", "python",
        "-m", "tests.semi_auto.program", case.name, str(folder),
    ]  # fmt: skip
    job = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code = job.wait(SECONDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    if code:
        raise RuntimeError(f"{case.name} does not compile:\n{_end_of_log(folder / 'logs')}")
    return read_compiled(case, folder)


def read_compiled(case: Case, folder: Path) -> Compiled:
    """What a compilation left in `folder`. Raises RuntimeError when two ranks of a stage were told different strategies."""
    strategies: dict[int, bytes] = {}
    communication = {}
    for rank in range(case.layout.ranks):
        stage, written = case.layout.coordinates(rank).stage, (folder / f"strategy_{rank}.ckpt").read_bytes()
        if stage not in strategies:
            strategies[stage] = written
            communication[stage] = Counter(_communication(folder / "graphs" / f"rank_{rank}"))
        elif read_strategy(written)[0] != stage or sorted_layouts(written) != sorted_layouts(strategies[stage]):
            raise RuntimeError(f"rank {rank} has another strategy than the first of its stage")
    return Compiled(strategies, communication)


def sorted_layouts(strategy: bytes) -> list[ParameterLayout]:
    """The layouts of a strategy file by name."""
    return sorted(read_strategy(strategy)[1], key=lambda layout: layout.name)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _end_of_log(logs: Path) -> str:
    texts = [path.read_text(errors="replace") for path in sorted(logs.glob("worker_*.log"))]
    return max(texts, key=lambda text: "Error" in text, default="no log")[-3000:]


def _communication(dumps: Path) -> Iterator[Communication]:
    (dump,) = dumps.glob(PASS)
    lines = dump.read_text().splitlines()
    for number, line in enumerate(lines):
        found = _OPERATOR.search(line)
        if found is not None:
            scope = next((match.group(1) for match in map(_SCOPE.search, lines[number + 1 : number + 5]) if match is not None), "")
            yield _read(found.group(1), line, scope)


def _read(operator: str, line: str, scope: str) -> Communication:
    """From an operator's line in a dump, and the name of the cells around it ("Gradients/Default/network-LossNetwork/…")."""
    kind, ranks, instance = _KIND.search(line), _RANKS.search(line), _INSTANCE.search(line)
    cells = (part.partition("-")[0] for part in scope.split("/")[:-1])
    return Communication(
        f"AllReduce {kind.group(1)}" if kind is not None and operator == "AllReduce" else operator,
        tuple(int(rank) for rank in ranks.group(1).split(",") if rank.strip()) if ranks is not None else (),
        tuple(cell for cell in cells if cell not in ("Default", "Gradients", "network")),
        scope.startswith("Gradients/"),
        instance is not None and _OF_WEIGHTS.search(instance.group(1)) is not None,
    )
