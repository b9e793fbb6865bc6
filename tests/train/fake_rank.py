"""A rank that trains nothing: what `msrun` is told to start when the launcher is tested. Arguments: a folder, and how it behaves.

It notes its environment and its process id in the folder. The scheduler, as MindSpore's own does, goes on until every rank has ended well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from mappings.errors import Problem, Refused
from train.processes import end_with_parent

NAMES = ("MS_ROLE", "MS_WORKER_NUM", "RANK_ID", "MS_NODE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT", "HCCL_CONNECT_TIMEOUT", "OMP_NUM_THREADS")
WRONG_RANK = 1


def main() -> None:
    folder, behaviour = Path(sys.argv[1]), sys.argv[2]
    end_with_parent(os.getppid())
    ranks = range(int(os.environ["MS_WORKER_NUM"]))
    if os.environ["MS_ROLE"] == "MS_SCHED":
        _note(folder / "scheduler.json")
        _wait(folder, [f"done_{rank}" for rank in ranks])
        return
    rank = int(os.environ["RANK_ID"])
    signal.signal(signal.SIGTERM, lambda number, frame: _save(folder, rank, number, frame))
    _note(folder / f"rank_{rank}.json")
    print(f"hello from rank {rank}", flush=True)
    _wait(folder, [f"rank_{other}.json" for other in ranks] + ["scheduler.json"])
    if behaviour != "succeed":
        if rank == WRONG_RANK:
            _go_wrong(behaviour)
        time.sleep(600)
    print("the end", end="", flush=True)
    (folder / f"done_{rank}").touch()


def _note(path: Path) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"pid": os.getpid()} | {name: os.environ.get(name) for name in NAMES}))
    os.replace(partial, path)


def _wait(folder: Path, names: list[str]) -> None:
    while not all((folder / name).exists() for name in names):
        time.sleep(0.05)


def _save(folder: Path, rank: int, number: int, _: FrameType | None) -> None:
    time.sleep(0.5)
    (folder / f"saved_{rank}").write_text(str(number))
    (folder / f"done_{rank}").touch()
    os._exit(0)


def _go_wrong(behaviour: str) -> None:
    if behaviour == "raise":
        raise RuntimeError("the tensors do not meet")
    if behaviour == "refuse":
        print(f"a line before\nrefused: {Refused('the data is wrong', [Problem('what is wrong', 'where', 'mend it')])}")
        print("[WARNING] a line of MindSpore", flush=True)
        sys.exit(3)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
