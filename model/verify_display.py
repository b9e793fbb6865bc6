"""The outcome of `verify` on a terminal, from the same facts as the report and the JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from converter.display import console, duration, layout_text, printable, size

MAX_DIFFERENCES = 10
VALUE_HEADINGS = ("first index", "expected", "found", "elements", "relative error")


@contextmanager
def steps(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Says what is being done, on stderr: in one place on a terminal, line by line in a log, not at all when quiet."""
    if quiet:
        yield lambda text: None
    elif not sys.stderr.isatty():
        yield lambda text: print(f"verify: {text}", file=sys.stderr, flush=True)
    else:
        with console(stderr=True).status("verify") as status:
            yield lambda text: status.update(printable(text))


def show_verification(facts: dict[str, Any], report: str | None, json_file: str | None) -> None:
    """Checks as a table, what differs, and the verdict as the last line."""
    out, source, target = console(), facts["source"], facts["target"]
    out.print(
        f"[bold]{printable(source['path'])}[/]  {printable(source['architecture'])} ({printable(source['family'])}), "
        f"{source['parameters']:,} parameters, {size(source['bytes'])}"
    )
    layout = "one file" if target["layout"] is None else layout_text(target["layout"])
    out.print(f"[bold]{printable(target['path'])}[/]  {layout}, {target['format']}, {size(target['bytes'])}, dtype {target['dtype']}")
    for note in facts["notes"]:
        out.print(f"  [yellow]note[/]  {printable(note)}")
    _show_checks(out, facts["checks"])
    _show_differences(out, facts["weights"]["differences"])
    if facts["forward"] is not None:
        _show_forward(out, facts["forward"])
    for what, path in (("report", report), ("facts", json_file)):
        if path is not None:
            out.print(f"{what:8}{printable(path)}")
    _show_verdict(out, facts)


def _table(*headings: str, right: int = 0) -> Table:
    """A plain table; the last `right` columns are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place >= len(headings) - right else "left", overflow="fold")
    return table


def _show_checks(out: Console, checks: list[dict[str, Any]]) -> None:
    table = _table("check", "", "what was found")
    for check in checks:
        table.add_row(check["name"], "[green]holds[/]" if check["holds"] else "[bold red]FAILS[/]", printable(check["summary"]))
    out.print()
    out.print(table)
    out.print()


def _show_differences(out: Console, differences: list[dict[str, Any]]) -> None:
    if not differences:
        return
    shown = differences[:MAX_DIFFERENCES]
    headings = ["parameter", "file", "what"]
    compared = any(item["elements"] for item in shown)
    table = _table(*headings, *VALUE_HEADINGS, right=4) if compared else _table(*headings)
    for item in shown:
        table.add_row(*(printable(item[key]) for key in ("name", "file", "what")), *(_value_cells(item) if compared else []))
    out.print(table)
    if len(differences) > MAX_DIFFERENCES:
        out.print(f"... and {len(differences) - MAX_DIFFERENCES} more; --json FILE has them all")
    out.print()


def _value_cells(item: dict[str, Any]) -> list[str]:
    index = printable(str(item["first_index"])) if item["elements"] else ""
    elements = f"{item['elements']:,}" if item["elements"] else ""
    return [index, number(item["expected"]), number(item["found"]), elements, number(item["max_relative_error"])]


def number(value: float | str | None) -> str:
    """A number for a person; what is not finite comes as text."""
    return "" if value is None else f"{float(value):.3g}"


def _show_forward(out: Console, forward: dict[str, Any]) -> None:
    table = _table(
        "probe", "tokens", "worst state", "relative error", "worst token", "KL mean", "top-1", "perplexity HF", "MindSpore", right=7
    )
    for probe in forward["probes"]:
        worst = max(probe["states"], key=lambda state: float(state["relative_error"]))
        table.add_row(probe["name"], str(probe["tokens"]), worst["name"], number(worst["relative_error"]), number(worst["worst_token"]),
                      *_logits_cells(probe["logits"]))  # fmt: skip
    out.print(table)
    seconds = forward["seconds"]
    out.print(f"\nTransformers {duration(seconds['transformers'])}, MindSpore {duration(seconds['mindspore'])}, both in float32 on the CPU")
    for note in forward["notes"]:
        out.print(f"  [yellow]note[/]  {printable(note)}")
    if forward["continuation"] is not None:
        _show_continuation(out, forward["continuation"])
    out.print()


def _logits_cells(logits: dict[str, Any] | None) -> list[str]:
    if logits is None:
        return ["", "", "", ""]
    perplexities = [number(logits[key]) for key in ("perplexity_reference", "perplexity_ours")]
    return [number(logits["kl_mean"]), f"{100 * logits['top1_agreement']:.4g} %", *perplexities]


def _show_continuation(out: Console, facts: dict[str, Any]) -> None:
    if facts["prompt_text"]:
        out.print(f"  prompt        {printable(facts['prompt_text'])}")
        out.print(f"  continuation  {_one_line(facts['reference_text'])}")
    if facts["first_difference"] is not None:
        out.print(f"  [yellow]MindSpore[/]     {_one_line(facts['ours_text']) or facts['ours']}")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _proved(facts: dict[str, Any]) -> str:
    bits = "every bit" if facts["target"]["dtype"] == "keep" else f"every bit of the cast to {facts['target']['dtype']}"
    if facts["forward"] is None:
        return f"{bits}; neither model was run (--forward runs both)"
    dtype = facts["forward"]["threshold"]["dtype"]
    return f"{bits}, every layer's computation" if dtype == "float32" else f"{bits}, every layer as near as {dtype} allows"


def _show_verdict(out: Console, facts: dict[str, Any]) -> None:
    took = duration(facts["seconds"]["total"])
    if facts["holds"]:
        out.print(f"[bold green]VERIFIED[/]  {len(facts['checks'])} checks hold: {_proved(facts)}  ({took})")
    else:
        out.print(f"[bold red]NOT VERIFIED[/]  {', '.join(facts['failed'])} of {len(facts['checks'])} checks failed  ({took})")
