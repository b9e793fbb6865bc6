"""`dialects`: the dialect tables as a person reads them."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from converter.display import console, printable
from mappings.dialect_table import CANONICAL, Dialect, bundled_dialect, bundled_dialects, dialect_of, place_of_cut, target_named
from mappings.errors import refuse
from mappings.parameters import REPLICATED


def dialect_facts() -> list[dict[str, Any]]:
    """The bundled dialects with their layout versions, and the families of each."""
    facts = []
    for name in bundled_dialects():
        table = bundled_dialect(name)
        versions = [_version_facts(dialect_of(table, version), what) for version, what in table.versions.items()]
        facts.append({"dialect": name, "description": table.description, "default": table.default, "versions": versions})
    return facts


def _version_facts(dialect: Dialect, what: str) -> dict[str, Any]:
    analogy = [family for family in dialect.families if dialect.by_analogy(family)]
    return {"version": dialect.version, "what": what, "families": list(dialect.families), "by_analogy": analogy}


def show_dialects(facts: list[dict[str, Any]]) -> None:
    """A line for each version; families by analogy are marked."""
    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("--target", "families", "what it is"):
        table.add_column(heading, overflow="fold")
    table.add_row(f"[bold]{CANONICAL}[/]", "all", "the names of the bundled models")
    for entry in facts:
        for version in entry["versions"]:
            default = " (default)" if version["version"] == entry["default"] else ""
            families = [f"{family}*" if family in version["by_analogy"] else family for family in version["families"]]
            table.add_row(f"[bold]{entry['dialect']}@{version['version']}[/]{default}", ", ".join(families), printable(version["what"]))
    out.print(table)
    if any(version["by_analogy"] for entry in facts for version in entry["versions"]):
        out.print("\n* by analogy: the dialect's own code has no such network; names and layouts are this tool's choice")


def tensor_facts(target: str) -> dict[str, Any]:
    """The tensors of one dialect in one version, network by network. Raises Refused for an unknown one."""
    dialect = target_named(target)
    if dialect is None:
        raise refuse(f"{CANONICAL} has the canonical names", mend="`ms-convert rules FAMILY` shows them")
    networks = [network for network in dialect.table.networks if dialect.version in network.versions]
    return {
        "dialect": dialect.table.dialect, "version": dialect.version, "description": dialect.table.description,
        "networks": [
            {
                "families": list(network.families), "by_analogy": list(network.by_analogy), "source": network.source,
                "tensors": [
                    {
                        "name": tensor.name, "axes": str(tensor.axes), "parts": dict(tensor.ms), "stage": tensor.stage,
                        "cut_axis": _cut_axis(place_of_cut(tensor), tensor.replicated),
                    }
                    for tensor in network.tensors
                    if dialect.version in tensor.versions
                ],
            }
            for network in networks
        ],
        "not_weights": [{"name": item.name + ("*" if item.prefix else ""), "why": item.why} for item in dialect.table.not_weights],
    }  # fmt: skip


def _cut_axis(place: Any, replicated: bool) -> int | None:
    return None if replicated or place is None or place.by == REPLICATED else place.axis


def show_tensors(facts: dict[str, Any]) -> None:
    """Each tensor with its layout, and the canonical parameters that it holds."""
    out = console()
    out.print(f"[bold]{facts['dialect']}@{facts['version']}[/]  {printable(facts['description'])}")
    for network in facts["networks"]:
        families = ", ".join(f"{family} (by analogy)" if family in network["by_analogy"] else family for family in network["families"])
        out.print(f"\n[bold]{families}[/]   ({printable(network['source'])})")
        for tensor in network["tensors"]:
            cut = "replicated" if tensor["cut_axis"] is None else f"cut along axis {tensor['cut_axis']}"
            out.print(f"  {printable(tensor['name'])}   [cyan]{printable(tensor['axes'])}[/], {cut}")
            for label, name in tensor["parts"].items():
                out.print(f"    = {printable(f'{label}: ' if label else '')}{printable(name)}")
    for item in facts["not_weights"]:
        out.print(f"not a weight  {printable(item['name'])}: {printable(item['why'])}")
