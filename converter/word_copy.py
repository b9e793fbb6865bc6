"""Copying between strided views of words in memory, at the speed of memory: transposes by tiles, casts on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from converter.casts import cast_into

Words = np.ndarray[Any, np.dtype[Any]]

# A transposed tile fits the second-level cache. The padding keeps its rows out of each other's cache sets.
TILE_ROWS = 256
TILE_ROW_BYTES = 1024
_TILE_PADDING = 64
_SHORT = 16  # elements: a dimension shorter than that is not worth a tile


class WordCopier:
    """Copies views of words. For one thread: it owns a tile of memory."""

    def __init__(self) -> None:
        self._tile = np.empty((TILE_ROWS, TILE_ROW_BYTES + _TILE_PADDING), np.uint8)

    def copy(self, target: Words, source: Words, target_dtype: str, source_dtype: str) -> int:
        """Copy `source` to `target` (same shape, words of the given types). Returns how many finite values a cast made infinite."""
        across, along = _unit_axis(source), _unit_axis(target)
        if across is None or along is None or across == along or min(source.shape[across], source.shape[along]) < _SHORT:
            return _move(target, source, target_dtype, source_dtype)
        outer = [axis for axis in range(source.ndim) if axis not in (across, along)]
        order = (*outer, along, across)
        source, target = source.transpose(order), target.transpose(order)
        return sum(
            self._transpose(target[index], source[index], target_dtype, source_dtype) for index in np.ndindex(source.shape[: len(outer)])
        )

    def _transpose(self, target: Words, source: Words, target_dtype: str, source_dtype: str) -> int:
        """Two dimensions, rows contiguous in the source and columns contiguous in the target: by tiles packed in the cache."""
        words = self._tile.view(source.dtype)
        rows, columns = source.shape
        width = TILE_ROW_BYTES // source.itemsize
        overflows = 0
        for left in range(0, columns, width):
            for top in range(0, rows, TILE_ROWS):
                piece = source[top : top + TILE_ROWS, left : left + width]
                tile = words[: piece.shape[0], : piece.shape[1]]
                tile[...] = piece
                overflows += _move(target[top : top + TILE_ROWS, left : left + width], tile, target_dtype, source_dtype)
        return overflows


def _unit_axis(view: Words) -> int | None:
    """The axis along which the view's words are adjacent in memory."""
    return next((axis for axis in range(view.ndim) if view.strides[axis] == view.itemsize and view.shape[axis] > 1), None)


def _move(target: Words, source: Words, target_dtype: str, source_dtype: str) -> int:
    if target_dtype == source_dtype:
        target[...] = source
        return 0
    return cast_into(target, source, target_dtype, source_dtype)
