"""`manifest.json`: what a rank tree is, where it came from, and the checksum of every tensor. Written last, atomically."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal

from converter.dtypes import ITEM_SIZE
from converter.hf_folder import check_inside, is_named_like_weights
from converter.layout import MAX_RANKS, ParallelLayout
from converter.partial_files import SUFFIX, is_reserved, open_new, sync_folder
from converter.records import RecordError, decode, encode
from converter.untrusted import MAX_AXES, name_problem, quoted
from mappings.config_values import shown
from mappings.dialect_table import Dialect, dialect_of, parse_dialect
from mappings.errors import Problem, Refused, refuse
from model.config import ModelConfig

MANIFEST = "manifest.json"
SIDE_FOLDER = "huggingface"
LAYOUT_VERSION = 1
MAX_MANIFEST_BYTES = 512 << 20
MAX_ELEMENTS = 1 << 50
MAX_LAYERS = 10_000
MAX_EXPERTS = 100_000
MAX_PROBLEMS = 40
RANK, UNIFIED, MINDFORMERS2 = "rank", "unified", "mindformers2"
_WEIGHT_FILES = {
    RANK: re.compile(r"rank_[0-9]{1,7}/checkpoint_[0-9]{1,7}\.(safetensors|ckpt)"),
    UNIFIED: re.compile(r"part[0-9]{1,6}\.safetensors"),
    MINDFORMERS2: re.compile(r"iteration_[0-9]{8}/model-[0-9]{7}-[0-9]{7}\.safetensors"),
}


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
    """The whole manifest. `run` is the identity of the conversion, repeated in the header of each safetensors file.

    `disk` says how the files lie (converter/disk_layouts.py). Unified files hold whole parameters, all of rank 0, whatever the layout is
    that `strategy` records: the one of the strategy files beside them.
    """

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
    target: TargetRecord | None = None
    disk: Literal["rank", "unified", "mindformers2"] = "rank"
    strategy: LayoutRecord | None = None


@dataclass(frozen=True)
class TargetRecord:
    """The dialect whose names and layouts the files have, none for the canonical ones; its table travels with them.

    Two layout versions of a dialect can have equal names and shapes and other contents.
    """

    dialect: str
    version: str
    table: str

    @classmethod
    def of(cls, dialect: Dialect | None) -> TargetRecord | None:
        return None if dialect is None else cls(dialect.table.dialect, dialect.version, dialect.table.text)

    def read(self, where: str) -> Dialect:
        """The dialect. Raises Refused for a table that is none, and for a version that it does not have."""
        table = parse_dialect(self.table, f"{where}: dialect {quoted(self.dialect)}")
        if table.dialect != self.dialect:
            raise refuse(f"the table of {quoted(table.dialect)} stands for {quoted(self.dialect)}", where, "restore it, or convert again")
        return dialect_of(table, self.version)


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
    write_atomically(folder / MANIFEST, json.dumps(encode(manifest), separators=(",", ":")))


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file's content: a reader sees the old or the new one, with `durable` also after a power cut. One writer at a time."""
    write_whole(path, text.encode("utf-8"), durable)
    if durable:
        sync_folder(path.parent)


def write_whole(path: Path, content: bytes, durable: bool = False) -> None:
    """Write a file that has its name only when all of it is there."""
    temporary = path.with_name(f".{path.name}{SUFFIX}")
    with open_new(temporary) as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def _what_it_is(folder: Path) -> str:
    return "a Hugging Face folder, not a rank tree" if (folder / "config.json").exists() else "not a finished output of ms-convert"


