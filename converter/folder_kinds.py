"""Which layout of a checkpoint a folder has, from the names in it: so that no flag needs to say."""

from __future__ import annotations

import re
from pathlib import Path

from converter.folder_lock import PROGRESS_FOLDER
from converter.manifest import MANIFEST
from converter.mindformers2_folder import ITERATION, METADATA, MODEL_FILE, TRACKER
from converter.output_folder import RUN_RECORD
from converter.unified_folder import NAME_MAP

CONVERSION, UNFINISHED, HUGGING_FACE = "conversion", "unfinished", "hugging face"
UNIFIED, MINDFORMERS2, RANKS, SAFETENSORS, UNKNOWN = "unified", "mindformers2", "ranks", "safetensors", "unknown"
RANK_FOLDER = re.compile(r"rank_([0-9]{1,7})")
_HUGGING_FACE_WEIGHTS = re.compile(r"(model|pytorch_model)(-[0-9]+-of-[0-9]+)?\.(safetensors|bin)|(model|pytorch_model)\..*index\.json")


def folder_kind(folder: Path) -> str:
    """One of the kinds above. Nothing is opened.

    MindFormers itself puts a `param_name_map.json` into Hugging Face folders that it loads; they stay what they are.
    """
    names = {entry.name for entry in folder.iterdir()}
    if MANIFEST in names:
        return CONVERSION
    if (folder / PROGRESS_FOLDER / RUN_RECORD).is_file():
        return UNFINISHED
    if TRACKER in names or METADATA in names:
        return MINDFORMERS2
    if "config.json" in names and (NAME_MAP not in names or any(map(_HUGGING_FACE_WEIGHTS.fullmatch, names))):
        return HUGGING_FACE
    if NAME_MAP in names or "part0.safetensors" in names:
        return UNIFIED
    if any(map(RANK_FOLDER.fullmatch, names)):
        return RANKS
    if any(map(MODEL_FILE.fullmatch, names)):
        return MINDFORMERS2
    return SAFETENSORS if any(name.endswith((".safetensors", ".ckpt")) for name in names) else UNKNOWN


def places_below(folder: Path) -> list[str]:
    """Folders one level below that hold a checkpoint of MindSpore or MindFormers: where to look when the folder itself holds none."""
    known = (UNIFIED, MINDFORMERS2, RANKS, CONVERSION)
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    return [entry.name for entry in below if ITERATION.fullmatch(entry.name) or folder_kind(entry) in known][:20]
