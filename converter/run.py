"""What the commands hf2ms and ms2hf do between the command line and the converter: plan, show, execute, tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from converter.display import console, duration, printable, progress, ranges, show_foreign, show_plan, show_restoration, size
from converter.outcome import Outcome
from mappings.tables import load_table


def run_hf2ms(model: str, output: str | None, rules_file: str | None, *, dry_run: bool, as_json: bool, **choices: Any) -> None:
    """Plan, and unless `dry_run` convert. Raises Refused."""
    from converter.hf2ms import RankTreeOptions, convert, plan_conversion
    from converter.plan_report import conversion_facts

    table = load_table(Path(rules_file)) if rules_file else None
    conversion = plan_conversion(Path(model), RankTreeOptions(**choices), table)
    facts = conversion_facts(conversion)
    if dry_run or output is None:
        click.echo(json.dumps(facts, indent=2)) if as_json else show_plan(facts)
        return
    if not as_json:
        show_plan(facts)
    with progress("hf2ms", conversion.mine.plan.nbytes, quiet=as_json) as shown:
        outcome = convert(conversion, Path(output), shown.reach)
    tell(outcome, shown.seconds, facts, as_json, next_step=f"ms-convert ms2hf {output} -o BACK")


def run_ms2hf(slices: str, output: str | None, *, dry_run: bool, as_json: bool, **choices: Any) -> None:
    """Plan, and unless `dry_run` restore. Raises Refused."""
    from converter.ms2hf import HFOptions, plan_restoration, restore
    from converter.plan_report import restoration_facts

    restoration = plan_restoration(Path(slices), HFOptions(**choices))
    facts = restoration_facts(restoration)
    if dry_run or output is None:
        click.echo(json.dumps(facts, indent=2)) if as_json else show_restoration(facts)
        return
    if not as_json:
        show_restoration(facts)
    with progress("ms2hf", restoration.planned.plan.nbytes, quiet=as_json) as shown:
        outcome = restore(restoration, Path(output), shown.reach)
    tell(outcome, shown.seconds, facts, as_json, next_step=f"AutoModel.from_pretrained({output!r})")


def run_foreign(
    slices: str, output: str | None, from_dialect: str, config: str | None, strategy: str | None, tp: int | None, *, dry_run: bool,
    as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Plan, and unless `dry_run` restore, a checkpoint without a manifest; one with its manifest must be of the dialect. Raises Refused."""
    from converter.foreign2hf import ForeignSource, plan_foreign, restore_foreign
    from converter.manifest import MANIFEST
    from converter.ms2hf import HFOptions
    from converter.plan_report import foreign_facts
    from converter.rank_tree import check_dialect
    from mappings.dialect_table import target_named

    dialect = target_named(from_dialect)
    if (Path(slices) / MANIFEST).is_file():
        check_dialect(Path(slices), dialect, versioned="@" in from_dialect)
        run_ms2hf(slices, output, dry_run=dry_run, as_json=as_json, **choices)
        return
    if config is None:
        raise click.UsageError("--from needs --config: a checkpoint without a manifest does not say what its model is.")
    source = ForeignSource(Path(slices), dialect, Path(config), Path(strategy) if strategy is not None else None, tp)
    restoration = plan_foreign(source, HFOptions(**choices))
    facts = foreign_facts(restoration)
    if dry_run or output is None:
        click.echo(json.dumps(facts, indent=2)) if as_json else show_foreign(facts)
        return
    if not as_json:
        show_foreign(facts)
    with progress("ms2hf", restoration.plan.nbytes, quiet=as_json) as shown:
        outcome = restore_foreign(restoration, Path(output), shown.reach)
    tell(outcome, shown.seconds, facts, as_json, next_step=f"AutoModel.from_pretrained({output!r})")


def tell(outcome: Outcome, seconds: float, facts: dict[str, Any], as_json: bool, next_step: str) -> None:
    """What a finished command did, for a person or as JSON."""
    result = {
        "output": str(outcome.output), "finished": outcome.finished, "files_written": outcome.files, "bytes_written": outcome.bytes_written,
        "seconds": round(seconds, 3), "missing_ranks": list(outcome.missing_ranks), "notes": outcome.notes,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(facts | {"result": result}, indent=2))
        return
    out = console()
    for note in outcome.notes:
        out.print(f"  [yellow]note[/]     {printable(note)}")
    if outcome.files:
        rate = f"{size(outcome.bytes_written / seconds)}/s"
        out.print(f"  wrote    {outcome.files} file(s), {size(outcome.bytes_written)} in {duration(seconds)} ({rate})")
    if outcome.finished:
        out.print(f"[bold green]done[/]  {printable(str(outcome.output))}   next: {printable(next_step)}")
    else:
        missing = f"rank{'s' if len(outcome.missing_ranks) > 1 else ''} {ranges(list(outcome.missing_ranks))}"
        out.print(f"[bold yellow]not finished[/]  {printable(str(outcome.output))}: still to be written: {missing} (--ranks)")