def _what_to_do(folder: Path) -> str:
    if (folder / "config.json").exists():
        return "hf2ms makes a rank tree of it; `verify` takes the Hugging Face folder first"
    if (folder.parent / MANIFEST).exists():
        return f"give the folder of the whole tree, {folder.parent}"
    return (
        "if hf2ms was stopped, run the same command again: it continues; a checkpoint of MindFormers goes through "
        "`ms2hf --from DIALECT --config FILE`"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and check a rank tree's manifest. Raises Refused for a missing, foreign or damaged one."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise refuse("no such folder", str(folder), "give the output folder of hf2ms")
    if not path.is_file():
        raise refuse(f"no {MANIFEST}: {_what_it_is(folder)}", str(folder), _what_to_do(folder))
    check_inside(path, folder)
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise refuse(f"larger than {MAX_MANIFEST_BYTES >> 20} MiB", str(path), "this is no manifest of ms-convert")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise refuse(f"not readable as JSON: {str(error)[:200]}", str(path), "restore it, or convert again") from error
    version = data.get("layout_version") if isinstance(data, dict) else None
    if version != LAYOUT_VERSION:
        raise refuse(
            f"layout version {shown(version)}, this tool reads {LAYOUT_VERSION}",
            str(path),
            "use the version of ms-convert that wrote it",
        )
    try:
        manifest = decode(Manifest, data, "manifest")
    except (RecordError, RecursionError) as error:
        raise refuse(str(error)[:300], str(path), "restore it, or convert again") from error
    problems = [Problem(what, str(path), "restore it, or convert again") for what in islice(_mistakes(manifest), MAX_PROBLEMS)]
    if problems:
        raise Refused("the manifest contradicts itself", problems)
    return manifest


def _mistakes(manifest: Manifest) -> Iterator[str]:
    """What makes a well-formed manifest unusable or unsafe."""
    layout, model = manifest.layout, manifest.model
    if not (layout.tp > 0 and layout.pp > 0 and layout.dp > 0 and layout.tp * layout.pp * layout.dp <= MAX_RANKS):
        yield f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp} is no layout"
    elif not (0 < model.layers <= MAX_LAYERS and model.heads > 0 and model.kv_heads > 0 and 0 <= model.experts <= MAX_EXPERTS):
        yield "the model's sizes are out of range"
    elif len(layout.layers_per_stage) != layout.pp or min(layout.layers_per_stage) < 1 or sum(layout.layers_per_stage) != model.layers:
        yield "layers_per_stage does not split the model's layers"
    elif not _has_every_rank(manifest):
        yield "the files are not one for each rank, in order"
    else:
        yield from _mistakes_of_ranks(manifest)
    uneven = layout.padded_vocab % max(layout.tp, 1) and (manifest.target is None or layout.padded_vocab != layout.vocab)
    if layout.padded_vocab < layout.vocab or uneven or layout.vocab != model.vocab:
        yield "the vocabulary sizes do not fit"
    if layout.padded_vocab != model.padded_vocab:
        yield "model and layout have different padded vocabularies"
    if manifest.strategy is not None:
        yield from _mistakes_of_strategy(manifest.strategy, manifest)
    yield from _mistakes_of_source(manifest.source)


def _mistakes_of_strategy(strategy: LayoutRecord, manifest: Manifest) -> Iterator[str]:
    ranks = (strategy.tp, strategy.pp, strategy.dp)
    if manifest.disk != UNIFIED or min(ranks) < 1 or strategy.tp * strategy.pp * strategy.dp > MAX_RANKS:
        yield "the strategy files are for no layout"
    elif len(strategy.layers_per_stage) != strategy.pp or sum(strategy.layers_per_stage) != manifest.model.layers:
        yield "the strategy files do not split the model's layers"


def _has_every_rank(manifest: Manifest) -> bool:
    ranks = [file.rank for file in manifest.files]
    if manifest.disk == UNIFIED:
        return bool(ranks) and manifest.layout.layout().ranks == 1 and set(ranks) == {0}
    return ranks == list(range(manifest.layout.layout().ranks))


