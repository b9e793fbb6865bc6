"""`make bench`: all measurements, in a temporary folder of the disk that holds the repository (about 50 GB are needed for 8 GB)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from tests.benchmarks import conversion, training


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Times that each command is run.")
@click.option("--large/--no-large", default=True, show_default=True, help="Measure an 8 GB model too, for the memory.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to work. Default: a temporary folder in .cache/.")
def main(rounds: int, large: bool, folder: Path | None) -> None:
    """Measure conversion against `cp -r`, and the trainer against the bare model."""
    cache = Path(__file__).parents[2] / ".cache"
    cache.mkdir(exist_ok=True)
    work = folder or Path(tempfile.mkdtemp(prefix="bench-", dir=cache))
    try:
        conversion.main(work, rounds, large)
        training.main(work)
    finally:
        if folder is None:
            shutil.rmtree(work)


main()
