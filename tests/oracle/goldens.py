"""What upstream gave, as small files: `golden/NAME.npz`.

Entries `tp1/PARAMETER` are the whole tensors and `tp2/rank_R/PARAMETER` the slices of rank R; the entry `about` is JSON: how it was made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, npt.NDArray[Any]]
FOLDER = Path(__file__).parent / "golden"
LARGEST = 300_000
"""Bytes of a file: more does not belong into the repository."""


@dataclass(frozen=True)
class Golden:
    """`whole` at tp 1, `ranks[r]` at tp 2; `about` says which model went in, what made it and with which versions."""

    whole: Tensors
    ranks: tuple[Tensors, ...]
    about: Mapping[str, Any]


def read_golden(name: str) -> Golden:
    """The stored output `name`."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        entries = {key: file[key] for key in file.files}
    about = json.loads(str(entries.pop("about")))
    ranks = [_under(entries, f"tp2/rank_{rank}/") for rank in range(2)]
    return Golden(_under(entries, "tp1/"), tuple(ranks) if any(ranks) else (), about)


def write_golden(name: str, golden: Golden) -> None:
    """Stores `golden`, byte for byte the same for the same contents. Raises ValueError when the file is larger than `LARGEST`."""
    entries = {f"tp1/{key}": value for key, value in golden.whole.items()}
    for rank, tensors in enumerate(golden.ranks):
        entries |= {f"tp2/rank_{rank}/{key}": value for key, value in tensors.items()}
    arrays = {key: np.ascontiguousarray(entries[key]) for key in sorted(entries)}
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, about=np.array(json.dumps(dict(golden.about), indent=1, sort_keys=True)), **arrays)
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}")


def _under(entries: Tensors, prefix: str) -> dict[str, npt.NDArray[Any]]:
    return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
