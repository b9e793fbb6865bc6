"""Casts between floating-point types: round to nearest, ties to even; infinities and NaN stay what they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

FLOATS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Types whose every finite value is finite in the key's type
_FITS = {"F64": {"F64", "F32", "F16", "BF16"}, "F32": {"F32", "F16", "BF16"}, "BF16": {"BF16", "F16"}, "F16": {"F16"}}

# The word of +infinity and the mask that takes the sign away
_INFINITY = {"F32": (0x7F800000, 0x7FFFFFFF), "F16": (0x7C00, 0x7FFF), "BF16": (0x7F80, 0x7FFF)}


def can_cast(source: str, target: str) -> bool:
    """Whether values of one type may be turned into another: only floating-point types, never integers."""
    return source == target or (source in FLOATS and target in FLOATS)


def cast_into(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], target_dtype: str, source_dtype: str) -> int:
    """Write `source` (words of `source_dtype`) as words of `target_dtype` to `target`, of the same shape, any strides.

    Returns how many finite values became infinite. The results are those of torch's `Tensor.to`, which rounds F64 to F32 before it
    rounds to 16 bits.
    """
    values = source.view(FLOATS[source_dtype])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if source_dtype == "F64" and target_dtype in ("F16", "BF16"):
            values = values.astype(np.float32)
        np.copyto(target.view(FLOATS[target_dtype]), values, casting="unsafe")
    if source_dtype in _FITS[target_dtype]:
        return 0
    infinity, magnitude = _INFINITY[target_dtype]
    infinite = (target & magnitude) == infinity
    return int(np.count_nonzero(np.isfinite(values_of(source, source_dtype)[infinite]))) if infinite.any() else 0


def values_of(words: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The same memory seen as floating-point values."""
    return words.view(FLOATS[dtype])
