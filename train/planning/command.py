"""What `ms-train plan` does between the command line and the estimates."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import click

from converter.display import console, printable
from mappings.errors import Problem, Refused, refuse
from train.config import FloatType, ModelSettings
from train.planning.choices import Choice, Wanted, choices
from train.planning.devices import Device, parse_size, read_devices
from train.planning.display import show_plan
from train.planning.report import facts_of
from train.planning.run_shape import Workload
from train.planning.source import PlannedModel, read_planned_model
from train.planning.written_config import config_text, write_config


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command (train/cli.py says what they mean)."""

    model: str
    devices: int
    seq_length: int
    global_batch: int
    rules: str | None = None
    device_type: str = ""
    device_memory: str | None = None
    devices_table: str | None = None
    precision: FloatType = "bfloat16"
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    recompute_every: int | None = None
    optimizer_sharding: bool | None = None
    dropout: float | None = None
    tokens_per_second: float | None = None
    data: str = "data"
    steps: int = 1000


def plan(options: PlanOptions, *, as_json: bool, write: str | None, overwrite: bool) -> int:
    """Print the plan and write the config of its first layout. -> exit code: 1 when nothing that was asked for can be run.

    Raises Refused for a model, a device or a file that cannot be used.
    """
    model = read_planned_model(ModelSettings(options.model, options.rules))
    device = _device(options)
    work = _workload(options, model)
    wanted = Wanted(
        options.devices, options.dp, options.tp, options.pp, options.micro_batch, options.recompute_every, options.optimizer_sharding
    )
    found = choices(model, work, device, wanted)
    if not found:
        raise _no_layout(options)
    facts = facts_of(model, work, device, options.devices, found, options.tokens_per_second)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        show_plan(facts, found, options.tokens_per_second)
    if write is not None:
        _write(model, found, options, Path(write), overwrite, quiet=as_json)
    return 0 if found[0].feasible else 1


def _device(options: PlanOptions) -> Device:
    known = read_devices(Path(options.devices_table) if options.devices_table else None)
    device = known.get(options.device_type)
    if device is None:
        raise refuse(f"no device {options.device_type!r} in the table", "--device-type", f"known: {', '.join(known)}")
    if options.device_memory is None:
        return device
    memory = parse_size(options.device_memory)
    if memory is None:
        raise refuse(f"{options.device_memory!r} is no size", "--device-memory", "write 64GiB or 64GB")
    return replace(device, memory=memory)


def _workload(options: PlanOptions, model: PlannedModel) -> Workload:
    config = model.config
    if options.seq_length > config.max_positions:
        what = f"is {options.seq_length}, the model has {config.max_positions} positions"
        raise refuse(what, "--seq-length", f"use at most {config.max_positions}")
    if options.recompute_every is not None and options.recompute_every > config.layers:
        raise refuse(f"is {options.recompute_every}, the model has {config.layers} layers", "--recompute-every", "use fewer, or 0")
    if options.dropout is not None:
        dropout = options.dropout
        config = replace(config, embedding_dropout=dropout, attention_dropout=dropout, hidden_dropout=dropout)
    return Workload(config, options.seq_length, options.global_batch, options.precision, options.precision)


def _no_layout(options: PlanOptions) -> Refused:
    fixed = {name: value for name in ("dp", "tp", "pp") if (value := getattr(options, name)) is not None}
    problems = [
        Problem(f"{value} does not divide {options.devices} devices", f"--{name}", f"use a divisor of {options.devices}")
        for name, value in fixed.items()
        if options.devices % value
    ]
    if not problems:
        product = " x ".join(f"{name} {value}" for name, value in fixed.items())
        problems = [Problem(f"{product} does not divide {options.devices} devices", mend="let dp x tp x pp be the number of devices")]
    return Refused("there is no such layout", problems)


def _write(model: PlannedModel, found: list[Choice], options: PlanOptions, path: Path, overwrite: bool, quiet: bool) -> None:
    best = found[0].best
    if best is None or not found[0].feasible:
        raise refuse("no layout can be run, so no config was written", str(path))
    write_config(path, config_text(model, best, options.data, options.steps, options.dropout, options.rules), overwrite)
    if not quiet:
        console().print(f"[bold green]wrote[/]  {printable(str(path))}   next: ms-train launch {printable(str(path))} --dry-run")
