"""PyTorch files against PyTorch: the places of the bytes, and that nothing in a file is executed."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.derived import check_not_carried
from converter.dtypes import word_type
from converter.hf_folder import read_hf_folder
from converter.source_model import understand
from converter.tensors import StoredTensor
from converter.torch_format import SAFETENSORS_TYPES, read_torch_bin
from mappings.errors import Refused
from tests.conftest import TinyFolder
from tests.converter.command_line import done, tensors_of
from tests.converter.stored_bytes import accepted, assert_inside, damaged, each_truncation, read_words, refusal
from tests.tiny_models import as_pytorch_bin, save_tiny


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch") / "pytorch_model.bin"


def _words(tensor: Any) -> np.ndarray[Any, Any]:
    """The tensor's elements as unsigned words, by PyTorch."""
    import torch

    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return np.frombuffer(raw, word_type(SAFETENSORS_TYPES[str(tensor.dtype)])).reshape(tensor.shape)


def _assert_same(stored: list[StoredTensor], state: Mapping[str, Any]) -> None:
    assert [tensor.name for tensor in stored] == list(state)
    for tensor, expected in zip(stored, state.values(), strict=True):
        assert (tensor.dtype, tensor.shape) == (SAFETENSORS_TYPES[str(expected.dtype)], tuple(expected.shape))
        np.testing.assert_array_equal(read_words(tensor), _words(expected), tensor.name)


def _state() -> OrderedDict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(3)
    base = torch.randn(40, 7, generator=generator) * 0.5
    return OrderedDict(
        whole=base,
        columns=base[:, 2:5],
        transposed=base.T,
        rows=base[11:13],
        last=base[39, 6],
        expanded=base[0].expand(5, 7),
        every_third=base.reshape(-1)[1::3],
        half=torch.randn(33, 5, generator=generator).to(torch.bfloat16),
        parameter=torch.nn.Parameter(torch.randn(3, 3, generator=generator)),
        empty=torch.zeros(0, 4),
        nothing_of_base=base[:0],
        step=torch.tensor(7, dtype=torch.int64),
        mask=torch.tensor([[True, False], [False, True]]),
        one_column=torch.randn(6, 1, generator=generator).T,
    )


def test_views_of_one_storage_are_found_with_their_offsets_and_strides(scratch: Path) -> None:
    import torch

    state = _state()
    torch.save(state, scratch)
    stored = read_torch_bin(scratch)
    _assert_same(stored, state)
    found = {tensor.name: tensor for tensor in stored}
    start = found["whole"].extents[0].offset
    assert found["whole"].strides is None
    assert (found["columns"].strides, found["columns"].extents[0].offset) == ((7, 1), start + 2 * 4)
    assert (found["transposed"].strides, found["transposed"].extents) == ((1, 7), found["whole"].extents)
    assert (found["rows"].strides, found["rows"].extents[0].offset) == (None, start + 11 * 7 * 4)
    assert (found["expanded"].strides, found["expanded"].extents[0].length) == ((0, 1), 7 * 4)
    assert_inside([tensor for tensor in stored if tensor.strides is None], scratch.stat().st_size)


@pytest.mark.parametrize("dtype", SAFETENSORS_TYPES)
def test_every_type_keeps_its_bits(dtype: str, scratch: Path) -> None:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    raw = np.random.default_rng(0).integers(0, 2 if kind is torch.bool else 256, 12 * kind.itemsize, np.uint8)
    state = {"a": torch.frombuffer(bytearray(raw.tobytes()), dtype=kind).reshape(3, 4), "b": torch.zeros((), dtype=kind)}
    torch.save(state, scratch)
    _assert_same(read_torch_bin(scratch), state)


@settings(max_examples=40)
@given(st.data())
def test_any_views_are_found_where_pytorch_has_them(scratch: Path, data: st.DataObject) -> None:
    import torch

    state = {}
    for storage in range(data.draw(st.integers(1, 4))):
        base = torch.randn(data.draw(st.integers(1, 400)), generator=torch.Generator().manual_seed(storage))
        base = base.to(data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
        for view in range(data.draw(st.integers(1, 3))):
            rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
            strides = (data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12)))
            reach = (rows - 1) * strides[0] + (columns - 1) * strides[1]
            if reach < len(base):
                offset = data.draw(st.integers(0, len(base) - 1 - reach))
                state[f"{storage}.{view}"] = base.as_strided((rows, columns), strides, offset)
    torch.save(state, scratch)
    _assert_same(read_torch_bin(scratch), state)


