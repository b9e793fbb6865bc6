"""`ms-convert verify` as a command: what it accounts for, what it finds, what it needs, and its exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import TinyFolder
from tests.converter.command_line import REPOSITORY, in_process, ms_convert, refused
from tests.model.verifying import convert, outcome, replaced, table_text, verify, write_table
from tests.tiny_models import VARIANTS, add_derived_buffers, as_pytorch_bin, as_v4_config, save_tiny

WEIGHT_CHECKS = ["coverage", "not carried", "weights", "description"]
LIMIT_BYTES = 300 << 20


@pytest.mark.parametrize("file_format", ["safetensors", "ckpt"])
@pytest.mark.parametrize("variant", ["gpt2", "llama-uneven-vocab-tied", "llama-mqa", "qwen3", "bert-pretraining"])
def test_a_conversion_is_verified(variant: str, file_format: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant)
    facts = verify(source, convert(source, tmp_path / "slices", "--tp", 4, "--pp", 2, "--dp", 2, "--format", file_format))
    assert facts["holds"] and list(outcome(facts)) == WEIGHT_CHECKS and facts["forward"] is None
    assert facts["target"]["layout"]["tp"] == 4 and facts["target"]["format"] == file_format


def test_every_tensor_is_accounted_for_on_both_sides(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "gpt2")
    buffers = add_derived_buffers(source)
    facts = verify(source, convert(source, tmp_path / "slices", "--tp", 2, "--pp", 2))
    fates = {fate["name"]: fate for fate in facts["weights"]["fates"]}
    assert fates.keys() == load_file(source / "model.safetensors").keys() | set(buffers)
    assert {name for name, fate in fates.items() if fate["fate"] == "dropped"} == set(buffers)
    assert all(fates[name]["reason"] for name in buffers)
    fused = fates["transformer.h.3.attn.c_attn.weight"]["parameters"]
    assert fused == [f"layers.3.attention.{part}_proj.weight" for part in "qkv"]
    holdings = {holding["name"]: holding for holding in facts["weights"]["holdings"]}
    assert holdings["layers.3.attention.k_proj.weight"]["sources"] == ["transformer.h.3.attn.c_attn.weight"]
    assert holdings["layers.3.attention.k_proj.weight"]["files"] == [f"rank_{rank}/checkpoint_{rank}.safetensors" for rank in (2, 3)]
    carried = {name for fate in fates.values() for name in fate["parameters"]}
    assert carried == holdings.keys()
    assert {item["name"] for item in facts["replicated"]} >= {"embedding.tokens.embedding_table", "final_norm.gamma"}


def changed(path: Path, change: Callable[[dict[str, np.ndarray[Any, Any]]], None]) -> None:
    """Rewrites a rank file as the safetensors library does, its header's metadata kept."""
    raw = path.read_bytes()
    metadata = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    tensors = load_file(path)
    change(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata)
    size = path.stat().st_size
    manifest = json.loads((path.parent.parent / "manifest.json").read_text(encoding="utf-8"))
    record = next(file for file in manifest["files"] if file["path"] == f"{path.parent.name}/{path.name}")
    record["size"] = size
    (path.parent.parent / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_one_flipped_bit_is_found_and_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    slices = convert(source, tmp_path / "slices", "--tp", 2, "--pp", 2)
    name = "layers.3.mlp.down_proj.weight"

    def flip(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors[name].view(np.uint32)[17, 5] ^= 1

    changed(slices / "rank_3" / "checkpoint_3.safetensors", flip)
    facts = verify(source, slices)
    assert facts["failed"] == ["weights"]
    (found,) = facts["weights"]["differences"]
    whole = load_file(source / "model.safetensors")["model.layers.3.mlp.down_proj.weight"]
    expected, stored = float(whole[17, 48 + 5]), float(load_file(slices / "rank_3" / "checkpoint_3.safetensors")[name][17, 5])
    assert (found["name"], found["file"]) == (name, "rank_3/checkpoint_3.safetensors")
    assert (found["shape"], found["first_index"], found["elements"]) == ([64, 48], [17, 5], 1)
    assert (found["expected"], found["found"]) == (expected, stored)
    assert found["max_absolute_error"] == abs(expected - stored) > 0
    assert found["max_relative_error"] == pytest.approx(abs(expected - stored) / np.abs(whole[:, 48:]).max())


def test_slices_that_changed_places_are_found(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    slices = convert(source, tmp_path / "slices", "--tp", 2)
    first, second = (load_file(slices / f"rank_{rank}" / f"checkpoint_{rank}.safetensors") for rank in (0, 1))
    name = "layers.1.attention.q_proj.weight"
    changed(slices / "rank_0" / "checkpoint_0.safetensors", lambda tensors: tensors.update({name: second[name]}))
    changed(slices / "rank_1" / "checkpoint_1.safetensors", lambda tensors: tensors.update({name: first[name]}))
    facts = verify(source, slices)
    assert [item["name"] for item in facts["weights"]["differences"]] == [name, name]
    assert facts["weights"]["differences"][0]["elements"] == first[name].size


def test_the_weights_of_another_model_of_the_same_shape_fail(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    slices = convert(tiny_folder("qwen2"), tmp_path / "slices", "--tp", 2)
    facts = verify(tiny_folder("qwen2", seed=1), slices)
    assert facts["failed"] == ["weights"]
    assert {item["name"] for item in facts["weights"]["differences"]} == {item["name"] for item in facts["weights"]["holdings"]}


def test_a_config_that_changed_after_the_conversion_fails(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", "llama-gqa")
    slices = convert(source, tmp_path / "slices")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"]["rope_theta"] = 10_000.0
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    facts = verify(source, slices)
    assert facts["failed"] == ["description"]
    (difference,) = facts["description_differences"]
    assert (difference["source"]["theta"], difference["target"]["theta"]) == (10_000.0, 50_000.0)


@pytest.mark.parametrize("cast", ["bf16", "fp16"])
def test_a_cast_is_verified_as_a_cast_and_with_the_limits_of_its_type(cast: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("qwen3")
    facts = verify(source, convert(source, tmp_path / "slices", "--tp", 2, "--dtype", cast), "--forward")
    assert outcome(facts)["weights"] and facts["forward"]["threshold"]["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[cast]
    exact = verify(
        tiny_folder("qwen3", dtype=torch.bfloat16), convert(tiny_folder("qwen3", dtype=torch.bfloat16), tmp_path / "exact"), "--forward"
    )
    assert exact["holds"] and exact["forward"]["threshold"]["dtype"] == "float32"


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_a_single_file_of_whole_parameters_is_verified(ending: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-uneven-vocab")
    rank = convert(source, tmp_path / "slices") / "rank_0" / "checkpoint_0.safetensors"
    file = tmp_path / f"model.{ending}"
    parameters = [{"name": name, "data": ms.Tensor(array)} for name, array in load_file(rank).items()]
    ms.save_checkpoint(parameters, str(file), format=ending)
    facts = verify(source, file, "--forward")
    assert facts["holds"] and facts["target"]["kind"] == "file" and facts["target"]["layout"] is None
    parameters[3]["data"] = parameters[3]["data"] + 1
    ms.save_checkpoint(parameters[:-1], str(file), format=ending)
    worse = verify(source, file, "--forward")
    assert set(worse["failed"]) == {"coverage", "weights", "forward"} and worse["forward"] is None


def test_a_family_that_is_not_bundled_is_verified_with_the_table_of_the_tree(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_folder("llama-gqa"), tmp_path / "model")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["OurForCausalLM"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = replaced(table_text("llama"), '"LlamaForCausalLM"', '"LlamaForCausalLM", "OurForCausalLM"', times=2)
    table = write_table(tmp_path, text)
    facts = verify(source, convert(source, tmp_path / "slices", "--tp", 2, "--rules", table))
    assert facts["holds"] and any("no bundled rule table serves OurForCausalLM" in note for note in facts["notes"])


@pytest.mark.parametrize("form", ["older spelling of the config", "PyTorch files", "bfloat16", "shards"])
def test_every_form_of_a_folder_is_run(form: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"bfloat16": {"dtype": torch.bfloat16}, "shards": {"max_shard_size": "100KB"}}.get(form, {})
    source = save_tiny(tmp_path / "model", "llama-rope-llama3", **options)
    {"older spelling of the config": as_v4_config, "PyTorch files": as_pytorch_bin}.get(form, lambda _: None)(source)
    facts = verify(source, convert(source, tmp_path / "slices", "--tp", 2, "--pp", 2), "--forward")
    assert facts["holds"] and facts["forward"]["threshold"]["dtype"] == "float32"
    assert all(state["relative_error"] < 3e-5 for state in facts["forward"]["states"])


def test_no_code_of_the_folder_runs(tmp_path: Path) -> None:
    """`auto_map` names Python files that a library may run if it is told to trust them."""
    source = save_tiny(tmp_path / "model", "llama-gqa", tokenizer=True)
    mark = tmp_path / "ran"
    (source / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n", encoding="utf-8")
    for name, key in (("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((source / name).read_text(encoding="utf-8"))
        content["auto_map"] = {"AutoConfig": "evil.Evil", key: ["evil.Evil", "evil.Evil"]}
        (source / name).write_text(json.dumps(content), encoding="utf-8")
    ran = ms_convert("verify", source, convert(tiny_llama(tmp_path), tmp_path / "slices"), "--forward")
    assert ran.code in (0, 1) and not mark.exists()


def tiny_llama(folder: Path) -> Path:
    return save_tiny(folder / "plain", "llama-gqa")


# --- the command ------------------------------------------------------------------------------------------------------------------------


def test_wrong_calls_have_exit_code_2(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    assert ms_convert("verify", source).code == 2
    assert ms_convert("verify", source, source, "--generate", 0).code == 2
    assert ms_convert("verify", source, source, "--report", tmp_path / "absent" / "report.html").code == 2
    assert ms_convert("verify", source, source, "--rules", tmp_path / "absent.toml").code == 2


def test_what_cannot_be_verified_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    assert "no such file or folder" in refused("verify", source, tmp_path / "absent")
    assert "no manifest.json" in refused("verify", source, source)
    assert "config.json is missing" in refused("verify", tmp_path, source)
    (tmp_path / "notes.txt").write_text("no tensors")
    assert "not a .safetensors or .ckpt file" in refused("verify", source, tmp_path / "notes.txt")


def test_a_checkpoint_of_another_model_is_refused_as_such(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Fewer or more layers, another family; with a tied folder and an untied tree nothing else is blamed."""
    source, other = tiny_folder("llama-gqa"), tiny_folder("gpt2")
    tree = convert(source, tmp_path / "tree", "--tp", 2)
    assert "made from a llama model" in refused("verify", other, tree)
    for layers in (1, 5):
        config = LlamaConfig.from_pretrained(source, num_hidden_layers=layers)
        LlamaForCausalLM(config).save_pretrained(tmp_path / f"layers-{layers}")
        assert "another model" in refused("verify", tmp_path / f"layers-{layers}", tree)


def test_a_model_without_a_head_has_no_continuation_to_compare(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("bert")
    facts = verify(source, convert(source, tmp_path / "slices"), "--generate", 4)
    assert facts["failed"] == ["forward"]
    assert "no language model head" in next(check["summary"] for check in facts["checks"] if check["name"] == "forward")


@pytest.mark.parametrize("package", ["mindspore", "torch", "transformers"])
def test_a_package_that_a_forward_pass_lacks_is_named(package: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    slices = convert(source, tmp_path / "slices")
    code = f"import sys; sys.modules[{package!r}] = None; from converter.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "verify", str(source), str(slices), "--forward"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 1 and f"a forward pass needs {package}, which is not installed" in ran.stderr
    assert "pip install 'ms-convert[mindspore,hf]'" in ran.stderr


def test_the_terminal_says_what_holds_and_the_verdict_last(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    slices = convert(source, tmp_path / "slices", "--tp", 2)
    ran = ms_convert("verify", source, slices, "--json", tmp_path / "facts.json")
    assert ran.code == 0 and ran.out.splitlines()[-1].startswith("VERIFIED")
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))["holds"]
    bad = ms_convert("verify", tiny_folder("llama-gqa", seed=1), slices)
    assert bad.code == 1 and bad.out.splitlines()[-1].startswith("NOT VERIFIED  weights of 4 checks failed")
    shown = [line.split()[0] for line in bad.out.splitlines() if "checkpoint_0.safetensors" in line and "other bits" in line]
    assert shown[:2] == ["embedding.tokens.embedding_table", "layers.0.attention_norm.gamma"]


def test_verify_stands_in_the_help_and_imports_nothing_heavy(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    assert any(line.split()[:1] == ["verify"] for line in in_process("--help").out.splitlines())
    source = tiny_folder("llama-gqa")
    slices = convert(source, tmp_path / "slices", "--tp", 2)
    code = (
        "import sys; from converter.cli import run; code = run(sys.argv[1:]);"
        "heavy = {'mindspore', 'torch', 'transformers', 'jinja2', 'matplotlib'} & set(sys.modules); sys.exit(code or 10 * len(heavy))"
    )
    for arguments in (["--help"], ["verify", "--help"], ["verify", str(source), str(slices)]):
        assert subprocess.run([sys.executable, "-c", code, *arguments], cwd=REPOSITORY, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_without_a_forward_pass_memory_does_not_depend_on_the_models_size(tmp_path: Path) -> None:
    """One tensor alone, of 400 MB, is larger than what the process may hold."""
    source = save_tiny(tmp_path / "model", "llama-tied", vocab_size=800_000, hidden_size=128)
    slices = convert(source, tmp_path / "slices", "--tp", 2, "--pp", 2)
    assert (source / "model.safetensors").stat().st_size > 400_000_000
    code = "import sys; from converter.cli import run; code = run(sys.argv[1:]); print(open('/proc/self/status').read()); sys.exit(code)"
    command = [sys.executable, "-c", code, "verify", str(source), str(slices)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    peak = next(int(line.split()[1]) << 10 for line in done.stdout.splitlines() if line.startswith("VmHWM:"))
    assert 20 << 20 < peak < LIMIT_BYTES


def test_the_tests_of_a_forward_pass_leave_no_variant_out() -> None:
    from tests.model.test_verify_forward import LAYOUTS

    assert LAYOUTS.keys() == VARIANTS.keys()
