"""`inspect` tells each layout of a checkpoint from the others, with our manifest and without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest
from safetensors import safe_open

from tests.conftest import TinyFolder
from tests.converter.command_line import done, refused

CUT = ("--tp", 2, "--pp", 2)
KINDS = {
    "rank": "rank tree of MindSpore slices", "unified": "unified safetensors of whole MindSpore parameters",
    "mindformers2": "MindFormers 2.x checkpoint",
}  # fmt: skip
FOREIGN = {
    "rank": "folders of ranks (MindFormers 1.x, or MindSpore's tools)", "unified": "unified safetensors of MindSpore",
    "mindformers2": "MindFormers 2.x checkpoint",
}  # fmt: skip


def inspected(path: Path) -> Any:
    facts = done("inspect", path, "--json").facts
    assert facts["kind"].split("(")[0].strip() in done("inspect", path).out
    return facts


@pytest.fixture(scope="module", params=list(KINDS))
def written(request: pytest.FixtureRequest, tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp(request.param) / "out"
    done("hf2ms", tiny_folder("llama-gqa"), "-o", out, "--layout", request.param, *CUT)
    return request.param, out


def names_in(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "np") as file:
            found |= set(file.keys())
    return found


def test_what_hf2ms_wrote_is_told_with_its_layout(written: tuple[str, Path]) -> None:
    disk, out = written
    facts = inspected(out)
    assert (facts["kind"], facts["disk"]) == (KINDS[disk], disk)
    ranks = facts["strategy"] if disk == "unified" else facts["layout"]
    assert (ranks["tp"], ranks["pp"]) == (2, 2)
    assert {tensor["name"] for tensor in facts["tensors"]} == names_in(out)


@pytest.fixture
def bare(written: tuple[str, Path], tmp_path: Path) -> tuple[str, Path]:
    """The same files as another tool would have left them: no manifest, nothing of Hugging Face's."""
    disk, out = written
    shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("manifest.json", "huggingface"))
    return disk, tmp_path / "bare"


def test_the_same_files_without_the_manifest_are_told_too(bare: tuple[str, Path], written: tuple[str, Path]) -> None:
    disk, folder = bare
    facts = inspected(folder)
    assert facts["kind"] == FOREIGN[disk]
    if disk == "rank":
        assert (facts["ranks"], facts["strategy"]["folder"], facts["strategy"]["files"]) == (4, "strategy", 4)
        assert set(facts["strategy"]["stages"]) == {"0", "1"}
        return
    manifest = json.loads((written[1] / "manifest.json").read_text())
    held = sum(Path(written[1], file["path"]).stat().st_size for file in manifest["files"])
    assert sum(file["bytes"] for file in facts["files"]) == held
    assert {tensor["name"] for tensor in facts["tensors"]} == names_in(folder)
    assert set(facts["chunks"]) == ({"1"} if disk == "unified" else {"1", "2"})


def test_what_mindspore_unified_is_told_with_what_no_strategy_names(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    done("hf2ms", tiny_folder("llama-gqa"), "-o", tree, *CUT)
    ms.merge_pipeline_strategys(str(tree / "strategy"), str(tmp_path / "merged.ckpt"))
    ms.unified_safetensors(str(tree), str(tmp_path / "merged.ckpt"), str(tmp_path / "unified"))
    ms.save_checkpoint(
        [{"name": "global_step", "data": ms.Tensor(7)}], str(tmp_path / "unified/hyper_param.safetensors"), format="safetensors"
    )
    facts = inspected(tmp_path / "unified")
    assert facts["kind"] == FOREIGN["unified"]
    assert facts["ignored"] == {"not in param_name_map.json": 1}
    assert {tensor["name"] for tensor in facts["tensors"]} == names_in(tree)


def test_ranks_of_a_training_run_are_told_with_the_strategies_beside_their_folder(bare: tuple[str, Path], tmp_path: Path) -> None:
    disk, folder = bare
    if disk != "rank":
        return
    (tmp_path / "output/checkpoint").mkdir(parents=True)
    for rank in folder.glob("rank_*"):
        rank.rename(tmp_path / "output/checkpoint" / rank.name)
    (folder / "strategy").rename(tmp_path / "output/strategy")
    assert inspected(tmp_path / "output/checkpoint")["strategy"]["folder"] == "../strategy"
    assert "give the folder with the checkpoint: checkpoint" in refused("inspect", tmp_path / "output")


def test_loose_checkpoints_are_listed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ms.save_checkpoint([{"name": f"{name}.weight", "data": ms.Tensor([1.5, 2.5])}], str(tmp_path / f"{name}.ckpt"))
    facts = inspected(tmp_path)
    assert [file["name"] for file in facts["files"]] == ["a.ckpt", "b.ckpt"]
    assert [tensor["name"] for tensor in facts["tensors"]] == ["a.weight", "b.weight"]


def test_a_hugging_face_folder_that_mindformers_has_loaded_stays_one(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """MindFormers writes its map of names beside the weights."""
    shutil.copytree(tiny_folder("llama-gqa"), tmp_path / "model")
    (tmp_path / "model/param_name_map.json").write_text("{}")
    assert inspected(tmp_path / "model")["kind"] == "Hugging Face folder"
