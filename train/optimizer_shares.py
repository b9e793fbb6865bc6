"""What one data-parallel rank updates of a parameter, by shapes alone: the rules of train/optimizer.py without a framework."""

from __future__ import annotations

import math
from dataclasses import dataclass

STATE_BYTES = 4
"""Moments and master weights are float32."""


def divided(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether the state of a parameter is divided over `ranks` data-parallel ranks: along axis 0, where it divides evenly."""
    return ranks > 1 and len(shape) > 0 and shape[0] % ranks == 0


def decays(shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: norms and biases, and nothing else, have one axis."""
    return len(shape) > 1


@dataclass(frozen=True)
class Share:
    """What one rank updates of a parameter: rows [start, stop) where the state is divided, otherwise all of it. `copied`: it has a master
    weight, since the parameter itself is of a 16-bit type, or not all this rank's.
    """

    shape: tuple[int, ...]
    start: int
    stop: int
    divided: bool
    copied: bool
    decayed: bool

    @property
    def elements(self) -> int:
        """How many elements this rank updates."""
        return (self.stop - self.start) * math.prod(self.shape[1:]) if self.divided else math.prod(self.shape)

    @property
    def state_bytes(self) -> int:
        """Bytes of both moments and of the master weight, if there is one."""
        return STATE_BYTES * self.elements * (3 if self.copied else 2)


def share_of(shape: tuple[int, ...], is_float32: bool, ranks: int, rank: int) -> Share:
    """The share that data-parallel rank `rank` of `ranks`, which divide the state, has of a parameter (a tensor-parallel rank's slice)."""
    parts = divided(shape, ranks)
    rows = shape[0] // ranks if parts else 0
    return Share(shape, rows * rank, rows * (rank + 1), parts, parts or not is_float32, decays(shape))
