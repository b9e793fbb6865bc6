"""Folders that are not what they seem: each is refused by name, in one message, with exit code 1, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converter.hf2ms import RankTreeOptions, convert, plan_conversion
from mappings.errors import Refused
from tests.converter.command_line import assert_same_folder, done, ms_convert, refused, round_trip
from tests.tiny_models import as_pytorch_bin, save_tiny

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with shards and an index, to be damaged."""
    return save_tiny(tmp_path / "model", "llama-gqa", max_shard_size="150KB")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A folder with one weight file, to be damaged."""
    return save_tiny(tmp_path / "model", "llama-gqa")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def index_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return content


def write_index(folder: Path, content: object) -> None:
    (folder / INDEX).write_text(json.dumps(content))


def refusal(folder: Path, *options: object) -> str:
    """The message; nothing is written, and a dry run refuses the same."""
    out = folder.parent / "out"
    message = refused("hf2ms", folder, "-o", out, *options)
    assert not out.exists()
    assert refused("hf2ms", folder, "--dry-run", *options) == message
    return message


def test_a_shard_that_the_index_names_and_nobody_has(sharded: Path) -> None:
    gone = shards(sharded)[1:3]
    for path in gone:
        path.unlink()
    message = refusal(sharded)
    assert all(f"{path.name} is named by {INDEX} and missing" in message for path in gone)


def test_a_shard_that_the_index_does_not_name(sharded: Path) -> None:
    shutil.copy(shards(sharded)[0], sharded / "model-00099-of-00099.safetensors")
    assert "model-00099-of-00099.safetensors is not named by" in refusal(sharded)


def test_tensors_that_are_in_a_file_and_not_in_the_index(sharded: Path) -> None:
    index = index_of(sharded)
    names = [name for name in index["weight_map"] if name.endswith("mlp.up_proj.weight")]
    for name in names:
        del index["weight_map"][name]
    write_index(sharded, index)
    message = refusal(sharded)
    assert "is in the file but not in the index" in message and "mlp.up_proj.weight" in message
    assert "layers.{" in message, "layers are folded"


def test_tensors_that_are_in_the_index_and_in_no_file(sharded: Path) -> None:
    index = index_of(sharded)
    for layer in range(4, 8):
        index["weight_map"][f"model.layers.{layer}.mlp.up_proj.weight"] = shards(sharded)[0].name
    write_index(sharded, index)
    message = refusal(sharded)
    assert "model.layers.{4..7}.mlp.up_proj.weight is in the index but not in the file" in message


def test_tensors_that_the_index_has_in_another_file(sharded: Path) -> None:
    index = index_of(sharded)
    first, second = (path.name for path in shards(sharded)[:2])
    name = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][name] = second
    write_index(sharded, index)
    message = refusal(sharded)
    assert f"{name} is in the index but not in the file ({second})" in message


def test_a_tensor_that_stands_in_two_files(sharded: Path) -> None:
    first, second = shards(sharded)[:2]
    twice = load_file(first) | dict(list(load_file(second).items())[:1])
    save_file(twice, first, metadata={"format": "pt"})
    assert f"stands in several files ({first.name}, {second.name})" in refusal(sharded)


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "C:\\secret", "", 7, None, ["x"]])
def test_an_index_that_points_out_of_the_folder(place: object, sharded: Path) -> None:
    save_file({"x": torch.ones(2)}, sharded.parent / "secret.safetensors")
    (sharded / "sub").mkdir()
    save_file({"x": torch.ones(2)}, sharded / "sub" / "model.safetensors")
    index = index_of(sharded)
    index["weight_map"]["model.norm.weight"] = place
    write_index(sharded, index)
    assert "is not a plain file name" in refusal(sharded)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_that_is_none(content: object, sharded: Path) -> None:
    write_index(sharded, content)
    assert INDEX in refusal(sharded)


@pytest.mark.parametrize("target", ["weights", "config", "index", "side file"])
def test_a_link_that_leads_out_of_the_folder(target: str, sharded: Path) -> None:
    name = {"weights": shards(sharded)[0].name, "config": "config.json", "index": INDEX, "side file": "generation_config.json"}[target]
    outside = sharded.parent / "elsewhere"
    outside.mkdir()
    shutil.move(sharded / name, outside / name)
    (sharded / name).symlink_to(outside / name)
    message = refusal(sharded)
    assert name in message and "a link that leads out of the folder" in message


def test_a_link_to_a_file_of_the_same_folder_is_followed(single: Path, tmp_path: Path) -> None:
    (single / "model.safetensors").rename(single / "weights")
    (single / "model.safetensors").symlink_to("weights")
    done("hf2ms", single, "-o", tmp_path / "slices", "--tp", 2)


def hf_cache(folder: Path) -> Path:
    """The folder as the Hugging Face hub's cache lays it out: a snapshot of links to blobs."""
    repository = folder.parent / "models--someone--tiny"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = repository / "blobs" / f"{number:040x}"
        shutil.copy(path, blob)
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama-gqa", max_shard_size="150KB", tokenizer=True)
    back = round_trip(hf_cache(source), tmp_path, "--tp", 2)
    assert_same_folder(source, back)
    assert not any(path.is_symlink() for path in back.rglob("*"))


