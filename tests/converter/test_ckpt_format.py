"""MindSpore checkpoints against MindSpore, in both directions, and against damage."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import converter.ckpt_format
from converter.ckpt_format import MINDSPORE_TYPES, SAFETENSORS_TYPES, SLICE_BYTES, ckpt_layout, read_ckpt
from converter.protobuf_wire import bytes_field, integer_field, integer_fields, varint
from converter.tensors import FileLayout
from mappings.errors import Refused
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

DTYPES = sorted(MINDSPORE_TYPES)
SAMPLE: list[Header] = [
    ("layers.0.weight", "BF16", (7, 5)),
    ("layers.0.bias", "F32", (5,)),
    ("step", "I64", ()),
    ("scale", "F16", ()),
    ("mask", "BOOL", (3, 2)),
    ("one", "BOOL", (1,)),
    ("ids", "I64", (2, 1, 3)),
    ("moment", "F64", (4,)),
    ("bytes", "U8", (9,)),
]


@pytest.fixture(scope="module", autouse=True)
def _mindspore() -> None:
    """Imported before Hypothesis watches: MindSpore raises the recursion limit."""
    import mindspore  # noqa: F401


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ckpt")


def _mindspore_parameters(items: Sequence[Header], seed: int = 0) -> list[dict[str, Any]]:
    import mindspore as ms
    from mindspore._c_expression import TensorPy as Tensor_
    from mindspore.train.serialization import tensor_to_ms_type

    contents = random_content(items, seed)
    return [
        {"name": name, "data": ms.Tensor(Tensor_.convert_bytes_to_tensor(content, shape, tensor_to_ms_type[MINDSPORE_TYPES[dtype]]))}
        for (name, dtype, shape), content in zip(items, contents, strict=True)
    ]


def _loaded(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What MindSpore reads: type, shape and bytes by name."""
    import mindspore as ms

    return {
        name: (SAFETENSORS_TYPES[str(parameter.dtype)], tuple(parameter.shape), bytes(parameter.get_bytes()))
        for name, parameter in ms.load_checkpoint(str(path)).items()
    }


def _read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {tensor.name: (tensor.dtype, tensor.shape, read_words(tensor).tobytes()) for tensor in read_ckpt(path)}


def _save(path: Path, items: Sequence[Header], **options: Any) -> Path:
    import mindspore as ms

    ms.save_checkpoint(_mindspore_parameters(items), str(path), **options)
    return path


def test_the_types_are_all_those_that_mindspore_can_write() -> None:
    from mindspore.train.serialization import tensor_to_ms_type

    assert set(SAFETENSORS_TYPES) == set(tensor_to_ms_type) - {"str", "Int4"}


@pytest.mark.parametrize("crc_check", [False, True])
def test_what_mindspore_saves_is_read_with_the_same_bytes(crc_check: bool, tmp_path: Path) -> None:
    path = _save(tmp_path / "model.ckpt", SAMPLE, crc_check=crc_check)
    contents = random_content(SAMPLE, 0)
    assert _read(path) == {name: (dtype, shape, content) for (name, dtype, shape), content in zip(SAMPLE, contents, strict=True)}
    assert [tensor.name for tensor in read_ckpt(path)] == [name for name, _, _ in SAMPLE]


@settings(max_examples=25)
@given(headers(DTYPES, smallest=1), st.integers(0, 99))
def test_mindspore_loads_what_we_lay_out_with_the_same_bytes(scratch: Path, items: list[Header], seed: int) -> None:
    contents = random_content(items, seed)
    path = scratch / "ours.ckpt"
    write_layout(path, ckpt_layout(items), contents)
    expected = {name: (dtype, shape, content) for (name, dtype, shape), content in zip(items, contents, strict=True)}
    assert _loaded(path) == expected
    assert _read(path) == expected


@settings(max_examples=25)
@given(headers(DTYPES, smallest=1))
def test_the_layout_is_byte_for_byte_what_mindspore_writes(scratch: Path, items: list[Header]) -> None:
    theirs, ours = scratch / "theirs.ckpt", scratch / "same.ckpt"
    _save(theirs, items)
    write_layout(ours, ckpt_layout(items), random_content(items, 0))
    assert ours.read_bytes() == theirs.read_bytes()


def test_long_parameters_are_cut_where_mindspore_cuts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mindspore.train.serialization

    items: list[Header] = [("short", "F32", (3,)), ("exact", "F32", (16, 16)), ("long", "BF16", (37, 50)), ("after", "I64", ())]
    monkeypatch.setattr(mindspore.train.serialization, "SLICE_SIZE", 1)  # KiB
    monkeypatch.setattr(converter.ckpt_format, "SLICE_BYTES", 1024)
    theirs = _save(tmp_path / "theirs.ckpt", items)
    write_layout(tmp_path / "ours.ckpt", ckpt_layout(items), random_content(items, 0))
    assert (tmp_path / "ours.ckpt").read_bytes() == theirs.read_bytes()
    assert [len(tensor.extents) for tensor in read_ckpt(theirs)] == [1, 1, 4, 1]
    assert _read(theirs) == _loaded(theirs)


