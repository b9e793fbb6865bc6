"""MindFormers 2.x checkpoints as its trainer saves them, of one rank or many, read without a manifest.

Source: mindformers 2.0 and 2.1, checkpoint/{checkpoint,metadata,sharded_tensor,utils}.py:

    latest_checkpointed_iteration.txt                 the step, written last
    iteration_{step:08d}/
        [prefix-]model-{rank:07d}-{world:07d}.safetensors    weights; `opt-` instead of `model-`: the optimizer's state
        common.json, metadata.json

`metadata.json` lists each tensor's shape, into how many parts each axis is cut (`axis_fragmentations`), and its chunks. A chunk's
`global_offset` is *one* number, the chunk's place among all in row-major order (`_get_global_offset_and_replica_id_from_layout`), not an
offset in elements. `storage_data`, keyed by `str((name, (place,)))`, says which files hold a chunk: the index, not a file's name, is
the truth, since a balanced save writes each chunk once. A single rank has no metadata.json: every tensor is whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from converter.chunked import Chunk, ChunkedTensor, ForeignCheckpoint, check_chunks
from converter.ckpt_format import SAFETENSORS_TYPES
from converter.hf_folder import check_inside, read_json_object
from converter.manifest import is_plain_relative
from converter.tensors import StoredTensor
from converter.unified_folder import safetensors_files, stored_tensors
from converter.untrusted import name_problem, quoted, shape_problem
from mappings.errors import Problem, Refused, refuse

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
COMMON = "common.json"
KIND = "MindFormers 2.x checkpoint"
OPTIMIZER_STATE = "optimizer state"
MAX_METADATA_BYTES = 1 << 30
ITERATION = re.compile(r"iteration_[0-9]{8,18}")
MODEL_FILE = re.compile(r"(?:.+-)?model-[0-9]{7,}-[0-9]{7,}\.safetensors")
OPTIMIZER_FILE = re.compile(r"(?:.+-)?opt-[0-9]{7,}-[0-9]{7,}\.safetensors")
_BROKEN = "restore it, or save the checkpoint again"


def iteration_folder(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"iteration_{step:08d}"


def step_folders(folder: Path) -> list[str]:
    """The names of the folders of steps in a folder, sorted."""
    return sorted((entry.name for entry in folder.iterdir() if ITERATION.fullmatch(entry.name) and entry.is_dir()), key=_step_of)


def _step_of(name: str) -> int:
    return int(name.rpartition("_")[2])


def chunk_key(name: str, place: int) -> str:
    """How `storage_data` spells a chunk."""
    return str((name, (place,)))


def find_iteration(folder: Path) -> Path:
    """The folder of the latest step; the folder itself where nothing tracks steps.

    Raises Refused for a step that is not there, and for folders of steps of which nothing says which is the last finished one.
    """
    tracker = folder / TRACKER
    if not tracker.is_file():
        steps = step_folders(folder)
        if steps and not safetensors_files(folder):
            mend = f"the save may not have ended: give the folder of the step that you want, {steps[-1]} for example"
            raise refuse(f"no {TRACKER} beside {len(steps)} folder(s) of steps", str(folder), mend)
        return folder
    check_inside(tracker, folder)
    with tracker.open("rb") as file:
        text = file.read(64).decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise refuse(f"it holds {quoted(text)}, not a step", str(tracker), _BROKEN)
    found = folder / iteration_folder(int(text))
    if not found.is_dir():
        raise refuse(f"{found.name} is missing, which {TRACKER} names", str(folder), "give the folder of a step that is there")
    check_inside(found, folder)
    return found


def read_mindformers2(folder: Path) -> ForeignCheckpoint:
    """The weights of the latest step, or of the step whose folder is given; the optimizer's state is counted, not read.

    Raises Refused for an index that contradicts itself or its files, or that leads outside the folder.
    """
    place = find_iteration(folder)
    return _read_indexed(place) if (place / METADATA).is_file() else _read_plain(place)


def _read_plain(folder: Path) -> ForeignCheckpoint:
    """Every file's tensors, whole; no name twice."""
    tensors: dict[str, ChunkedTensor] = {}
    optimizer: list[str] = []
    twice = []
    files = safetensors_files(folder)
    for name in files:
        for stored in stored_tensors(folder, name):
            if OPTIMIZER_FILE.fullmatch(name):
                optimizer.append(stored.name)
            elif stored.name in tensors:
                twice.append(Problem(f"{stored.name} is in another file too", str(folder / name), f"parts of tensors need {METADATA}"))
            else:
                tensors[stored.name] = ChunkedTensor.whole(stored)
    if twice:
        raise Refused("a tensor is in two files", twice[:20])
    if not tensors:
        raise refuse("no .safetensors file with weights", str(folder), "give the folder of a checkpoint")
    read = tuple(folder / name for name in files if not OPTIMIZER_FILE.fullmatch(name))
    return ForeignCheckpoint(KIND, folder, tensors, {OPTIMIZER_STATE: tuple(optimizer)} if optimizer else {}, read)


def _read_indexed(folder: Path) -> ForeignCheckpoint:
    content = read_json_object(folder / METADATA, MAX_METADATA_BYTES, folder)
    described, storage = content.get("state_dict_metadata"), content.get("storage_data")
    if not isinstance(described, dict) or not isinstance(storage, dict):
        raise refuse("it has no state_dict_metadata or no storage_data", str(folder / METADATA), _BROKEN)
    index = _Index(folder, storage)
    tensors, optimizer = {}, []
    for name, entry in described.items():
        places = index.check_entry(name, entry)
        if index.is_optimizer_state(name, places):
            optimizer.append(name)
        else:
            tensors[name] = index.tensor(name, entry, places)
    check_chunks(tensors.values())
    if not tensors:
        raise refuse("it lists no weights", str(folder / METADATA), "give the folder of a checkpoint")
    ignored = {OPTIMIZER_STATE: tuple(optimizer)} if optimizer else {}
    return ForeignCheckpoint(KIND, folder, tensors, ignored, index.files, tuple(index.replicas))


