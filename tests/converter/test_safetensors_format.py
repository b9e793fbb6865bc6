"""Safetensors files against the safetensors library, in both directions, and against damage."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save, save_file

from converter.dtypes import ITEM_SIZE
from converter.safetensors_format import library_order, read_header, safetensors_layout
from converter.tensors import StoredTensor
from mappings.errors import Refused
from tests.conftest import TinyFolder
from tests.converter.stored_bytes import (
    Header,
    accepted,
    assert_inside,
    damaged,
    each_truncation,
    headers,
    random_content,
    read_words,
    refusal,
    write_layout,
)

DTYPES = sorted(ITEM_SIZE)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safetensors") / "model.safetensors"


def _torch_dtype(dtype: str) -> Any:
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    }[dtype]  # fmt: skip


def _torch_tensors(items: Sequence[Header], seed: int = 0) -> dict[str, Any]:
    import torch

    contents = random_content(items, seed)
    return {
        name: torch.frombuffer(bytearray(content), dtype=_torch_dtype(dtype)).reshape(shape)
        if content
        else torch.empty(shape, dtype=_torch_dtype(dtype))
        for (name, dtype, shape), content in zip(items, contents, strict=True)
    }


def _again(path: Path) -> tuple[bytes, list[StoredTensor]]:
    """The header that we would write for the file, and its tensors."""
    tensors, metadata = read_header(path)
    layout = safetensors_layout([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], metadata)
    assert [tensor.extents for tensor in tensors] == list(layout.extents)
    assert layout.size == path.stat().st_size
    ((offset, header),) = layout.literals
    assert offset == 0
    return header, tensors


@given(headers(DTYPES), st.one_of(st.none(), st.tuples(st.text(max_size=5), st.text(max_size=30))))
@example([("a", "F32", (2,)), ('"\\/\b\f\x7f', "U8", ())], ("format", '\x00\x1f"\\\u2028\ue000😀\r\n\t'))
def test_a_file_of_the_library_laid_out_again_has_the_same_bytes(
    scratch: Path, items: list[Header], metadata: tuple[str, str] | None
) -> None:
    items = [item for item in items if item[0].isprintable()]
    scratch.write_bytes(save(_torch_tensors(items), metadata=dict([metadata]) if metadata else None))
    header, tensors = _again(scratch)
    assert scratch.read_bytes().startswith(header)
    assert {(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors} == set(items)


@given(headers(DTYPES), st.integers(0, 99))
def test_extents_hold_the_bytes_that_the_library_wrote(scratch: Path, items: list[Header], seed: int) -> None:
    import torch

    values = _torch_tensors(items, seed)
    save_file(values, scratch)
    tensors, metadata = read_header(scratch)
    assert metadata == {}
    for tensor in tensors:
        expected = values[tensor.name].contiguous().reshape(-1)
        assert read_words(tensor).tobytes() == (expected.view(torch.uint8).numpy().tobytes() if expected.numel() else b"")


@given(headers(DTYPES), st.integers(0, 99))
def test_the_library_reads_what_we_lay_out_in_any_order(scratch: Path, items: list[Header], seed: int) -> None:
    contents = random_content(items, seed)
    write_layout(scratch, safetensors_layout(items, {"format": "pt", "run": "«1»"}), contents)
    read = dict(safetensors.deserialize(scratch.read_bytes()))
    expected = zip(items, contents, strict=True)
    assert {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in read.items()} == {
        name: (dtype, shape, content) for (name, dtype, shape), content in expected
    }
    with safetensors.safe_open(scratch, "pt") as file:
        assert file.metadata() == {"format": "pt", "run": "«1»"}


@given(headers(DTYPES, smallest=1))
def test_the_library_order_is_that_of_the_library(scratch: Path, items: list[Header]) -> None:
    save_file(_torch_tensors(items), scratch)
    tensors, _ = read_header(scratch)
    assert [items[index][0] for index in library_order(items)] == [tensor.name for tensor in tensors]


@pytest.mark.parametrize("variant", ["llama-gqa", "gpt2", "bert"])
def test_shards_of_transformers_laid_out_again_have_the_same_headers(variant: str, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(variant, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        header, _ = _again(shard)
        assert shard.read_bytes()[: len(header)] == header


def _file(entries: Mapping[str, object] | str, data: bytes = b"", padding: int = 0) -> bytes:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode("utf-8", "surrogatepass")
    text += b" " * padding
    return len(text).to_bytes(8, "little") + text + data


def _entry(dtype: object = "F32", shape: object = (2, 3), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


_RAW = '{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'

HOSTILE: dict[str, tuple[bytes, str]] = {
    "data cut off": (_file({"w": _entry()}, bytes(23)), "truncated: the header speaks of"),
    "data too long": (_file({"w": _entry()}, bytes(25)), "1 bytes follow after the last tensor"),
    "header longer than the file": (b"\x10'\0\0\0\0\0\0{" + bytes(50), "truncated: the header alone ends at byte 10008, the file at 59"),
    "header over the limit": ((10**8 + 1).to_bytes(8, "little") + b'{"w"', "the format allows 100000000"),
    "a hole at the start": (_file({"w": _entry(offsets=(4, 28))}, bytes(28)), "leaves a hole"),
    "a hole": (_file({"a": _entry(), "b": _entry(offsets=(28, 52))}, bytes(52)), "leaves a hole"),
    "an overlap": (_file({"a": _entry(), "b": _entry(offsets=(20, 44))}, bytes(44)), "overlaps"),
    "two tensors on the same bytes": (_file({"a": _entry(), "b": _entry()}, bytes(24)), "overlaps"),
    "a size that contradicts the shape": (_file({"w": _entry(shape=(2, 4))}, bytes(24)), "span 24 bytes, its shape and type need 32"),
    "an end before the begin": (_file({"w": _entry(offsets=(24, 0))}, bytes(24)), "data_offsets is not a begin and an end"),
    "a negative begin": (_file({"w": _entry(offsets=(-24, 0))}, bytes(24)), "data_offsets is not a begin and an end"),
    "three offsets": (_file({"w": _entry(offsets=(0, 24, 48))}, bytes(24)), "data_offsets is not a begin and an end"),
    "an unknown type": (_file({"w": _entry(dtype="F4")}, bytes(24)), "the type 'F4' is not known here"),
    "a type that is a list": (_file({"w": _entry(dtype=["F32"])}, bytes(24)), "is not known here"),
    "a negative axis": (_file({"w": _entry(shape=(-2, -3))}, bytes(24)), "something else than sizes"),
    "a boolean axis": (_file({"w": _entry(shape=(True, 6))}, bytes(24)), "something else than sizes"),
    "a fractional axis": (_file({"w": _entry(shape=(2.0, 3))}, bytes(24)), "something else than sizes"),
    "boolean offsets": (_file({"w": _entry(dtype="U8", shape=(), offsets=(False, True))}, bytes(1)), "data_offsets is not"),
    "an axis over 64 bits": (_file({"w": _entry(shape=(2**64, 0))}, bytes(24)), "something else than sizes"),
    "a product over 64 bits": (_file({"w": _entry(shape=(2**40, 2**40))}, bytes(24)), "need over 2**63"),
    "a product that wraps to the right size": (_file({"w": _entry(dtype="U8", shape=(2**32 + 1, 2**32 - 1))}, bytes(24)), "over 2**63"),
    "too many axes": (_file({"w": _entry(shape=[1] * 33)}, bytes(4)), "33 axes"),
    "a shape that is a number": (_file({"w": _entry(shape=6)}, bytes(24)), "not a list"),
    "an entry that is a list": (_file({"w": [1]}), "no { at character"),
    "an entry that is null": (_file({"w": None}), "no { at character"),
    "a missing key": (_file({"w": {"dtype": "F32", "shape": [6]}}, bytes(24)), "not with dtype, shape and data_offsets"),
    "an unknown key": (_file({"w": {**_entry(), "strides": [3, 1]}}, bytes(24)), "not with dtype, shape and data_offsets"),
    "a name that is there twice": (_file(f'{{"w":{_RAW},"w":{_RAW}}}', bytes(24)), "'w' is there twice"),
    "a name twice in two spellings": (_file(f'{{"w":{_RAW},"\\u0077":{_RAW}}}', bytes(24)), "'w' is there twice"),
    "a key that is there twice": (_file('{"w":{"dtype":"U8",' + _RAW[1:] + "}", bytes(24)), "cannot be read"),
    "metadata that is there twice": (_file('{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' is there twice"),
    "a metadata key that is there twice": (_file('{"__metadata__":{"a":"1","a":"2"}}'), "'a' is there twice"),
    "metadata that is a list": (_file({"__metadata__": ["pt"]}), "no { at character"),
    "metadata with a number": (_file({"__metadata__": {"epoch": 3}}), 'no " at character'),
    "half a surrogate in a name": (_file(f'{{"\\ud800":{_RAW}}}', bytes(24)), "no string at character"),
    "a name that drives the terminal": (_file({"\x1b]0;owned\x07": _entry()}, bytes(24)), "unprintable"),
    "an empty name": (_file({"": _entry()}, bytes(24)), "a name that is empty"),
    "an endless name": (_file({"w" * 5000: _entry()}, bytes(24)), "a name of 5000 characters"),
    "bytes that are not UTF-8": (_file(f'{{"w\xff":{_RAW}}}').replace(b"\xc3\xbf", b"\xff\xff"), "not UTF-8 at byte 11"),
    "text after the end": (_file(f'{{"w":{_RAW}}} {{}}', bytes(24)), "text after its end"),
    "a zero byte after the end": (_file(f'{{"w":{_RAW}}}\0', bytes(24)), "text after its end"),
    "a comma too many": (_file(f'{{"w":{_RAW},}}', bytes(24)), 'no " at character'),
    "a header that ends early": (_file(f'{{"w":{_RAW}', bytes(24)), "no , at character"),
    "a header without end": (_file('{"w'), "no string at character"),
    "an entry without end": (_file('{"w":{"dtype":"F32"'), "is longer than 4096 characters"),
    "not a number": (_file('{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,24]}}', bytes(24)), "cannot be read"),
    "a number of thousands of digits": (_file(f'{{"w":{{"dtype":"U8","shape":[{"9" * 4000}],"data_offsets":[0,0]}}}}'), "else than sizes"),
    "a number of a million digits": (_file(f'{{"w":{{"dtype":"U8","shape":[{"9" * 10**6}],"data_offsets":[0,0]}}}}'), "longer than 4096"),
    "lists in lists": (_file('{"w":{"dtype":' + "[" * 3000 + "]" * 1000 + "}}"), "cannot be read"),
    "a type of many lists": (_file('{"w":{"dtype":' + "[" * 900 + "]" * 900 + ',"shape":[],"data_offsets":[0,0]}}'), "the type that is no"),
    "a million lists in lists": (_file('{"w":' + "[" * 10**6), "no { at character 5"),
    "a million empty lists": (_file('{"w":{"shape":[' + "[]," * 10**6 + "[]]}}"), "longer than 4096"),
    "a million objects in objects": (_file('{"w":' * 10**6), "longer than 4096"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_with_its_fault_and_little_memory(case: str, tmp_path: Path) -> None:
    data, fault = HOSTILE[case]
    tracemalloc.start()
    try:
        message = refusal(read_header, tmp_path / "model.safetensors", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fault in message
    assert message.replace("\n", "").isprintable()
    assert peak < 2_000_000 + 4 * len(data)


def test_all_faulty_entries_are_named_at_once_and_many_are_counted(tmp_path: Path) -> None:
    data = _file({f"w{index}": _entry(dtype="F3") for index in range(50)}, bytes(24))
    message = refusal(read_header, tmp_path / "model.safetensors", data)
    assert message.count("the type 'F3'") == 20
    assert "and 30 more problems" in message


def test_a_huge_claim_in_a_small_or_sparse_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tracemalloc.start()
    try:
        refusal(read_header, path, (99_999_999).to_bytes(8, "little") + b'{"w":')
        with path.open("wb") as file:
            file.write((99_999_992).to_bytes(8, "little"))
            file.truncate(100_000_000)
        refusal(read_header, path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_space_around_the_tokens_and_after_the_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"__metadata__": {"}": "{"}, "b": _entry(offsets=[24, 48]), "a": _entry()}, indent=2)
    path.write_bytes(_file(text, bytes(48), padding=3))
    tensors, metadata = read_header(path)
    assert metadata == {"}": "{"}
    assert [tensor.name for tensor in tensors] == ["a", "b"]


@pytest.mark.parametrize(("names", "fault"), [(["w", "w"], "two tensors"), (["__metadata__"], "reserved")])
def test_names_that_a_header_cannot_hold_are_refused(names: list[str], fault: str) -> None:
    with pytest.raises(Refused, match=fault):
        safetensors_layout([(name, "F32", (1,)) for name in names], {})


def _sample() -> bytes:
    items: list[Header] = [("layers.0.weight", "BF16", (3, 5)), ("layers.0.bias", "F32", (5,)), ("ids", "I64", ()), ("none", "U8", (0, 2))]
    return bytes(save(_torch_tensors(items), metadata={"format": "pt"}))


def _read(path: Path) -> list[StoredTensor]:
    return read_header(path)[0]


def test_every_truncation_is_refused(scratch: Path) -> None:
    for data in each_truncation(_sample(), 1):
        assert accepted(_read, scratch, data) is None


@settings(max_examples=200)
@given(damaged(_sample(), 330))
def test_a_damaged_file_is_refused_or_means_what_the_library_reads(scratch: Path, data: bytes) -> None:
    tensors = accepted(_read, scratch, data)
    if tensors is None:
        return
    assert_inside(tensors, len(data))
    try:
        library = dict(safetensors.deserialize(data))
    except SafetensorError as error:
        raise AssertionError(f"accepted what the library refuses: {data!r}") from error
    assert {tensor.name: (tensor.dtype, tensor.shape, read_words(tensor).tobytes()) for tensor in tensors} == {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in library.items()
    }


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else(scratch: Path, data: bytes) -> None:
    accepted(_read, scratch, data)
    accepted(_read, scratch, len(data).to_bytes(8, "little") + data)
    accepted(_read, scratch, (len(data) + 1).to_bytes(8, "little") + b"{" + data)
