"""A Hugging Face folder that went to MindSpore's ranks and back is the folder that went in. The safetensors library and filecmp judge."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.conftest import TinyFolder
from tests.converter.command_line import (
    assert_same_folder,
    assert_same_tensors,
    done,
    files_of,
    ms_convert,
    refused,
    round_trip,
    same_bits,
    tensors_of,
)
from tests.tiny_models import VARIANTS, add_derived_buffers, as_pytorch_bin, as_v4_config, save_tiny, tiny_model

FAMILIES = (
    "gpt2", "gpt2-uneven-vocab", "llama-gqa", "llama-bias", "llama-uneven-vocab-tied", "mistral-head-dim", "qwen2", "qwen3-tied", "bert",
    "bert-mlm", "bert-pretraining",
)  # fmt: skip
STAGES = {1: "4", 2: "3,1", 3: "1,2,1"}
"""Layers of each stage of the models with four layers: a single stage, and uneven splits."""
FORMATS = ("safetensors", "ckpt")


def layout(tp: int, pp: int, file_format: str = "safetensors") -> tuple[object, ...]:
    return "--tp", tp, "--pp", pp, "--layers-per-stage", STAGES[pp], "--format", file_format


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_family_comes_back_byte_for_byte_at_every_layout(
    variant: str, tp: int, pp: int, file_format: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source = tiny_folder(variant, tokenizer=True)
    back = round_trip(source, tmp_path, *layout(tp, pp, file_format))
    assert_same_tensors(source, back)
    assert_same_folder(source, back)
    assert len(list((tmp_path / "slices").glob(f"rank_*/*.{file_format}"))) == tp * pp


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_comes_back_byte_for_byte(variant: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", variant)
    if variant == "bert-mlm-untied":
        give_both_biases_one_value(source)
    stages = "2,1,2" if variant == "llama-five-layers" else "1,2,1"
    back = round_trip(source, tmp_path, "--tp", 4, "--pp", 3, "--layers-per-stage", stages)
    assert_same_tensors(source, back)
    assert_same_folder(source, back)


def give_both_biases_one_value(folder: Path) -> None:
    """As every release before Transformers 5 saved the head for masked words: its two names for the bias were one parameter."""
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_two_biases_that_should_be_one_and_differ_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    message = refused("hf2ms", tiny_folder("bert-mlm-untied"), "-o", tmp_path / "slices")
    assert "cls.predictions.decoder.bias differs from cls.predictions.bias" in message and "--no-tie-embeddings" not in message
    assert not (tmp_path / "slices").exists()


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_are_even_unless_told_otherwise(pp: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    facts = done("hf2ms", source, "--tp", 2, "--pp", pp, "--dry-run", "--json").facts
    assert facts["layout"]["layers_per_stage"] == [4 // pp] * pp
    assert_same_folder(source, round_trip(source, tmp_path, "--tp", 2, "--pp", pp))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["gpt2", "llama-uneven-vocab-tied", "qwen3-bias", "bert-mlm"])
def test_half_precision_comes_back_byte_for_byte(variant: str, dtype: torch.dtype, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant, dtype=dtype)
    assert {tensor.dtype for tensor in tensors_of(source).values()} == {dtype}
    for file_format in FORMATS:
        assert_same_folder(source, round_trip(source, tmp_path / file_format, *layout(2, 3, file_format)))


def test_a_model_of_several_dtypes_keeps_each_tensors_own(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    mixed = {
        name: tensor.float() if "norm" in name else tensor.half() if "embed" in name else tensor
        for name, tensor in tensors_of(source).items()
    }
    save_file(mixed, source / "model.safetensors", metadata={"format": "pt"})
    assert_same_folder(source, round_trip(source, tmp_path, *layout(4, 2)))


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "gpt2", dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    for tensor in tensors.values():
        words = tensor.view(-1).view(torch.int16)
        words[: min(len(words), 65536)] = torch.arange(min(len(words), 65536)).to(torch.int16)  # NaNs with payloads, infinities, subnormals
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert_same_folder(source, round_trip(source, tmp_path, *layout(4, 1)))


@pytest.mark.parametrize("variant", ["gpt2", "llama-tied", "bert-pretraining"])
def test_shards_keep_their_names_their_tensors_and_their_order(variant: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant, max_shard_size="100KB", tokenizer=True)
    assert len(list(source.glob("model-*-of-*.safetensors"))) > 3
    assert_same_folder(source, round_trip(source, tmp_path, *layout(2, 2)))


def test_tensors_in_an_unusual_order_and_metadata_of_ones_own_come_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama-gqa")
    path = source / "model.safetensors"
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    pieces, entries, end = [], {}, 0
    for name in sorted(header, key=lambda name: hash((name, 7)) % 1009):
        begin, stop = header[name]["data_offsets"]
        pieces.append(data[start + begin : start + stop])
        entries[name] = header[name] | {"data_offsets": [end, end + stop - begin]}
        end += stop - begin
    text = json.dumps({"__metadata__": {"format": "pt", "trained by": "Zoë «7»"}} | entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(pieces))
    back = round_trip(source, tmp_path, *layout(2, 2))
    assert_same_tensors(source, back)
    written = (back / "model.safetensors").read_bytes()
    again = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
    assert again == json.loads(text)
    assert written.endswith(b"".join(pieces))


@pytest.mark.parametrize("variant", ["llama-gqa", "llama-rope-llama3", "llama-rope-yarn-full", "qwen2-sliding", "gpt2", "bert"])
def test_a_config_spelled_as_transformers_4_did_comes_back_as_it_was(variant: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", variant)
    as_v4_config(source)
    assert_same_folder(source, round_trip(source, tmp_path, *layout(4, 3)))


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
@pytest.mark.parametrize("variant", ["gpt2", "llama-gqa", "llama-tied", "bert-mlm"])
def test_pytorch_files_come_back_as_safetensors_that_transformers_loads(variant: str, max_shard_size: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", variant, max_shard_size=max_shard_size)
    before = tensors_of(source)
    as_pytorch_bin(source)
    back = round_trip(source, tmp_path, *layout(2, 3))
    after = tensors_of(back)
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    assert not list(back.glob("*.bin*"))
    assert (back / "model.safetensors.index.json").exists() == (max_shard_size == "100KB")
    assert torch.equal(logits(load(back)), logits(tiny_model(variant)))


def load(folder: Path) -> Any:
    """Loads with the class that config.json names; missing and unexpected weights must be none."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = model(torch.arange(24)[None] * 7 % 199)[0]
    return answer


