"""A plan as a config file of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

from converter.manifest import write_whole
from converter.untrusted import quoted
from mappings.errors import refuse
from train.config import CheckpointSettings
from train.planning.estimate import Estimate
from train.planning.source import PlannedModel


def config_text(
    model: PlannedModel, chosen: Estimate, data: str, steps: int, dropout: float | None = None, rules: str | None = None
) -> str:  # fmt: skip
    """TOML that `ms-train launch` reads. The number of hosts and their addresses are left to its command line."""
    run, layout = chosen.run, chosen.run.layout
    hosts = _hosts(layout.ranks, chosen.device.host_devices)
    tables: dict[str, dict[str, object]] = {
        "model": {"path": str(model.folder), **({} if rules is None else {"rules": rules})},
        "data": {"path": data, "seq_length": run.work.seq},
        "parallel": {
            "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "micro_batches": run.micro_batches,
            "layers_per_stage": list(layout.layers_per_stage), "optimizer_sharding": run.optimizer_sharding,
        },
        "train": {"steps": steps, "global_batch": run.work.global_batch, "recompute_every": run.recompute_every}
        | ({} if dropout is None else {"dropout": dropout}),
        "precision": {"kind": run.work.weights, "compute": run.work.compute},
        "checkpoint": {"folder": _checkpoint_folder(model.folder)},
        "launch": {"device": "ascend"},
    }  # fmt: skip
    launch = "ms-train launch FILE"
    if hosts > 1:
        launch += f" --nnodes {hosts} --node-rank N --master-addr ADDRESS    on each of {hosts} hosts"
    name = chosen.device.name if chosen.device.name.isprintable() else quoted(chosen.device.name)
    lines = [
        f"# Planned for {layout.ranks} x {name}: about {chosen.memory.total / (1 << 30):.1f} GiB of each. {launch}",
        "# `ms-train settings` lists every key.",
    ]
    for table, values in tables.items():
        lines += ["", f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _hosts(ranks: int, host_devices: int) -> int:
    """The fewest hosts that have these ranks, each the same number of them."""
    return next(hosts for hosts in range(-(-ranks // host_devices), ranks + 1) if ranks % hosts == 0)


def _checkpoint_folder(model: Path) -> str:
    """The trainer's default, but beside the model's folder where that would be inside it: a model stays as it is."""
    default = CheckpointSettings().folder
    source = model.resolve()
    return str(source.parent / default) if Path(default).resolve().is_relative_to(source) else default


def write_config(path: Path, text: str, overwrite: bool) -> None:
    """Write the file. Raises Refused when one is there and may not be replaced."""
    if not path.resolve().parent.is_dir():
        raise refuse("there is no such folder", str(path.parent), "make it, or give another name")
    if path.exists() and not overwrite:
        raise refuse("is there already", str(path), "give another name, or say --overwrite")
    write_whole(path, text.encode("utf-8"))


def _toml(value: object) -> str:
    """A TOML value: JSON's spelling, but for DEL, which a TOML text may not hold as it stands."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
