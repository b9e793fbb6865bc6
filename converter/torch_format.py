"""PyTorch files (pytorch_model*.bin): where their tensors' bytes are, so that they are moved like those of any other file.

Source: torch/serialization.py. Since PyTorch 1.6 such a file is a zip: `<archive>/data.pkl` describes the tensors, `<archive>/data/<key>`
holds one storage each, uncompressed. torch.load maps the file (mmap=True) and makes every storage a view of the mapping; so the
addresses of the storages differ from their places in the file by one constant, and that is checked for all of them.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.dtypes import item_size
from converter.recognise import KINDS, not_a, recognise_opening
from converter.tensors import Extent, FileIdentity, StoredTensor
from converter.untrusted import Problems, changed_files, name_problem, opened, quoted, shape_problem
from mappings.errors import Refused, refuse

if TYPE_CHECKING:
    import torch

SAFETENSORS_TYPES = {
    "torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint64": "U64", "torch.uint32": "U32", "torch.uint16": "U16", "torch.uint8": "U8", "torch.bool": "BOOL",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.complex64": "C64",
}  # fmt: skip

_MAX_INDEX = 16 * 2**20  # bytes of the zip's directory and of data.pkl; a tensor takes about two hundred in each
_FIRST_SAFE = (2, 6)  # CVE-2025-32434: before it, weights_only=True could still run code
_REBUILD = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"}
_TYPE_NAMES = {name.removeprefix("torch.") for name in SAFETENSORS_TYPES}
_LOCAL_HEADER = 30  # bytes before the name: APPNOTE.TXT 4.3.7
_UTF8_NAME = 1 << 11  # the flag of a member whose name is UTF-8
_CHECKED = 16  # bytes of each storage that are compared with the file

_SAVE_STATE = "load it where it was made and save model.state_dict() with safetensors.torch.save_file"
_BROKEN = "fetch the file again; if it stays so, save it again as safetensors where it was made"
_UNTRUSTED = "do not load this file with weights_only=False; ask for safetensors"


@dataclass(frozen=True, slots=True)
class _Storage:
    """The place of a storage's bytes in the file, or of another member of the zip."""

    offset: int
    length: int


def read_torch_bin(path: Path) -> list[StoredTensor]:
    """The tensors of a PyTorch file in the order of its state dict; nothing but its description is read, nothing in it is executed.

    Tensors that share memory are given as they are: several names with the same extent, or overlapping ones. Strides are in elements,
    0 along an expanded axis. Raises Refused for every other kind of file, for torch missing or older than 2.6, for entries that are no
    plain CPU tensors, and for a pickle that asks for anything but tensors.
    """
    with opened(path) as (descriptor, size), open(descriptor, "rb", closefd=False) as file:
        identity = FileIdentity.of(os.fstat(descriptor))
        opening = file.read(4096)
        if recognise_opening(opening, size) == "torch_legacy":
            raise refuse(f"this is {KINDS['torch_legacy'].phrase}", str(path), KINDS["torch_legacy"].mend)
        if recognise_opening(opening, size) != "torch_zip":
            raise not_a("torch_zip", path, opening, size)
        storages = _storages(_BoundedReads(file, size), size, path)
        state = _load(path)
        if FileIdentity.of(os.stat(path)) != identity:  # PyTorch opened it by its name
            raise changed_files([path])
        _check_state(state, path)
        placed = _placed(state.values(), storages, file, path)
        return [_stored(name, tensor, placed, path, identity) for name, tensor in state.items()]


class _BoundedReads:
    """A binary file of which no single read is large: a zip's directory has the size that the file claims."""

    def __init__(self, file: io.BufferedReader, size: int) -> None:
        self._file = file
        self._size = size
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, length: int = -1) -> bytes:
        rest = max(0, self._size - self.tell())
        length = min(length, rest) if length >= 0 else rest
        if length > _MAX_INDEX:
            raise zipfile.BadZipFile(f"a directory of {length} bytes ({_MAX_INDEX} at most)")
        return self._file.read(length)


