"""Greedy generation, for comparing continuations with another implementation. Each step runs the whole sequence again."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from mindspore import Tensor, nn

from model.execution import synchronous_pynative
from model.forward import Integers, check_inputs


def greedy(cell: nn.Cell, ids: Integers, steps: int, eos: Collection[int] = ()) -> Integers:
    """Continue `ids` with the likeliest token, up to `steps` times, ending after a token of `eos`.

    The sequence keeps its true length in every step, because dynamic rotary scaling depends on it.

    Args:
        cell: a decoder of `build_model`, with a head.
        ids: [1, seq] in [0, vocab).

    Returns:
        [1, seq + tokens generated].
    """
    sequence = np.asarray(ids, np.int32)
    vocab = cell.config.vocab
    with synchronous_pynative():
        for _ in range(steps):
            check_inputs(cell.config, sequence)
            logits = cell(Tensor(sequence))[0, -1, :vocab].asnumpy()
            chosen = int(logits.argmax())
            sequence = np.append(sequence, np.array([[chosen]], np.int32), axis=1)
            if chosen in eos:
                break
    return sequence
