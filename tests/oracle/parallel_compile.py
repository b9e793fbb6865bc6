"""Runs MindSpore's parallel compiler on MindFormers' networks, on a machine that has neither Ascend nor GPU (tests/semi_auto/stubs.py).

Shard statements are checked and MindSpore writes its own strategy files. Nothing can be executed. Needs gcc and nm.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.semi_auto.stubs import build_stubs

MSRUN = "from mindspore.parallel.cluster.run import main; main()"


def compile_network(network: str, source: str, folder: Path, ranks: int = 2, port: int = 8391) -> Path:
    """Compiles `networks.NETWORKS[network]` at tp `ranks`; returns the strategy file of rank 0 in `folder`.

    Raises RuntimeError, with the end of rank 0's log, when the compiler wrote none.
    """
    program = Path(__file__).parent / "rank_program.py"
    logs = folder / "logs"
    msrun = [sys.executable, "-c", MSRUN, f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={port}"]
    command = [*msrun, f"--log_dir={logs}", "--join=True", str(program), network, source, str(folder)]
    with tempfile.TemporaryDirectory() as stubs:
        environment = _environment(Path(stubs))
        code = subprocess.run(command, env=environment, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    written = folder / "strategy_0.ckpt"
    if code or not written.is_file():
        log = logs / "worker_0.log"
        end = log.read_text(errors="replace")[-3000:] if log.is_file() else "no log"
        raise RuntimeError(f"{network} was not compiled (msrun answered {code}):\n{end}")
    return written


def _environment(stubs: Path) -> dict[str, str]:
    """The environment in which MindSpore takes the libraries that are made in `stubs` for CUDA and NCCL."""
    found = importlib.util.find_spec("mindspore")
    if found is None or found.origin is None:
        raise RuntimeError("MindSpore is not installed")
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    return os.environ | build_stubs(Path(found.origin).parent, stubs) | own
