"""`hf2ms --target` against what MindFormers' own converters made of the same models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from converter.hf2ms import RankTreeOptions, convert, plan_conversion
from tests.oracle.goldens import FOLDER, LARGEST, Tensors, read_golden
from tests.oracle.sources import GAIN, SOURCES, SPREAD

TARGETS = {
    "llama-1.8": "mindformers-legacy@1.8",
    "llama-1.8-fused": "mindformers-legacy@1.8-fused",
    "qwen2-1.8": "mindformers-legacy@1.8",
    "qwen2-1.8-fused": "mindformers-legacy@1.8-fused",
    "llama-1.3": "mindformers-legacy@1.3",
    "llama-1.3-fused": "mindformers-legacy@1.3-fused",
    "qwen2-1.3": "mindformers-legacy@1.3",
    "qwen2-1.3-fused": "mindformers-legacy@1.3-fused",
    "gpt2-1.3": "mindformers-legacy@1.3",
    "qwen3-2.0": "mindformers@2.0",
}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_whole_checkpoint_is_bit_for_bit_what_upstream_makes(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    (converted,) = ranks_of(str(golden.about["source"]), TARGETS[name], 1, tmp_path)
    assert_same(converted, golden.whole)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_each_rank_of_two_holds_bit_for_bit_upstreams_slices(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    converted = ranks_of(str(golden.about["source"]), TARGETS[name], 2, tmp_path)
    assert len(converted) == len(golden.ranks) == 2
    for ours, upstream in zip(converted, golden.ranks, strict=True):
        assert_same(ours, upstream)


def test_the_fused_layouts_of_1_3_and_1_8_have_equal_shapes_and_other_contents() -> None:
    older, newer = read_golden("llama-1.3-fused"), read_golden("llama-1.8-fused")
    assert older.whole.keys() == newer.whole.keys()
    fused = [name for name in older.whole if not np.array_equal(older.whole[name], newer.whole[name])]
    assert {name.split(".", 3)[3] for name in fused} == {"attention.w_qkv.weight", "feed_forward.w_gate_hidden.weight"}
    assert all(older.whole[name].shape == newer.whole[name].shape for name in fused)


def test_the_ranks_of_1_3_fused_are_no_slices_of_its_whole_tensor() -> None:
    golden = read_golden("llama-1.3-fused")
    name = "model.layers.0.attention.w_qkv.weight"
    joined = np.concatenate([rank[name] for rank in golden.ranks])
    assert joined.shape == golden.whole[name].shape
    assert not np.array_equal(joined, golden.whole[name])


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_two_elements_of_a_source_are_equal(name: str) -> None:
    source = SOURCES[name]
    tensors = source.tensors()
    values = np.concatenate([value.ravel() - (GAIN if key in source.gains else 0) for key, value in tensors.items()])
    assert abs(float(values.std()) - SPREAD) < 1e-3
    every = np.concatenate([value.ravel() for value in tensors.values()])
    assert np.unique(every).size == every.size


def test_every_stored_output_is_tested_and_small() -> None:
    stored = {path.stem: path.stat().st_size for path in FOLDER.glob("*.npz")}
    assert stored.keys() == TARGETS.keys()
    assert max(stored.values()) <= LARGEST


def ranks_of(source: str, target: str, tp: int, folder: Path) -> list[Tensors]:
    """What `hf2ms` writes for each rank, read by the safetensors library."""
    out = folder / "ranks"
    model = SOURCES[source].write(folder / "hf")
    convert(plan_conversion(model, RankTreeOptions(tp=tp, target=target)), out)
    return [load_file(out / f"rank_{rank}" / f"checkpoint_{rank}.safetensors") for rank in range(tp)]


def assert_same(ours: Tensors, upstream: Tensors) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert set(ours) == set(upstream)
    described = {name: (value.dtype, value.shape) for name, value in ours.items()}
    assert described == {name: (value.dtype, value.shape) for name, value in upstream.items()}
    assert not [name for name, value in ours.items() if value.tobytes() != upstream[name].tobytes()]
