"""What the command translate does between the command line and the converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from converter.display import progress, show_plan
from converter.foreign2hf import ForeignSource
from converter.hf2ms import convert
from converter.manifest import MANIFEST
from converter.outcome import refuse_inside, refuse_overlap
from converter.plan_report import conversion_facts
from converter.rank_tree import check_dialect
from converter.run import tell
from converter.translate import TranslationOptions, plan_foreign_translation, plan_translation
from mappings.dialect_table import target_named


def run_translate(
    checkpoint: str, output: str | None, from_dialect: str | None, config: str | None, strategy: str | None, source_tp: int | None, *,
    dry_run: bool, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Plan, and unless `dry_run` translate. Raises Refused."""
    folder, options = Path(checkpoint), TranslationOptions(**choices)
    dialect = target_named(from_dialect) if from_dialect is not None else None
    if from_dialect is None and (config, strategy, source_tp) != (None, None, None):
        raise click.UsageError("--config, --strategy and --source-tp go with --from.")
    if from_dialect is None or (folder / MANIFEST).is_file():
        if from_dialect is not None:
            check_dialect(folder, dialect, versioned="@" in from_dialect)
        conversion = plan_translation(folder, options)
    else:
        if config is None:
            raise click.UsageError("--from needs --config: a checkpoint without a manifest does not say what its model is.")
        place = Path(strategy) if strategy is not None else None
        conversion = plan_foreign_translation(ForeignSource(folder, dialect, Path(config), place, source_tp), options)
    facts = conversion_facts(conversion) | {"command": "translate", "model": checkpoint}
    if dry_run or output is None:
        click.echo(json.dumps(facts, indent=2)) if as_json else show_plan(facts)
        return
    if not as_json:
        show_plan(facts)
    refuse_overlap(folder, Path(output))
    if strategy is not None:
        refuse_inside(Path(strategy), Path(output))
    with progress("translate", conversion.mine.plan.nbytes, quiet=as_json) as shown:
        outcome = convert(conversion, Path(output), shown.reach)
    tell(outcome, shown.seconds, facts, as_json, next_step=f"ms-convert inspect {output}")