@pytest.mark.parametrize("variant", ["gpt2", "llama-uneven-vocab-tied", "qwen2", "qwen3", "mistral-sliding", "bert-mlm"])
def test_transformers_computes_the_same_with_what_came_back(variant: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant)
    back = round_trip(source, tmp_path, *layout(4, 2))
    assert torch.equal(logits(load(back)), logits(load(source)))
    auto = transformers.AutoModel.from_pretrained(back)
    assert type(auto).__name__ == type(transformers.AutoModel.from_pretrained(source)).__name__


@pytest.mark.parametrize("dp", [2, 3])
def test_data_parallel_ranks_share_their_files_and_are_merged_once(dp: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-tied")
    back = round_trip(source, tmp_path, "--tp", 2, "--pp", 2, "--dp", dp)
    paths = [tmp_path / "slices" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors" for rank in range(4 * dp)]
    for rank, path in enumerate(paths):
        stage, rest = divmod(rank, 2 * dp)
        assert os.path.samefile(path, paths[stage * 2 * dp + rest % 2])
    assert len({path.stat().st_ino for path in paths}) == 4
    assert_same_folder(source, back)


def test_where_there_are_no_hard_links_data_parallel_ranks_get_copies(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    source = tiny_folder("qwen3-tied")
    assert_same_folder(source, round_trip(source, tmp_path, "--tp", 2, "--dp", 2))
    first, second = ((tmp_path / f"slices/rank_{rank}/checkpoint_{rank}.safetensors") for rank in (0, 2))
    assert not os.path.samefile(first, second) and first.read_bytes() == second.read_bytes()


def test_sub_folders_and_odd_side_files_come_back(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "bert", tokenizer=True)
    (source / "2_Dense" / "deep").mkdir(parents=True)
    (source / "2_Dense" / "deep" / "notes «1».txt").write_bytes(bytes(range(256)))
    (source / "empty").touch()
    (source / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    back = round_trip(source, tmp_path, *layout(2, 2))
    assert_same_folder(source, back)
    assert "2_Dense/deep/notes «1».txt" in files_of(back)


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"two\nlines", b"\x1b[31mred", b"back\\slash"])
def test_a_file_name_that_the_way_back_would_not_take_is_refused_on_the_way_there(name: bytes, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")
    (source / os.fsdecode(name)).write_text("read me")
    message = refused("hf2ms", source, "-o", tmp_path / "slices")
    assert "rename it" in message and "\x1b" not in message
    assert not (tmp_path / "slices").exists()


@pytest.mark.parametrize("variant", ["gpt2", "gpt2-no-head", "llama", "qwen2-tied", "bert", "bert-mlm"])
def test_derived_buffers_are_listed_and_not_restored(variant: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", variant)
    before = tensors_of(source)
    added = add_derived_buffers(source)
    plan = done("hf2ms", source, *layout(2, 2), "--dry-run", "--json").facts
    back = round_trip(source, tmp_path, *layout(2, 2))
    after = tensors_of(back)
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    listed = done("ms2hf", tmp_path / "slices", "--dry-run", "--json").facts["not_restored"]
    assert len(plan["dropped"]) == len(listed) == len({name.split(".")[-1] for name in added})
    assert all(entry["why"] for entry in [*plan["dropped"], *listed])
    shown = ms_convert("ms2hf", tmp_path / "slices", "--dry-run").out
    assert all(name.split(".")[-1] in shown for name in added)


CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_gives_what_torch_gives_on_either_way(name: str, source_dtype: torch.dtype, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen2-uneven-vocab", dtype=source_dtype)
    done("hf2ms", source, "-o", tmp_path / "cast", "--dtype", name, *layout(2, 2, "ckpt"))
    done("hf2ms", source, "-o", tmp_path / "kept", *layout(4, 3))
    for slices, option in (("cast", name), ("kept", name), ("cast", "original")):
        ran = done("ms2hf", tmp_path / slices, "-o", tmp_path / f"{slices}-{option}", "--dtype", option)
        assert ("config.json came back as it was" in ran.out) == (option != "original")
        for key, tensor in tensors_of(tmp_path / f"{slices}-{option}").items():
            expected = tensors_of(source)[key].to(CASTS[name])
            assert same_bits(tensor, expected.to(source_dtype) if option == "original" else expected), key


def folder_with_a_large_value(folder: Path) -> Path:
    source = save_tiny(folder, "llama-gqa")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][5, 90] = 7e4
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_a_cast_that_overflows_is_refused_and_nothing_looks_finished(tmp_path: Path) -> None:
    source, out = folder_with_a_large_value(tmp_path / "model"), tmp_path / "slices"
    message = refused("hf2ms", source, "-o", out, "--tp", 2, "--dtype", "fp16")
    assert "layers.2.mlp.down_proj.weight" in message and "--allow-overflow" in message
    assert "norm" not in message, "an infinity that was there before is no overflow"
    assert not (out / "manifest.json").exists()
    assert not list(out.glob("rank_1/*.safetensors")), "column 90 of 96 is in rank 1's slice"
    done("hf2ms", source, "-o", tmp_path / "wide", "--tp", 2, "--dtype", "bf16")
    refused("ms2hf", tmp_path / "wide", "-o", tmp_path / "back", "--dtype", "fp16")
    assert not (tmp_path / "back" / "config.json").exists()


def test_an_overflow_that_was_allowed_gives_the_infinity_that_torch_gives(tmp_path: Path) -> None:
    source = folder_with_a_large_value(tmp_path / "model")
    done("hf2ms", source, "-o", tmp_path / "slices", "--tp", 2, "--dtype", "fp16", "--allow-overflow")
    done("ms2hf", tmp_path / "slices", "-o", tmp_path / "back", "--dtype", "fp16")
    before, after = tensors_of(source), tensors_of(tmp_path / "back")
    assert after["model.layers.2.mlp.down_proj.weight"].isinf().sum() == 1
    assert all(same_bits(after[name], before[name].half()) for name in before)


@pytest.mark.slow
def test_smollm2_comes_back_byte_for_byte_from_three_by_two_ranks(smollm2: Path, tmp_path: Path) -> None:
    back = round_trip(smollm2, tmp_path, "--tp", 3, "--pp", 2)
    assert_same_tensors(smollm2, back)
    assert_same_folder(smollm2, back)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "file_format"), [(2, "ckpt"), (4, "safetensors")])
def test_minilm_comes_back_bit_for_bit(minilm: Path, tp: int, file_format: str, tmp_path: Path) -> None:
    back = round_trip(minilm, tmp_path, "--tp", tp, "--pp", 2, "--format", file_format)
    before, after = tensors_of(minilm), tensors_of(back)
    assert before.keys() - after.keys() == {"embeddings.position_ids"} and not after.keys() - before.keys()
    assert all(same_bits(before[name], after[name]) for name in after)
    assert_same_folder(minilm, back, ignore=frozenset({"model.safetensors"}))
