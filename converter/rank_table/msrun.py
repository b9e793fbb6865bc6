"""The command lines of msrun, MindSpore's launcher, that start the same ranks without a table.

Options and their bounds: mindspore/parallel/cluster/run.py. With msrun the ranks find each other through a scheduler on the first host, and
MindFormers from 1.2.0 on calls starting by rank table deprecated.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

DEFAULT_PORT = 8118
SCRIPT = "train.py"


def command_lines(servers: Sequence[tuple[str, Sequence[int]]], port: int = DEFAULT_PORT) -> list[tuple[str, str]]:
    """For each server, given as its address and the numbers of its devices: the address, and what is to be called there.

    Addresses may come from a stranger's file: in the command they are one word of the shell, whatever they are.
    """
    total = sum(len(devices) for _, devices in servers)
    return [(address, _command(node, servers[0][0], devices, total, port)) for node, (address, devices) in enumerate(servers)]


def _command(node: int, master: str, devices: Sequence[int], total: int, port: int) -> str:
    chosen = "" if list(devices) == list(range(len(devices))) else f"ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, devices))} "
    return (
        f"{chosen}msrun --worker_num={total} --local_worker_num={len(devices)} --master_addr={shlex.quote(master)} --master_port={port} "
        f"--node_rank={node} --cluster_time_out=600 --log_dir=logs --join=True {SCRIPT}"
    )