def test_a_parameter_over_512_mib_is_cut_and_found_again_without_reading_it(tmp_path: Path) -> None:
    import mindspore.train.serialization

    assert mindspore.train.serialization.SLICE_SIZE * 1024 == SLICE_BYTES
    layout = ckpt_layout([("embedding", "BF16", (300_001, 2048)), ("norm", "F32", (8,))])
    _write_sparse(tmp_path / "model.ckpt", layout)
    tracemalloc.start()
    embedding, norm = read_ckpt(tmp_path / "model.ckpt")
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert [extent.length for extent in embedding.extents] == [SLICE_BYTES, SLICE_BYTES, 300_001 * 4096 - 2 * SLICE_BYTES]
    assert (embedding.extents, norm.extents) == layout.extents


def _write_sparse(path: Path, layout: FileLayout) -> None:
    with path.open("wb") as file:
        file.truncate(layout.size)
        for offset, literal in layout.literals:
            file.seek(offset)
            file.write(literal)


def test_a_tensor_without_elements_is_not_left_out(tmp_path: Path) -> None:
    items: list[Header] = [("none", "F32", (0, 5)), ("inner", "BOOL", (2, 0, 3)), ("some", "F32", (2,))]
    write_layout(tmp_path / "model.ckpt", ckpt_layout(items), random_content(items, 0))
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in read_ckpt(tmp_path / "model.ckpt")] == items
    assert {name: loaded[:2] for name, loaded in _loaded(tmp_path / "model.ckpt").items()} == {item[0]: item[1:] for item in items}


@pytest.mark.parametrize(
    ("items", "fault"),
    [
        ([("w", "F8_E4M3", (2, 2))], "MindSpore has no type for F8_E4M3"),
        ([("w", "C64", (2,))], "MindSpore has no type for C64"),
        ([("w", "F32", (0,))], r"takes the dims \[0\] for a scalar"),
        ([("w", "F32", (1,)), ("v", "F32", (1,)), ("w", "F32", (1,))], "two tensors have this name"),
    ],
)
def test_what_mindspore_would_not_read_back_is_not_written(items: list[Header], fault: str) -> None:
    with pytest.raises(Refused, match=fault):
        ckpt_layout(items)


def _value(tag: str, dims: Sequence[int], kind: str, content: bytes) -> bytes:
    tensor = integer_fields(1, dims) + bytes_field(2, kind.encode()) + bytes_field(3, content)
    return bytes_field(1, bytes_field(1, tag.encode()) + bytes_field(2, tensor))


def test_dims_of_zero_around_one_element_are_a_scalar_as_mindspore_takes_them(tmp_path: Path) -> None:
    (tmp_path / "old.ckpt").write_bytes(_value("step", [0], "Float32", b"\0\0\xc0?"))
    assert _read(tmp_path / "old.ckpt") == _loaded(tmp_path / "old.ckpt") == {"step": ("F32", (), b"\0\0\xc0?")}


def test_packed_dims_and_fields_in_another_order_are_read_as_protobuf_reads_them(tmp_path: Path) -> None:
    tensor = bytes_field(3, bytes(range(24))) + bytes_field(1, b"\x02\x03") + bytes_field(2, b"Float32")
    data = bytes_field(1, bytes_field(2, tensor) + bytes_field(1, b"w"))
    (tmp_path / "odd.ckpt").write_bytes(bytes_field(1, bytes_field(1, b"v") + bytes_field(2, tensor)) + data)
    assert _read(tmp_path / "odd.ckpt") == _loaded(tmp_path / "odd.ckpt")
    assert _read(tmp_path / "odd.ckpt")["w"] == ("F32", (2, 3), bytes(range(24)))


def test_strings_and_hash_tables_are_refused_by_name(tmp_path: Path) -> None:
    import mindspore as ms
    from mindspore.train.checkpoint_pb2 import Checkpoint

    path = tmp_path / "model.ckpt"
    ms.save_checkpoint(_mindspore_parameters([("w", "F32", (2,))]), str(path), append_dict={"note": "hello", "epoch": 3})
    message = Checkpoint.FromString(path.read_bytes())
    message.value.add(tag="table").maptensor.tensor.add(tensor_type="Int32", tensor_content=bytes(4))
    said = refusal(read_ckpt, tmp_path / "more.ckpt", message.SerializeToString())
    assert "'note': the type 'str'" in said
    assert "'table': a hash table" in said
    assert "'w'" not in said
    assert "'epoch'" not in said


_TAG, _KIND, _GOOD = bytes_field(1, b"w"), bytes_field(2, b"Float32"), _value("w", [2], "Float32", bytes(8))


def _odd(tensor: bytes, tag: bytes = _TAG) -> bytes:
    return bytes_field(1, tag + bytes_field(2, tensor))


