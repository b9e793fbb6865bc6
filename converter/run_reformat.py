"""What the command reformat does between the command line and the converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from converter.display import console, printable, progress, size
from converter.run import tell


def run_reformat(source: str, output: str | None, *, dry_run: bool, as_json: bool, **choices: Any) -> None:
    """Plan, and unless `dry_run` write. Raises Refused."""
    from converter.reformat import ReformatOptions, Reformatting, plan_reformatting, reformat

    planned: Reformatting = plan_reformatting(Path(source), ReformatOptions(**choices))
    facts = {
        "command": "reformat", "source": source, "format": planned.options.file_format,
        "files": [
            {
                "path": file.path, "from": planned.sources[file.path],
                "tensors": len(file.tensors), "bytes": sum(tensor.nbytes for tensor in file.tensors),
            }
            for file in planned.plan.files
        ],
        "links": dict(planned.links), "strategies": list(planned.found.strategies), "notes": list(planned.notes),
    }  # fmt: skip
    if not as_json:
        _show(facts, planned.plan.nbytes)
    if dry_run or output is None:
        click.echo(json.dumps(facts, indent=2)) if as_json else None
        return
    with progress("reformat", planned.plan.nbytes, quiet=as_json) as shown:
        outcome = reformat(planned, Path(output), shown.reach)
    tell(outcome, shown.seconds, facts, as_json, next_step=f"ms-convert inspect {output}")


def _show(facts: dict[str, Any], nbytes: int) -> None:
    out, files = console(), facts["files"]
    tensors = sum(file["tensors"] for file in files)
    out.print(f"[bold]{printable(facts['source'])}[/]  {len(files)} checkpoint(s), {tensors} tensors, {size(nbytes)} -> {facts['format']}")
    for file in files[:8]:
        out.print(f"  {printable(file['from'])} -> {printable(file['path'])}")
    if len(files) > 8:
        out.print(f"  and {len(files) - 8} more")
