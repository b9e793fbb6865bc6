"""Reading a rank tree: a file in another's place, two files in one place, and what a cast leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from converter.cli import run
from converter.display import show_refusal
from converter.safetensors_format import read_header
from mappings.errors import Problem, Refused
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    save_tiny(folder / "model", "llama-gqa")
    assert run(["hf2ms", str(folder / "model"), "-o", str(folder / "slices"), "--tp", "2", "--pp", "2"]) == 0
    return folder


def copy_of(tree: Path, place: Path) -> Path:
    shutil.copytree(tree / "slices", place / "slices")
    return place / "slices"


def test_files_of_two_ranks_that_changed_places_are_refused_by_name(tree: Path, tmp_path: Path) -> None:
    from converter.rank_tree import read_rank_tree

    slices = copy_of(tree, tmp_path)
    first, second = slices / "rank_0/checkpoint_0.safetensors", slices / "rank_1/checkpoint_1.safetensors"
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    with pytest.raises(Refused) as refusal:
        read_rank_tree(slices)
    told = str(refusal.value)
    assert "rank_0/checkpoint_0.safetensors" in told and "rank '1' stands in the place of rank 0" in told


def test_two_checkpoints_in_one_ranks_folder_are_refused(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slices = copy_of(tree, tmp_path)
    shutil.copy(slices / "rank_2/checkpoint_2.safetensors", slices / "rank_2/older.safetensors")
    assert run(["ms2hf", str(slices), "-o", str(tmp_path / "back")]) == 1
    assert "older.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_lossy_cast_is_told_on_the_way_back(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hf2ms", str(tree / "model"), "-o", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    capsys.readouterr()
    assert run(["ms2hf", str(tmp_path / "bf16"), "-o", str(tmp_path / "back"), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["result"]["notes"]
    assert any("cast the weights to bf16" in note for note in notes)


def test_a_lossy_cast_is_not_called_equal(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hf2ms", str(tree / "model"), "-o", str(tmp_path / "bf16"), "--dtype", "bf16"]) == 0
    assert run(["verify", str(tree / "model"), str(tmp_path / "bf16")]) == 0
    told = capsys.readouterr().out
    assert "the cast to bf16" in told and "every bit is equal" not in told


def test_every_misfit_of_a_layout_is_told_at_once(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["hf2ms", str(tree / "model"), "--tp", "3", "--pp", "9", "--vocab-multiple", "64", "--dry-run"]) == 1
    told = capsys.readouterr().err
    assert "attention heads cannot be divided among 3" in told
    assert "cannot fill 9 pipeline stages" in told
    assert "--vocab-multiple 64 is not divisible by tp 3" in told


def test_a_full_disk_is_told_before_an_earlier_conversion_is_replaced(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slices = copy_of(tree, tmp_path)
    (tmp_path / "back").mkdir()
    (tmp_path / "back/config.json").write_text("{}")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert (
        run(["hf2ms", str(tree / "model"), "-o", str(slices), "--tp", "2", "--dtype", "fp32", "--vocab-multiple", "4096", "--overwrite"])
        == 1
    )
    assert "bytes are needed" in capsys.readouterr().err
    assert (slices / "manifest.json").exists() and len(list(slices.glob("rank_*/*.safetensors"))) == 4
    assert run(["ms2hf", str(slices), "-o", str(tmp_path / "back"), "--overwrite"]) == 1
    assert (tmp_path / "back/config.json").read_text() == "{}"


def test_a_long_refusal_is_one_screen_and_counts_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    show_refusal(Refused("too much is wrong", [Problem(f"number {index} is wrong", f"file {index}", "mend it") for index in range(100)]))
    told = capsys.readouterr().err.splitlines()
    assert len(told) < 30 and told[-1].strip() == "and 76 more" and told[-2].strip() == "-> mend it"


def test_bytes_that_changed_in_every_layer_are_told_in_one_line_per_file(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slices = copy_of(tree, tmp_path)
    path = slices / "rank_0/checkpoint_0.safetensors"
    tensors, _ = read_header(path)
    content = bytearray(path.read_bytes())
    for tensor in tensors:
        content[tensor.extents[0].offset] ^= 1
    path.write_bytes(content)
    assert run(["ms2hf", str(slices), "-o", str(tmp_path / "back")]) == 1
    told = capsys.readouterr().err
    assert "layers.{0..1}.attention.q_proj.weight is not what the manifest recorded" in told


def test_folders_that_were_mixed_up_are_named_as_what_they_are(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["ms2hf", str(tree / "model"), "-o", str(tmp_path / "x")], "a Hugging Face folder, not a rank tree"),
        (["ms2hf", str(tree / "slices/rank_0"), "-o", str(tmp_path / "x")], f"give the folder of the whole tree, {tree / 'slices'}"),
        (["hf2ms", str(tree / "slices"), "-o", str(tmp_path / "x")], "a rank tree of ms-convert, not a Hugging Face folder"),
        (["verify", str(tree / "slices"), str(tree / "model")], "a rank tree of ms-convert, not a Hugging Face folder"),
    ):
        assert run(arguments) == 1
        assert told in capsys.readouterr().err.replace("\n", "")