FAULTY: dict[str, tuple[bytes, str]] = {
    "dims over the content": (_value("w", [3], "Float32", bytes(8)), "8 bytes, its dims and type need 12"),
    "dims that overflow": (_value("w", [2**40, 2**40], "Float32", bytes(8)), "need over 2**63"),
    "a negative dim": (_value("w", [-2, -1], "Float32", bytes(8)), "something else than sizes"),
    "an unknown type": (_value("w", [2], "Complex64", bytes(16)), "the type 'Complex64'"),
    "a name twice, apart": (_GOOD + _value("v", [2], "Float32", bytes(8)) + _GOOD, "two parameters have this name"),
    "parts that disagree": (_value("w", [4], "Float32", bytes(8)) + _value("w", [4], "Int32", bytes(8)), "disagree in type or dims"),
    "a part too few": (_value("w", [8], "Float32", bytes(8)) * 2, "16 bytes, its dims and type need 32"),
    "a name that drives the terminal": (_GOOD + _value("\x1b[2J", [2], "Float32", bytes(8)), "unprintable"),
    "thousands of dims": (_odd(integer_fields(1, [1] * 5000) + _KIND + bytes_field(3, bytes(4))), "there too often"),
    "thousands of packed dims": (_odd(bytes_field(1, b"\1" * 5000) + _KIND + bytes_field(3, bytes(4))), "there too often"),
    "content that is there twice": (_odd(_KIND + bytes_field(3, bytes(4)) * 2), "there too often"),
    "no content": (_odd(integer_field(1, 2) + _KIND), "has no type or no content"),
    "a value without a tensor": (_GOOD + bytes_field(1, _TAG), "does not hold a tag and a tensor"),
    "empty values": (_GOOD + b"\x0a\0" * 100_000, "does not hold a tag and a tensor"),
    "a foreign field": (_GOOD + integer_field(7, 1), "field 7"),
    "a name of 100 kB": (_GOOD + _odd(_KIND + bytes_field(3, b""), bytes_field(1, b"w" * 100_000)), "a name of 100000 bytes"),
    "a name that is not UTF-8": (_GOOD + _odd(_KIND + bytes_field(3, b""), bytes_field(1, b"w\xff")), "not UTF-8"),
    "a length beyond the message": (_GOOD + bytes_field(1, _TAG + b"\x12\x7f" + _KIND), "after the message around it"),
    "a length of 2**63": (_GOOD + b"\x0a" + varint(2**63), "truncated"),
    "a varint without end": (_GOOD + b"\x0a" + b"\xff" * 50, "no number of at most 64 bits"),
    "a varint over 64 bits": (_GOOD + b"\x0a" + b"\xff" * 9 + b"\x7f", "no number of at most 64 bits"),
    "a group": (_GOOD + b"\x0b" + bytes(50), "unknown wire type 3"),
    "field number zero": (_GOOD + b"\x02" + bytes(50), "no field at byte"),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_faulty_checkpoint_is_refused_with_its_fault_and_little_memory(case: str, tmp_path: Path) -> None:
    data, fault = FAULTY[case]
    tracemalloc.start()
    try:
        message = refusal(read_ckpt, tmp_path / "model.ckpt", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert fault in message
    assert peak < 500_000


def test_more_parameters_than_any_model_has_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter.ckpt_format, "MAX_PARAMETERS", 100)
    items: list[Header] = [(f"w{index}", "F32", (1,)) for index in range(101)]
    write_layout(tmp_path / "model.ckpt", ckpt_layout(items), random_content(items, 0))
    assert "over 100 parameters" in refusal(read_ckpt, tmp_path / "model.ckpt")


@pytest.fixture(scope="module")
def sample(scratch: Path) -> bytes:
    write_layout(scratch / "sample.ckpt", ckpt_layout(SAMPLE), random_content(SAMPLE, 0))
    return (scratch / "sample.ckpt").read_bytes()


def test_a_truncated_checkpoint_is_refused_or_ends_between_two_parameters(scratch: Path, sample: bytes) -> None:
    ends = {tensor.extents[-1].offset + tensor.extents[-1].length for tensor in read_ckpt(scratch / "sample.ckpt")}
    read = [len(data) for data in each_truncation(sample, 1) if accepted(read_ckpt, scratch / "cut.ckpt", data)]
    assert set(read) == ends - {len(sample)}


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_checkpoint_is_refused_or_means_what_protobuf_reads(scratch: Path, sample: bytes, data: st.DataObject) -> None:
    from mindspore.train.checkpoint_pb2 import Checkpoint

    content = data.draw(damaged(sample, 260))
    tensors = accepted(read_ckpt, scratch / "damaged.ckpt", content)
    if tensors is None:
        return
    assert_inside(tensors, len(content))
    parsed = Checkpoint.FromString(content)
    assert [(value.tag, value.tensor.tensor_type, value.tensor.tensor_content) for value in parsed.value] == [
        (tensor.name, MINDSPORE_TYPES[tensor.dtype], read_words(tensor).tobytes()) for tensor in tensors
    ]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_else(scratch: Path, data: bytes) -> None:
    accepted(read_ckpt, scratch / "random.ckpt", data)
    accepted(read_ckpt, scratch / "random.ckpt", b"\x0a" + bytes([len(data)]) + data)
