"""What a file is, told from its first bytes."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.ckpt_format import read_ckpt
from converter.recognise import KINDS, recognise, recognise_opening
from converter.safetensors_format import read_header
from converter.torch_format import read_torch_bin
from tests.converter.stored_bytes import refusal

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def _saved(save: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def _torch(**options: bool) -> bytes:
    import torch

    return _saved(lambda buffer: torch.save({"weight": torch.randn(3, 4)}, buffer, **options))


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.safetensors", b"x")
    return buffer.getvalue()


def _safetensors() -> bytes:
    import torch
    from safetensors.torch import save

    return bytes(save({"weight": torch.randn(3, 4)}))


FOREIGN: dict[str, Callable[[], bytes]] = {
    "lfs_pointer": lambda: LFS_POINTER,
    "html": lambda: b"\n\n <!DOCTYPE html>\n<html><head><title>401</title></head></html>",
    "json": lambda: b'{"error": "Repository not found"}',
    "text": lambda: b"Access to this model is restricted.\n",
    "gguf": lambda: b"GGUF\x03\0\0\0" + bytes(64),
    "hdf5": lambda: b"\x89HDF\r\n\x1a\n" + bytes(64),
    "npy": lambda: _saved(lambda buffer: np.save(buffer, np.ones(3))),
    "npz": lambda: _saved(lambda buffer: np.savez(buffer, weight=np.ones(3))),
    "zip": _zip,
    "archive": lambda: gzip.compress(b"weights"),
    "pickle": lambda: pickle.dumps({"weight": [1.0]}),
    "torch_legacy": lambda: _torch(_use_new_zipfile_serialization=False),
    "torch_zip": _torch,
    "safetensors": _safetensors,
    "safetensors_truncated": lambda: _safetensors()[:40],
    "zeros": lambda: bytes(5000),
    "empty": lambda: b"",
    "unknown": lambda: b"\xff\xfe\x00\x01 no such format",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_each_kind_is_told_from_its_first_bytes(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(FOREIGN[kind]())
    assert recognise(tmp_path / "model.bin") == kind


def test_what_mindspore_writes_is_told_apart(tmp_path: Path) -> None:
    import mindspore as ms

    parameters = [{"name": "decoder.weight", "data": ms.Tensor(np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32))}]
    path = tmp_path / "model.ckpt"
    ms.save_checkpoint(parameters, str(path))
    assert recognise(path) == "ckpt"
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(path.read_bytes()[:200])
    assert recognise(cut) == "ckpt_truncated"
    for mode in ("AES-GCM", "AES-CBC", "SM4-CBC"):
        secret = tmp_path / f"{mode}.ckpt"
        ms.save_checkpoint(parameters, str(secret), enc_key=b"0123456789abcdef", enc_mode=mode)
        assert recognise(secret) == "ckpt_encrypted"


def test_a_strategy_file_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    strategy = ParallelStrategyMap(current_stage=3)
    strategy.parallel_strategy_item.add(node_name="MatMul-op0").parallel_strategys.stage = 1
    (tmp_path / "ckpt_strategy_rank_0.ckpt").write_bytes(strategy.SerializeToString())
    assert recognise(tmp_path / "ckpt_strategy_rank_0.ckpt") == "strategy"


OWN = {"safetensors": read_header, "ckpt": read_ckpt, "torch_zip": read_torch_bin}


@pytest.mark.parametrize(("own", "kind"), [(own, kind) for own in OWN for kind in FOREIGN if own != kind])
def test_a_reader_that_gets_another_kind_says_what_it_got_and_what_to_do(own: str, kind: str, tmp_path: Path) -> None:
    read: Callable[[Path], object] = OWN[own]
    message = refusal(read, tmp_path / "weights", FOREIGN[kind]())
    said = {"unknown": "nor anything else that is known", "safetensors_truncated": "truncated"}.get(kind, KINDS[kind].phrase)
    assert said in message
    assert "\n    -> " in message


@pytest.mark.parametrize("read", [read_header, read_ckpt, read_torch_bin, recognise])
def test_what_is_no_regular_file_is_refused_and_does_not_block(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(read, tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert "a folder" in refusal(read, tmp_path / "folder")
    assert "No such file" in refusal(read, tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot be read" in refusal(read, tmp_path / "loop")


@given(st.binary(max_size=300), st.integers(0, 2**63))
def test_any_bytes_are_of_some_kind(opening: bytes, more: int) -> None:
    assert recognise_opening(opening, len(opening) + (more if opening else 0)) in KINDS
