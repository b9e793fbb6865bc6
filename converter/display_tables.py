"""`families` and `rules`: the rule tables as a person reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from converter.display import console, printable
from mappings.tables import FamilyTable, bundled_families, bundled_table, load_table


def family_facts() -> list[dict[str, Any]]:
    """The bundled families."""
    tables = [bundled_table(family) for family in bundled_families()]
    return [
        {"family": table.family, "description": table.description, "architectures": list(table.architectures), "rules": len(table.rules)}
        for table in tables
    ]


def show_families(facts: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for heading in ("family", "Hugging Face architectures", "what it is"):
        table.add_column(heading, overflow="fold")
    for entry in facts:
        table.add_row(f"[bold]{entry['family']}[/]", "\n".join(entry["architectures"]), entry["description"])
    console().print(table)
    console().print("\nAnother family: write a rule table and pass it with --rules FILE; `ms-convert rules llama` shows one.")


def _table(family: str | None, rules_file: str | None) -> FamilyTable:
    return load_table(Path(rules_file)) if rules_file is not None else bundled_table(str(family))


def table_text(family: str | None, rules_file: str | None) -> str:
    """A table as it is written. Raises Refused for a table with mistakes."""
    return _table(family, rules_file).text


def rule_facts(family: str | None, rules_file: str | None) -> dict[str, Any]:
    """One table's rules, drops and duplicates. Raises Refused for a table with mistakes."""
    table = _table(family, rules_file)
    return {
        "family": table.family, "description": table.description, "table": table.where, "architectures": list(table.architectures),
        "rules": [entry for index in range(len(table.rules)) for entry in _rule_entries(table, index)],
        "dropped": [{"hf": drop.hf, "why": drop.why, "check": drop.check} for drop in table.drops],
        "duplicates": [{"hf": item.hf, "of": item.of} for item in table.duplicates],
    }  # fmt: skip


def _rule_entries(table: FamilyTable, index: int) -> list[dict[str, Any]]:
    rule = table.rules[index]
    return [
        {
            "hf": list(rule.hf), "hf_axes": str(rule.hf_axes), "part": label, "ms": ms, "ms_axes": str(table.parameters[ms].axes),
            "cut": table.parameters[ms].cut, "stage": table.parameters[ms].stage, "role": table.parameters[ms].role,
            "when": list(rule.when), "layers": [rule.from_layer, rule.to_layer],
        }
        for label, ms in rule.ms
    ]  # fmt: skip


STAGE_HEADINGS = {"first": "on the first stage", "layer": "in every layer", "last": "on the last stage"}


def _show_rule(out: Console, entry: dict[str, Any], new_tensor: bool) -> None:
    """The HF tensor, then the parameter that it equals, its layout, and how it is cut."""
    same = entry["hf_axes"] == entry["ms_axes"]
    if new_tensor:
        out.print(f"  {printable(' or '.join(entry['hf']))}" + ("" if same else f"   [cyan]{printable(entry['hf_axes'])}[/]"))
    part = f"{entry['part']}: " if entry["part"] else ""
    facts = [f"[cyan]{printable(entry['ms_axes'])}[/]", "replicated" if entry["cut"] == "replicated" else f"cut by {entry['cut']}"]
    facts += [f"{entry['role']} of a tied pair"] if entry["role"] else []
    facts += [f"if {printable(' and '.join(entry['when']))}"] if entry["when"] else []
    facts += [f"layers {entry['layers'][0]} to {entry['layers'][1]}"] if entry["layers"] != [0, None] else []
    out.print(f"    = {printable(part + entry['ms'])}   {', '.join(facts)}")


def show_rules(facts: dict[str, Any]) -> None:
    out = console()
    out.print(f"[bold]{printable(facts['family'])}[/]  {printable(facts['description'])}")
    out.print(f"serves {printable(', '.join(facts['architectures']))}   ({printable(facts['table'])})\n")
    for stage, heading in STAGE_HEADINGS.items():
        entries = [entry for entry in facts["rules"] if entry["stage"] == stage]
        if entries:
            out.print(f"[bold]{heading}[/]")
        for position, entry in enumerate(entries):
            _show_rule(out, entry, new_tensor=position == 0 or entries[position - 1]["hf"] != entry["hf"])
    out.print()
    for entry in facts["dropped"]:
        out.print(f"dropped    {printable(entry['hf'])}: {printable(entry['why'])} (checked: {entry['check']})")
    for entry in facts["duplicates"]:
        out.print(f"duplicate  {printable(entry['hf'])} must equal {printable(entry['of'])}")
    if any(entry["role"] == "head" for entry in facts["rules"]):
        out.print(
            "tied       where the model ties its embeddings, the head is no parameter; if the file holds one it must equal the embedding"
        )
