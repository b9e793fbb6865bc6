"""`ms-convert`: the command line. Commands import what they need when they run, so that `--help` answers at once."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import click

from converter import __version__
from converter.command_line import run_command_line
from converter.command_options import ByteSize, Command, LayerCounts, RankList, folder_argument

EXAMPLES = """
\b
Examples:
  ms-convert hf2ms ./Llama-3.1-8B -o ./slices --tp 2 --pp 2
  ms-convert hf2ms ./Llama-3.1-8B --tp 2 --pp 2 --dry-run
  ms-convert ms2hf ./slices -o ./back
  ms-convert translate ./slices -o ./mindformers --target mindformers
  ms-convert verify ./Llama-3.1-8B ./slices --forward --report report.html
  ms-convert inspect ./slices
  ms-convert reformat ./checkpoint -o ./as-ckpt --format ckpt
  ms-convert doctor --config train.toml
  ms-convert rank-table check rank_table.json
"""
LAZY_COMMANDS = {
    "doctor": "train.doctor_command:doctor",
    "rank-table": "converter.rank_table.command:rank_table",
    "verify": "model.verify_command:verify",
}


class LazyGroup(click.Group):
    """A group that also has commands by import string, most of them of rooms above this one; they are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LAZY_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in LAZY_COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = LAZY_COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), name)
        return command


def _check_output(output: str | None, dry_run: bool) -> None:
    """Raises UsageError for a command that would write and has no folder to write to."""
    if output is None and not dry_run:
        raise click.UsageError("Missing option '-o' / '--output' (or say --dry-run).")


@click.group(cls=LazyGroup, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="ms-convert")
def cli() -> None:
    """Move checkpoints between Hugging Face and MindSpore, sliced for tensor- and pipeline-parallel ranks, bit for bit."""


@cli.command(
    cls=Command,
    short_help="Convert a Hugging Face folder to MindSpore checkpoints.",
    epilog="""
\b
Examples:
  ms-convert hf2ms ./SmolLM2-135M -o ./slices --tp 3 --pp 2
  ms-convert hf2ms ./Llama-3.1-8B -o ./slices --tp 8 --format ckpt --dtype bf16
  ms-convert hf2ms ./Qwen3-8B -o ./slices --tp 4 --target mindformers
  ms-convert hf2ms ./Llama-3.1-8B -o ./slices --tp 4 --target mindformers-legacy@1.3-fused
  ms-convert hf2ms ./Llama-3.1-8B -o ./unified --tp 2 --pp 2 --layout unified
  ms-convert hf2ms ./Qwen3-8B -o ./checkpoint --tp 4 --target mindformers --layout mindformers2
  ms-convert hf2ms ./Qwen3-32B -o /shared/slices --tp 8 --pp 4 --ranks 0-15     (host 1)
  ms-convert hf2ms ./Qwen3-32B -o /shared/slices --tp 8 --pp 4 --ranks 16-31    (host 2)
""",
)
@folder_argument("model")
@click.option("-o", "--output", type=click.Path(), help="Folder for the files. Needed unless --dry-run.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--dp", type=click.IntRange(1), default=1, show_default=True, help="Data-parallel ranks; their files are hard links.")
@click.option("--layers-per-stage", type=LayerCounts(), help="Layers of each stage, as in 10,10,12. Default: even.")
@click.option(
    "--vocab-multiple", type=click.IntRange(1), help="Pad the vocabulary to a multiple of this. Default: none for tp 1, else lcm(128, tp)."
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["safetensors", "ckpt"]),
    default="safetensors",
    show_default=True,
    help="Format of rank files.",
)
@click.option(
    "--dtype", type=click.Choice(["keep", "bf16", "fp16", "fp32"]), default="keep", show_default=True, help="Cast floating-point weights."
)
@click.option("--allow-overflow", is_flag=True, help="Let a cast turn finite values into infinities.")
@click.option("--ranks", type=RankList(), help="Write these ranks only, as in 0-7,12. The manifest follows once all are there.")
@click.option(
    "--target",
    default="ms-convert",
    show_default=True,
    metavar="DIALECT[@VERSION]",
    help="Whose names and layouts the files have: ms-convert, mindformers (2.x), mindformers-legacy (1.x). `ms-convert dialects` lists "
    "the layout versions.",
)
@click.option(
    "--layout",
    "disk",
    type=click.Choice(["rank", "unified", "mindformers2"]),
    default="rank",
    show_default=True,
    help="How the files lie: a folder for each rank; whole parameters in part files, with the strategy files of --tp and --pp, for "
    "load_distributed_checkpoint; or what the trainer of MindFormers 2.x loads and resumes from.",
)
@click.option(
    "--max-file-size", "max_file_bytes", type=ByteSize(), help="Of a part of --layout unified, as in 500MB or 2GiB. Default: 3GiB."
)
@click.option("--rules", "rules_file", type=click.Path(exists=True, dir_okay=False), help="A rule table of your own (TOML).")
@click.option("--tie-embeddings/--no-tie-embeddings", "tied", default=None, help="Overrule config.json where it contradicts the file.")
@click.option("--durable", is_flag=True, help="Wait until each file is on the disk (fsync) before it gets its name.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Threads that copy.")
@click.option("--dry-run", is_flag=True, help="Print the plan, from headers alone, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier conversion in the output folder, and only what ms-convert wrote there.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def hf2ms(
    model: str, output: str | None, dry_run: bool, as_json: bool, rules_file: str | None, file_format: str, **choices: Any
) -> None:  # fmt: skip
    """Convert a Hugging Face folder MODEL to MindSpore checkpoints, by default slices with one folder per rank."""
    from converter.run import run_hf2ms

    _check_output(output, dry_run)
    run_hf2ms(model, output, rules_file, dry_run=dry_run, as_json=as_json, file_format=file_format, **choices)


