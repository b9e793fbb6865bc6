"""From a stream of tokens to sequences of equal length, by arithmetic on places in the stream.

A sequence of length S is S + 1 tokens: the model reads the first S and predicts the last S. So neighbours share one token, and every token
but the first is predicted exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


class Sequences(Protocol):
    """Which tokens of the stream each sequence holds."""

    left_over: int

    def __len__(self) -> int: ...

    def spans(self, start: int, stop: int) -> tuple[Integers, Integers]:
        """The first token and the number of tokens of the sequences [start, stop)."""


class Packed:
    """Documents one after the other, cut wherever a sequence is full. The last `left_over` tokens fill no sequence."""

    def __init__(self, tokens: int, length: int) -> None:
        self._length = length
        self._count = max(0, (tokens - 1) // length)
        self.left_over = tokens - (self._count * length + 1) if self._count else tokens

    def __len__(self) -> int:
        return self._count

    def spans(self, start: int, stop: int) -> tuple[Integers, Integers]:
        starts = np.arange(start, stop, dtype=np.int64) * self._length
        return starts, np.full(len(starts), self._length + 1, np.int64)


class Padded:
    """Each document begins a sequence; one that is longer goes on in the next, whose first token is the last one of the sequence before."""

    left_over = 0

    def __init__(self, documents: Integers, length: int) -> None:
        """`documents`: the number of tokens of each, its end token included."""
        self._length, self._documents = length, documents
        self._document_starts = np.cumsum(documents) - documents
        self._ends = np.cumsum(-(-(documents - 1) // length))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def spans(self, start: int, stop: int) -> tuple[Integers, Integers]:
        numbers = np.arange(start, stop, dtype=np.int64)
        document = np.searchsorted(self._ends, numbers, side="right")
        before = np.where(document > 0, self._ends[document - 1], 0)
        inside = (numbers - before) * self._length
        return self._document_starts[document] + inside, np.minimum(self._documents[document] - inside, self._length + 1)


class TokenStream:
    """The tokens of several files, one after the other. A file is open only while it is read: there may be thousands."""

    def __init__(self, files: Sequence[Path], dtype: npt.DTypeLike) -> None:
        self._files, self._dtype = files, np.dtype(dtype)
        self._counts = np.array([path.stat().st_size // self._dtype.itemsize for path in files], np.int64)
        self._ends = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, stop: int) -> Tokens:
        """The tokens [start, stop)."""
        pieces = [np.empty(0, self._dtype)]
        file = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first, end = int(self._ends[file] - self._counts[file]), min(stop, int(self._ends[file]))
            pieces.append(np.fromfile(self._files[file], self._dtype, end - start, offset=(start - first) * self._dtype.itemsize))
            start, file = end, file + 1
        tokens: Tokens = np.concatenate(pieces).astype(np.int32)
        return tokens


def rows(stream: TokenStream, sequences: Sequences, start: int, stop: int, length: int, pad_id: int) -> tuple[Tokens, Tokens]:
    """Sequences [start, stop) as ids [n, length + 1], padded on the right, and a mask of the same shape: 1 a token, 0 padding."""
    starts, lengths = sequences.spans(start, stop)
    first = int(starts[0])
    tokens = stream.read(first, int((starts + lengths).max()))
    columns = np.arange(length + 1)
    mask = columns < lengths[:, None]
    places = np.where(mask, starts[:, None] - first + columns, 0)
    return np.where(mask, tokens[places], np.int32(pad_id)).astype(np.int32), mask.astype(np.int32)