class _Index:
    """`metadata.json` and the headers of the files that it names, each read once."""

    def __init__(self, folder: Path, storage: Mapping[str, Any]) -> None:
        self._folder, self._storage = folder, storage
        self._headers: dict[str, Mapping[str, StoredTensor]] = {}
        self.replicas: list[tuple[StoredTensor, ...]] = []

    @property
    def files(self) -> tuple[Path, ...]:
        """The files whose headers were read."""
        return tuple(self._folder / name for name in self._headers)

    def _wrong(self, name: str, what: str) -> Refused:
        return refuse(f"{quoted(name)}: {what}", str(self._folder / METADATA), _BROKEN)

    def check_entry(self, name: str, entry: Any) -> list[int]:
        """The places of a tensor's chunks. Raises Refused for an entry that is not one."""
        described = entry if isinstance(entry, dict) else {}
        shape, cuts, chunks = described.get("global_shape"), described.get("axis_fragmentations"), described.get("chunk")
        if name_problem(name) or not isinstance(shape, list) or not isinstance(cuts, list) or shape_problem(shape) or shape_problem(cuts):
            raise self._wrong(name, "no global_shape and axis_fragmentations")
        if len(cuts) != len(shape) or any(cut < 1 or size % cut for size, cut in zip(shape, cuts, strict=True)):
            raise self._wrong(name, f"{cuts} parts of the axes {shape}")
        count = math.prod(cuts)
        if not isinstance(chunks, list) or len(chunks) != count:
            raise self._wrong(name, f"{len(chunks) if isinstance(chunks, list) else 'no'} of {count} chunks")
        local = [size // cut for size, cut in zip(shape, cuts, strict=True)]
        places = [place for chunk in chunks if (place := _place_of(chunk, local)) is not None]
        if sorted(places) != list(range(count)):
            raise self._wrong(name, f"its chunks are not the {count} of the shape {local}")
        return places

    def is_optimizer_state(self, name: str, places: Iterable[int]) -> bool:
        """Whether a tensor lies in the optimizer's files."""
        files = [file for place in places for file in self._files_of(name, place)]
        return bool(files) and all(OPTIMIZER_FILE.fullmatch(file) for file in files)

    def tensor(self, name: str, entry: Mapping[str, Any], places: Iterable[int]) -> ChunkedTensor:
        """The tensor of an entry that was checked."""
        shape, cuts = tuple(entry["global_shape"]), entry["axis_fragmentations"]
        local = tuple(size // cut for size, cut in zip(shape, cuts, strict=True))
        chunks = []
        for place in places:
            holders = self._holders(name, place)
            for stored in holders:
                if stored.shape != local:
                    raise self._wrong(name, f"a chunk has the shape {list(stored.shape)} in {stored.path.name}, not {list(local)}")
            if len(holders) > 1:
                self.replicas.append(tuple(holders))
            numbers = _row_major(place, cuts)
            chunks.append(Chunk(tuple(number * size for number, size in zip(numbers, local, strict=True)), holders[0]))
        dtype = self._dtype(name, entry)
        return ChunkedTensor(name, dtype or chunks[0].stored.dtype, shape, tuple(chunks))

    def _dtype(self, name: str, entry: Mapping[str, Any]) -> str | None:
        properties = entry.get("properties")
        said = properties.get("dtype") if isinstance(properties, dict) else None
        if not isinstance(said, str):
            return None
        return SAFETENSORS_TYPES.get(said)

    def _files_of(self, name: str, place: int) -> list[str]:
        stores = self._storage.get(chunk_key(name, place))
        files = [store.get("file_name") if isinstance(store, dict) else None for store in stores] if isinstance(stores, list) else []
        if not files or not all(isinstance(file, str) for file in files):
            raise self._wrong(name, f"no file for chunk {place}")
        outside = [file for file in files if "/" in str(file) or not is_plain_relative(str(file))]
        if outside:
            raise self._wrong(name, f"{quoted(str(outside[0]))} is not the name of a file in the folder")
        return [str(file) for file in files]

    def _holders(self, name: str, place: int) -> list[StoredTensor]:
        """The chunk in each of its files that is there; at least one must be."""
        files = list(dict.fromkeys(self._files_of(name, place)))
        present = [file for file in files if file in self._headers or (self._folder / file).is_file()]
        return [self._stored(name, place, file) for file in present or files[:1]]

    def _stored(self, name: str, place: int, file: str) -> StoredTensor:
        if file not in self._headers:
            self._headers[file] = {tensor.name: tensor for tensor in stored_tensors(self._folder, file)}
        stored = self._headers[file].get(name)
        if stored is None:
            raise self._wrong(name, f"it is not in {quoted(file)}, which should hold chunk {place}")
        return stored


def _place_of(chunk: Any, local: list[int]) -> int | None:
    """A chunk's place; None for what is no chunk of this shape."""
    offset = chunk.get("global_offset") if isinstance(chunk, dict) else None
    good = isinstance(offset, list) and len(offset) == 1 and type(offset[0]) is int and chunk.get("local_shape") == local
    return int(offset[0]) if good and isinstance(offset, list) else None


def _row_major(place: int, counts: list[int]) -> tuple[int, ...]:
    """The index along each axis of the `place`-th of a grid of boxes."""
    numbers = []
    for count in reversed(counts):
        place, number = divmod(place, count)
        numbers.append(number)
    return tuple(reversed(numbers))
