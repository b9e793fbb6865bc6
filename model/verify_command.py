"""The command `ms-convert verify`. Everything heavy is imported when it runs."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from converter.command_options import Command, folder_argument

OUTPUT = click.Path(dir_okay=False, writable=True, allow_dash=True)


@click.command(
    cls=Command,
    short_help="Prove that a conversion changed nothing.",
    epilog="""
\b
Examples:
  ms-convert verify ./SmolLM2-135M ./slices
  ms-convert verify ./SmolLM2-135M ./slices --forward --generate 32 --report report.html
  ms-convert verify ./bert-base model.ckpt --forward --json facts.json
""",
)
@folder_argument("hf")
@folder_argument("ms")
@click.option("--forward", is_flag=True, help="Run both models on probe inputs and compare them layer by layer.")
@click.option("--generate", type=click.IntRange(1, 4096), help="Compare a greedy continuation of so many tokens too. Implies --forward.")
@click.option("--report", type=OUTPUT, help="Write a self-contained HTML report.")
@click.option("--json", "json_file", type=OUTPUT, help="Write the facts as JSON; - prints them.")
@click.option("--rules", type=click.Path(exists=True, dir_okay=False), help="The rule table (TOML) to verify with, if not a bundled one.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, show_default=True, help="Threads that read and compare.")
def verify(
    hf: str, ms: str, forward: bool, generate: int | None, report: str | None, json_file: str | None, rules: str | None, workers: int
) -> int:
    """Prove that MS (a rank tree, or one .ckpt or .safetensors file) is the Hugging Face folder HF.

    Every tensor is accounted for and every bit compared; with --forward the MindSpore model also runs against Transformers.
    The exit code is 0 only if every check holds.
    """
    for path in (report, json_file):
        if path is not None and (path == report or path != "-") and not Path(path).absolute().parent.is_dir():
            raise click.UsageError(f"the folder of {path} does not exist")
    if report is not None and find_spec("jinja2") is None:
        raise click.UsageError("--report needs jinja2: pip install 'ms-convert[report]'")
    from model.verification import VerifyOptions

    options = VerifyOptions(forward=forward or generate is not None, generate=generate or 0, rules=rules, workers=workers)
    return _verify(hf, ms, options, _command_line(hf, ms, options), report, json_file)


def _verify(hf: str, ms: str, options: Any, command: str, report: str | None, json_file: str | None) -> int:
    from converter.display import progress
    from converter.manifest import write_atomically
    from model.verification import bytes_to_read, open_sides, verify
    from model.verify_display import show_verification, steps

    quiet = json_file == "-"
    sides = open_sides(Path(hf), Path(ms), options.rules)
    with progress("verify", bytes_to_read(sides), quiet=quiet) as shown, steps(quiet) as on_step:
        outcome = verify(sides, options, command, _adding(shown.reach), on_step, on_compared=shown.close)
    text = json.dumps(outcome.facts, indent=2, allow_nan=False)
    if report is not None:
        from model.report import render_report

        write_atomically(Path(report), render_report(outcome.facts))
    if json_file is not None and not quiet:
        write_atomically(Path(json_file), text + "\n")
    click.echo(text) if quiet else show_verification(outcome.facts, report, json_file)
    return 0 if outcome.holds else 1


def _adding(reach: Callable[[int], None]) -> Callable[[int], None]:
    """Counts from any thread, for a display that is told the sum."""
    done, lock = 0, threading.Lock()

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            reach(done)

    return add


def _command_line(hf: str, ms: str, options: Any) -> str:
    """The command that repeats this, for the report."""
    words = ["ms-convert", "verify", hf, ms]
    words += ["--forward"] if options.forward else []
    words += ["--generate", str(options.generate)] if options.generate else []
    words += ["--rules", options.rules] if options.rules else []
    return shlex.join(words)
