"""The strategy files of a rank tree say how its slices are cut: MindSpore merges the tree by them, and numpy cuts as they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from converter.hf2ms import RankTreeOptions, convert, plan_conversion
from converter.hf_folder import read_hf_folder
from converter.layout import make_layout, slice_of
from converter.source_model import understand
from converter.strategies import stage_layouts, strategy_files, strategy_path
from converter.strategy_format import ParameterLayout, read_strategy
from tests.conftest import TinyFolder

Array = np.ndarray[Any, Any]


def cut_by_strategy(whole: Array, layout: ParameterLayout, device: int) -> Array:
    """The slice of a stage's device: devices fill the matrix in order, an axis is cut along the matrix axis that its map names."""
    place = np.unravel_index(device, layout.device_matrix)
    for axis, name in enumerate(layout.tensor_map):
        if name != -1:
            along = len(layout.device_matrix) - 1 - name
            whole = np.split(whole, layout.device_matrix[along], axis)[int(place[along])]
    return whole


@pytest.mark.parametrize("variant", ["llama-gqa-2", "llama-mqa", "gpt2-uneven-vocab", "qwen3-tied", "bert-mlm"])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 3), (8, 1, 2), (1, 2, 2)])
def test_cutting_as_the_strategy_says_gives_each_ranks_slice(variant: str, tp: int, pp: int, dp: int, tiny_folder: TinyFolder) -> None:
    source = understand(read_hf_folder(tiny_folder(variant)))
    layout = make_layout(source.config, source.expansion, tp=tp, pp=pp, dp=dp)
    files = strategy_files(source, layout)
    assert list(files) == [strategy_path(rank) for rank in range(layout.ranks)]
    for rank in range(layout.ranks):
        place = layout.coordinates(rank)
        stage, layouts = read_strategy(files[strategy_path(rank)])
        assert stage == place.stage
        assert len(layouts) == len(stage_layouts(source, layout, stage))
        held = [
            item
            for item in source.expansion.parameters.values()
            if stage in layout.stages_of(item.parameter, item.layer, source.config.tied)
        ]
        assert {entry.name for entry in layouts} == {item.name for item in held}
        by_name = {entry.name: entry for entry in layouts}
        for item in held:
            shape = tuple(
                layout.padded_vocab if atom == "vocab" else size
                for atom, size in zip(map(str, item.parameter.axes.items), item.shape, strict=True)
            )
            whole = np.arange(int(np.prod(shape))).reshape(shape)
            piece = slice_of(item.parameter, item.shape, source.expansion.sizes, layout, place.tensor)
            start = (place.tensor // piece.replicas) * piece.length
            expected = whole if piece.axis is None else whole.take(range(start, start + piece.length), piece.axis)
            assert np.prod(by_name[item.name].device_matrix) == tp * dp
            assert np.array_equal(cut_by_strategy(whole, by_name[item.name], rank - layout.rank(stage, 0, 0)), expected), item.name


NAMES = {
    "embed_tokens.weight": "embedding.tokens.embedding_table", "input_layernorm.weight": "attention_norm.gamma",
    "post_attention_layernorm.weight": "mlp_norm.gamma", "norm.weight": "final_norm.gamma", "q_norm.weight": "q_norm.gamma",
    "k_norm.weight": "k_norm.gamma",
}  # fmt: skip


def canonical(name: str) -> str:
    """The MindSpore name of a Llama or Qwen tensor, written down here once more. Their layouts are MindSpore's own: no transform."""
    *path, module, kind = name.removeprefix("model.").replace("self_attn", "attention").split(".")
    return ".".join([*path, NAMES.get(f"{module}.{kind}", f"{module}.{kind}")])


@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
@pytest.mark.parametrize(
    ("variant", "tp", "pp", "dp"), [("llama-gqa-2", 4, 2, 1), ("qwen3", 2, 3, 2), ("llama-uneven-vocab-tied", 8, 2, 1)]
)
def test_mindspore_rebuilds_the_whole_tensors_from_our_tree(
    variant: str, tp: int, pp: int, dp: int, file_format: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    import mindspore as ms

    source = tiny_folder(variant)
    convert(plan_conversion(source, RankTreeOptions(tp=tp, pp=pp, dp=dp, file_format=file_format)), tmp_path / "tree")
    merged = tmp_path / "merged.ckpt"
    ms.merge_pipeline_strategys(str(tmp_path / "tree" / "strategy"), str(merged))
    ms.transform_checkpoints(str(tmp_path / "tree"), str(tmp_path / "whole"), "whole", str(merged), None, output_format="ckpt")
    (path,) = (tmp_path / "whole").rglob("*.ckpt")
    made = {name: parameter.asnumpy() for name, parameter in ms.load_checkpoint(str(path)).items()}
    original = {canonical(name): array for name, array in load_file(source / "model.safetensors").items()}
    assert made.keys() == original.keys()
    for name, array in original.items():
        padding = made[name].shape[0] - array.shape[0]
        assert padding == 0 or name in ("embedding.tokens.embedding_table", "lm_head.weight")
        assert np.array_equal(made[name], np.concatenate([array, np.zeros((padding, *array.shape[1:]), array.dtype)])), name