def test_tied_names_get_the_same_place_and_equal_copies_do_not(scratch: Path) -> None:
    import torch

    weight = torch.randn(9, 5)
    torch.save({"embed.weight": weight, "lm_head.weight": weight, "copy": weight.clone()}, scratch)
    embed, head, copy = read_torch_bin(scratch)
    assert embed.extents == head.extents
    assert embed.strides is head.strides is None
    assert copy.extents != embed.extents


@pytest.mark.parametrize("variant", ["gpt2", "llama-tied"])
def test_a_transformers_state_dict_is_the_same_in_a_bin_file(variant: str, tiny_folder: TinyFolder, scratch: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder(variant))
    torch.save(model.state_dict(), scratch)  # with the attribute _metadata that Module.state_dict sets
    _assert_same(read_torch_bin(scratch), model.state_dict())


def test_a_file_written_without_checksums_is_read(scratch: Path) -> None:
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(5.0)}, scratch)
    finally:
        torch.serialization.set_crc32_options(True)
    _assert_same(read_torch_bin(scratch), {"w": torch.arange(5.0)})


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "Modèle 模型.bin", "PYTORCH_MODEL.BIN"])
def test_the_archive_inside_may_have_any_name(name: str, tmp_path: Path) -> None:
    import torch

    torch.save(_state(), tmp_path / name)
    _assert_same(read_torch_bin(tmp_path / name), _state())


