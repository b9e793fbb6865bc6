"""`ms-convert rank-table`: make a rank table, and check one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from converter.command_options import Command
from converter.rank_table.msrun import DEFAULT_PORT, command_lines
from converter.rank_table.table import Version, as_json
from mappings.errors import refuse


@click.group(
    short_help="Make and check HCCL's rank tables.",
    epilog="""
\b
Examples:
  ms-convert rank-table make --servers 10.0.0.1:8,10.0.0.2:8 --device-ips 10.0.0.1=hccn1.conf --device-ips 10.0.0.2=hccn2.conf
  ms-convert rank-table check rank_table.json
""",
)
def rank_table() -> None:
    """Make and check HCCL's rank table, which says what rank runs on which device."""


@rank_table.command(
    cls=Command,
    short_help="Make a rank table.",
    epilog="""
\b
Examples:
  ms-convert rank-table make --servers 10.0.0.1:2 --device-ips 10.0.0.1=192.168.100.101,192.168.100.102 -o rank_table.json
  ms-convert rank-table make --servers 10.0.0.1:8,10.0.0.2:8 --device-ips 10.0.0.2=node2-hccn.conf -o rank_table.json   (on 10.0.0.1)
  ms-convert rank-table make --servers 10.0.0.1:4-7 -o rank_table.json
""",
)
@click.option("--servers", required=True, help="Addresses of the hosts and their devices: 10.0.0.1:8 for 0 to 7, 10.0.0.1:4-7 for some.")
@click.option(
    "--device-ips", multiple=True, metavar="SERVER=SOURCE",
    help="Addresses of a server's devices: a list with commas, a copy of its /etc/hccn.conf, or what `hccn_tool -i N -ip -g` printed. "
    "This host's are read from /etc/hccn.conf or asked of hccn_tool.",
)  # fmt: skip
@click.option("--version", type=click.Choice(["1.0", "1.2"]), default="1.0", show_default=True, help="1.2 is for super-pods (Atlas A3).")
@click.option(
    "--super-device-ids", multiple=True, metavar="SERVER=SOURCE",
    help="1.2: SDIDs of a server's devices: a list with commas, or what `npu-smi info -t spod-info -i NPU -c CHIP` printed for each.",
)  # fmt: skip
@click.option("--super-pods", help="1.2: servers of each super-pod, as in 10.0.0.1,10.0.0.2;10.0.0.3. Default: all in one.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The file, named *.json. Default: printed.")
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@click.option(
    "--port", type=click.IntRange(1024, 65535), default=DEFAULT_PORT, show_default=True, help="Of the scheduler, for the msrun lines."
)
def make(
    servers: str, device_ips: tuple[str, ...], version: Version, super_device_ids: tuple[str, ...], super_pods: str | None,
    output: str | None, overwrite: bool, port: int,
) -> None:  # fmt: skip
    """Make a rank table from the hosts, their devices and the devices' addresses; print the msrun lines that make it unnecessary."""
    from converter.rank_table.make import fill_in, parse_servers, parse_super_pods
    from converter.rank_table.sources import by_server

    wanted = parse_servers(servers)
    pods = parse_super_pods(super_pods, wanted)
    sources, ids = by_server(device_ips, "--device-ips"), by_server(super_device_ids, "--super-device-ids")
    filled = fill_in(wanted, sources, ids, version, _own_addresses)
    text = as_json(filled, version, pods)
    if output is None:
        click.echo(text, nl=False)
    else:
        _write(Path(output), text, overwrite)
        click.echo(
            f"{output}: {sum(len(server.devices) for server in wanted)} ranks; on each host: export RANK_TABLE_FILE={shlex.quote(output)}"
        )
    named = [piece.rpartition(":")[0].strip(" []") for piece in servers.split(",")]
    if named != [server.address for server in wanted]:
        click.echo(
            "ranks follow the dictionary order of the addresses, as MindSpore's guide wants: "
            f"{', '.join(server.address for server in wanted)}",
            err=output is None,
        )
    for line in msrun_text([(server.address, server.devices) for server in wanted], port):
        click.echo(line, err=output is None)


def _own_addresses(server: str) -> Mapping[int, str]:
    """The addresses of this host's devices, if the server is this host."""
    from converter.machine.ascend import device_numbers, read_addresses
    from converter.machine.network import own_addresses
    from converter.machine.system import System

    system = System()
    return read_addresses(system, device_numbers(system)) if server in own_addresses(system) else {}


def _write(path: Path, text: str, overwrite: bool) -> None:
    if path.suffix != ".json":
        raise refuse("HCCL reads files called *.json only", str(path), f"-o {path.name}.json")
    try:
        with open(path, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise refuse("the file exists", str(path), "give another -o, or --overwrite") from error


def msrun_text(servers: Sequence[tuple[str, Sequence[int]]], port: int = DEFAULT_PORT) -> list[str]:
    """What a person is told of msrun."""
    return ["without a table, with MindSpore's own launcher:", *(f"  on {host}: {line}" for host, line in command_lines(servers, port))]


@rank_table.command(
    cls=Command, short_help="Say every problem of a rank table.", epilog="\b\nExamples:\n  ms-convert rank-table check rank_table.json"
)
@click.argument("file", type=click.Path())
@click.option("--json", "as_json_text", is_flag=True, help="Print facts as JSON.")
def check(file: str, as_json_text: bool) -> int:
    """Say every problem of the rank table FILE, each with its line. Exit code 1 if there is an error; warnings do not fail."""
    from converter.display import console
    from converter.doctor.display import show_findings, verdict
    from converter.findings import exit_code
    from converter.rank_table.check import check_file

    table = check_file(Path(file))
    servers = _startable(table.servers)
    if as_json_text:
        facts = {
            "version": table.version,
            "servers": len(table.servers),
            "ranks": table.ranks,
            "findings": [finding.facts() for finding in table.findings],
            "msrun": [{"server": host, "command": line} for host, line in command_lines(servers)] if servers else [],
        }
        click.echo(json.dumps(facts, indent=2))
        return exit_code(table.findings)
    out = console()
    out.print(f"{file}: version {table.version}, {len(table.servers)} servers, {table.ranks} ranks", markup=False)
    show_findings(out, table.findings)
    out.print(verdict(table.findings))
    for line in msrun_text(servers) if servers else ():
        out.print(line, markup=False)
    return exit_code(table.findings)


def _startable(servers: Sequence[Any]) -> list[tuple[str, list[int]]]:
    """The servers in the order of their ranks, if the file says of each where it is and which devices it has."""
    found = []
    for server in servers:
        devices = [device.device_id for device in server.devices]
        ranks = [device.rank_id for device in server.devices]
        if server.server_id is None or not server.server_id.isprintable() or not devices or None in devices or None in ranks:
            return []
        if len(set(devices)) < len(devices):
            return []
        found.append((min(ranks), server.host_ip or server.server_id, sorted(devices)))
    return [(address, devices) for _, address, devices in sorted(found)]
