"""What the commands of ms-train do between the command line and the trainer: check, start, show, tell."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from converter.display import console, duration, printable, progress, size
from converter.rank_tree import read_rank_tree
from converter.records import encode
from mappings.errors import Problem, Refused
from train.config import ModelSettings, TrainConfig, load_config
from train.config_checks import check, check_data
from train.data_index import DataIndex, read_index
from train.model_source import check_layout, read_model_source
from train.processes import end_with_parent
from train.settings import describe
from train.tokenizer import load_tokenizer
from train.training_state import latest_checkpoint, read_state


def load_checked(path: Path, overrides: Sequence[str], ranks: int | None) -> TrainConfig:
    """The config, found to fit itself, the model, the data and, if given, the number of ranks. No framework is imported.

    Raises Refused with every problem at once.
    """
    config = load_config(path, overrides)
    source = read_model_source(config.model)
    problems = [*check(config, source.config, ranks), *check_layout(source, config.parallel)]
    if ranks is None:
        problems += _check_files(config)
    for setting, folder in (("data.path", config.data.path), ("data.validation_path", config.data.validation_path)):
        if folder is not None:
            try:
                problems += check_data(config, source.config, read_index(Path(folder)), setting)
            except Refused as refused:
                problems += refused.problems or [Problem(refused.title, folder)]
    if problems:
        raise Refused(f"{path.name} does not fit", problems)
    return config


def _check_files(config: TrainConfig) -> list[Problem]:
    """What is wrong with the rank tree or checkpoint that the ranks will start from: said once and at once, where each would say it."""
    try:
        checkpoint = latest_checkpoint(Path(config.checkpoint.folder)) if config.checkpoint.resume else None
        path = Path(config.model.path) if checkpoint is None else checkpoint
        source = read_model_source(ModelSettings(str(path), config.model.rules, config.model.tie_embeddings))
        if source.manifest is None:
            return []
        problems = [] if checkpoint is None else list(check_layout(source, config.parallel))
        read_rank_tree(path)
        if checkpoint is not None:
            read_state(checkpoint, source.manifest)
    except Refused as refused:
        return list(refused.problems) or [Problem(refused.title)]
    return problems


def notes_on(config: TrainConfig) -> Iterator[str]:
    """What a person should know of a config that fits."""
    folder = read_model_source(config.model).tokenizer_folder
    if not (folder / "tokenizer.json").is_file():  # without it Transformers would have to be imported
        return
    tokenizer = load_tokenizer(folder)
    for data in (config.data.path, config.data.validation_path):
        if data is not None and read_index(Path(data)).vocabulary_digest != tokenizer.vocabulary_digest:
            yield f"{data} was prepared with another tokenizer than the one in {folder}: its ids may mean other words to the model"


def run_rank(path: Path, overrides: Sequence[str]) -> int:
    """Train as one rank: of a job that msrun started, or the only one. Raises Refused."""
    role = os.environ.get("MS_ROLE")
    if role is not None:
        end_with_parent(os.getppid())
    if role == "MS_SCHED":
        return _serve()
    ranks = int(os.environ.get("MS_WORKER_NUM", "1")) if role is not None else 1
    config = load_checked(path, overrides, ranks)
    if role is None:
        _show_notes(config)
    from train.loop import run

    return run(config)


def _show_notes(config: TrainConfig) -> None:
    for note in notes_on(config):
        console().print(f"[yellow]note[/]  {printable(note)}")


def _serve() -> int:
    """The scheduler that msrun starts beside the ranks: it returns when they have ended."""
    from mindspore.communication import init

    init()
    return 0


def launch_ranks(path: Path, overrides: Sequence[str], *, dry_run: bool) -> int:
    """Start the ranks of this host. Raises Refused."""
    from train.launch import plan_launch

    config = load_checked(path, overrides, ranks=None)
    sets = [word for override in overrides for word in ("--set", override)]
    launch = plan_launch(config, ["-m", "train.cli", "run", str(path), *sets])
    parallel, out = config.parallel, console()
    layout = f"tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp}"
    out.print(f"[bold]{config.ranks} rank(s)[/]  {layout}, logs in {printable(str(launch.log_folder))}")
    _show_notes(config)
    if dry_run:
        click.echo(" ".join(launch.msrun()))
        return 0
    from train.launch_display import LaunchDisplay
    from train.msrun import run_job

    shown = LaunchDisplay(config)
    try:
        code = run_job(launch, shown.line, shown.poll)
    finally:
        shown.close()
    if code:
        out.print(f"[bold yellow]ended by signal {code - 128}[/]  the same command with --resume goes on from the last checkpoint")
    return code


def prepare_and_tell(*, as_json: bool, **options: Any) -> None:
    """Prepare data and say what came of it. Raises Refused."""
    from train.prepare import PrepareOptions, plan_preparation, prepare

    preparation = plan_preparation(PrepareOptions(**options))
    with progress("prepare-data", preparation.nbytes, quiet=as_json) as shown:
        prepared = prepare(preparation, shown.reach)
    if as_json:
        click.echo(json.dumps({"index": encode(prepared.index), "notes": prepared.notes, "seconds": round(shown.seconds, 3)}, indent=2))
        return
    out, index = console(), prepared.index
    for note in prepared.notes:
        out.print(f"  [yellow]note[/]       {printable(note)}")
    _show_index(index)
    rate = f", {index.tokens / shown.seconds:,.0f} tokens/s" if shown.seconds > 1 else ""
    out.print(f"[bold green]done[/]  {printable(str(options['output']))} in {duration(shown.seconds)}{rate}")


def _show_index(index: DataIndex) -> None:
    out = console()
    empty = f", {index.empty_documents:,} empty ones left out" if index.empty_documents else ""
    documents = f"{index.documents:,} documents{empty}, {index.tokens:,} tokens"
    ids = f"vocabulary {index.vocabulary:,}, largest id {index.largest_id:,}, end token {index.eos_id}"
    out.print(f"  corpus     {index.input_files} file(s), {size(index.input_bytes)}: {documents}")
    out.print(f"  tokenizer  {printable(index.tokenizer)}: {ids}")
    left = f"; {index.left_over_tokens:,} tokens at the end fill none" if index.left_over_tokens else ""
    way = "packed" if index.packed else f"padded with {index.pad_id}"
    nbytes = sum(shard.size + shard.db_size for shard in index.shards)
    out.print(f"  sequences  {index.sequences:,} of {index.seq_length:,} tokens, {way}{left}")
    out.print(f"  shards     {len(index.shards)}, {size(nbytes)}")


def show_settings(*, as_json: bool) -> None:
    """Every key that a config may have."""
    found = list(describe(TrainConfig))
    if as_json:
        click.echo(json.dumps([asdict(setting) for setting in found], indent=2))
        return
    out = console()
    for name in dict.fromkeys(setting.table for setting in found):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=f"\\[{name}]", title_justify="left", title_style="bold")
        for heading in ("key", "type", "default", "bounds", "meaning"):
            table.add_column(heading, style="dim" if heading == "meaning" else "")
        for setting in found:
            if setting.table == name:
                table.add_row(setting.key, printable(setting.kind), printable(setting.default), setting.bounds, printable(setting.meaning))
        out.print(table)
        out.print()