class _Runs:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def _rezipped(data: bytes, change: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with other contents for some members (by their name after the archive's), or with new ones."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w", compression) as target:
        contents = {name.split("/", 1)[1]: source.read(name) for name in source.namelist()}
        for name, content in {**contents, **change}.items():
            target.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def _saved(value: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("call", ["eval", "system", "bytearray"])
def test_a_malicious_pickle_is_named_and_executes_nothing(call: str, protocol: int, tmp_path: Path) -> None:
    import os

    import torch

    mark = tmp_path / "executed"
    attack = {
        "eval": _Runs(eval, f"open({str(mark)!r}, 'w').close()"),
        "system": _Runs(os.system, f"touch {mark}"),
        "bytearray": _Runs(bytearray, 2**40),
    }[call]
    pickled = pickle.dumps({"w": attack}, protocol)
    message = refusal(read_torch_bin, tmp_path / "model.bin", _rezipped(_saved({"w": torch.ones(2)}), {"data.pkl": pickled}))
    assert "asks for more than tensors" in message
    assert call in message or protocol >= 4
    assert "weights_only=False" in message
    assert not mark.exists()
    if call != "bytearray":
        pickle.loads(pickled)  # noqa: S301 - the attack is a real one
        assert mark.exists()


def test_a_call_hidden_beside_the_description_is_not_read(tmp_path: Path) -> None:
    """PyTorch finds members whatever their case: a second description must not slip past the one that was checked."""
    import torch

    attack = pickle.dumps(_Runs(print, "executed"), 2)
    for name in ("DATA.PKL", "data.PKL"):
        data = _rezipped(_saved({"w": torch.ones(2)}), {name: attack})
        assert "two members have the same name" in refusal(read_torch_bin, tmp_path / "model.bin", data)


def test_pytorch_before_2_6_is_refused(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    torch.save({"w": torch.ones(2)}, scratch)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("loaded"))
    for version in ("2.5.1+cpu", "1.13.0", "2.5.0a0+git1234"):
        monkeypatch.setattr(torch, "__version__", version)
        assert "CVE-2025-32434" in refusal(read_torch_bin, scratch)


def test_without_pytorch_the_message_says_what_to_install(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch.write_bytes(_saved({}))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'ms-convert[hf]'" in refusal(read_torch_bin, scratch)


NOT_PLAIN: dict[str, tuple[Callable[[Any], object], str]] = {
    "numbers": (lambda ones: {"w": ones, "epoch": 3, "lr": 0.5}, "'epoch': a int, not a tensor"),
    "nested": (lambda ones: {"epoch": 3, "state_dict": {"w": ones}}, "'state_dict': a state dict inside the file's own, with 1 entries"),
    "list": (lambda ones: {"w": [ones]}, "'w': a list, not a tensor"),
    "tuple": (lambda ones: (ones, ones), "holds a tuple, not a state dict"),
    "tensor": (lambda ones: ones, "holds a Tensor, not a state dict"),
    "name": (lambda ones: {0: ones}, "a name that is a int"),
    "unprintable": (lambda ones: {"\x1b[2J": ones}, "unprintable"),
    "complex128": (lambda ones: {"w": ones.cdouble()}, "the type torch.complex128"),
    "conjugate": (lambda ones: {"w": ones.cfloat().conj()}, "conjugated"),
    "meta": (lambda ones: {"w": ones.to("meta")}, "more than tensors: 'torch._utils._rebuild_meta_tensor_no_storage'"),
    "sparse": (lambda ones: {"w": ones.to_sparse()}, "more than tensors: 'torch._utils._rebuild_sparse_tensor'"),
    "axes": (lambda ones: {"w": ones.reshape((1,) * 31 + (2, 3))}, "33 axes"),
}


@pytest.mark.parametrize("case", NOT_PLAIN)
def test_what_is_no_plain_state_dict_is_refused_by_name(case: str, scratch: Path) -> None:
    import torch

    make, fault = NOT_PLAIN[case]
    assert fault in refusal(read_torch_bin, scratch, _saved(make(torch.ones(2, 3))))


def test_a_whole_module_is_refused_with_its_class(scratch: Path) -> None:
    import torch

    assert "'torch.nn.modules.linear.Linear'" in refusal(read_torch_bin, scratch, _saved(torch.nn.Linear(2, 3)))


def test_all_entries_that_are_no_tensors_are_named_at_once(scratch: Path) -> None:
    import torch

    message = refusal(read_torch_bin, scratch, _saved({"w": torch.ones(2), **{f"note{index}": "text" for index in range(30)}}))
    assert message.count("a str, not a tensor") == 20
    assert "and 10 more problems" in message


def _with_directory_size(data: bytes, size: int) -> bytes:
    """The same archive, the size of its directory changed in both of its end records (APPNOTE.TXT 4.3.14 and 4.3.16)."""
    end, long_end = data.rindex(b"PK\x05\x06"), data.rindex(b"PK\x06\x06")
    changed = bytearray(data)
    changed[end + 12 : end + 16] = struct.pack("<I", size)
    changed[long_end + 40 : long_end + 48] = struct.pack("<Q", size)
    return bytes(changed)


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "compressed": (lambda data: _rezipped(data, {}, zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "big-endian": (lambda data: _rezipped(data, {"byteorder": b"big"}), "not little-endian"),
    "a storage that no tensor uses": (lambda data: _rezipped(data, {"data/7": bytes(24)}), "holds 2 storages, its tensors use 1"),
    "a storage of another size": (lambda data: _rezipped(data, {"data/0": bytes(20)}), "not found in the file"),
    "a storage that is longer": (lambda data: _rezipped(data, {"data/0": bytes(40)}), "not found in the file"),
    "TorchScript": (lambda data: _rezipped(data, {"constants.pkl": b"\x80\x02)."}), "TorchScript"),
    "no description": (lambda data: data.replace(b"data.pkl", b"data.pkk"), "zip archive"),
    "a description that is no pickle": (lambda data: _rezipped(data, {"data.pkl": b"\x80\x02\xff"}), "damaged or truncated"),
    "an old pickle": (lambda data: _rezipped(data, {"data.pkl": pickle.dumps({}, 0)}), "not a pickle as PyTorch writes it"),
    "a description without end": (lambda data: _rezipped(data, {"data.pkl": b"\x80\x02}"}), "damaged or truncated"),
    "an empty description": (lambda data: _rezipped(data, {"data.pkl": b""}), "not a pickle as PyTorch writes it"),
    "a huge description": (lambda data: _rezipped(data, {"data.pkl": bytes(17 * 2**20)}), "a description of tensors of over"),
    "a directory that is cut off": (lambda data: data[:-30], "damaged or truncated"),
    "a directory of gigabytes": (lambda data: _with_directory_size(data, 2**31), "damaged or truncated"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_archive_is_refused_with_its_fault_and_little_memory(case: str, scratch: Path) -> None:
    import torch

    damage, fault = DAMAGED[case]
    data = damage(_saved({"w": torch.randn(2, 3)}))
    tracemalloc.start()
    try:
        message = refusal(read_torch_bin, scratch, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fault in message
    assert peak < 3_000_000


def test_a_view_beyond_its_storage_is_refused(scratch: Path) -> None:
    import torch

    data = _saved({"w": torch.randn(2, 3)})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read("archive/data.pkl")
    sizes = b"K\x02K\x03\x86"  # the shape (2, 3)
    assert pickled.count(sizes) == 1
    for shape in (b"K\x02K\x04\x86", b"K\x02J\xff\xff\xff\x7f\x86", b"K\x02J\xfe\xff\xff\xff\x86"):
        refusal(read_torch_bin, scratch, _rezipped(data, {"data.pkl": pickled.replace(sizes, shape)}))


def _small() -> bytes:
    import torch

    return _saved(OrderedDict(weight=torch.randn(3, 5, generator=torch.Generator().manual_seed(1)), bias=torch.arange(4)))


def test_every_truncation_is_refused(scratch: Path) -> None:
    for data in each_truncation(_small(), 7):
        assert accepted(read_torch_bin, scratch, data) is None


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_file_is_refused_or_read_as_pytorch_reads_it(scratch: Path, data: st.DataObject) -> None:
    import torch

    original = _small()
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        pickled = archive.read("archive/data.pkl")
    if data.draw(st.booleans()):
        content = data.draw(damaged(original, len(original)))
    else:
        content = _rezipped(original, {"data.pkl": data.draw(damaged(pickled, len(pickled)))})
    stored = accepted(read_torch_bin, scratch, content)
    if stored is not None:
        _assert_same(stored, torch.load(scratch, weights_only=True))


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else(scratch: Path, data: bytes) -> None:
    assert accepted(read_torch_bin, scratch, data) is None
    assert accepted(read_torch_bin, scratch, b"PK\x03\x04" + data) is None
    assert accepted(read_torch_bin, scratch, _rezipped(_small(), {"data.pkl": data})) is None


def _with(folder: Path, variant: str, tensors: Mapping[str, Any]) -> Path:
    """A folder with a PyTorch file, some of its tensors replaced or added."""
    import torch

    save_tiny(folder, variant)
    as_pytorch_bin(folder)
    path = folder / "pytorch_model.bin"
    state = torch.load(path, weights_only=True)
    torch.save(state | dict(tensors), path)
    return folder


def test_expanded_weights_are_converted_as_what_they_stand_for(tmp_path: Path) -> None:
    import torch

    expanded = {
        "model.norm.weight": torch.full((1,), 1.25).expand(64),
        "model.layers.1.self_attn.q_proj.weight": torch.linspace(-1.5, 0.5, 64).expand(64, 64),
        "model.layers.2.self_attn.o_proj.weight": torch.linspace(-1.5, 0.5, 64)[:, None].expand(64, 64),
        "model.layers.3.mlp.down_proj.weight": torch.tensor(-0.75).expand(64, 96),
    }
    source = _with(tmp_path / "model", "llama-gqa", expanded)
    original = torch.load(source / "pytorch_model.bin", weights_only=True)
    assert all(original[name].shape == expanded[name].shape and 0 in original[name].stride() for name in expanded)
    done("hf2ms", source, "-o", tmp_path / "slices", "--tp", 2, "--pp", 2)
    done("verify", source, tmp_path / "slices")
    done("ms2hf", tmp_path / "slices", "-o", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)


def _refusal_of_buffer(folder: Path, buffer: Any) -> str:
    source = understand(read_hf_folder(_with(folder, "gpt2", {"transformer.h.2.attn.bias": buffer})))
    tracemalloc.start()
    try:
        with pytest.raises(Refused) as caught:
            check_not_carried(source)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert "transformer.h.2.attn.bias" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(1, 1, 60_000, 60_000), (0, 1, 60_000, 60_000)])
def test_a_buffer_that_is_small_in_the_file_and_huge_by_its_shape_is_refused_without_the_memory(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    import torch

    message = _refusal_of_buffer(tmp_path / "model", torch.ones(1, 1, 1, 1, dtype=torch.bool)[: shape[0]].expand(shape))
    assert ("too large" if all(shape) else "values are others") in message


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "complex64"])
def test_a_buffer_of_a_type_that_it_cannot_have_is_refused_by_its_name(dtype: str, tmp_path: Path) -> None:
    import torch

    buffer = torch.ones(64, 64).tril()[None, None].to(getattr(torch, dtype))
    assert SAFETENSORS_TYPES[f"torch.{dtype}"] in _refusal_of_buffer(tmp_path / "model", buffer)
