"""The facts of `inspect` as a person reads them."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.table import Table

from converter.display import console, layout_text, printable, size
from mappings.names import fold_names, number_free


def show_inspection(facts: dict[str, Any], show_all: bool = False) -> None:
    """One screen of facts; layers are folded unless `show_all`."""
    out = console()
    out.print(f"[bold]{printable(facts['path'])}[/]  {printable(facts['kind'])}" + (f" ({facts['form']})" if "form" in facts else ""))
    for label, text in _lines(facts):
        out.print(f"  {label:<11} {printable(text)}")
    if "options" in facts:
        return
    if "parameters" in facts:
        _show_strategy(out, facts["parameters"])
    elif facts.get("tensors"):
        _show_tensors(out, facts["tensors"], show_all)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if facts.get("family"):
        lines.append(("family", facts["family"]))
    target = facts.get("target")
    if target and target["version"]:
        lines.append(("names", f"{target['dialect']}, layout version {target['version']}"))
    if facts.get("architectures"):
        lines.append(("class", ", ".join(map(str, facts["architectures"]))))
    if facts.get("model"):
        model = facts["model"]
        lines.append(
            ("model", ", ".join(f"{name} {model[name]}" for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")))
        )
        lines.append(("", f"{'tied' if model['tied'] else 'untied'} embeddings, {model['norm']}, {model['positions']} positions"))
    if "layout" in facts:
        layout = facts["layout"]
        lines.append(("layout", layout_text(layout)))
        if facts.get("strategy"):
            lines.append(("strategies", f"for {layout_text(facts['strategy'])}"))
        lines.append(("vocabulary", f"{layout['vocab']}, padded to {layout['padded_vocab']}"))
        lines.append(("from", f"{facts['source']} (ms-convert {facts['tool_version']}, dtype {facts['dtype']})"))
    if "files" in facts:
        files = facts["files"]
        names = ", ".join(file["name"] for file in files[:4]) + (", ..." if len(files) > 4 else "")
        lines.append(("files", f"{len(files)}, {size(sum(file['bytes'] for file in files))}: {names}"))
    lines += _foreign_lines(facts)
    if facts.get("side_files"):
        lines.append(("side files", ", ".join(facts["side_files"][:12]) + (", ..." if len(facts["side_files"]) > 12 else "")))
    lines += [
        (name, ", ".join(f"{key}={value}" for key, value in facts[name].items())) for name in ("metadata", "options") if facts.get(name)
    ]
    if "finished_files" in facts:
        lines.append(("finished", ", ".join(facts["finished_files"]) or "none yet"))
    if "parameters" in facts:
        stages = ", ".join(map(str, facts["stages"]))
        lines.append(("stages", f"{stages}; {len(facts['parameters'])} parameter layouts"))
    if "elements" in facts:
        dtypes = ", ".join(f"{size(count)} {dtype}" for dtype, count in facts["bytes_by_dtype"].items())
        which = " on the first rank of each stage" if "layout" in facts else ""
        lines.append(("tensors", f"{len(facts['tensors'])}, {facts['elements']:,} elements ({dtypes}){which}"))
    lines += [("note", note) for note in facts.get("notes", [])]
    if facts.get("problem"):
        lines.append(("problem", facts["problem"]))
    return lines


def _foreign_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What is told of a checkpoint that has no manifest."""
    lines = []
    if "ranks" in facts:
        lines.append(("ranks", str(facts["ranks"])))
        strategy = facts["strategy"]
        if strategy is None:
            lines.append(("strategy", "no strategy files here or in ../strategy"))
        elif "problem" in strategy:
            lines.append(("strategy", f"{strategy['folder']}/: {strategy['problem']}"))
        else:
            stages = ", ".join(f"stage {stage}: {count} parameters" for stage, count in strategy["stages"].items())
            lines.append(("strategy", f"{strategy['folder']}/: {strategy['files']} file(s), {stages}"))
    if facts.get("chunks", {"1": 0}).keys() != {"1"}:
        lines.append(("chunks", ", ".join(f"{tensors} tensors in {number}" for number, tensors in facts["chunks"].items())))
    lines += [("not weights", f"{count} tensors: {why}") for why, count in facts.get("ignored", {}).items()]
    if facts.get("training"):
        lines.append(("training", ", ".join(f"{name} {value}" for name, value in facts["training"].items())))
    return lines


def _show_tensors(out: Console, tensors: list[dict[str, Any]], show_all: bool) -> None:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for tensor in tensors:
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        key = (tensor["name"] if show_all else number_free(tensor["name"]), tensor["dtype"], shape)
        groups.setdefault(key, []).append(tensor)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column("tensor", overflow="fold")
    for heading in ("dtype", "shape", "count", "elements"):
        table.add_column(heading, justify="right")
    for (_, dtype, shape), members in groups.items():
        name = ", ".join(fold_names(member["name"] for member in members))
        elements = sum(math.prod(member["shape"]) for member in members)
        table.add_row(printable(name), dtype, shape, str(len(members)), f"{elements:,}")
    out.print(table)


def _show_strategy(out: Console, parameters: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for heading in ("stage", "parameter", "device matrix", "tensor map", "cut"):
        table.add_column(heading, overflow="fold")
    groups: dict[tuple[str, ...], list[str]] = {}
    for item in parameters:
        cut = (str(item["stage"]), str(item["device_matrix"]), str(item["tensor_map"]), _cut_text(item))
        groups.setdefault((number_free(item["name"]), *cut), []).append(item["name"])
    for (_, stage, matrix, mapping, cut_text), names in groups.items():
        table.add_row(*map(printable, (stage, ", ".join(fold_names(names)), matrix, mapping, cut_text)))
    out.print(table)


def _cut_text(item: dict[str, Any]) -> str:
    """Which axes are cut into how many: `axis 0 in 8`; a tensor map counts the device axes from the right."""
    matrix = item["device_matrix"]
    cuts = [f"axis {axis} in {matrix[-1 - device]}" for axis, device in enumerate(item["tensor_map"]) if device != -1]
    shards = item["optimizer_shards"]
    if shards:
        cuts.append("optimizer: all replicas" if shards == -1 else f"optimizer: {shards} more")
    return ", ".join(cuts) or "whole"
