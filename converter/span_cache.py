"""Spans of source tensors kept in one bounded piece of memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from converter.dtypes import item_size, word_type
from converter.open_files import SourceFiles
from converter.tensors import StoredTensor
from converter.word_copy import Words

_ALIGNMENT = 64  # bytes, of a cache line


class _Span(NamedTuple):
    """Elements [lo, hi) of a source's buffer, at byte `place` of the memory."""

    source: StoredTensor
    lo: int
    hi: int
    place: int


class SpanCache:
    """The spans read last, in `nbytes` of memory. When they do not fit, all are forgotten. For one thread."""

    def __init__(self, sources: SourceFiles, nbytes: int) -> None:
        self.nbytes = nbytes
        self._sources = sources
        self._memory = np.empty(nbytes, np.uint8)
        self._data = self._memory.data
        self._spans: list[_Span] = []
        self._used = 0

    def capacity(self, dtype: str) -> int:
        """Elements of a type that the whole memory holds."""
        return self.nbytes // item_size(dtype)

    def span(self, source: StoredTensor, lo: int, hi: int) -> tuple[Words, int]:
        """Words that hold elements [lo, hi) of the source's buffer, and the index of element `lo` in them; valid until the next call.

        Reads the file unless a kept span holds them. At most `capacity` elements.
        """
        for kept in self._spans:
            if kept.lo <= lo and hi <= kept.hi and (kept.source is source or kept.source == source):
                return self._words(kept), lo - kept.lo
        item = item_size(source.dtype)
        if self._used + (hi - lo) * item > self.nbytes:
            self.forget()
        made = _Span(source, lo, hi, self._used)
        self._sources.read(source, [(lo * item, self._data[made.place : made.place + (hi - lo) * item])])
        self._used = -(-(made.place + (hi - lo) * item) // _ALIGNMENT) * _ALIGNMENT
        self._spans.append(made)
        return self._words(made), 0

    def scratch(self, dtype: str) -> tuple[Words, memoryview]:
        """The whole memory as words and as bytes, for the caller's use until the next call. Forgets the spans."""
        self.forget()
        item = item_size(dtype)
        length = self.nbytes // item * item
        return self._memory[:length].view(word_type(dtype)), self._data

    def forget(self) -> None:
        """Forget all spans."""
        self._spans.clear()
        self._used = 0

    def _words(self, span: _Span) -> Words:
        length = (span.hi - span.lo) * item_size(span.source.dtype)
        return self._memory[span.place : span.place + length].view(word_type(span.source.dtype))
