"""What is not carried is checked first: dropped buffers must be what the config says, duplicates must equal what they repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from converter.source_model import SourceModel
from converter.stored_bytes import MAX_SMALL_BYTES, read_small, same_bytes
from converter.tensors import StoredTensor
from mappings.errors import Problem, Refused
from mappings.names import fold_names
from model.config import ModelConfig

HALF_PRECISION = {"F16", "BF16"}
_MASKED = -9e3  # GPT-2's -1e4 is -9984 in bfloat16; no score that a model makes is near it


def check_not_carried(source: SourceModel) -> None:
    """Raises Refused, naming every dropped buffer that is not what it should be and every duplicate that differs."""
    problems = [*_wrong_duplicates(source), *_wrong_buffers(source)]
    if problems:
        raise Refused("tensors that would not be carried are not what they should be", problems)


def _wrong_duplicates(source: SourceModel) -> Iterable[Problem]:
    heads = {name for rule in source.table.rules_with_role("head") for name in rule.hf}
    for name, of in source.duplicates.items():
        if not same_bytes(source.tensors[name], source.tensors[of]):
            why, mend = "of which the model uses one only", "find out which of the two is right, and save it under both names"
            if name in heads:
                why, mend = "tied embeddings", "if the model has a head of its own, say --no-tie-embeddings"
            yield Problem(f"{name} differs from {of}, which it should repeat ({why})", str(source.tensors[name].path), mend)


def _wrong_buffers(source: SourceModel) -> Iterable[Problem]:
    wrong: dict[tuple[str, str], list[str]] = {}
    for name, drop in source.dropped.items():
        if not _CHECKS[drop.check](source.tensors[name], source.config):
            wrong.setdefault((drop.why, drop.check), []).append(name)
    for (why, check), names in wrong.items():
        for name in fold_names(names):
            yield Problem(
                f"{name} would be dropped ({why}), but its values are others ({check})",
                str(source.folder.path),
                "check config.json against the model",
            )


def _is_inv_freq(tensor: StoredTensor, config: ModelConfig) -> bool:
    """theta ** (-2 i / rotary_dim). With a scaling rule, files hold scaled or plain frequencies by version: only the size is checked."""
    if config.rope is None or tensor.shape != (config.rope.rotary_dim // 2,):
        return False
    if config.rope.scaling is not None:
        return True
    found = _float64(tensor)  # before anything of the size that its shape says is made
    expected = config.rope.theta ** -(np.arange(0, config.rope.rotary_dim, 2, dtype=np.float64) / config.rope.rotary_dim)
    relative = 2e-2 if tensor.dtype in HALF_PRECISION else 1e-5
    return bool(np.allclose(found, expected, rtol=relative, atol=1e-6 if tensor.dtype in HALF_PRECISION else 0.0))


def _is_arange(tensor: StoredTensor, config: ModelConfig) -> bool:
    if tensor.elements * np.dtype(np.int64).itemsize > MAX_SMALL_BYTES:
        return False
    values = read_small(tensor).reshape(-1)
    return bool(np.array_equal(values, np.arange(values.size)))


def _is_causal_mask(tensor: StoredTensor, config: ModelConfig) -> bool:
    if len(tensor.shape) < 2 or not tensor.elements or tensor.shape[-1] != tensor.shape[-2]:
        return False
    values = read_small(tensor)
    return bool(np.array_equal(values, np.broadcast_to(np.tri(tensor.shape[-1], dtype=bool), tensor.shape)))


def _is_masked_bias(tensor: StoredTensor, config: ModelConfig) -> bool:
    return tensor.elements == 1 and bool(np.all(_float64(tensor) <= _MASKED))


def _anything(tensor: StoredTensor, config: ModelConfig) -> bool:
    return True


def _float64(tensor: StoredTensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return read_small(tensor).astype(np.float64)


_CHECKS: dict[str, Callable[[StoredTensor, ModelConfig], bool]] = {
    "inv_freq": _is_inv_freq,
    "arange": _is_arange,
    "causal_mask": _is_causal_mask,
    "masked_bias": _is_masked_bias,
    "none": _anything,
}