def _storages(file: _BoundedReads, size: int, path: Path) -> list[_Storage]:
    """The storages of the archive that hold bytes, in file order, after its description was found harmless."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename.lower(): member for member in archive.infolist()}  # PyTorch does not tell cases apart
            if len(members) != len(archive.infolist()):
                raise zipfile.BadZipFile("two members have the same name")
        places = {name: _member(file, member, size) for name, member in members.items()}
        prefix = next(iter(members), "").split("/")[0]  # as PyTorch takes it
        description = places.get(f"{prefix}/data.pkl")
        if description is None or f"{prefix}/constants.pkl" in places:
            raise refuse("a zip without a state dict of tensors (TorchScript, perhaps)", str(path), _SAVE_STATE)
        if description.length > _MAX_INDEX:
            raise refuse(f"a description of tensors of over {_MAX_INDEX} bytes", str(path), _UNTRUSTED)
        byte_order = places.get(f"{prefix}/byteorder")
        if byte_order is not None and _content(file, byte_order) != b"little":
            raise refuse("its numbers are not little-endian", str(path), _SAVE_STATE)
        _check_pickle(_content(file, description), path)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        raise refuse(f"a damaged or truncated PyTorch file: {error}", str(path), _BROKEN) from error
    held = [place for name, place in places.items() if name.startswith(f"{prefix}/data/") and place.length]
    return sorted(held, key=lambda place: place.offset)


def _member(file: _BoundedReads, member: zipfile.ZipInfo, size: int) -> _Storage:
    """The place of a member's bytes, which its local header tells: the directory at the end gives only that header's place."""
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 or member.compress_size != member.file_size:
        raise zipfile.BadZipFile(f"{quoted(member.filename)} is compressed or encrypted")
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER)
    name = file.read(int.from_bytes(header[26:28], "little"))
    encoding = "utf-8" if member.flag_bits & _UTF8_NAME else "cp437"
    if header[:4] != b"PK\x03\x04" or name != member.orig_filename.encode(encoding):
        raise zipfile.BadZipFile(f"no header of {quoted(member.filename)} at byte {member.header_offset}")
    offset = member.header_offset + _LOCAL_HEADER + len(name) + int.from_bytes(header[28:30], "little")
    if offset + member.file_size > size:
        raise zipfile.BadZipFile(f"{quoted(member.filename)} ends after the file")
    return _Storage(offset, member.file_size)


def _content(file: _BoundedReads, place: _Storage) -> bytes:
    # Not by the zip's checksums: PyTorch can be told to leave them out, and reads such files
    file.seek(place.offset)
    return file.read(place.length)


def _check_pickle(pickled: bytes, path: Path) -> None:
    """Refuse a pickle that names anything but what a state dict of plain tensors is made of. It is taken apart, not executed."""
    if pickled[:1] != b"\x80" or not b"\x02" <= pickled[1:2] <= b"\x05":
        raise refuse("its description is not a pickle as PyTorch writes it", str(path), _UNTRUSTED)
    found: set[str] = set()
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            found.add(str(argument))
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            found.add(f"an object by {opcode.name}")
    foreign = sorted(name for name in found if not _is_tensor_part(*name.split(" ", 1)))
    if foreign:
        what = ", ".join(quoted(name.replace(" ", ".")) for name in foreign[:10])
        raise refuse(f"the pickle in this file asks for more than tensors: {what}", str(path), _UNTRUSTED)


def _is_tensor_part(module: str, name: str = "") -> bool:
    return (
        (module, name) in (("collections", "OrderedDict"), ("torch.storage", "UntypedStorage"), ("torch", "Size"))
        or (module == "torch" and (name in _TYPE_NAMES or name.endswith("Storage")))
        or (module == "torch._utils" and name in _REBUILD)
    )


def _load(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise refuse(
            f"PyTorch is needed to read this file and cannot be imported ({error})", str(path), "pip install 'ms-convert[hf]'"
        ) from error
    if tuple(int(part) for part in str(torch.__version__).split(".")[:2]) < _FIRST_SAFE:
        what = f"PyTorch {torch.__version__} may execute code that is hidden in this file (CVE-2025-32434)"
        raise refuse(what, str(path), "pip install 'torch>=2.6', or ask for safetensors")
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a hostile pickle makes the unpickler raise whatever it likes
        raise refuse(f"PyTorch refuses this file: {quoted(f'{type(error).__name__}: {error}')}", str(path), _UNTRUSTED) from error


def _check_state(state: Any, path: Path) -> None:
    import torch

    if not isinstance(state, Mapping):
        raise refuse(f"this file holds a {type(state).__name__}, not a state dict (tensors by name)", str(path), _SAVE_STATE)
    problems = Problems(path)
    for name, value in state.items():
        if not isinstance(name, str):
            problems.add(str(name), f"a name that is a {type(name).__name__}", _SAVE_STATE)
        elif isinstance(value, Mapping) and any(isinstance(inner, torch.Tensor) for inner in value.values()):
            mend = "load it where it was made and save this entry alone with safetensors.torch.save_file"
            problems.add(name, f"a state dict inside the file's own, with {len(value)} entries", mend)
        elif not isinstance(value, torch.Tensor):
            problems.add(name, f"a {type(value).__name__}, not a tensor", _SAVE_STATE)
        elif problem := name_problem(name) or shape_problem(value.shape) or _tensor_problem(value):
            problems.add(name, problem, _SAVE_STATE)
    problems.raise_if_any("entries of this PyTorch file are refused")


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.device.type != "cpu":
        return f"a tensor that is {tensor.layout}, {tensor.dtype}, on {tensor.device}: not plain numbers in this file"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated view, whose numbers are not in the file"
    if str(tensor.dtype) not in SAFETENSORS_TYPES:
        return f"the type {tensor.dtype}, which safetensors has no name for"
    return None


def _placed(tensors: Iterable[torch.Tensor], storages: Sequence[_Storage], file: io.BufferedReader, path: Path) -> dict[int, _Storage]:
    """The place in the file of each loaded storage, by its address.

    Every storage in the archive belongs to a tensor, so that the storages in order of their addresses are those in the file in order.
    """
    mapped = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors) if storage.nbytes()}
    addresses = sorted(mapped)
    if len(addresses) != len(storages):
        raise refuse(f"the zip holds {len(storages)} storages, its tensors use {len(addresses)}", str(path), _SAVE_STATE)
    placed = dict(zip(addresses, storages, strict=True))
    for address, place in placed.items():
        file.seek(place.offset)
        same_distance = address - place.offset == addresses[0] - storages[0].offset
        same_content = bytes(mapped[address][:_CHECKED].tolist()) == file.read(min(_CHECKED, place.length))
        if not (same_distance and mapped[address].nbytes() == place.length and same_content):
            raise _unplaced(path)
    return placed


def _stored(name: str, tensor: torch.Tensor, placed: Mapping[int, _Storage], path: Path, identity: FileIdentity) -> StoredTensor:
    dtype, shape = SAFETENSORS_TYPES[str(tensor.dtype)], tuple(tensor.shape)
    if not tensor.numel():
        return StoredTensor(name, path, dtype, shape, (Extent(0, 0),), identity=identity)
    storage = placed[tensor.untyped_storage().data_ptr()]
    begin = tensor.storage_offset() * item_size(dtype)
    last = sum((axis - 1) * stride for axis, stride in zip(shape, tensor.stride(), strict=True))
    length = (last + 1) * item_size(dtype)
    if begin + length > storage.length:
        raise _unplaced(path)
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return StoredTensor(name, path, dtype, shape, (Extent(storage.offset + begin, length),), strides, identity)


def _unplaced(path: Path) -> Refused:
    return refuse("the tensors' bytes were not found in the file where PyTorch has them", str(path), _SAVE_STATE)
