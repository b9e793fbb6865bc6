"""How the ranks of one host are started: the command line of `msrun`, MindSpore's own launcher, and the variables that the ranks see."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mappings.errors import refuse
from train.config import LaunchSettings, TrainConfig

MANY_RANKS = 128
CPU_NODE_TIMEOUT = 600
"""A rank that compiles on a busy CPU sends no heartbeat for longer than MindSpore's 30 s, after which it would count as dead."""
MANY_RANKS_NODE_TIMEOUT = 900
PORT_OF_SEVERAL_HOSTS = 8118
HCCL_SETTINGS = (
    "hccl_connect_timeout", "hccl_exec_timeout", "hccl_rdma_timeout", "hccl_if_base_port", "hccl_buffsize", "hccl_socket_ifname",
    "hccl_socket_family",
)  # fmt: skip
NO_RANK = -2
"""msrun shows the log of the ranks that it is told, or of all; of this one there is none."""


@dataclass(frozen=True)
class Launch:
    """What is started on this host: `command` follows `python`. `first_rank` is the number of the first rank here."""

    command: tuple[str, ...]
    ranks: int
    local_ranks: int
    first_rank: int
    node_rank: int
    master_addr: str
    master_port: int
    cluster_timeout: int
    log_folder: Path
    environment: Mapping[str, str]

    def log(self, rank: int) -> Path:
        """The log of a rank of this host."""
        return self.log_folder / f"worker_{rank}.log"

    def msrun(self) -> list[str]:
        """The command line of msrun."""
        options = {
            "worker_num": self.ranks, "local_worker_num": self.local_ranks, "node_rank": self.node_rank, "master_addr": self.master_addr,
            "master_port": self.master_port, "cluster_time_out": self.cluster_timeout, "log_dir": self.log_folder, "join": True,
            "tail_worker_log": NO_RANK,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "mindspore.parallel.cluster.run", *given, _python_name(), *self.command]


def plan_launch(config: TrainConfig, command: Sequence[str]) -> Launch:
    """How the ranks of this host are started. The config must have passed `config_checks.check`. Raises Refused."""
    settings = config.launch
    local = config.ranks // settings.nnodes
    node = settings.node_rank or 0
    folder = Path(settings.log_folder) / time.strftime("%Y-%m-%d_%H-%M-%S")
    return Launch(
        command=tuple(command),
        ranks=config.ranks,
        local_ranks=local,
        first_rank=node * local,
        node_rank=node,
        master_addr=settings.master_addr,
        master_port=_port(settings),
        cluster_timeout=settings.cluster_timeout,
        log_folder=_unused(folder),
        environment=_environment(config, local),
    )


def _port(settings: LaunchSettings) -> int:
    try:
        socket.getaddrinfo(settings.master_addr, None)
    except OSError as error:
        raise refuse(f"cannot be resolved: {error.strerror or error}", f"launch.master_addr: {settings.master_addr}") from error
    given = PORT_OF_SEVERAL_HOSTS if settings.master_port is None and settings.nnodes > 1 else settings.master_port
    if given is not None:
        if not settings.node_rank:  # the scheduler is on this host
            _check_free(given)
        return given
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _check_free(port: int) -> None:
    """Raises Refused for a port on which somebody listens: the ranks would wait for a scheduler that cannot begin."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise refuse(f"cannot be used: {error.strerror}", f"launch.master_port: {port}", "give another one") from error


def _unused(folder: Path) -> Path:
    """The folder, or with a number if one was made in the same second."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}_{number}")
    return free


def _environment(config: TrainConfig, local_ranks: int) -> dict[str, str]:
    """The variables that msrun and the ranks are given besides those of this process."""
    settings = config.launch
    package_home = str(Path(__file__).resolve().parents[1])
    found = {
        "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH")))),
        "PYTHONPATH": os.pathsep.join(filter(None, (package_home, os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "GLOG_v": os.environ.get("GLOG_v", "3"),  # noqa: SIM112 (MindSpore's spelling)
    }
    node_timeout = _node_timeout(config)
    if node_timeout is not None:
        found["MS_NODE_TIMEOUT"] = node_timeout
    if settings.device == "cpu":
        found["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // local_ranks))
        return found
    for name in HCCL_SETTINGS:
        value = getattr(settings, name)
        if value is not None:
            found[name.upper()] = str(value)
    if settings.hccl_deterministic:
        found["HCCL_DETERMINISTIC"] = "true"
    return found


def _node_timeout(config: TrainConfig) -> str | None:
    """MS_NODE_TIMEOUT: as the config says, or else as the user's environment does; None leaves MindSpore's own."""
    given = config.launch.node_timeout
    if given is not None:
        return str(given)
    if "MS_NODE_TIMEOUT" in os.environ:
        return os.environ["MS_NODE_TIMEOUT"]
    if config.ranks > MANY_RANKS:
        return str(MANY_RANKS_NODE_TIMEOUT)
    return str(CPU_NODE_TIMEOUT) if config.launch.device == "cpu" else None


def _python_name() -> str:
    """The interpreter's name beside `sys.executable`: msrun starts what stands first in PATH, and knows these two names only."""
    return "python" if (Path(sys.executable).parent / "python").exists() else "python3"
