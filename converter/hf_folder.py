"""Reading a Hugging Face folder: config, index, headers and side files. No tensor data is read."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.folder_lock import PROGRESS_FOLDER
from converter.partial_files import is_reserved
from converter.safetensors_format import read_header
from converter.tensors import FileIdentity, StoredTensor
from converter.untrusted import changed_files
from mappings.errors import Problem, Refused, refuse
from mappings.names import fold_names

MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_SIDE_FILES = 20_000
NOT_WEIGHTS = {"training_args.bin"}  # written by transformers' Trainer beside the weights
SKIPPED_FOLDERS = {".git", ".cache", "__pycache__", PROGRESS_FOLDER}
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".h5",
    ".msgpack",
    ".gguf",
    ".pt",
    ".pth",
    ".ckpt",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".pkl",
    ".npz",
)


@dataclass(frozen=True)
class WeightForm:
    """One way in which a folder holds its weights. `shard` matches the names that belong to it."""

    name: str
    single: str
    index: str
    shard: re.Pattern[str]


SAFETENSORS, TORCH = (
    WeightForm("safetensors", "model.safetensors", "model.safetensors.index.json", re.compile(r"model(-\d+-of-\d+)?\.safetensors")),
    WeightForm("torch", "pytorch_model.bin", "pytorch_model.bin.index.json", re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")),
)
FORMS = (SAFETENSORS, TORCH)


@dataclass(frozen=True)
class WeightFile:
    """A weight file: `tensors` in data order, `metadata` of its header (empty for torch files). `modified` is st_mtime_ns."""

    name: str
    path: Path
    size: int
    modified: int
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]


@dataclass(frozen=True)
class SideFile:
    """A file that travels with the weights as it is. `name` is relative, with forward slashes."""

    name: str
    path: Path
    size: int


@dataclass(frozen=True)
class HFFolder:
    """A Hugging Face folder whose index, files and headers agree.

    `left` names files that are not carried (weights in another format), each with the reason.
    """

    path: Path
    config: dict[str, Any]
    form: WeightForm
    files: tuple[WeightFile, ...]
    index: str | None
    side_files: tuple[SideFile, ...]
    left: tuple[tuple[str, str], ...]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {tensor.name: tensor for file in self.files for tensor in file.tensors}


def read_hf_folder(folder: Path) -> HFFolder:
    """Read the headers of a folder. Raises Refused with all problems of a kind: a missing or foreign file, an index that disagrees."""
    if not folder.exists():
        raise refuse("no such folder", str(folder), "give the folder that holds config.json and the weights")
    if not folder.is_dir():
        raise refuse("a file, not a folder", str(folder), "give the folder that holds config.json and the weights")
    if (folder / "manifest.json").exists() and not (folder / "config.json").exists():
        mend = "`ms2hf` takes it; `verify` takes the Hugging Face folder first, then this"
        raise refuse("a rank tree of ms-convert, not a Hugging Face folder", str(folder), mend)
    config = read_json_object(folder / "config.json", MAX_CONFIG_BYTES, folder)
    form, index = _find_form(folder)
    weight_map = _read_index(folder, form, index) if index else {}
    names = sorted(set(weight_map.values())) if index else [form.single]
    _check_files(folder, form, names, index)
    files = _read_weight_files(folder, form, names)
    _check_headers(folder, files, weight_map, index)
    side_files, left = _side_files(folder, form, {*names, *([index] if index else [])})
    return HFFolder(folder, config, form, files, index, side_files, left)


def read_json_object(path: Path, limit: int, folder: Path) -> dict[str, Any]:
    """The JSON object in a file of `folder`, at most `limit` bytes. Raises Refused."""
    if not path.is_file():
        raise refuse(f"{path.name} is missing", str(folder), "give a complete Hugging Face folder")
    check_inside(path, folder)
    if path.stat().st_size > limit:
        raise refuse(f"larger than {limit >> 20} MiB", str(path), "this is no such file: check what was downloaded")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refuse(f"the file cannot be read: {error.strerror or error}", str(path), "see that you may read it") from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"not valid JSON: {str(error)[:200]}", str(path), "download or write it again") from error
    if not isinstance(data, dict):
        raise refuse("JSON, but not an object", str(path), "download or write it again")
    return data


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a path that leads out of its folder; links into the blobs of the same Hugging Face cache entry are allowed."""
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise refuse(f"a link that leads out of the folder, to {real}", str(path), "copy the file into the folder")


def _find_form(folder: Path) -> tuple[WeightForm, str | None]:
    for form in FORMS:
        has_single, has_index = (folder / form.single).exists(), (folder / form.index).exists()
        if has_single and has_index:
            what = f"both {form.single} and {form.index} are there: which one is the model?"
            raise refuse(what, str(folder), "remove the one that is out of date")
        if has_single or has_index:
            return form, form.index if has_index else None
    shards = sorted(name for name in os.listdir(folder) if any(form.shard.fullmatch(name) for form in FORMS))
    if shards:
        raise refuse(
            f"{len(shards)} weight shards ({shards[0]}, ...) but no index",
            str(folder),
            f"add {FORMS[0].index}: without it a missing shard would go unnoticed",
        )
    others = sorted(name for name in os.listdir(folder) if name.endswith(WEIGHT_SUFFIXES))
    found = f"; found {', '.join(others[:5])}" if others else ""
    raise refuse(
        f"no weights: neither {' nor '.join(form.single for form in FORMS)}, nor an index{found}",
        str(folder),
        "give a folder with safetensors weights",
    )


