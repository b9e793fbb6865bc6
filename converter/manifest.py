"""`manifest.json`: what a rank tree is, where it came from, and the checksum of every tensor. Written last, atomically."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from converter.dtypes import ITEM_SIZE
from converter.layout import MAX_RANKS, ParallelLayout
from converter.records import RecordError, decode, encode
from mappings.errors import Problem, Refused, refuse
from model.config import ModelConfig

MANIFEST = "manifest.json"
SIDE_FOLDER = "huggingface"
LAYOUT_VERSION = 1
MAX_MANIFEST_BYTES = 4 << 30
MAX_ELEMENTS = 1 << 50
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
_RANK_FILE = re.compile(r"rank_\d{1,7}/checkpoint_\d{1,7}\.(safetensors|ckpt)")


@dataclass(frozen=True)
class TensorRecord:
    """A tensor of a file, in data order. `xxh3` is the 64-bit xxHash3 of its bytes, in hex ("" where it is not known)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3: str = ""


@dataclass(frozen=True)
class WeightFileRecord:
    """A weight file of the HF folder, to be written again under its name, with its header's metadata and tensor order."""

    name: str
    size: int
    metadata: dict[str, str]
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class SideFileRecord:
    """A file that travels in `huggingface/` and comes back byte for byte."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True)
class SourceRecord:
    """The Hugging Face folder. `dropped` (name in file: reason) is not restored; `duplicates` (name: the name that it repeats) is."""

    name: str
    form: Literal["safetensors", "torch"]
    index: str | None
    files: tuple[WeightFileRecord, ...]
    side_files: tuple[SideFileRecord, ...]
    dropped: dict[str, str]
    duplicates: dict[str, str]
    config: dict[str, Any]


@dataclass(frozen=True)
class RankFileRecord:
    """A rank's file with its coordinates and its layers (global numbers), never to be guessed from the file's name."""

    path: str
    rank: int
    stage: int
    data: int
    tensor: int
    layers: tuple[int, ...]
    size: int
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class Manifest:
    """The whole manifest. `run` is the identity of the conversion, repeated in the header of each safetensors file."""

    layout_version: int
    tool_version: str
    run: str
    family: str
    table: str
    table_name: str
    model: ModelConfig
    layout: LayoutRecord
    format: Literal["safetensors", "ckpt"]
    dtype: Literal["keep", "bf16", "fp16", "fp32"]
    source: SourceRecord
    files: tuple[RankFileRecord, ...]


@dataclass(frozen=True)
class LayoutRecord:
    """ParallelLayout as it stands in the file; rank order is pipeline outermost, then data, tensor innermost."""

    tp: int
    pp: int
    dp: int
    layers_per_stage: tuple[int, ...]
    vocab: int
    padded_vocab: int
    rank_order: Literal["pp-dp-tp"] = "pp-dp-tp"

    @classmethod
    def of(cls, layout: ParallelLayout) -> LayoutRecord:
        return cls(layout.tp, layout.pp, layout.dp, layout.layers_per_stage, layout.vocab, layout.padded_vocab)

    def layout(self) -> ParallelLayout:
        return ParallelLayout(self.tp, self.pp, self.dp, self.layers_per_stage, self.vocab, self.padded_vocab)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`: temporary file, fsync, rename, fsync of the folder."""
    write_atomically(folder / MANIFEST, json.dumps(encode(manifest), separators=(",", ":"), ensure_ascii=False))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader sees the old or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a rank tree's manifest. Raises Refused for a missing, foreign or damaged one."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise refuse("no such folder", str(folder), "give the output folder of hf2ms")
    if not path.is_file():
        raise refuse(
            f"no {MANIFEST}: not a finished output of ms-convert",
            str(folder),
            "if hf2ms was stopped, run the same command again; it continues",
        )
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise refuse("larger than 4 GiB", str(path), "this is no manifest of ms-convert")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(f"not valid JSON: {str(error)[:200]}", str(path), "restore it, or convert again") from error
    version = data.get("layout_version") if isinstance(data, dict) else None
    if version != LAYOUT_VERSION:
        raise refuse(
            f"layout version {str(version)[:40]}, this tool reads {LAYOUT_VERSION}",
            str(path),
            "use the version of ms-convert that wrote it",
        )
    try:
        manifest = decode(Manifest, data, "manifest")
    except (RecordError, RecursionError) as error:
        raise refuse(str(error)[:300], str(path), "restore it, or convert again") from error
    problems = [Problem(what, str(path), "restore it, or convert again") for what in _mistakes(manifest)]
    if problems:
        raise Refused("the manifest contradicts itself", problems[:40])
    return manifest


