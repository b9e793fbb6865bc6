"""How the gradients are cut up for their sum over data-parallel ranks. Without a framework, so that a plan counts as the trainer does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

PIECE_ELEMENTS = 64 << 20
"""The most that one exchange carries, 256 MiB of float32: enough for full speed, and little beside the gradients themselves."""


def sum_pieces(sizes: Sequence[int], most: int = PIECE_ELEMENTS) -> Iterator[tuple[int, ...]]:
    """Indices of parameters with these numbers of elements, in order, together at most `most` or a single one."""
    piece: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        if piece and held + size > most:
            yield tuple(piece)
            piece, held = [], 0
        piece.append(index)
        held += size
    if piece:
        yield tuple(piece)


def largest_piece(total: int, largest: int) -> int:
    """Elements of the largest piece at most, of `total` in all where the largest parameter has `largest`."""
    return min(total, max(PIECE_ELEMENTS, largest))