def _read_index(folder: Path, form: WeightForm, index: str) -> dict[str, str]:
    data = read_json_object(folder / index, MAX_INDEX_BYTES, folder)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse("no weight_map in the index", str(folder / index), "download the index again")
    bad = sorted({str(value)[:80] for value in weight_map.values() if not _is_basename(value)})
    if bad:
        problems = [
            Problem(
                f"names {value!r}, which is not a plain file name", str(folder / index), "an index may name files of its own folder only"
            )
            for value in bad[:10]
        ]
        raise Refused("the index points outside the folder", problems)
    return weight_map


def _is_basename(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) < 256 and value not in (".", "..") and not set(value) & {"/", "\\", "\0"}


def _check_files(folder: Path, form: WeightForm, names: list[str], index: str | None) -> None:
    problems = [
        Problem(f"{name} is named by {index} and missing", str(folder), "download it, or the whole folder, again")
        for name in names
        if not (folder / name).is_file()
    ]
    stray = sorted(name for name in os.listdir(folder) if form.shard.fullmatch(name) and name not in names)
    problems += [Problem(f"{name} is not named by {index or form.single}", str(folder), "remove it, or repair the index") for name in stray]
    if problems:
        raise Refused("the index and the files disagree", problems)


def _read_weight_files(folder: Path, form: WeightForm, names: list[str]) -> tuple[WeightFile, ...]:
    files, refusals = [], []
    for name in names:
        try:
            files.append(_read_weight_file(folder, form, name))
        except Refused as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise Refused(f"{len(refusals)} weight files cannot be read", [problem for error in refusals for problem in error.problems])
    return tuple(files)


def _read_weight_file(folder: Path, form: WeightForm, name: str) -> WeightFile:
    path = folder / name
    check_inside(path, folder)
    status = path.stat()
    if form.name == "torch":
        from converter.torch_format import read_torch_bin  # takes longer to import than a safetensors header to read

        tensors, metadata = read_torch_bin(path), dict[str, str]()
    else:
        tensors, metadata = read_header(path)
    if tensors and tensors[0].identity != FileIdentity.of(status):
        raise changed_files([path])
    return WeightFile(name, path, status.st_size, status.st_mtime_ns, tuple(tensors), metadata)


def _check_headers(folder: Path, files: tuple[WeightFile, ...], weight_map: dict[str, str], index: str | None) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for tensor in file.tensors:
            places[tensor.name].append(file.name)
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, found in places.items():
        if len(found) > 1:
            kinds["stands in several files", ", ".join(found)].append(name)
        elif index and name not in weight_map:
            kinds["is in the file but not in the index", found[0]].append(name)
    for name, file_name in weight_map.items():
        if file_name not in places.get(name, []):
            kinds["is in the index but not in the file", file_name].append(name)
    problems = [Problem(f"{folded} {what} ({where})") for (what, where), names in kinds.items() for folded in fold_names(names)]
    if problems:
        raise Refused(
            "the index and the headers disagree",
            [*problems, Problem("download the folder again, or rebuild the index", str(folder / (index or "")))],
        )


def _side_files(folder: Path, form: WeightForm, used: set[str]) -> tuple[tuple[SideFile, ...], tuple[tuple[str, str], ...]]:
    carried, left = [], []
    for path, why_left in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if name in used:
            continue
        if is_named_like_weights(name) or any(name == other.index for other in FORMS if other is not form):
            why_left = f"weights in another form than the {form.name} ones that are converted"
        elif is_reserved(name):
            why_left = "a file in the making, or of ms-convert's own"
        if why_left:
            left.append((name, why_left))
            continue
        check_inside(path, folder)
        carried.append(SideFile(name, path, path.stat().st_size))
        if len(carried) > MAX_SIDE_FILES:
            raise refuse(f"more than {MAX_SIDE_FILES} files beside the weights", str(folder), "is this the model's folder?")
    return tuple(carried), tuple(left)


def is_named_like_weights(name: str) -> bool:
    """Whether a relative name is that of the model's own weights in some form. A sub-folder's files are parts of their own
    (sentence-transformers keeps a dense layer in one): they travel as they are.
    """
    return "/" not in name and name not in NOT_WEIGHTS and name.endswith(WEIGHT_SUFFIXES)


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every entry below the folder that is no plain folder, with the reason why it cannot travel ("" when it can).

    Raises Refused for a folder that cannot be read.
    """

    def cannot_read(error: OSError) -> None:
        what = f"a folder that cannot be read: {error.strerror or error}"
        raise refuse(what, str(error.filename), "see that you may read it, or move it out of the model's folder") from error

    for root, folders, names in os.walk(folder, onerror=cannot_read, followlinks=False):
        links = {name for name in folders if (Path(root) / name).is_symlink()}
        yield from ((Path(root) / name, "a link to a folder, which is not followed") for name in sorted(links))
        yield from ((Path(root) / name, "no part of a model") for name in sorted(SKIPPED_FOLDERS.intersection(folders) - links))
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS - links)
        for name in sorted(names):
            path = Path(root) / name
            yield path, "" if path.is_file() else "neither a file nor a link to one"
