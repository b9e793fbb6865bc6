"""Checkpoints in MindSpore's other format: MindSpore saved them, MindSpore loads them, and its own converter is the oracle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from converter.ckpt_format import ckpt_layout, read_ckpt
from converter.safetensors_format import read_header, safetensors_layout
from tests.converter.command_line import assert_same_folder, done, files_of, ms_convert, refused
from tests.converter.interrupted import changes, killed

RNG = np.random.default_rng(7)
FORMATS = ("ckpt", "safetensors")


def values(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.normal(0, 0.5, shape).astype(np.float32)


def parameters() -> dict[str, ms.Tensor]:
    """What a training run saves: weights of several types, moments, and scalars beside them."""
    return {
        "decoder.layers.1.mlp.weight": ms.Tensor(values((7, 5))),
        "decoder.layers.0.mlp.weight": ms.Tensor(values((7, 5)), ms.bfloat16),
        "embedding": ms.Tensor(values((11, 3)), ms.float16),
        "adam_m.embedding": ms.Tensor(values((3,)).astype(np.float64)),
        "mask": ms.Tensor(np.array([True, False, True])),
        "tokens": ms.Tensor(RNG.integers(-(2**40), 2**40, (2, 3, 4))),
        "bytes": ms.Tensor(RNG.integers(0, 255, (5,)).astype(np.uint8)),
        "step_num": ms.Tensor(np.int32(1234567)),
        "loss_scale": ms.Tensor(np.float32(65536)),
    }


def save(path: Path, file_format: str, content: dict[str, ms.Tensor] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [{"name": name, "data": tensor} for name, tensor in (content or parameters()).items()]
    ms.save_checkpoint(saved, str(path), format=file_format)
    return path


def loaded(path: Path) -> dict[str, ms.Parameter]:
    found: dict[str, ms.Parameter] = ms.load_checkpoint(str(path), format=path.suffix[1:])
    return found


def assert_same(found: dict[str, ms.Parameter], expected: dict[str, ms.Parameter]) -> None:
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert (found[name].dtype, found[name].shape) == (parameter.dtype, parameter.shape), name
        words = [item.astype(ms.float32) if item.dtype == ms.bfloat16 else item for item in (found[name], parameter)]
        assert np.array_equal(words[0].asnumpy(), words[1].asnumpy()), name


def other(file_format: str) -> str:
    return "safetensors" if file_format == "ckpt" else "ckpt"


@pytest.mark.parametrize("file_format", FORMATS)
def test_mindspore_loads_the_other_format_as_it_loads_the_first(file_format: str, tmp_path: Path) -> None:
    source = save(tmp_path / f"model.{file_format}", file_format)
    done("reformat", source, "-o", tmp_path / "out", "--format", other(file_format))
    assert files_of(tmp_path / "out") == sorted([f"model.{other(file_format)}", "reformat.json"])
    assert_same(loaded(tmp_path / "out" / f"model.{other(file_format)}"), loaded(source))


def test_mindspores_own_converter_writes_the_same_tensors(tmp_path: Path) -> None:
    source = save(tmp_path / "model.ckpt", "ckpt")
    ms.ckpt_to_safetensors(str(source), str(tmp_path / "theirs"))
    done("reformat", source, "-o", tmp_path / "ours", "--format", "safetensors")
    (theirs,) = (tmp_path / "theirs").rglob("*.safetensors")
    with safe_open(theirs, "pt") as first, safe_open(tmp_path / "ours/model.safetensors", "pt") as second:
        assert set(first.keys()) == set(second.keys())
        assert all(first.get_tensor(name).equal(second.get_tensor(name)) for name in first.keys())  # noqa: SIM118 (not a dict)


@pytest.mark.parametrize("file_format", FORMATS)
def test_there_and_back_gives_the_same_bytes_in_the_same_order(file_format: str, tmp_path: Path) -> None:
    source = save(tmp_path / f"model.{file_format}", file_format)
    done("reformat", source, "-o", tmp_path / "there", "--format", other(file_format))
    done("reformat", tmp_path / "there" / f"model.{other(file_format)}", "-o", tmp_path / "back", "--format", file_format)
    assert (tmp_path / "back" / source.name).read_bytes() == source.read_bytes()


names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=12)
shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
dtypes = st.sampled_from(["F32", "BF16", "F16", "F64", "I64", "I32", "I8", "U8", "BOOL"])


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(names, st.tuples(dtypes, shapes), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_any_file_keeps_names_order_types_shapes_and_bits(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, tuple[str, tuple[int, ...]]], random: Any
) -> None:
    folder = tmp_path_factory.mktemp("any")
    described = [(name, dtype, shape) for name, (dtype, shape) in content.items()]
    for layout, name in ((ckpt_layout(described), "a.ckpt"), (safetensors_layout(described, {}), "a.safetensors")):
        data = bytearray(random.randbytes(layout.size))
        for offset, literal in layout.literals:
            data[offset : offset + len(literal)] = literal
        (folder / name).write_bytes(data)
        target = other(name.partition(".")[2])
        done("reformat", folder / name, "-o", folder / target, "--format", target)
        made = folder / target / f"a.{target}"
        found = read_header(made)[0] if target == "safetensors" else read_ckpt(made)
        assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in found] == described
        for tensor, places in zip(found, layout.extents, strict=True):
            (here,) = tensor.extents
            expected = b"".join(bytes(data[place.offset : place.offset + place.length]) for place in places)
            assert made.read_bytes()[here.offset : here.offset + here.length] == expected


def rank_tree(folder: Path) -> Path:
    """What MindFormers leaves behind: ranks with weights and a JSON file beside them, strategies, a data-parallel rank as a hard link."""
    for rank in range(3):
        save(folder / f"checkpoint/rank_{rank}/llama_rank_{rank}-2_10.ckpt", "ckpt")
        (folder / f"checkpoint/rank_{rank}/meta.json").write_text('{"last_epoch": 2}')
    (folder / "checkpoint/rank_3").mkdir()
    os.link(folder / "checkpoint/rank_2/llama_rank_2-2_10.ckpt", folder / "checkpoint/rank_3/llama_rank_3-2_10.ckpt")
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    strategy = ParallelStrategyMap(current_stage=1)
    strategy.parallel_strategy_item.add(node_name="MatMul-op0").parallel_strategys.stage = 1
    (folder / "strategy").mkdir()
    (folder / "strategy/ckpt_strategy_rank_0.ckpt").write_bytes(strategy.SerializeToString())
    return folder


def test_a_tree_keeps_its_folders_its_strategies_and_its_links(tmp_path: Path) -> None:
    source = rank_tree(tmp_path / "source")
    out = tmp_path / "out"
    facts = done("reformat", source, "-o", out, "--format", "safetensors", "--json").facts
    ranks = [f"checkpoint/rank_{rank}/llama_rank_{rank}-2_10.safetensors" for rank in range(4)]
    assert files_of(out) == sorted([*ranks, "reformat.json", "strategy/ckpt_strategy_rank_0.ckpt"])
    for rank, path in enumerate(ranks):
        assert_same(loaded(out / path), loaded(source / f"checkpoint/rank_{rank}/llama_rank_{rank}-2_10.ckpt"))
    assert (out / ranks[3]).samefile(out / ranks[2])
    strategy = "strategy/ckpt_strategy_rank_0.ckpt"
    assert (out / strategy).read_bytes() == (source / strategy).read_bytes()
    assert "checkpoint/rank_0/meta.json" in facts["result"]["notes"][0]
    record = json.loads((out / "reformat.json").read_text())
    assert [file["path"] for file in record["files"]] == ranks


def test_a_run_that_is_killed_looks_unfinished_and_is_continued(tmp_path: Path) -> None:
    source = rank_tree(tmp_path / "source")
    command = ["reformat", source, "--format", "safetensors", "--workers", 1, "-o"]
    all_changes = changes(*command, tmp_path / "fresh")
    for change in (all_changes // 3, all_changes * 2 // 3, all_changes - 3):
        out = tmp_path / f"out-{change}"
        assert killed(change, *command, out)
        assert "reformat.json" not in files_of(out) or change == all_changes - 3
        done(*command, out)
        assert "nothing to do" in done(*command, out).out
        assert_same_folder(out, tmp_path / "fresh")


def test_what_the_other_format_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    layout = safetensors_layout([("w", "F8_E4M3", (4,))], {})
    (tmp_path / "fp8.safetensors").write_bytes(layout.literals[0][1] + bytes(4))
    assert "MindSpore has no type for F8_E4M3" in refused(
        "reformat", tmp_path / "fp8.safetensors", "-o", tmp_path / "out", "--format", "ckpt"
    )
    layout = safetensors_layout([("w", "U8", (4,))], {"format": "ms", "w": "Int4"})
    (tmp_path / "int4.safetensors").write_bytes(layout.literals[0][1] + bytes(4))
    assert "packed 4-bit" in refused("reformat", tmp_path / "int4.safetensors", "-o", tmp_path / "out", "--format", "ckpt")
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert "no .ckpt or .safetensors file" in refused("reformat", tmp_path / "a", "-o", tmp_path / "out", "--format", "ckpt")
    (tmp_path / "a/model.ckpt").write_bytes(b"\x80\x02pickle")
    assert "a Python pickle" in refused("reformat", tmp_path / "a", "-o", tmp_path / "out", "--format", "safetensors")
    (tmp_path / "b").mkdir()
    save(tmp_path / "b/model.ckpt", "ckpt")
    save(tmp_path / "b/model.safetensors", "safetensors")
    assert "two files would have one name" in refused("reformat", tmp_path / "b", "-o", tmp_path / "out", "--format", "ckpt")


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    outside = save(tmp_path / "outside/model.ckpt", "ckpt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.ckpt").symlink_to(outside)
    assert "leads out of the folder" in refused("reformat", tmp_path / "in", "-o", tmp_path / "out", "--format", "safetensors")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "model.ckpt", "ckpt")
    facts = done("reformat", source, "--format", "safetensors", "--dry-run", "--json").facts
    assert facts["files"][0]["path"] == "model.safetensors"
    assert files_of(tmp_path) == ["model.ckpt"]
    assert ms_convert("reformat", source, "--format", "safetensors").code == 2
