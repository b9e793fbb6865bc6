"""Sentence vectors as sentence-transformers folders ask for them: pooled hidden states, normalised or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.hf_folder import check_inside, read_json_object
from converter.manifest import is_plain_relative
from mappings.errors import refuse

MAX_BYTES = 1 << 20
MODULES = "modules.json"

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Pooling:
    """`mode` is "mean" or "cls"; `normalize` divides by the Euclidean norm."""

    mode: str
    normalize: bool


def read_pooling(folder: Path) -> tuple[Pooling | None, str]:
    """What a sentence-transformers folder says, and a note when it asks for something that is not computed here.

    (None, "") for a folder that is none. Raises Refused for a modules.json that is not JSON or that points out of the folder.
    """
    modules = _read_modules(folder)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:
        return None, ""
    where = str(modules[kinds.index("Pooling")].get("path", ""))
    if not is_plain_relative(where):
        raise refuse(f"the pooling module lies at {where[:80]!r}, which is no folder below it", str(folder / MODULES), "mend the file")
    modes = _modes(read_json_object(folder / where / "config.json", MAX_BYTES, folder))
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if modes not in (["mean"], ["cls"]) or others:
        asked = ", ".join([*(f"{mode} pooling" for mode in modes), *others]) or "no pooling"
        return None, f"sentence vectors were not compared: the folder asks for {asked}"
    return Pooling(modes[0], "Normalize" in kinds), ""


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES
    if not path.is_file():
        return []
    check_inside(path, folder)
    if path.stat().st_size > MAX_BYTES:
        raise refuse("larger than 1 MiB", str(path), "this is no modules.json")
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(f"not valid JSON: {str(error)[:200]}", str(path), "download it again") from error
    return [module for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The pooling modes that are on, in both spellings of the file."""
    if isinstance(config.get("pooling_mode"), str):
        return [str(config["pooling_mode"])]
    switches = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    return [switches.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value is True]


def sentence_vectors(hidden: Floats, real: npt.NDArray[np.bool_], pooling: Pooling) -> npt.NDArray[np.float64]:
    """hidden [batch, seq, hidden], real [batch, seq] (False for padding) -> [batch, hidden]."""
    pool: Callable[[], npt.NDArray[np.float64]] = {
        "mean": lambda: (hidden * real[..., None]).sum(axis=1, dtype=np.float64) / real.sum(axis=1)[:, None],
        "cls": lambda: hidden[:, 0].astype(np.float64),
    }[pooling.mode]
    vectors = pool()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if pooling.normalize else vectors
