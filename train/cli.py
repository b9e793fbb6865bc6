"""`ms-train`: the command line. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from converter import __version__
from converter.command_line import run_command_line
from converter.command_options import Command, FiniteRange

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLES = """
\b
Examples:
  ms-train prepare-data --tokenizer ./Llama-3.1-8B --input 'corpus/*.jsonl' --seq-length 4096 --output corpus.mindrecord
  ms-train plan --model ./Llama-3.1-8B --devices 8 --device-memory 64GiB --seq-length 4096 --global-batch 256 --write train.toml
  ms-train launch --tp 2 --pp 2 --dp 1 config.toml
  ms-train run config.toml --set train.steps=10
  ms-train settings
"""


@click.group(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="ms-train")
def cli() -> None:
    """Go on pretraining a converted model with MindSpore, in parallel over tensors, pipeline stages and data."""


SHORTCUTS = {"resume": "checkpoint.resume=true", "profile": "watch.profile=true", "pynative": 'train.mode="pynative"'}


def config_argument(command: F) -> F:
    """The config file, and what takes the place of its values: `_all_overrides` gathers them."""
    for option in (
        click.option(
            "--check-start", metavar="HF_FOLDER", help="Before the first step, compare the loss with Transformers' (watch.check_start)."
        ),
        click.option("--profile", is_flag=True, help=f"Wrap the run in mindspore.Profiler ({SHORTCUTS['profile']})."),
        click.option("--pynative", is_flag=True, help=f"Run operator by operator, to debug ({SHORTCUTS['pynative']})."),
        click.option("--resume", is_flag=True, help=f"Go on from the newest checkpoint ({SHORTCUTS['resume']})."),
        click.option(
            "--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Take this value instead of the file's; may be repeated."
        ),
        click.argument("config", type=click.Path(exists=True, dir_okay=False)),
    ):
        command = option(command)
    return command


def _all_overrides(overrides: tuple[str, ...], flags: dict[str, Any]) -> tuple[str, ...]:
    """Those of --set and those that options of their own stand for."""
    given = [
        f"{OPTION_TABLES[name]}.{name}={json.dumps(value)}" for name, value in flags.items() if name in OPTION_TABLES and value is not None
    ]
    return (*overrides, *given, *(override for name, override in SHORTCUTS.items() if flags[name]))


OPTION_TABLES = {
    "tp": "parallel", "pp": "parallel", "dp": "parallel", "nnodes": "launch", "node_rank": "launch", "master_addr": "launch",
    "master_port": "launch", "device": "launch", "check_start": "watch",
}  # fmt: skip


@cli.command(
    cls=Command,
    short_help="Train in this process.",
    epilog="""
\b
Examples:
  ms-train run config.toml
  ms-train run config.toml --set train.steps=100 --set optimizer.learning_rate=3e-5 --resume
""",
)
@config_argument
def run(config: str, overrides: tuple[str, ...], **flags: Any) -> int:
    """Train as the file CONFIG says, in this process: as the only rank, or as one of those that `launch` starts."""
    from train.run import run_rank

    return run_rank(Path(config), _all_overrides(overrides, flags))


@cli.command(
    cls=Command,
    short_help="Train in tp x pp x dp ranks under msrun.",
    epilog="""
\b
Examples:
  ms-train launch --tp 2 --pp 2 --dp 1 config.toml
  ms-train launch --tp 2 --pp 2 config.toml --check-start ./Llama-3.1-8B
  ms-train launch --tp 8 --pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 config.toml    (host 0)
  ms-train launch --tp 8 --pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 config.toml    (host 1)
""",
)
@config_argument
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel ranks (parallel.tp).")
@click.option("--pp", type=click.IntRange(1), help="Pipeline stages (parallel.pp).")
@click.option("--dp", type=click.IntRange(1), help="Data-parallel ranks (parallel.dp).")
@click.option("--nnodes", type=click.IntRange(1), help="Hosts (launch.nnodes).")
@click.option("--node-rank", type=click.IntRange(0), help="Number of this host, from 0 (launch.node_rank).")
@click.option("--master-addr", help="Address of host 0 (launch.master_addr).")
@click.option("--master-port", type=click.IntRange(1024, 65535), help="Port on host 0. Default: a free one; 8118 with several hosts.")
@click.option("--device", type=click.Choice(["cpu", "ascend"]), help="What the ranks run on (launch.device).")
@click.option("--dry-run", is_flag=True, help="Check the config and print what would be started.")
def launch(config: str, overrides: tuple[str, ...], dry_run: bool, **flags: Any) -> int:
    """Start tp x pp x dp ranks under msrun, each of which trains as the file CONFIG says, and watch over them.

    Ctrl-C or SIGTERM lets every rank save and end; a second one ends them at once.
    """
    from train.run import launch_ranks

    return launch_ranks(Path(config), _all_overrides(overrides, flags), dry_run=dry_run)


@cli.command(
    "prepare-data",
    cls=Command,
    short_help="Turn text into token sequences in MindRecord shards.",
    epilog="""
