"""Element types by their safetensors names ("F32", "BF16", ...), the only spelling used inside the converter.

Source: the safetensors format (`Dtype` in safetensors/src/tensor.rs). Tensors that keep their type are moved as unsigned words of the
same size, so that no value is ever interpreted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
    "C64": 8,
}  # fmt: skip

_WORD: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def item_size(dtype: str) -> int:
    """Bytes per element. Raises KeyError for a type that is not a safetensors name."""
    return ITEM_SIZE[dtype]


def word_type(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned numpy type of the same width, for moving values bit for bit."""
    return np.dtype(_WORD[ITEM_SIZE[dtype]])