@cli.command(
    cls=Command,
    short_help="Give the Hugging Face folder back.",
    epilog="""
\b
Examples:
  ms-convert ms2hf ./slices -o ./back
  ms-convert ms2hf ./slices -o ./back --dtype bf16
  ms-convert ms2hf ./output -o ./back --from mindformers --config ./Qwen3-8B/config.json --strategy ./output/strategy
  ms-convert ms2hf ./llama.ckpt -o ./back --from mindformers-legacy@1.3 --config ./Llama-3.1-8B
""",
)
@folder_argument("slices")
@click.option("-o", "--output", type=click.Path(), help="Folder for the Hugging Face model. Needed unless --dry-run.")
@click.option(
    "--from",
    "from_dialect",
    metavar="DIALECT[@VERSION]",
    help="For a checkpoint that ms-convert did not write: whose names and layouts it has (`ms-convert dialects`).",
)
@click.option("--config", type=click.Path(), help="With --from: the model's config.json, or the folder with it and the tokenizer.")
@click.option("--strategy", type=click.Path(), help="With --from, for ranks: the run's strategy files. Default: `strategy` beside them.")
@click.option(
    "--source-tp", type=click.IntRange(1), help="With --from, for whole tensors fused per rank: the tensor-parallel ranks of the run."
)
@click.option(
    "--dtype",
    type=click.Choice(["original", "bf16", "fp16", "fp32"]),
    default="original",
    show_default=True,
    help="Cast floating-point weights.",
)
@click.option("--allow-overflow", is_flag=True, help="Let a cast turn finite values into infinities.")
@click.option("--durable", is_flag=True, help="Wait until each file is on the disk (fsync) before it gets its name.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Threads that copy.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace weights, index, config and files of the same names in the output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def ms2hf(
    slices: str, output: str | None, from_dialect: str | None, config: str | None, strategy: str | None, source_tp: int | None,
    dry_run: bool, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Give the Hugging Face folder back from SLICES, the output of hf2ms. No other flags are needed: the manifest knows.

    With --from, SLICES is a checkpoint of MindFormers: folders of ranks with their strategy files, a unified or 2.x folder, or a file.
    """
    from converter.run import run_foreign, run_ms2hf

    _check_output(output, dry_run)
    if from_dialect is not None:
        run_foreign(slices, output, from_dialect, config, strategy, source_tp, dry_run=dry_run, as_json=as_json, **choices)
        return
    if (config, strategy, source_tp) != (None, None, None):
        raise click.UsageError("--config, --strategy and --source-tp go with --from.")
    run_ms2hf(slices, output, dry_run=dry_run, as_json=as_json, **choices)


@cli.command(
    cls=Command,
    short_help="Write .ckpt as safetensors, or the other way round.",
    epilog="""
\b
Examples:
  ms-convert reformat ./model.ckpt -o ./out --format safetensors
  ms-convert reformat ./checkpoint -o ./as-ckpt --format ckpt       (rank_0/, rank_1/, ...)
""",
)
@click.argument("source", type=click.Path(exists=True))
@click.option("-o", "--output", type=click.Path(), help="Folder for the files. Needed unless --dry-run.")
@click.option("--format", "file_format", type=click.Choice(["safetensors", "ckpt"]), required=True, help="Format to write.")
@click.option("--durable", is_flag=True, help="Wait until each file is on the disk (fsync) before it gets its name.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Threads that copy.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, from headers alone, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier result in the output folder, and only what ms-convert wrote there.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def reformat(source: str, output: str | None, dry_run: bool, as_json: bool, **choices: Any) -> None:
    """Write SOURCE, any MindSpore checkpoint or a folder of them, in MindSpore's other format: .ckpt or safetensors, bit for bit."""
    from converter.run_reformat import run_reformat

    _check_output(output, dry_run)
    run_reformat(source, output, dry_run=dry_run, as_json=as_json, **choices)


@cli.command(
    cls=Command,
    short_help="Change names, layouts or the cut of a checkpoint.",
    epilog="""
\b
Examples:
  ms-convert translate ./slices -o ./mindformers --target mindformers
  ms-convert translate ./mindformers -o ./for-the-trainer --target ms-convert --tp 2 --pp 2
  ms-convert translate ./output -o ./new --from mindformers-legacy@1.3 --config ./Llama-3.1-8B --target mindformers-legacy@1.8 --tp 4
""",
)
@folder_argument("checkpoint")
@click.option("--target", required=True, metavar="DIALECT[@VERSION]", help="Whose names and layouts the files get (`ms-convert dialects`).")
@click.option("-o", "--output", type=click.Path(), help="Folder for the new files. Needed unless --dry-run.")
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel ranks. Default: as CHECKPOINT, 1 with --from.")
@click.option("--pp", type=click.IntRange(1), help="Pipeline stages. Default: as CHECKPOINT, 1 with --from.")
@click.option("--dp", type=click.IntRange(1), help="Data-parallel ranks. Default: as CHECKPOINT, 1 with --from.")
@click.option("--layers-per-stage", type=LayerCounts(), help="Layers of each stage. Default: as CHECKPOINT; evenly where --pp is another.")
@click.option("--vocab-multiple", type=click.IntRange(1), help="Pad the vocabulary to a multiple of this. Default: as in hf2ms.")
@click.option(
    "--layout", "disk", type=click.Choice(["rank", "unified", "mindformers2"]), default="rank", show_default=True, help="How the files lie."
)
@click.option("--max-file-size", "max_file_bytes", type=ByteSize(), help="Of a part of --layout unified. Default: 3GiB.")
@click.option(
    "--format", "file_format", type=click.Choice(["safetensors", "ckpt"]), default="safetensors", show_default=True, help="Of rank files."
)
@click.option("--ranks", type=RankList(), help="Write these ranks only, as in 0-7,12.")
@click.option("--from", "from_dialect", metavar="DIALECT[@VERSION]", help="For a checkpoint that ms-convert did not write: what it has.")
@click.option("--config", type=click.Path(), help="With --from: the model's config.json, or the folder with it and the tokenizer.")
@click.option("--strategy", type=click.Path(), help="With --from, for ranks: the run's strategy files. Default: `strategy` beside them.")
@click.option(
    "--source-tp", type=click.IntRange(1), help="With --from, for whole tensors fused per rank: the tensor-parallel ranks of the run."
)
@click.option("--durable", is_flag=True, help="Wait until each file is on the disk (fsync) before it gets its name.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Threads that copy.")
@click.option("--dry-run", is_flag=True, help="Print the plan, from headers alone, and write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier conversion in the output folder, and only what ms-convert wrote there.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def translate(checkpoint: str, output: str | None, dry_run: bool, as_json: bool, **choices: Any) -> None:
    """Write CHECKPOINT in the names and layouts of another dialect, or cut for other ranks, with no Hugging Face folder in between.

    CHECKPOINT is an output of ms-convert; with --from, one of MindFormers, as for ms2hf.
    """
    from converter.run_translate import run_translate

    _check_output(output, dry_run)
    run_translate(checkpoint, output, dry_run=dry_run, as_json=as_json, **choices)


@cli.command(
    cls=Command,
    short_help="Say what a folder or file is.",
    epilog="\b\nExamples:\n  ms-convert inspect ./Llama-3.1-8B\n  ms-convert inspect ./slices/rank_0/checkpoint_0.safetensors --all",
)
@click.argument("path", type=click.Path(exists=True))
@click.option("--all", "show_all", is_flag=True, help="Every tensor on its own line, layers not folded.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def inspect(path: str, show_all: bool, as_json: bool) -> None:
    """Say what a folder or file is: format, family, sizes, dtypes, layout, tensors."""
    from pathlib import Path

    from converter.display_inspection import show_inspection
    from converter.inspection import inspect_path

    facts = inspect_path(Path(path))
    click.echo(json.dumps(facts, indent=2)) if as_json else show_inspection(facts, show_all)


@cli.command(cls=Command, short_help="List the bundled families and their architectures.", epilog="\b\nExamples:\n  ms-convert families")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def families(as_json: bool) -> None:
    """List the bundled families and the Hugging Face architectures that they serve."""
    from converter.display_tables import family_facts, show_families

    facts = family_facts()
    click.echo(json.dumps(facts, indent=2)) if as_json else show_families(facts)


@cli.command(
    cls=Command,
    short_help="List the dialects of --target, or print one.",
    epilog="\b\nExamples:\n  ms-convert dialects\n  ms-convert dialects mindformers@2.0 --json",
)
@click.argument("dialect", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def dialects(dialect: str | None, as_json: bool) -> None:
    """List the dialects (`--target`) with their layout versions and families, or print the tensors of one DIALECT[@VERSION]."""
    from converter.display_dialects import dialect_facts, show_dialects, show_tensors, tensor_facts

    if dialect is None:
        listed = dialect_facts()
        click.echo(json.dumps(listed, indent=2)) if as_json else show_dialects(listed)
    else:
        facts = tensor_facts(dialect)
        click.echo(json.dumps(facts, indent=2)) if as_json else show_tensors(facts)


@cli.command(
    cls=Command,
    short_help="Print or check the rule table of a family.",
    epilog="""
\b
Examples:
  ms-convert rules llama
  ms-convert rules llama --toml > my_family.toml
  ms-convert rules --rules my_family.toml
""",
)
@click.argument("family", required=False)
@click.option(
    "--rules", "rules_file", type=click.Path(exists=True, dir_okay=False), help="A rule table of your own (TOML): checked and printed."
)
@click.option("--toml", is_flag=True, help="Print the table's own text, to start a table of your own from.")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def rules(family: str | None, rules_file: str | None, toml: bool, as_json: bool) -> None:
    """Print the rule table of FAMILY: which Hugging Face tensor is which MindSpore parameter, and how it is cut."""
    from converter.display_tables import rule_facts, show_rules, table_text

    if (family is None) == (rules_file is None):
        raise click.UsageError("Give a FAMILY (see `ms-convert families`) or --rules FILE.")
    if toml:
        click.echo(table_text(family, rules_file), nl=False)
        return
    facts = rule_facts(family, rules_file)
    click.echo(json.dumps(facts, indent=2)) if as_json else show_rules(facts)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 refused or failed, 2 a wrong call, 130 interrupted."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    return run_command_line(cli, "ms-convert", arguments)


if __name__ == "__main__":
    main()
