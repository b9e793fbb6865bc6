"""Unified and MindFormers 2.x folders of strangers: what MindFormers itself indexes is read, tricks of an index are not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from converter.chunked import ForeignCheckpoint
from converter.execute import fill
from converter.mindformers2_folder import read_mindformers2
from converter.mindformers2_index import StageWeights, metadata_text
from converter.strategy_format import ParameterLayout
from converter.unified_folder import read_unified
from mappings.errors import Refused

GOLDEN = Path(__file__).parents[1] / "data" / "mindformers2_metadata.json"
"""tests/oracle/generate_metadata_2_0.py made it with MindFormers."""

TWO, THREE = (2, 2), (2, 1, 2)
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
RNG = np.random.default_rng(3)


def stage_weights(stage: int) -> StageWeights:
    layer = f"decoder.layers.{stage}."
    described = {
        f"{layer}self_attention.linear_qkv.weight": (TWO, (0, -1), "BF16", (12, 6)),
        f"{layer}mlp.linear_fc2.weight": (TWO, (-1, 0), "BF16", (6, 5)),
        f"{layer}input_layernorm.weight": (TWO, (-1,), "F32", (6,)),
        f"{layer}self_attention.k.bias": (THREE, (1,), "F16", (4,)),
        "embedding.word_embeddings.weight": (TWO, (0, -1), "BF16", (64, 6)),
    }
    ranks = range(4 * stage, 4 * stage + 4)
    layouts = [ParameterLayout(name, matrix, mapping) for name, (matrix, mapping, _, _) in described.items()]
    slices = {name: (dtype, shape) for name, (_, _, dtype, shape) in described.items()}
    return StageWeights(ranks, [f"model-{rank:07d}-0000008.safetensors" for rank in ranks], layouts, slices)


def test_our_index_is_what_mindformers_writes_key_for_key() -> None:
    ours, theirs = json.loads(metadata_text([stage_weights(0), stage_weights(1)])), json.loads(GOLDEN.read_text())
    assert ours == theirs
    for name, entry in theirs["state_dict_metadata"].items():  # its reader unpacks the values as they come
        assert list(ours["state_dict_metadata"][name]["layout"]) == list(entry["layout"])


TYPES = {"BFloat16": np.float16, "Float32": np.float32, "Float16": np.float16}
"""numpy has no bfloat16 that safetensors would save; the index is changed to say float16."""


def write_golden(folder: Path) -> Arrays:
    """The files that MindFormers' index speaks of, cut by numpy; returns the whole arrays."""
    index = json.loads(GOLDEN.read_text().replace("BFloat16", "Float16"))
    wholes: Arrays = {}
    files: dict[str, Arrays] = {}
    for name, entry in index["state_dict_metadata"].items():
        whole = RNG.normal(0, 0.5, entry["global_shape"]).astype(TYPES[entry["properties"]["dtype"]])
        wholes[name] = whole
        cuts = entry["axis_fragmentations"]
        for chunk in entry["chunk"]:
            (place,) = chunk["global_offset"]
            piece = whole
            for axis, number in enumerate(np.unravel_index(place, cuts)):
                piece = np.split(piece, cuts[axis], axis)[number]
            for store in index["storage_data"][str((name, (place,)))]:
                files.setdefault(store["file_name"], {})[name] = np.ascontiguousarray(piece)
    folder.mkdir(parents=True, exist_ok=True)
    for file, arrays in files.items():
        save_file(arrays, folder / file, {"format": "ms"})
    (folder / "metadata.json").write_text(json.dumps(index))
    return wholes


def assert_read(checkpoint: ForeignCheckpoint, wholes: Mapping[str, np.ndarray[Any, Any]]) -> None:
    assert checkpoint.tensors.keys() == wholes.keys()
    for name, whole in wholes.items():
        words = np.empty(whole.shape, f"u{whole.itemsize}")
        fill(checkpoint.tensors[name].target(), words)
        assert np.array_equal(words.view(whole.dtype), whole), name


def test_chunks_are_put_where_mindformers_index_says(tmp_path: Path) -> None:
    wholes = write_golden(tmp_path / "root/iteration_00000012")
    (tmp_path / "root/latest_checkpointed_iteration.txt").write_text("12")
    assert_read(read_mindformers2(tmp_path / "root"), wholes)


