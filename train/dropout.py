"""Dropout whose masks follow from a key, not from the state of a generator.

A pipeline stage computes a micro-batch's forward pass twice, before and during its backward pass, and a resumed run must go on as if it had
not been interrupted. Both need the same masks again, so a mask is a hash of (element, place in the model, seed, step, micro-batch, rank).
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from model.ops import ComposedAttention
from model.stage import DecoderStage
from train.communication import Groups

_BITS = 24
_MULTIPLIER_1, _MULTIPLIER_2, _GOLDEN = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B1


def mix(value: int) -> int:
    """The finaliser of MurmurHash3 (fmix32 in MurmurHash3.cpp of github.com/aappleby/smhasher): every bit of the input changes half of the
    output's.
    """
    value ^= value >> 16
    value = value * _MULTIPLIER_1 & 0xFFFFFFFF
    value ^= value >> 13
    value = value * _MULTIPLIER_2 & 0xFFFFFFFF
    return value ^ (value >> 16)


def combine(*values: int) -> int:
    """One 32-bit key of several numbers, in order."""
    key = 0
    for value in values:
        key = mix(key ^ (value * _GOLDEN & 0xFFFFFFFF)) + 1 & 0xFFFFFFFF
    return key


def as_int32(value: int) -> int:
    """The int32 with the same bits, for integer operators that wrap."""
    return value - (1 << 32) if value >= 1 << 31 else value


class DropoutKey:
    """The key that all dropout cells of a rank read. Equal on tensor-parallel ranks, which hold copies of the hidden states."""

    def __init__(self, seed: int, data_rank: int) -> None:
        self.parameter = Parameter(Tensor(0, ms.int32), name="dropout_key", requires_grad=False)
        self._seed, self._data_rank, self._step = seed, data_rank, 0

    def begin(self, step: int) -> None:
        """Take up a step, counted from 0 over the whole run."""
        self._step = step

    def choose(self, micro_batch: int) -> None:
        """Set the key of a micro-batch of the step. Nothing that reads the one before may be running."""
        self.parameter.set_data(Tensor(as_int32(combine(self._seed, self._step, self._data_rank, micro_batch)), ms.int32))


class KeyedDropout(nn.Cell):
    """Drops an element with probability `probability` in training, and multiplies the others by 1 / (1 - probability).

    `site` tells the cells of a model apart. Integers are int32, which every device multiplies, and wrap; a logical shift is an arithmetic
    one without the sign's copies.
    """

    def __init__(self, probability: float, site: int, key: Parameter) -> None:
        super().__init__()
        self.key = key
        self.site = as_int32(combine(site))
        self.threshold = round(probability * (1 << _BITS))
        self.scale = 1.0 / (1.0 - probability)
        self.xor, self.right, self.bits = ops.BitwiseXor(), ops.RightShift(), ops.BitwiseAnd()

    def shifted(self, x: Tensor, count: int) -> Tensor:
        """x >> count without sign extension."""
        kept = (1 << (32 - count)) - 1
        return self.bits(self.right(x, ops.full_like(x, count)), ops.full_like(x, kept))

    def mixed(self, x: Tensor) -> Tensor:
        """`mix` of every element."""
        x = self.xor(x, self.shifted(x, 16)) * Tensor(as_int32(_MULTIPLIER_1), ms.int32)
        x = self.xor(x, self.shifted(x, 13)) * Tensor(as_int32(_MULTIPLIER_2), ms.int32)
        return self.xor(x, self.shifted(x, 16))

    def construct(self, x: Tensor) -> Tensor:
        """x of any shape -> the same, some elements zero."""
        if not self.training:
            return x
        count = 1
        for size in x.shape:
            count = count * size
        places = ops.cast(ops.arange(count), ms.int32)
        seed = ops.ones_like(places) * (self.key + self.site)
        words = self.mixed(self.xor(self.mixed(places), seed))
        kept = self.shifted(words, 32 - _BITS) >= self.threshold
        return x * ops.cast(ops.reshape(kept, x.shape), x.dtype) * self.scale


def attach_dropout(stage: DecoderStage, seed: int, groups: Groups) -> DropoutKey | None:
    """Put keyed dropout in the place of the stage's own wherever the probability is not 0. None when it is 0 everywhere.

    Attention weights differ between tensor-parallel ranks, so there the rank is part of the site; hidden states do not.
    """
    key = DropoutKey(seed, groups.place.data)
    sites = 0
    for path, cell in list(stage.cells_and_names()):
        for name, child in list(cell.name_cells().items()):
            if not isinstance(child, nn.Dropout) or not child.p:
                continue
            own = groups.place.tensor if isinstance(cell, ComposedAttention) else 0
            site = combine(own, *f"{path}.{name}".encode())
            setattr(cell, name, KeyedDropout(float(child.p), site, key.parameter))
            sites += 1
    stage.set_train(stage.training)
    return key if sites else None


def reference_mask(shape: tuple[int, ...], probability: float, site: int, key: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """KeyedDropout's mask, computed with Python's integers: True where an element is kept."""
    seed = (key + combine(site)) & 0xFFFFFFFF
    words = [mix(mix(place) ^ seed) for place in range(int(np.prod(shape)))]
    return np.array([(word >> (32 - _BITS)) >= round(probability * (1 << _BITS)) for word in words]).reshape(shape)