\b
Examples:
  ms-train prepare-data --tokenizer ./gpt2 --input 'corpus/*.{txt,jsonl,parquet}' --seq-length 1024 --output corpus.mindrecord
  ms-train prepare-data --tokenizer ./gpt2 --input stories.txt --separator '<|endoftext|>' --seq-length 512 --output stories.mindrecord
""",
)
@click.option("--tokenizer", required=True, type=click.Path(), help="The model's folder, or one with its tokenizer.json.")
@click.option("--input", "inputs", required=True, multiple=True, help="Files or a quoted pattern: .txt, .jsonl, .parquet; may be repeated.")
@click.option("--seq-length", required=True, type=click.IntRange(1, 1 << 22), help="Tokens that a sequence predicts; one more is stored.")
@click.option("-o", "--output", required=True, type=click.Path(), help="Folder for the data set.")
@click.option("--pad", is_flag=True, help="Let each document begin a sequence, and pad; default: documents are packed.")
@click.option("--text-key", default="text", show_default=True, help="Field (.jsonl) or column (.parquet) that holds the text.")
@click.option("--separator", help="A line of a .txt file that is exactly this ends a document. Default: a file is a document.")
@click.option("--eos-token", help="The token that ends a document. Default: the tokenizer's.")
@click.option("--pad-token", help="The token that fills a sequence. Default: the tokenizer's.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Processes.")
@click.option("--overwrite", is_flag=True, help="Replace what is in the output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the index as JSON.")
def prepare_data(inputs: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Turn text into token sequences in MindRecord shards. Stopped at any moment, the same command goes on."""
    from train.run import prepare_and_tell

    prepare_and_tell(as_json=as_json, inputs=inputs, **options)


@cli.command(
    cls=Command,
    short_help="Say which layouts of a model fit on your devices.",
    epilog="""
\b
Examples:
  ms-train plan --model ./Llama-3.1-8B --devices 8 --device-memory 64GiB --seq-length 4096 --global-batch 256
  ms-train plan --model config.json --devices 16 --seq-length 4096 --global-batch 256 --tp 8 --tokens-per-second 40000
  ms-train plan --model ./Llama-3.1-8B --devices 8 --seq-length 4096 --global-batch 256 --write train.toml --data corpus.mindrecord
""",
)
@click.option("--model", required=True, type=click.Path(), help="Hugging Face folder, rank tree, or a config.json alone.")
@click.option("--rules", type=click.Path(), help="A rule table of your own, for a family that is not bundled.")
@click.option("--devices", required=True, type=click.IntRange(1, 1 << 16), help="Devices, one rank each.")
@click.option("--device-type", default="910B-64GB", show_default=True, help="A device of the table.")
@click.option("--device-memory", help="Memory of one device, as in 64GiB. Default: the table's.")
@click.option("--devices-table", type=click.Path(), help="A table of devices of your own (TOML, like train/planning/devices.toml).")
@click.option("--seq-length", required=True, type=click.IntRange(1, 1 << 22), help="Tokens of a sequence.")
@click.option("--global-batch", required=True, type=click.IntRange(1, 1 << 30), help="Sequences of one step, over all ranks.")
@click.option("--dp", type=click.IntRange(1), help="Only layouts with so many data-parallel ranks.")
@click.option("--tp", type=click.IntRange(1), help="Only layouts with so many tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1), help="Only layouts with so many pipeline stages.")
@click.option("--micro-batch", type=click.IntRange(1), help="Sequences of a micro-batch. Default: the fastest that fits.")
@click.option("--recompute-every", type=click.IntRange(0), help="As train.recompute_every. Default: the fastest that fits.")
@click.option("--optimizer-sharding/--no-optimizer-sharding", default=None, help="As in the config. Default: the fastest that fits.")
@click.option(
    "--precision", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True, help="Of the weights."
)
@click.option("--dropout", type=FiniteRange(0, 0.999), help="As train.dropout. Default: the model's own.")
@click.option("--tokens-per-second", type=FiniteRange(1), help="Tell the utilisation (MFU) that this rate would need.")
@click.option("--write", type=click.Path(dir_okay=False), help="Write the config of the best layout here.")
@click.option("--data", default="data", show_default=True, help="data.path of the written config.")
@click.option("--steps", type=click.IntRange(1, 1 << 40), default=1000, show_default=True, help="train.steps of the written config.")
@click.option("--overwrite", is_flag=True, help="Replace the file of --write.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def plan(as_json: bool, write: str | None, overwrite: bool, **options: Any) -> int:
    """Say which layouts of a model fit on DEVICES, what each costs, and why the others do not. Needs no weights and no device.

    Exit code 1: none that was asked for can be run.
    """
    from train.planning.command import PlanOptions
    from train.planning.command import plan as make_plan

    return make_plan(PlanOptions(**options), as_json=as_json, write=write, overwrite=overwrite)


@cli.command(cls=Command, short_help="List every key of a config file.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def settings(as_json: bool) -> None:
    """List every key of a config file: type, default, bounds, meaning."""
    from train.run import show_settings

    show_settings(as_json=as_json)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 refused or failed, 2 a wrong call, 128 + n ended by signal n."""
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    return run_command_line(cli, "ms-train", arguments)


if __name__ == "__main__":
    main()