def test_the_index_is_the_truth_where_a_balanced_save_wrote_each_chunk_once(tmp_path: Path) -> None:
    wholes = write_golden(tmp_path)
    index = changed(tmp_path)
    for stores in index["storage_data"].values():
        del stores[:-1]
    (tmp_path / "metadata.json").write_text(json.dumps(index))
    for rank in (0, 1, 4, 5):
        (tmp_path / f"model-{rank:07d}-0000008.safetensors").unlink(missing_ok=True)
    assert_read(read_mindformers2(tmp_path), wholes)


def test_the_optimizers_state_is_counted_and_not_read(tmp_path: Path) -> None:
    wholes = write_golden(tmp_path)
    index = changed(tmp_path)
    name = "decoder.layers.0.input_layernorm.weight"
    index["state_dict_metadata"][f"adam_m.{name}"] = index["state_dict_metadata"][name]
    index["storage_data"][str((f"adam_m.{name}", (0,)))] = [{"file_name": "opt-0000000-0000008.safetensors", "storage_rank": 0}]
    (tmp_path / "metadata.json").write_text(json.dumps(index))
    found = read_mindformers2(tmp_path)
    assert_read(found, wholes)
    assert found.ignored == {"optimizer state": (f"adam_m.{name}",)}


def changed(folder: Path) -> Any:
    return json.loads((folder / "metadata.json").read_text())


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def _file(name: str) -> Callable[[Any, Any], None]:
    def change(entry: Any, storage: Any) -> None:
        for store in storage[str((QKV, (1,)))]:
            store["file_name"] = name

    return change


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a file outside": (_file("../secret.safetensors"), "is not the name of a file in the folder"),
    "an absolute path": (_file("/etc/passwd"), "is not the name of a file in the folder"),
    "a file that is not there": (_file("model-0000007-0000009.safetensors"), "is missing"),
    "a file without the tensor": (_file("model-0000004-0000008.safetensors"), "which should hold chunk 1"),
    "a file that is no text": (lambda entry, storage: storage[str((QKV, (1,)))][0].update(file_name=3), "no file for chunk 1"),
    "a chunk without a file": (lambda entry, storage: storage.pop(str((QKV, (1,)))), "no file for chunk 1"),
    "a chunk too few": (lambda entry, storage: entry["chunk"].pop(), "1 of 2 chunks"),
    "a chunk twice": (lambda entry, storage: entry["chunk"][1].update(global_offset=[0]), "its chunks are not the 2"),
    "a place beyond": (lambda entry, storage: entry["chunk"][1].update(global_offset=[2]), "its chunks are not the 2"),
    "an offset in elements": (lambda entry, storage: entry["chunk"][1].update(global_offset=[12, 0]), "its chunks are not the 2"),
    "a place that is no number": (lambda entry, storage: entry["chunk"][1].update(global_offset=[True]), "its chunks are not the 2"),
    "another shape": (lambda entry, storage: entry["chunk"][1].update(local_shape=[13, 6]), "its chunks are not the 2"),
    "parts without end": (lambda entry, storage: entry.update(global_shape=[2**40, 6], axis_fragmentations=[2**40, 1]), "2 of 10995"),
    "parts that do not divide": (lambda entry, storage: entry.update(axis_fragmentations=[5, 1]), "parts of the axes"),
    "another size": (lambda entry, storage: entry.update(global_shape=[26, 6]), "its chunks are not the 2"),
    "a shape of floats": (lambda entry, storage: entry.update(global_shape=[24.0, 6]), "no global_shape"),
    "another type": (lambda entry, storage: entry["properties"].update(dtype="Float32"), "a part is F16, the tensor F32"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_an_index_that_contradicts_itself_or_leads_outside_is_refused(case: str, tmp_path: Path) -> None:
    write_golden(tmp_path / "in")
    save_file({QKV: np.zeros((12, 6), np.float16)}, tmp_path / "secret.safetensors")
    index = changed(tmp_path / "in")
    change, fault = CHANGES[case]
    change(index["state_dict_metadata"][QKV], index["storage_data"])
    (tmp_path / "in/metadata.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=fault):
        read_mindformers2(tmp_path / "in")


@pytest.mark.parametrize("text", ["", "-1", "../../etc", "1" * 60, "99", "1_0", "\u0663"])
def test_a_tracker_that_names_no_step_that_is_there_is_refused(text: str, tmp_path: Path) -> None:
    write_golden(tmp_path / "iteration_00000012")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(Refused, match=r"not a step|is missing"):
        read_mindformers2(tmp_path)


def test_links_out_of_a_folder_are_refused(tmp_path: Path) -> None:
    write_golden(tmp_path / "in")
    victim = tmp_path / "in/model-0000000-0000008.safetensors"
    victim.rename(tmp_path / "outside.safetensors")
    victim.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(Refused, match="leads out of the folder"):
        read_mindformers2(tmp_path / "in")


def write_unified(folder: Path, weight_map: Any) -> Arrays:
    folder.mkdir()
    arrays = {name: RNG.normal(0, 0.5, (3, 4)).astype(np.float32) for name in ("a", "b")}
    for number, name in enumerate(arrays):
        save_file({name: arrays[name]}, folder / f"part{number}.safetensors")
    (folder / "param_name_map.json").write_text(json.dumps(weight_map))
    return arrays


GOOD = {"a": "part0.safetensors", "b": "part1.safetensors"}


@pytest.mark.parametrize("content", [GOOD, {"metadata": {"total_size": 96}, "weight_map": GOOD}], ids=["flat", "nested"])
def test_both_forms_of_the_map_are_read(content: Any, tmp_path: Path) -> None:
    arrays = write_unified(tmp_path / "in", content)
    assert_read(read_unified(tmp_path / "in"), arrays)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (GOOD | {"b": "../part1.safetensors"}, "is not the name of a file"),
        (GOOD | {"b": "/etc/passwd"}, "is not the name of a file"),
        (GOOD | {"b": "part7.safetensors"}, "is missing"),
        (GOOD | {"b": "part0.safetensors"}, "its files do not hold"),
        (GOOD | {"b": 1}, "does not map names to files"),
        ({"weight_map": []}, "does not map names to files"),
        ({}, "does not map names to files"),
    ],
)
def test_a_map_that_names_what_is_not_there_is_refused(content: Any, fault: str, tmp_path: Path) -> None:
    write_unified(tmp_path / "in", content)
    save_file({"b": np.zeros((3, 4), np.float32)}, tmp_path / "part1.safetensors")
    with pytest.raises(Refused, match=fault):
        read_unified(tmp_path / "in")