def _mistakes_of_ranks(manifest: Manifest) -> Iterator[str]:
    layout = manifest.layout.layout()
    layers = [
        tuple(range(end - count, end)) for end, count in zip(accumulate(layout.layers_per_stage), layout.layers_per_stage, strict=True)
    ]
    for path in _repeated(file.path for file in manifest.files):
        yield f"{quoted(path)} is named for two ranks"
    if manifest.disk == UNIFIED:
        for name in _repeated(tensor.name for file in manifest.files for tensor in file.tensors):
            yield f"{quoted(name)} is in two files"
    for file in manifest.files:
        place = layout.coordinates(file.rank)
        if (file.stage, file.data, file.tensor, file.layers) != (place.stage, place.data, place.tensor, layers[place.stage]):
            yield f"{quoted(file.path)}: wrong coordinates for rank {file.rank}"
        if not _WEIGHT_FILES[manifest.disk].fullmatch(file.path) or not file.path.endswith(manifest.format):
            yield f"{quoted(file.path)} is no rank file's path"
        for name in _repeated(tensor.name for tensor in file.tensors):
            yield f"{quoted(file.path)} lists {quoted(name)} twice"
        yield from _mistakes_of_tensors(file.tensors)


def _mistakes_of_source(source: SourceRecord) -> Iterator[str]:
    tensors = [tensor for file in source.files for tensor in file.tensors]
    names = [file.name for file in source.files] + [side.name for side in source.side_files]
    yield from _mistakes_of_tensors(tensors)
    for name in _repeated(tensor.name for tensor in tensors):
        yield f"the source has two tensors {quoted(name)}"
    for name in _repeated(names):
        yield f"the source has two files {quoted(name)}"
    for side in source.side_files:
        if (problem := side_name_problem(side.name)) is not None:
            yield f"{quoted(side.name)} is no relative path below {SIDE_FOLDER}/: {problem}"
    for file in source.files:
        if (problem := weight_name_problem(file.name)) is not None:
            yield f"{quoted(file.name)} is no plain file name of weights: {problem}"
    for needed in ("config.json", *([source.index] if source.index is not None else [])):
        if needed not in {side.name for side in source.side_files}:
            yield f"{quoted(needed)} is not among the side files"


def _mistakes_of_tensors(tensors: Iterable[TensorRecord]) -> Iterator[str]:
    for tensor in tensors:
        if name_problem(tensor.name) is not None:
            yield f"{quoted(tensor.name)} is no tensor's name"
        if tensor.dtype not in ITEM_SIZE or len(tensor.shape) > MAX_AXES or _elements(tensor.shape) > MAX_ELEMENTS:
            yield f"tensor {quoted(tensor.name)}: no such tensor ({quoted(tensor.dtype)} {str(tensor.shape[:MAX_AXES])[:60]})"


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
        if size < 0 or count > MAX_ELEMENTS:
            return MAX_ELEMENTS + 1
    return count


def side_name_problem(name: str) -> str | None:
    """Why a file beside the weights cannot travel under this name; None when it can."""
    if not is_plain_relative(name):
        return "control characters, a backslash, bytes that are not UTF-8, or a path that leaves its folder"
    if is_reserved(name):
        return f"{SUFFIX} at the end and .ms-convert at the beginning are for files in the making"
    return "it is named like weights" if is_named_like_weights(name) else None


def weight_name_problem(name: str) -> str | None:
    """Why a weight file cannot come back under this name; None when it can."""
    if not is_plain_relative(name) or "/" in name:
        return "control characters, a backslash, a slash, or bytes that are not UTF-8"
    if is_reserved(name):
        return ".ms-convert at the beginning is for files in the making"
    return None if name.endswith((".safetensors", ".bin")) else "it ends neither in .safetensors nor in .bin"


def is_plain_relative(name: str) -> bool:
    """Whether a name that a file gives is a relative path that stays below its folder, without a trick."""
    parts = name.split("/")
    good = all(part not in ("", ".", "..") and len(part) < 256 for part in parts)
    return good and len(name) < 1024 and "\\" not in name and not any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name)
