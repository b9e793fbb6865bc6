"""What the tests of the planner share: rule tables in few lines, models of any size, and an interpreter of copies in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from converter.copies import paired_boxes
from converter.layout import ParallelLayout, distinct_slices, slice_of
from converter.plan import StridedCopy, TargetTensor
from converter.strided import check_cover
from converter.tensors import Extent, StoredTensor, contiguous_strides
from mappings.expand import Expansion, expand
from mappings.tables import FamilyTable, parse_table
from model.config import ModelConfig

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@cache
def config_part() -> str:
    """The bundled llama table without its rules: a table's [config], with what comes before."""
    text = files("mappings").joinpath("families").joinpath("llama.toml").read_text(encoding="utf-8")
    return text[: text.index("[[rule]]")]


@cache
def table_of(entries: str) -> FamilyTable:
    """A table with llama's [config] and these rules, axes, parameters ..."""
    return parse_table(f"{config_part()}\n{entries}", "mine.toml")


def rule(hf: str, ms: str | dict[str, str], hf_axes: str = "", **more: Any) -> str:
    """The TOML of one rule."""
    target = f'"{ms}"' if isinstance(ms, str) else "{ " + ", ".join(f'{label} = "{name}"' for label, name in ms.items()) + " }"
    lines = [f'hf = "{hf}"', f"ms = {target}", *([f'hf_axes = "{hf_axes}"'] if hf_axes else [])]
    lines += [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in more.items()]
    return "\n".join(["[[rule]]", *lines, ""])


def config_of(**sizes: Any) -> ModelConfig:
    """A decoder; the sizes that a test does not name are small."""
    values: dict[str, Any] = {
        "family": "mine", "kind": "decoder", "layers": 1, "hidden": 3, "heads": 4, "kv_heads": 2, "head_dim": 2, "ffn": 8, "vocab": 11,
        "padded_vocab": 11, "max_positions": 5, "norm": "rms_norm", "norm_eps": 1e-5, "activation": "silu", "gated_mlp": True,
    }  # fmt: skip
    return ModelConfig(**values | sizes)


def attention_sizes(even_heads: bool = False) -> st.SearchStrategy[dict[str, int]]:
    """Random heads, KV heads (1 to all), head_dim and hidden size."""
    step = 2 if even_heads else 1
    return st.builds(
        lambda kv_heads, group, dim, hidden: {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": dim * step, "hidden": hidden},
        st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5),
    )  # fmt: skip


def numbered(shape: Iterable[int], seed: int = 0) -> Array:
    """Different numbers in a random order, none of them zero: an element in the wrong place shows, and so does one never written."""
    shape = tuple(shape)
    return (np.random.default_rng(seed).permutation(int(np.prod(shape))) + 1 + seed * 10**6).reshape(shape)


def stored(name: str, array: Array) -> StoredTensor:
    """A tensor whose buffer is the array's memory."""
    whole = array if array.base is None else array.base
    strides = tuple(stride // array.itemsize for stride in array.strides)
    shown = None if strides == contiguous_strides(array.shape) else strides
    return StoredTensor(name, Path("nowhere"), "I64", array.shape, (Extent(0, whole.size * 8),), shown)


def memory(array: Array) -> Array:
    """The memory behind an array, in order."""
    whole = array if array.base is None else array.base
    return whole.reshape(-1)


def run(target: TargetTensor, buffers: Mapping[str, Array]) -> Array:
    """The target as its copies fill it from the buffers of the sources; what no copy fills is zero. Every element is filled once."""
    assert check_cover(target) == []
    content = np.zeros(target.elements, np.int64)
    for copy in target.copies:
        view = _view(content, copy.target_offset, copy.target_strides, copy.shape)
        view[...] = _view(buffers[copy.source.name], copy.source_offset, copy.source_strides, copy.shape)
    return content.reshape(target.shape)


def _view(buffer: Array, offset: int, strides: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert 0 <= offset <= end < buffer.size
    return np.lib.stride_tricks.as_strided(buffer[offset:], shape, [stride * buffer.itemsize for stride in strides])


def expanded(table: FamilyTable, config: ModelConfig, tensors: Mapping[str, Array]) -> Expansion:
    """The expansion, which must expect exactly these tensors."""
    expansion = expand(table, config, {}, tensors)
    assert expansion.hf_shapes == {name: array.shape for name, array in tensors.items()}
    return expansion


def slices_of(expansion: Expansion, layout: ParallelLayout, tensors: Mapping[str, Array]) -> list[Arrays]:
    """What each tensor-parallel rank gets: the forward copies, run."""
    sources = {name: stored(name, array) for name, array in tensors.items()}
    buffers = {name: memory(array) for name, array in tensors.items()}
    ranks: list[Arrays] = []
    for rank in range(layout.tp):
        ranks.append({})
        for item in expansion.parameters.values():
            piece = slice_of(item.parameter, item.shape, expansion.sizes, layout, rank)
            copies: list[StridedCopy] = []
            for pairing in (pairing for pairing in expansion.pairings if pairing.ms == item.name):
                source = sources[pairing.hf]
                boxes = paired_boxes(expansion, pairing, piece, source.strides or contiguous_strides(source.shape))
                copies += [box.forward(source) for box in boxes]
            target = TargetTensor(item.name, "I64", piece.shape(item.shape), tuple(copies), item.name, piece.padding(item.shape))
            ranks[rank][item.name] = run(target, buffers)
    return ranks


def merged(expansion: Expansion, layout: ParallelLayout, ranks: list[Arrays]) -> Arrays:
    """The HF tensors from the ranks' slices: the backward copies, run."""
    tensors: Arrays = {}
    for hf, shape in expansion.hf_shapes.items():
        copies, buffers = [], {}
        for pairing in (pairing for pairing in expansion.pairings if pairing.hf == hf):
            item = expansion.parameters[pairing.ms]
            for rank, piece in distinct_slices(item.parameter, item.shape, expansion.sizes, layout):
                name = f"{pairing.ms} {rank}"
                buffers[name] = ranks[rank][pairing.ms].reshape(-1)
                source = stored(name, np.ascontiguousarray(ranks[rank][pairing.ms]))
                copies += [box.backward(source) for box in paired_boxes(expansion, pairing, piece, contiguous_strides(shape))]
        tensors[hf] = run(TargetTensor(hf, "I64", shape, tuple(copies), hf), buffers)
    return tensors