def test_several_files_without_a_map_are_not_guessed_at(tmp_path: Path) -> None:
    arrays = write_unified(tmp_path / "in", GOOD)
    os.unlink(tmp_path / "in/param_name_map.json")
    with pytest.raises(Refused, match=r"no param_name_map\.json"):
        read_unified(tmp_path / "in")
    os.unlink(tmp_path / "in/part1.safetensors")
    assert_read(read_unified(tmp_path / "in"), {"a": arrays["a"]})


def test_steps_without_a_tracker_are_not_guessed_at(tmp_path: Path) -> None:
    """MindFormers writes the tracker last: without it no step is known to be whole."""
    for step in (40, 8):
        (tmp_path / f"iteration_{step:08d}").mkdir()
        save_file({"w": np.ones(3, np.float32)}, tmp_path / f"iteration_{step:08d}" / "model-0000000-0000001.safetensors")
    with pytest.raises(Refused) as caught:
        read_mindformers2(tmp_path)
    assert "no latest_checkpointed_iteration.txt beside 2 folder(s) of steps" in str(caught.value) and "iteration_00000040" in str(
        caught.value
    )
    assert list(read_mindformers2(tmp_path / "iteration_00000008").tensors) == ["w"]


def test_every_replica_that_the_index_names_is_told(tmp_path: Path) -> None:
    """The four ranks of a stage hold a norm four times, a tensor of two parts each part twice."""
    write_golden(tmp_path)
    checkpoint = read_mindformers2(tmp_path)
    groups: dict[str, list[set[str]]] = {}
    for group in checkpoint.replicas:
        groups.setdefault(group[0].name, []).append({stored.path.name for stored in group})
    assert [len(files) for files in groups["decoder.layers.0.input_layernorm.weight"]] == [4]
    assert [len(files) for files in groups["decoder.layers.0.self_attention.linear_qkv.weight"]] == [2, 2]
