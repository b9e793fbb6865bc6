"""The file formats of ranks and weights by name: how the header of an existing file is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from converter.ckpt_format import read_ckpt
from converter.safetensors_format import read_header
from converter.tensors import StoredTensor


def _read_safetensors(path: Path) -> list[StoredTensor]:
    return read_header(path)[0]


READERS: Mapping[str, Callable[[Path], list[StoredTensor]]] = {"safetensors": _read_safetensors, "ckpt": read_ckpt}
