"""Holding a machine against a rank table and against what a training run will ask of it. Nothing is changed, no framework imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from converter.doctor.examine import Examination, examine
from converter.doctor.rule import Case
from converter.doctor.run_facts import RunFacts
from converter.machine.probe import probe
from converter.machine.system import System
from converter.rank_table.check import check_file
from train.config import LaunchSettings, load_config
from train.launch import HCCL_SETTINGS, PORT_OF_SEVERAL_HOSTS

WEIGHTS = ("*.safetensors", "*.ckpt", "*.bin")


def examine_system(system: System, rank_table: str | None, config: str | None, overrides: Sequence[str] = ()) -> Examination:
    """What is found on a system. Raises Refused for a table or a config that cannot be read."""
    run = None if config is None else run_facts(Path(config), system, overrides)
    folders = () if run is None else {*run.reads.values(), *run.writes.values(), run.checkpoint_folder}
    machine = probe(system, names=() if run is None else (run.master,), folders=folders)
    if run is not None:
        machine = replace(machine, environment={**machine.environment, **run.environment})
    if rank_table is None and (named := system.environment.get("RANK_TABLE_FILE")) in machine.existing_files:
        rank_table = str(system.place(named or ""))
    return examine(Case(machine, None if rank_table is None else check_file(Path(rank_table)), run))


def run_facts(path: Path, system: System, overrides: Sequence[str] = ()) -> RunFacts:
    """What the run of a config will ask of the machine. Raises Refused with all that the config gets wrong by itself."""
    config = load_config(path, overrides)
    launch, parallel = config.launch, config.parallel
    reads = {"model.path": config.model.path, "data.path": config.data.path, "data.validation_path": config.data.validation_path}
    return RunFacts(
        config=path.name,
        device=launch.device,
        ranks=config.ranks,
        nodes=launch.nnodes,
        node_rank=launch.node_rank,
        master=launch.master_addr,
        port=PORT_OF_SEVERAL_HOSTS if launch.master_port is None and launch.nnodes > 1 else launch.master_port,
        node_timeout=launch.node_timeout,
        groups=1 + sum(degree > 1 for degree in (parallel.tp, parallel.pp, parallel.dp)),
        reads={setting: folder for setting, folder in reads.items() if folder is not None},
        writes={"checkpoint.folder": config.checkpoint.folder, "watch.folder": config.watch.folder, "launch.log_folder": launch.log_folder},
        checkpoint_folder=config.checkpoint.folder,
        kept=config.checkpoint.keep,
        environment=_hccl_variables(launch),
        weight_bytes=_weight_bytes(system.place(config.model.path)),
    )


def _hccl_variables(launch: LaunchSettings) -> dict[str, str]:
    """What `ms-train launch` gives the ranks."""
    if launch.device != "ascend":
        return {}
    values = {name.upper(): getattr(launch, name) for name in HCCL_SETTINGS}
    deterministic = {"HCCL_DETERMINISTIC": "true"} if launch.hccl_deterministic else {}
    return {name: str(value) for name, value in values.items() if value is not None} | deterministic


def _weight_bytes(folder: Path) -> int:
    """The size of the weight files in a folder and in those right below it; hard links of one file count once, links to nowhere not."""
    files = (file for pattern in WEIGHTS for depth in ("", "*/") for file in folder.glob(depth + pattern) if os.path.isfile(file))
    return sum({(status.st_dev, status.st_ino): status.st_size for file in files if (status := file.stat())}.values())
