"""Slices that are not what the manifest says, or that contradict each other: refused by name, and nothing that looks finished is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from converter import ms2hf
from converter.ckpt_format import read_ckpt
from converter.compare import compare_weights
from converter.hf_folder import read_hf_folder
from converter.rank_tree import read_rank_tree
from converter.safetensors_format import read_header
from converter.source_model import understand
from mappings.errors import Refused
from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, done, files_of, refused

LAYOUT = ("--tp", 4, "--pp", 2)
VARIANT = "llama-gqa-2"
"""Two KV heads for four ranks: each is there twice."""


@pytest.fixture(params=["safetensors", "ckpt"])
def tree(request: pytest.FixtureRequest, tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    """A rank tree of one's own, to be damaged."""
    return convert(tiny_folder(VARIANT, tokenizer=True), tmp_path / "slices", request.param)


@pytest.fixture
def safetensors_tree(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    return convert(tiny_folder(VARIANT, tokenizer=True), tmp_path / "slices", "safetensors")


def convert(source: Path, out: Path, file_format: str, *options: object) -> Path:
    done("hf2ms", source, "-o", out, *LAYOUT, "--format", file_format, *options)
    return out


def rank_file(tree: Path, rank: int) -> Path:
    (path,) = (tree / f"rank_{rank}").iterdir()
    return path


def relative(tree: Path, rank: int) -> str:
    return rank_file(tree, rank).relative_to(tree).as_posix()


def refusal(tree: Path, *options: object) -> str:
    """The message; there is no folder that looks like a model."""
    back = tree.parent / "back"
    before = files_of(tree)
    message = refused("ms2hf", tree, "-o", back, *options)
    assert not (back / "config.json").exists()
    assert files_of(tree) == before
    assert {path.name for path in tree.parent.iterdir()} <= {"slices", "back", "other", "outside"}
    return message


def flip(tree: Path, rank: int, name: str) -> str:
    """Changes the lowest bit of a slice's last element in place; returns the new checksum of the slice."""
    path = rank_file(tree, rank)
    tensors = read_header(path)[0] if path.suffix == ".safetensors" else read_ckpt(path)
    (extent,) = next(tensor for tensor in tensors if tensor.name == name).extents
    data = bytearray(path.read_bytes())
    data[extent.offset + extent.length - 4] ^= 1
    path.write_bytes(data)
    return xxhash.xxh3_64_hexdigest(data[extent.offset : extent.offset + extent.length])


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (0, "embedding.tokens.embedding_table"),
        (1, "layers.0.attention.q_proj.weight"),
        (3, "layers.1.mlp_norm.gamma"),
        (2, "layers.0.attention.k_proj.weight"),
        (3, "layers.0.attention.k_proj.weight"),
        (7, "final_norm.gamma"),
    ],
)
def test_one_bit_that_changed_is_found_by_file_and_name_replicas_too(rank: int, name: str, tree: Path) -> None:
    flip(tree, rank, name)
    message = refusal(tree)
    assert f"{relative(tree, rank)}: {name} is not what the manifest recorded" in message
    assert message.count("checksum") == 1


def test_everything_that_changed_is_named_at_once(tree: Path) -> None:
    for rank in (0, 5):
        for name in ("attention.o_proj.weight", "mlp.down_proj.weight"):
            flip(tree, rank, f"layers.{rank // 4 * 2}.{name}")
    assert refusal(tree).count("checksum") == 4


