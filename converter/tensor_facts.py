"""The facts of a list of stored tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from converter.tensors import StoredTensor


def tensor_facts(tensors: Iterable[StoredTensor]) -> dict[str, Any]:
    """Names, dtypes, shapes and files, the number of elements, and the bytes of each dtype."""
    listed = list(tensors)
    dtypes: Counter[str] = Counter()
    for tensor in listed:
        dtypes[tensor.dtype] += tensor.nbytes
    return {
        "tensors": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "file": tensor.path.name} for tensor in listed
        ],
        "elements": sum(tensor.elements for tensor in listed),
        "bytes_by_dtype": dict(dtypes),
    }
