"""One forward pass with numpy at both ends, layer by layer: what a comparison with another implementation needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn

from mappings.errors import Problem, Refused
from model.bert import Bert
from model.config import ModelConfig
from model.execution import synchronous_pynative

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Outputs:
    """What a model computed. Logits are cut to the true vocabulary; what a model does not have is None.

    `hidden` is in order of computation: "embedding", "layers.0", ..., and for a decoder "final_norm"; each [batch, seq, hidden].
    """

    logits: Floats | None  # [batch, seq, vocab]
    hidden: dict[str, Floats]
    pooled: Floats | None = None  # [batch, hidden]
    nsp_logits: Floats | None = None  # [batch, 2]


def forward(cell: nn.Cell, ids: Integers, token_types: Integers | None = None, attention_mask: Integers | None = None) -> Outputs:
    """Run a model of `build_model` once, in PyNative mode whatever the caller's mode is.

    Args:
        ids: [batch, seq] in [0, vocab).
        token_types: [batch, seq] in [0, token_types), for encoders.
        attention_mask: [batch, seq], 0 where a token is padding, for encoders. A decoder is given padding on the right and needs no mask.

    Raises:
        Refused: for ids or token types out of range (MindSpore counts a negative one from the end), or a sequence longer than the learned
            positions.
    """
    config = cell.config
    check_inputs(config, ids, token_types)
    with synchronous_pynative():
        if not isinstance(cell, Bert):
            logits, states = cell(_integers(ids), True)
            return Outputs(_logits(logits, config), _name_states(config, states))
        inputs = [None if array is None else _integers(array) for array in (token_types, attention_mask)]
        logits, pooled, nsp_logits, states = cell(_integers(ids), *inputs, True)
        return Outputs(_logits(logits, config), _name_states(config, states), _floats(pooled), _floats(nsp_logits))


def check_inputs(config: ModelConfig, ids: Integers, token_types: Integers | None = None) -> None:
    """Refuse what an embedding table has no row for."""
    problems = []
    if ids.ndim != 2:
        raise Refused("wrong inputs", [Problem(f"ids of shape {list(ids.shape)}", "ids", "[batch, seq]")])
    if ids.size and not 0 <= ids.min() <= ids.max() < config.vocab:
        problems.append(Problem(f"ids from {ids.min()} to {ids.max()}, the vocabulary has {config.vocab}", "ids"))
    if token_types is not None and token_types.size and not 0 <= token_types.min() <= token_types.max() < config.token_types:
        problems.append(Problem(f"token types up to {token_types.max()}, the model has {config.token_types}", "token_types"))
    if config.positions == "learned" and ids.shape[1] > config.max_positions:
        problems.append(Problem(f"{ids.shape[1]} tokens, the model has {config.max_positions} positions", "ids"))
    if problems:
        raise Refused("wrong inputs", problems)


def state_names(config: ModelConfig) -> list[str]:
    """The names of the hidden states, in order of computation."""
    names = ["embedding", *(f"layers.{layer}" for layer in range(config.layers))]
    return [*names, "final_norm"] if config.kind == "decoder" else names


def _name_states(config: ModelConfig, states: tuple[Tensor, ...]) -> dict[str, Floats]:
    return {name: _floats(state) for name, state in zip(state_names(config), states, strict=True)}


def _logits(logits: Tensor | None, config: ModelConfig) -> Floats | None:
    return None if logits is None else _floats(logits)[..., : config.vocab]


def _integers(array: Integers) -> Tensor:
    return Tensor(array.astype(np.int32))


def _floats(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    array = tensor.asnumpy() if str(tensor.dtype) != "BFloat16" else tensor.float().asnumpy()
    return array.astype(np.float32)