def _mistakes(manifest: Manifest) -> list[str]:
    """What makes a well-formed manifest unusable or unsafe."""
    layout, model = manifest.layout, manifest.model
    found = []
    sizes = {name: size for name, size in model.axis_sizes().items() if size < 0}
    if sizes or not (0 < model.layers <= MAX_LAYERS and model.heads > 0 and model.kv_heads > 0 and model.experts <= MAX_EXPERTS):
        return ["the model's sizes are out of range"]
    if not (layout.tp > 0 and layout.pp > 0 and layout.dp > 0 and layout.tp * layout.pp * layout.dp <= MAX_RANKS):
        return [f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp} is no layout"]
    if len(layout.layers_per_stage) != layout.pp or sum(layout.layers_per_stage) != manifest.model.layers:
        found.append("layers_per_stage does not split the model's layers")
    if layout.padded_vocab < layout.vocab or layout.padded_vocab % layout.tp or layout.vocab != manifest.model.vocab:
        found.append("the vocabulary sizes do not fit")
    if sorted(file.rank for file in manifest.files) != list(range(layout.tp * layout.pp * layout.dp)):
        found.append("the files are not one for each rank")
    else:
        found += [
            f"{file.path[:80]!r}: wrong coordinates for rank {file.rank}" for file in manifest.files if not _placed(file, layout.layout())
        ]
    found += [f"{file.path[:80]!r} is no rank file's path" for file in manifest.files if not _RANK_FILE.fullmatch(file.path)]
    groups = [file.tensors for file in manifest.files] + [file.tensors for file in manifest.source.files]
    for tensors in groups:
        for tensor in tensors:
            if tensor.dtype not in ITEM_SIZE or len(tensor.shape) > 16 or _elements(tensor.shape) > MAX_ELEMENTS:
                found.append(f"tensor {tensor.name[:80]!r}: no such tensor ({tensor.dtype[:20]} {str(tensor.shape)[:60]})")
    found += [
        f"{side.name[:80]!r} is no relative path below {SIDE_FOLDER}/"
        for side in manifest.source.side_files
        if not is_plain_relative(side.name)
    ]
    found += [
        f"{file.name[:80]!r} is no plain file name"
        for file in manifest.source.files
        if not is_plain_relative(file.name) or "/" in file.name
    ]
    index = manifest.source.index
    if index is not None and (not is_plain_relative(index) or "/" in index):
        found.append(f"{index[:80]!r} is no plain file name")
    return found


def _placed(file: RankFileRecord, layout: ParallelLayout) -> bool:
    place = layout.coordinates(file.rank)
    return (file.stage, file.data, file.tensor) == (place.stage, place.data, place.tensor)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
        if size < 0 or count > MAX_ELEMENTS:
            return MAX_ELEMENTS + 1
    return count


def is_plain_relative(name: str) -> bool:
    """Whether a name that a file gives is a relative path that stays below its folder, without a trick."""
    parts = name.split("/")
    return 0 < len(name) < 1024 and not set(name) & {"\\", "\0"} and all(part not in ("", ".", "..") and len(part) < 256 for part in parts)
