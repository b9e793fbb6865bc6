"""`ms-convert doctor`: what would stop a run on this machine. It reads only, and imports neither MindSpore nor PyTorch."""

from __future__ import annotations

import json

import click

from converter.command_options import Command


@click.command(
    cls=Command,
    short_help="Say what here would stop a conversion or a run.",
    epilog="""
\b
Examples:
  ms-convert doctor
  ms-convert doctor --config train.toml
  ms-convert doctor --config train.toml --set launch.node_rank=1     (on the second host)
  ms-convert doctor --rank-table rank_table.json --json
""",
)
@click.option("--rank-table", "rank_table", type=click.Path(), help="Check this rank table, and hold it against this host.")
@click.option("--config", type=click.Path(), help="A config of ms-train: hold its ranks, addresses, ports and folders against this host.")
@click.option(
    "--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Take this value instead of the config's; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def doctor(rank_table: str | None, config: str | None, overrides: tuple[str, ...], as_json: bool) -> int:
    """Say what on this machine would stop a conversion or a run: versions, variables, devices, ports, folders.

    Each finding says what was seen, what is wanted, the error that it would cause and how to mend it. Nothing is changed.
    Exit code 1 if there is an error; warnings do not fail.
    """
    from converter.doctor.display import show_examination
    from converter.findings import exit_code
    from converter.machine.system import System
    from train.machine_check import examine_system

    if overrides and config is None:
        raise click.UsageError("--set changes what a --config says.")
    examination = examine_system(System(), rank_table, config, overrides)
    click.echo(json.dumps(examination.facts(), indent=2)) if as_json else show_examination(examination)
    return exit_code(examination.findings)
