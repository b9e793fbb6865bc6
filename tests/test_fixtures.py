"""The fixtures are what the tests that stand on them take for granted. Transformers and safetensors are the judges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.conftest import TinyFolder
from tests.real_models import REPOSITORY
from tests.tiny_models import SMALLEST, VARIANTS, add_derived_buffers, as_pytorch_bin, as_v4_config, save_tiny, tiny_model

ROPE_VARIANTS = [name for name, variant in VARIANTS.items() if "rope_parameters" in variant.config]


def load(folder: Path) -> transformers.PreTrainedModel:
    """Loads with the class that config.json names; missing, unexpected and mismatched weights must all be none."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def outputs(model: transformers.PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(24)[None] * 7 % 199
    with torch.no_grad():
        return model(ids)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_weight_of_a_tiny_model_is_large_and_varied(variant: str) -> None:
    for name, parameter in tiny_model(variant).named_parameters():
        assert parameter.abs().min() >= SMALLEST, name
        assert parameter.numel() < 16 or 0.3 < parameter.std() < 0.8, name
        assert len(parameter.unique()) > 0.9 * parameter.numel(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_loads_the_saved_folder_and_computes_the_same(variant: str, tiny_folder: TinyFolder) -> None:
    saved = outputs(tiny_model(variant))
    assert saved.isfinite().all() and saved.std() > 0.1
    assert torch.equal(outputs(load(tiny_folder(variant))), saved)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tiny_model_takes_less_than_a_megabyte(variant: str, tiny_folder: TinyFolder) -> None:
    assert (tiny_folder(variant) / "model.safetensors").stat().st_size < 1_000_000


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (tiny_model("llama", seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_half_precision_keeps_every_element_from_zero(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        state = load(save_tiny(tmp_path / str(dtype), "qwen3", dtype=dtype)).state_dict()
        assert {tensor.dtype for tensor in state.values()} == {dtype}
        assert all((tensor != 0).all() for tensor in state.values())


def test_a_small_shard_size_gives_several_files_and_an_index(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama-gqa", max_shard_size="100KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(list(folder.glob("*.safetensors"))) == len(set(index["weight_map"].values())) > 3
    assert torch.equal(outputs(load(folder)), outputs(tiny_model("llama-gqa")))


def test_the_side_files_of_a_real_folder_are_there(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "llama-uneven-vocab", tokenizer=True)
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "1_Pooling/config.json"} <= {
        path.relative_to(folder).as_posix() for path in folder.rglob("*")
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the capital of France")["input_ids"]).replace(" ", "") == "thecapitalofFrance"
    assert len(tokenizer) < min(variant.config["vocab_size"] for variant in VARIANTS.values())


@pytest.mark.parametrize("variant", ROPE_VARIANTS)
def test_both_spellings_of_the_config_mean_the_same_to_transformers(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    new = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in new and "dtype" in new
    as_v4_config(folder)
    old = json.loads((folder / "config.json").read_text())
    assert {"rope_theta", "rope_scaling", "torch_dtype"} <= old.keys()
    assert not {"rope_parameters", "dtype"} & old.keys()
    assert torch.equal(outputs(load(folder)), outputs(tiny_model(variant)))


@pytest.mark.parametrize("max_shard_size", ["1GB", "100KB"])
def test_pytorch_bin_files_hold_what_the_safetensors_files_held(max_shard_size: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "gpt2", max_shard_size=max_shard_size)
    as_pytorch_bin(folder)
    assert not list(folder.glob("*.safetensors*"))
    assert torch.equal(outputs(load(folder)), outputs(tiny_model("gpt2")))


@pytest.mark.parametrize("variant", ["gpt2", "gpt2-no-head", "llama", "llama-no-head", "bert", "bert-mlm"])
def test_derived_buffers_are_added_to_the_file_and_change_nothing(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", variant)
    with safe_open(folder / "model.safetensors", "pt") as file:
        before = set(file.keys())
    added = add_derived_buffers(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == before | set(added) and added
    model = transformers.AutoModel.from_pretrained(folder).eval()
    assert torch.equal(outputs(model), outputs(getattr(tiny_model(variant), model.base_model_prefix, tiny_model(variant))))


@pytest.mark.slow
def test_smollm2_is_an_ordinary_folder_that_knows_the_capital_of_france(smollm2: Path) -> None:
    assert len(list(smollm2.glob("model-*.safetensors"))) == 3
    model = load(smollm2)
    assert model.config.tie_word_embeddings and model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])


@pytest.mark.slow
def test_minilm_is_a_sentence_transformers_folder_whose_vectors_tell_near_from_far(minilm: Path) -> None:
    assert (minilm / "1_Pooling" / "config.json").is_file()
    with safe_open(minilm / "model.safetensors", "pt") as file:
        assert "embeddings.position_ids" in set(file.keys())
    model, tokenizer = transformers.AutoModel.from_pretrained(minilm).eval(), transformers.AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(
        ["A cat sits on the mat.", "A kitten rests on a rug.", "The central bank raised rates."], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden, mask = model(**batch)[0], batch["attention_mask"][..., None]
    cat, kitten, bank = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    assert cat @ kitten > 0.5 > 0.2 > cat @ bank


@pytest.mark.slow
def test_two_processes_that_ask_for_a_model_at_once_make_it_once(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from tests.real_models import minilm_folder; print(minilm_folder(Path({str(tmp_path)!r})))"
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert {out.strip() for out, _ in said} == {str(tmp_path / "all-minilm-l6-v2")}
    assert sum("fetching" in err for _, err in said) == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["all-minilm-l6-v2"]