def edit_manifest(tree: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = tree / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def record_of(manifest: dict[str, Any], rank: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(tensor for tensor in manifest["files"][rank]["tensors"] if tensor["name"] == name)
    return found


@pytest.mark.parametrize(
    ("rank", "other", "name"),
    [
        (1, 0, "layers.0.attention_norm.gamma"),
        (3, 2, "layers.1.attention.v_proj.weight"),
        (6, 4, "final_norm.gamma"),
    ],
)
def test_replicas_that_training_let_drift_apart_are_not_merged(rank: int, other: int, name: str, tree: Path) -> None:
    """File and manifest agree with each other, as a trainer would leave them."""
    checksum = flip(tree, rank, name)
    edit_manifest(tree, lambda manifest: record_of(manifest, rank, name).update(xxh3=checksum))
    message = refusal(tree)
    assert f"{name} differs between its replicas" in message
    assert relative(tree, rank) in message and relative(tree, other) in message


def test_a_tied_embedding_whose_two_ends_differ_is_not_merged(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tree = convert(tiny_folder("llama-tied"), tmp_path / "slices", "safetensors")
    name = "embedding.tokens.embedding_table"
    checksum = flip(tree, 6, name)
    edit_manifest(tree, lambda manifest: record_of(manifest, 6, name).update(xxh3=checksum))
    message = refusal(tree)
    assert f"{name} differs between its replicas" in message and relative(tree, 2) in message and relative(tree, 6) in message


def test_data_parallel_copies_that_differ_are_not_merged(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tree = convert(tiny_folder("llama-gqa"), tmp_path / "slices", "safetensors", "--dp", 2)
    path = rank_file(tree, 4)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # no longer a link
    path.write_bytes(data)
    assert relative(tree, 4) in refusal(tree)


def test_missing_ranks_are_named_all(tree: Path) -> None:
    names = [relative(tree, rank) for rank in (1, 6)]
    shutil.rmtree(tree / "rank_1")
    rank_file(tree, 6).unlink()
    message = refusal(tree)
    assert all(f"{name}: missing" in message for name in names)


def test_files_of_two_ranks_that_changed_places(tree: Path) -> None:
    first, second = rank_file(tree, 0), rank_file(tree, 1)
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    message = refusal(tree)
    assert relative(tree, 0) in message and relative(tree, 1) in message


def test_a_file_of_another_run_of_the_same_model(tree: Path, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    file_format = rank_file(tree, 0).suffix[1:]
    other = convert(tiny_folder(VARIANT, 1), tmp_path / "other", file_format)
    shutil.copy(rank_file(other, 5), rank_file(tree, 5))
    message = refusal(tree)
    assert relative(tree, 5) in message
    assert file_format == "ckpt" or "a file from another run" in message


@pytest.mark.parametrize("length", [0, 7, 2000, -1])
def test_a_truncated_file(length: int, tree: Path) -> None:
    path = rank_file(tree, 2)
    path.write_bytes(path.read_bytes()[:length])
    message = refusal(tree)
    assert relative(tree, 2) in message and "bytes, the manifest says" in message


@pytest.mark.parametrize("change", ["another tensor", "one less", "another shape", "another dtype"])
def test_a_file_with_other_tensors_of_the_same_size(change: str, safetensors_tree: Path) -> None:
    path = rank_file(safetensors_tree, 3)
    tensors = load_file(path)
    name = "layers.1.mlp.up_proj.weight"
    if change == "another tensor":
        tensors["layers.1.mlp.up_proj.weighs"] = tensors.pop(name)
    elif change == "one less":
        tensors["layers.1.mlp.gate_proj.weight"] = np.concatenate([tensors["layers.1.mlp.gate_proj.weight"], tensors.pop(name)])
    else:
        tensors[name] = tensors[name].T.copy() if change == "another shape" else tensors[name].view(np.int32)
    edited = safetensors_tree.parent / "outside"
    run = read_header(path)[1]
    save_file(tensors, edited, metadata=run)
    shutil.copy(edited, path)
    edit_manifest(safetensors_tree, lambda manifest: manifest["files"][3].update(size=path.stat().st_size))
    message = refusal(safetensors_tree)
    assert relative(safetensors_tree, 3) in message
    assert ("other tensors than the manifest lists" if change in ("another tensor", "one less") else name) in message


def test_a_rank_file_that_is_a_link_out_of_the_folder(tree: Path) -> None:
    path = rank_file(tree, 4)
    shutil.move(path, tree.parent / "outside")
    path.symlink_to(tree.parent / "outside")
    assert "a link that leads out of the folder" in refusal(tree)


@pytest.mark.parametrize("name", ["config.json", "README.md", "1_Pooling/config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["changed", "gone", "a link"])
def test_a_side_file_that_is_not_as_recorded(name: str, damage: str, safetensors_tree: Path) -> None:
    path = safetensors_tree / "huggingface" / name
    if damage == "changed":
        path.write_bytes(path.read_bytes() + b" ")
    else:
        shutil.move(path, safetensors_tree.parent / "outside")
    if damage == "a link":
        path.symlink_to(safetensors_tree.parent / "outside")
    assert name in refusal(safetensors_tree)


def repeated(manifest: dict[str, Any]) -> None:
    manifest["files"][1] = manifest["files"][0]


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "tp": lambda manifest: manifest["layout"].update(tp=2),
    "pp and stages": lambda manifest: manifest["layout"].update(pp=1, layers_per_stage=[4]),
    "layers per stage": lambda manifest: manifest["layout"].update(layers_per_stage=[3, 1]),
    "vocabulary": lambda manifest: manifest["layout"].update(vocab=255),
    "padded vocabulary": lambda manifest: manifest["layout"].update(padded_vocab=512),
    "heads": lambda manifest: manifest["model"].update(heads=4),
    "layers": lambda manifest: manifest["model"].update(layers=3),
    "a billion layers": lambda manifest: manifest["model"].update(layers=10**9),
    "tied": lambda manifest: manifest["model"].update(tied=True),
    "stage of a file": lambda manifest: manifest["files"][1].update(stage=1),
    "one rank less": lambda manifest: manifest["files"].pop(),
    "one rank twice": repeated,
    "path out of the folder": lambda manifest: manifest["files"][0].update(path="../outside/rank_0/checkpoint_0.safetensors"),
    "absolute path": lambda manifest: manifest["files"][0].update(path="/etc/passwd"),
    "weight file out of the folder": lambda manifest: manifest["source"]["files"][0].update(name="../escaped.safetensors"),
    "weight file with a path": lambda manifest: manifest["source"]["files"][0].update(name="/nowhere/escaped.safetensors"),
    "side file out of the folder": lambda manifest: manifest["source"]["side_files"][0].update(name="../escaped.json"),
    "index out of the folder": lambda manifest: manifest["source"].update(index="../escaped.index.json"),
    "weight file that is no weight file": lambda manifest: manifest["source"]["files"][0].update(name="config2.json"),
    "weight file in the making": lambda manifest: manifest["source"]["files"][0].update(name=".ms-convert.safetensors"),
    "side file in the making": lambda manifest: manifest["source"]["side_files"][0].update(name="config.json.partial"),
    "side file in the progress folder": lambda manifest: manifest["source"]["side_files"][0].update(name=".ms-convert/run.json"),
    "side file named like weights": lambda manifest: manifest["source"]["side_files"][0].update(name="model-2.safetensors"),
    "a shape": lambda manifest: manifest["source"]["files"][0]["tensors"][0].update(shape=[1, 2, 3]),
    "a huge shape": lambda manifest: manifest["source"]["files"][0]["tensors"][0].update(shape=[1 << 40, 1 << 40]),
    "a dtype": lambda manifest: manifest["source"]["files"][0]["tensors"][0].update(dtype="F128"),
    "a tensor more": lambda manifest: manifest["source"]["files"][0]["tensors"].append({"name": "x", "dtype": "F32", "shape": [2]}),
    "a tensor less": lambda manifest: manifest["source"]["files"][0]["tensors"].pop(),
    "a tensor dropped": lambda manifest: manifest["source"]["dropped"].update({"model.norm.weight": "not needed"}),
    "the table": lambda manifest: manifest.update(table=manifest["table"].replace("mlp.up_proj", "mlp.gate_proj")),
    "no table": lambda manifest: manifest.update(table="family = 3"),
    "version": lambda manifest: manifest.update(layout_version=2),
    "an unknown field": lambda manifest: manifest.update(comment="hello"),
    "a field less": lambda manifest: manifest.pop("run"),
    "the run": lambda manifest: manifest.update(run="0" * 32),
    "a checksum": lambda manifest: manifest["files"][2]["tensors"][3].update(xxh3="0" * 16),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused_and_nothing_is_written_elsewhere(edit: str, safetensors_tree: Path) -> None:
    edit_manifest(safetensors_tree, EDITS[edit])
    refusal(safetensors_tree)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"layout_version": 1}'])
def test_a_manifest_that_is_none(content: bytes, safetensors_tree: Path) -> None:
    (safetensors_tree / "manifest.json").write_bytes(content)
    assert "manifest.json" in refusal(safetensors_tree)


def test_what_is_no_rank_tree(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    assert "no manifest.json" in refused("ms2hf", tiny_folder("gpt2"), "-o", tmp_path / "back")
    assert "no such folder" in refused("ms2hf", tmp_path / "nowhere", "-o", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_would_be_replaced_is_kept_when_the_slices_are_refused(tree: Path, tiny_folder: TinyFolder) -> None:
    done("ms2hf", tree, "-o", tree.parent / "back")
    flip(tree, 1, "layers.0.attention.q_proj.weight")
    refused("ms2hf", tree, "-o", tree.parent / "back", "--overwrite")
    assert_same_folder(tiny_folder(VARIANT, tokenizer=True), tree.parent / "back")


def test_after_the_mend_the_same_command_succeeds(tree: Path, tiny_folder: TinyFolder) -> None:
    path = rank_file(tree, 1)
    whole = path.read_bytes()
    flip(tree, 1, "layers.0.attention.q_proj.weight")
    refusal(tree)
    assert not (tree.parent / "back").exists()
    path.write_bytes(whole)
    done("ms2hf", tree, "-o", tree.parent / "back")
    assert_same_folder(tiny_folder(VARIANT, tokenizer=True), tree.parent / "back")


@pytest.mark.parametrize("moment", ["before the checksums", "after the checksums"])
def test_a_slice_that_changes_after_its_header_was_read_is_refused_by_its_file(
    moment: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restoration = ms2hf.plan_restoration(tree, ms2hf.HFOptions())
    check_slices = ms2hf.check_slices

    def change(*arguments: Any) -> None:
        if moment == "after the checksums":
            check_slices(*arguments)
        flip(tree, 1, "layers.0.attention.q_proj.weight")
        if moment == "before the checksums":
            check_slices(*arguments)

    monkeypatch.setattr(ms2hf, "check_slices", change)
    with pytest.raises(Refused, match="changed") as caught:
        ms2hf.restore(restoration, tree.parent / "back")
    assert [problem.where for problem in caught.value.problems] == [str(rank_file(tree, 1))]
    assert not (tree.parent / "back" / "config.json").exists()


def test_a_slice_that_changes_after_its_header_was_read_is_not_compared(tree: Path, tiny_folder: TinyFolder) -> None:
    source, slices = understand(read_hf_folder(tiny_folder(VARIANT, tokenizer=True))), read_rank_tree(tree)
    assert compare_weights(source, slices).equal
    flip(tree, 6, "layers.2.attention.q_proj.weight")
    with pytest.raises(Refused, match="changed") as caught:
        compare_weights(source, slices)
    assert [problem.where for problem in caught.value.problems] == [str(rank_file(tree, 6))]


def test_a_slice_that_changes_while_it_is_compared_is_refused(tree: Path, tiny_folder: TinyFolder) -> None:
    source, slices = understand(read_hf_folder(tiny_folder(VARIANT, tokenizer=True))), read_rank_tree(tree)
    changed: list[str] = []

    def change(nbytes: int) -> None:
        if not changed:
            changed.append(flip(tree, 0, "embedding.tokens.embedding_table"))

    with pytest.raises(Refused, match="changed"):
        compare_weights(source, slices, 1, change)
