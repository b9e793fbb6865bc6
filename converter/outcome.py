"""What a run did, common to both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mappings.errors import refuse

OnProgress = Callable[[int], None]
"""Called with the bytes of tensor data that are done, those of an earlier run of the same conversion included."""


@dataclass
class Outcome:
    """`finished` is False when other ranks are still to be written (`missing_ranks`). `notes` are for the user to read."""

    output: Path
    finished: bool = True
    files: int = 0
    bytes_written: int = 0
    notes: list[str] = field(default_factory=list)
    missing_ranks: tuple[int, ...] = ()


def refuse_overlap(source: Path, output: Path) -> None:
    """Raises Refused when input and output are one folder or lie in one another."""
    here, there = source.resolve(), output.resolve()
    if here == there or here.is_relative_to(there) or there.is_relative_to(here):
        raise refuse("the output folder and the input folder lie in one another", str(output), "give an -o outside the input folder")


def refuse_inside(source: Path, output: Path) -> None:
    """Raises Refused when a file or folder that is read lies in the output folder, where it could be replaced before it is read."""
    if source.resolve().is_relative_to(output.resolve()):
        raise refuse(f"{source.name} is read and lies in the output folder", str(output), "give another -o, or move it elsewhere")


def counted_from(before: int, on_progress: OnProgress | None) -> OnProgress | None:
    """A callback for the bytes of this run alone, where `before` bytes were there already; they are reported at once."""
    if on_progress is None:
        return None
    on_progress(before)
    return lambda written: on_progress(before + written)
