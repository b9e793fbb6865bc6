"""MindSpore checkpoints of upstream's converters: read, and cut by MindSpore with a strategy file, as MindFormers' auto_trans_ckpt does."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracle.goldens import Golden, Tensors, read_golden, write_golden

RANKS = 2


def read_ckpt(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Every parameter of a .ckpt or .safetensors file."""
    import mindspore as ms

    form = "safetensors" if path.suffix == ".safetensors" else "ckpt"
    return {name: np.ascontiguousarray(value.asnumpy()) for name, value in ms.load_checkpoint(str(path), format=form).items()}


def save_ckpt(tensors: Tensors, path: Path) -> Path:
    """Writes a .ckpt with MindSpore."""
    import mindspore as ms

    path.parent.mkdir(parents=True, exist_ok=True)
    ms.save_checkpoint([{"name": name, "data": ms.Tensor(np.ascontiguousarray(value))} for name, value in tensors.items()], str(path))
    return path


def sliced(tensors: Tensors, strategy: Path) -> tuple[dict[str, npt.NDArray[Any]], ...]:
    """The slices of each of `RANKS` ranks, cut by `ms.transform_checkpoints`. Raises ValueError when it lost a parameter."""
    import mindspore as ms

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "whole"), Path(folder, "ranks")
        save_ckpt(tensors, source / "rank_0" / "checkpoint_0.ckpt")
        ms.transform_checkpoints(str(source), str(target), "checkpoint_", None, str(strategy))
        ranks = tuple(read_ckpt(target / f"rank_{rank}" / f"checkpoint_{rank}.ckpt") for rank in range(RANKS))
    for rank in ranks:
        if lost := set(tensors) - set(rank):
            raise ValueError(f"not in {strategy}: {sorted(lost)}")
    return ranks


def record(name: str, golden: Golden) -> None:
    """Stores a golden output that is new. One that is stored already must be what upstream gives now: ValueError otherwise."""
    import mindspore as ms

    about: Mapping[str, Any] = {**golden.about, "mindspore": ms.__version__}
    made = Golden(golden.whole, golden.ranks, about)
    try:
        stored = read_golden(name)
    except FileNotFoundError:
        write_golden(name, made)
        print(f"== {name}: stored, {len(golden.whole)} tensors whole and {len(golden.ranks)} ranks", flush=True)
        return
    pairs = [(stored.whole, made.whole), *zip(stored.ranks, made.ranks, strict=True)]
    if not all(_equal(before, now) for before, now in pairs):
        raise ValueError(f"{name}: upstream gives something else than golden/{name}.npz holds; remove the file to store it anew")
    print(f"== {name}: {len(golden.whole)} tensors, as stored", flush=True)


def _equal(before: Tensors, now: Tensors) -> bool:
    return before.keys() == now.keys() and all(
        before[name].dtype == now[name].dtype and before[name].shape == now[name].shape and before[name].tobytes() == now[name].tobytes()
        for name in before
    )