def test_a_snapshot_of_the_hub_cache_may_not_lead_out_of_its_repository(tmp_path: Path) -> None:
    snapshot = hf_cache(save_tiny(tmp_path / "model", "llama-gqa", tokenizer=True))
    other = hf_cache_of_another(tmp_path)
    for target in (other, tmp_path / "model" / "README.md"):
        (snapshot / "README.md").unlink()
        (snapshot / "README.md").symlink_to(target)
        assert "a link that leads out of the folder" in refused("hf2ms", snapshot, "-o", tmp_path / "out")


def hf_cache_of_another(folder: Path) -> Path:
    blob = folder / "models--someone--else" / "blobs" / "ff"
    blob.parent.mkdir(parents=True)
    blob.write_text("another repository's")
    return blob


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"
FOREIGN = {
    "Git LFS": POINTER,
    "HTML": b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>",
    "empty": b"",
    "zero bytes": bytes(4096),
    "GGUF": b"GGUF" + bytes(100),
    "JSON": b'{"error": "Access to this model is restricted"}',
    "pickle": pickle.dumps({"weights": [1, 2, 3]}),
    "zip": b"PK\x03\x04" + bytes(26) + b"a.txt",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_something_else_is_named_as_what_it_is(kind: str, sharded: Path) -> None:
    path = shards(sharded)[1]
    path.write_bytes(FOREIGN[kind])
    message = refusal(sharded)
    assert kind in message and path.name in message


def test_several_foreign_files_are_named_at_once(sharded: Path) -> None:
    for path in shards(sharded)[:3]:
        path.write_bytes(POINTER)
    message = refusal(sharded)
    assert all(path.name in message for path in shards(sharded)[:3])


@pytest.mark.parametrize("length", [7, 8, 300, 5000, -1])
def test_a_truncated_file(length: int, single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    message = refusal(single)
    assert "model.safetensors" in message
    assert length < 300 or "truncated" in message


def test_a_file_with_more_in_it_than_its_header_says(single: Path) -> None:
    with (single / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "4 bytes follow after the last tensor" in refusal(single)


def test_both_one_file_and_an_index(sharded: Path) -> None:
    save_file({"x": torch.ones(2)}, sharded / "model.safetensors")
    message = refusal(sharded)
    assert "both model.safetensors and" in message


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert "weight shards" in refusal(sharded) and "no index" in refusal(sharded)


@pytest.mark.parametrize("name", ["model.gguf", "flax_model.msgpack", "tf_model.h5", "model.onnx"])
def test_weights_in_a_form_that_is_not_read_are_named(name: str, single: Path) -> None:
    (single / "model.safetensors").rename(single / name)
    assert name in refusal(single)


def test_a_folder_without_weights_and_one_without_config(single: Path) -> None:
    (single / "config.json").rename(single / "kept")
    assert "config.json is missing" in refusal(single)
    (single / "kept").rename(single / "config.json")
    (single / "model.safetensors").unlink()
    assert "no weights" in refusal(single)


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "no such folder" in refused("hf2ms", tmp_path / "nowhere", "-o", tmp_path / "out")
    assert "a file, not a folder" in refused("hf2ms", tmp_path / "file", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', "NaN", "[" * 100_000, "\xff", '{"a": ' + "9" * 5000 + "}"])
def test_a_config_that_is_no_config(content: str, single: Path) -> None:
    (single / "config.json").write_text(content, encoding="latin-1")
    assert "config.json" in refusal(single)


def test_weights_in_several_forms_are_listed_as_left_behind(single: Path, tmp_path: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"old")
    for folder in ("onnx", ".git", ".ms-convert"):
        (single / folder).mkdir()
        (single / folder / "notes").write_text("x")
    (single / "onnx" / "notes").unlink()
    (single / "onnx" / "part.onnx").write_bytes(b"a part of its own")
    (single / "model.onnx").write_bytes(b"other")
    (single / "training_args.bin").write_bytes(b"no weights")
    (single / "linked").symlink_to(tmp_path)
    (single / "broken").symlink_to("nowhere")
    os.mkfifo(single / "pipe")
    left = {entry["name"]: entry["why"] for entry in done("hf2ms", single, "--dry-run", "--json").facts["left"]}
    assert left.keys() == {"pytorch_model.bin", "model.onnx", "linked", "broken", "pipe", ".git", ".ms-convert"} and all(left.values())
    shown = ms_convert("hf2ms", single, "-o", tmp_path / "slices").out
    assert all(name in shown for name in left)
    carried = tmp_path / "slices" / "huggingface"
    assert (carried / "onnx/part.onnx").read_bytes() == b"a part of its own" and (carried / "training_args.bin").exists()
    assert not (carried / "model.onnx").exists()


class Attack:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pytorch_file_that_would_run_code_is_refused_and_runs_none(legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")
    as_pytorch_bin(source)
    path = source / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=True) | {"h": Attack()}, path, _use_new_zipfile_serialization=not legacy)
    monkeypatch.chdir(tmp_path)
    message = refusal(source)
    assert "pytorch_model.bin" in message
    assert not (tmp_path / "attacked").exists()


def test_a_pytorch_file_without_torch_or_with_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")
    as_pytorch_bin(source)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.5.1")
        message = refusal(source)
        assert "2.5.1" in message and "2.6" in message
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch" in refusal(source)


def test_a_folder_that_the_user_may_not_read(single: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (single / "model.safetensors").chmod(0)
    assert "Permission denied" in refusal(single)


def test_a_config_that_cannot_be_read_is_not_called_broken(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, *arguments: Any, **options: Any) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", denied)
    message = refusal(single)
    assert "Permission denied" in message and "config.json" in message
    assert "JSON:" not in message and "download" not in message


def test_a_sub_folder_that_cannot_be_read_is_refused_by_its_name(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (single / "1_Pooling").mkdir()
    (single / "1_Pooling" / "config.json").write_text("{}")
    scandir = os.scandir

    def denied(path: Any) -> Any:
        if os.path.basename(path) == "1_Pooling":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    message = refusal(single)
    assert f"{single / '1_Pooling'}" in message and "Permission denied" in message


def add_one_to_the_last_byte(path: Path) -> None:
    """In place, as a download or a training run that still writes would."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last + 1 & 255]))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("moment", ["before the first byte", "in the middle"])
def test_a_shard_that_changes_after_its_header_was_read_is_refused_by_its_name(moment: str, form: str, sharded: Path) -> None:
    if form == "torch":
        as_pytorch_bin(sharded)
    conversion = plan_conversion(sharded, RankTreeOptions(tp=2, workers=1))
    path = conversion.source.folder.files[-1].path
    before = path.stat()
    out = sharded.parent / "out"

    def change(done: int = 0) -> None:
        if path.stat().st_mtime_ns == before.st_mtime_ns:
            add_one_to_the_last_byte(path)

    if moment == "before the first byte":
        change()
    with pytest.raises(Refused, match="changed") as caught:
        convert(conversion, out, change)
    assert path.stat().st_size == before.st_size
    assert [problem.where for problem in caught.value.problems] == [str(path)]
    assert not (out / "manifest.json").exists()
