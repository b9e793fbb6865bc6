"""Strategy files as MindSpore leaves them: of one stage, merged by its own tool, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from mindspore.parallel._parallel_serialization import _build_searched_strategy, _convert_to_list

from converter.strategy_files import Strategy, read_strategy_file
from converter.strategy_format import ParameterLayout, write_merged, write_strategy
from mappings.errors import Refused
from tests.converter.command_line import done, ms_convert, refused

STAGES = {
    0: (
        ParameterLayout("embedding", (2, 4), (0, -1)),
        ParameterLayout("layers.0.o_proj.weight", (2, 4), (-1, 0), 1, -1),
        ParameterLayout("layers.0.k_proj.weight", (2, 2, 2), (1, -1), 2, 2),
    ),
    1: (ParameterLayout("layers.1.norm", (2, 4), (-1,)), ParameterLayout("embedding", (2, 4), (0, -1))),
    2: (ParameterLayout("head", (2, 4), (0, 1)),),
}


def write_stages(folder: Path) -> Path:
    folder.mkdir()
    for stage, layouts in STAGES.items():
        (folder / f"ckpt_strategy_rank_{stage * 8}.ckpt").write_bytes(write_strategy(layouts, stage))
    return folder


def as_json(stage: int) -> str:
    layouts = {
        item.name: {
            "dev_matrix": list(item.device_matrix), "tensor_map": list(item.tensor_map), "field": 0, "param_split_shape": [],
            "opt_weight_shard_step": item.opt_weight_shard_step, "opt_weight_shard_size": item.opt_weight_shard_size,
        }
        for item in STAGES[stage]
    }  # fmt: skip
    items = {f"MatMul-op{stage}": {"stage": stage, "parallel_strategy": [[1, 2]]}}
    return json.dumps({"current_stage": 1, "parallel_strategy_item": items, "parallel_layout_item": layouts})


def test_what_mindspore_merged_is_read_stage_by_stage(tmp_path: Path) -> None:
    ms.merge_pipeline_strategys(str(write_stages(tmp_path / "strategy")), str(tmp_path / "merged.ckpt"))
    assert read_strategy_file(tmp_path / "merged.ckpt") == Strategy(STAGES, True, "protobuf")


def test_what_we_merge_means_to_mindspore_what_it_merges_itself(tmp_path: Path) -> None:
    ms.merge_pipeline_strategys(str(write_stages(tmp_path / "strategy")), str(tmp_path / "theirs.ckpt"))
    (tmp_path / "ours.ckpt").write_bytes(write_merged(STAGES))
    theirs, ours = (_convert_to_list(_build_searched_strategy(str(tmp_path / f"{name}.ckpt"))) for name in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    for name, layout in theirs.items():  # the order of the stages is that of MindSpore's listing of the folder
        assert ours[name][:6] == layout[:6]
        assert sorted(ours[name][6]) == sorted(layout[6])


def test_the_json_form_of_a_stage_and_of_a_merged_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    for stage in STAGES:
        (tmp_path / f"strategy/{stage}.json").write_text(as_json(stage))
        assert read_strategy_file(tmp_path / f"strategy/{stage}.json") == Strategy({stage: STAGES[stage]}, False, "JSON")
    ms.merge_pipeline_strategys(str(tmp_path / "strategy"), str(tmp_path / "merged.json"))
    assert read_strategy_file(tmp_path / "merged.json") == Strategy(STAGES, True, "JSON")


@pytest.mark.parametrize("name", ["strategy/ckpt_strategy_rank_8.ckpt", "merged.ckpt", "stage.json"])
def test_inspect_prints_each_form(name: str, tmp_path: Path) -> None:
    ms.merge_pipeline_strategys(str(write_stages(tmp_path / "strategy")), str(tmp_path / "merged.ckpt"))
    (tmp_path / "stage.json").write_text(as_json(0))
    facts = done("inspect", tmp_path / name, "--json").facts
    expected = {"merged.ckpt": [0, 1, 2], "stage.json": [0]}.get(name, [1])
    assert facts["stages"] == expected
    found = [(item["stage"], item["name"], item["device_matrix"], item["tensor_map"]) for item in facts["parameters"]]
    assert found == [(stage, item.name, list(item.device_matrix), list(item.tensor_map)) for stage in expected for item in STAGES[stage]]
    shown = done("inspect", tmp_path / name).out
    assert all(item.name in shown for stage in expected for item in STAGES[stage])


def test_the_cut_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "s.ckpt").write_bytes(write_strategy(STAGES[0], 0))
    lines = [line.strip() for line in done("inspect", tmp_path / "s.ckpt").out.splitlines()]
    cuts = {line.split()[1]: line for line in lines if line.startswith("0 ")}
    assert cuts["embedding"].endswith("axis 0 in 4")
    assert cuts["layers.0.o_proj.weight"].endswith("axis 1 in 4, optimizer: all replicas")
    assert cuts["layers.0.k_proj.weight"].endswith("axis 0 in 2, optimizer: 2 more")


def change(**entries: Any) -> str:
    content = json.loads(as_json(0))
    content["parallel_layout_item"]["embedding"] |= entries
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (change(param_split_shape=[3, 5]), "cut unevenly"),
        (change(field=1), "cut unevenly"),
        (change(tensor_map=[0, 0]), "does not point to different axes"),
        (change(tensor_map=[[0, 1], -1]), "something else than numbers"),
        (change(dev_matrix=[2, "4"]), "something else than numbers"),
        (change(dev_matrix=[True, 4]), "something else than numbers"),
        (as_json(0).replace('"stage": 0', '"stage": -1'), "does not say its pipeline stage"),
        (json.dumps({"parallel_layout_item": {}}), "has no parallel_strategy_item"),
        ('{"parallel_layout_item": ' + "[" * 100000, "not readable as JSON"),
    ],
)
def test_a_json_strategy_that_makes_no_sense_is_refused_with_its_fault(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(Refused, match=fault):
        read_strategy_file(tmp_path / "s.json")


def test_a_file_of_several_stages_that_does_not_say_which_is_refused(tmp_path: Path) -> None:
    content = json.loads(as_json(0))
    content["parallel_strategy_item"]["other"] = {"stage": 1}
    (tmp_path / "s.json").write_text(json.dumps(content))
    assert "does not say which each parameter is of" in refused("inspect", tmp_path / "s.json")


def test_another_json_file_is_still_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert ms_convert("inspect", tmp_path / "config.json").code == 1
