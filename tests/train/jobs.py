"""Starting the worker: in one process, or as a job of several ranks under msrun."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converter.records import encode
from tests.train.worker import Case

ROOT = Path(__file__).resolve().parents[2]


def run_cases(cases: Sequence[Case], folder: Path, ranks: int, timeout: int = 900) -> list[dict[str, Any]]:
    """The results of each rank, by case. Raises AssertionError with the end of the ranks' logs when the job fails."""
    folder.mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(encode(tuple(cases))), encoding="utf-8")
    words = [str(ROOT / "tests" / "train" / "worker.py"), str(folder / "cases.json"), str(folder)]
    command = [sys.executable, *words]
    if ranks > 1:
        msrun = shutil.which("msrun", path=str(Path(sys.executable).parent)) or "msrun"
        options = [f"--worker_num={ranks}", f"--local_worker_num={ranks}", f"--master_port={_free_port()}", f"--log_dir={folder / 'log'}"]
        command = [msrun, *options, "--join=True", *words]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # msrun starts whatever `python` is first there
    # A rank that compiles on a busy machine sends no heartbeat for longer than the 30 s after which it counts as dead
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "MS_NODE_TIMEOUT": "600"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    logs = "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(folder.glob("log/worker_*.log")))
    assert process.returncode == 0, f"{output[-2000:]}{logs}"
    return [json.loads((folder / f"rank_{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
