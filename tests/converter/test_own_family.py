"""A family that nobody bundled, as a table of its own: no Python, and everything that a table can say in one model.

A decoder in the manner of Falcon, Gemma and DeepSeek: query, key and value fused by KV group, with the rotary rows of query and key
interleaved; a norm that the catalogue lacks; one dense layer before the sparse ones; experts that hold gate and up transposed side by side;
and a shared expert whose width is no field of ModelConfig.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from converter.hf2ms import RankTreeOptions, convert, plan_conversion
from converter.ms2hf import HFOptions, plan_restoration, restore
from converter.strided import check_cover
from mappings.errors import Refused
from mappings.tables import load_table
from tests.converter.command_line import assert_same_folder, done
from tests.converter.planned import Array, Arrays

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4, 24, 8, 2, 6, 40, 77
EXPERTS, EXPERT_FFN, SHARED, DENSE = 3, 10, 14, 1
GROUP, QKV = HEADS // KV_HEADS, (HEADS + 2 * KV_HEADS) * HEAD_DIM
TP, PP = 2, 2
PADDED = 128

TABLE = """
family = "falcma"
description = "a family of one's own"
architectures = ["FalcmaForCausalLM"]
prefix = "core."

[config]
kind = { value = "decoder" }
head = { value = true }
layers = { key = "n_layer" }
hidden = { key = "n_embd" }
heads = { key = "n_head" }
kv_heads = { key = "n_kv_head" }
head_dim = { key = "head_size" }
ffn = { key = "ffn_size" }
vocab = { key = "vocab_size" }
max_positions = { key = "max_len" }
norm = { value = "rms_norm" }
norm_eps = { key = "eps", default = 1e-6 }
norm_offset = { value = 1.0 }
norm_position = { value = "pre" }
activation = { key = "act", map = "activation" }
gated_mlp = { value = true }
positions = { value = "rope" }
rope = { reader = "rope" }
qkv_bias = { value = true }
output_bias = { value = false }
mlp_bias = { value = false }
tied = { key = "tie_word_embeddings", default = false }
experts = { key = "n_experts" }
experts_per_token = { key = "top_k" }
expert_ffn = { key = "expert_size" }
bos_ids = { key = "bos_token_id" }
eos_ids = { key = "eos_token_id" }
pad_id = { key = "pad_token_id" }

[config.fixed]
model_type = ["falcma"]

[axes]
shared_ffn = { key = "shared_size" }

[[parameter]] # Gemma's second norm
name = "layers.{layer}.post_attention_norm.gamma"
axes = "hidden"
cut = "replicated"
stage = "layer"

[[parameter]]
name = "layers.{layer}.mlp.shared.up_proj.weight"
axes = "shared_ffn hidden"
cut = "shared_ffn"
stage = "layer"

[[parameter]] # one gain for each expert
name = "layers.{layer}.mlp.experts.gain"
axes = "experts hidden"
cut = "replicated"
stage = "layer"

[[rule]]
hf = "core.wte.weight"
ms = "embedding.tokens.embedding_table"

[[rule]]
hf = "core.h.{layer}.attn.qkv.weight"
hf_axes = "(kv_heads [q: group half_dim pair | k: half_dim pair | v: head_dim]) hidden"
[rule.ms]
q = "layers.{layer}.attention.q_proj.weight"
k = "layers.{layer}.attention.k_proj.weight"
v = "layers.{layer}.attention.v_proj.weight"

[[rule]]
hf = "core.h.{layer}.attn.qkv.bias"
hf_axes = "(kv_heads [q: group half_dim pair | k: half_dim pair | v: head_dim])"
ms = { q = "layers.{layer}.attention.q_proj.bias", k = "layers.{layer}.attention.k_proj.bias", v = "layers.{layer}.attention.v_proj.bias" }

[[rule]]
hf = "core.h.{layer}.attn.out.weight"
hf_axes = "(heads head_dim) hidden"
ms = "layers.{layer}.attention.o_proj.weight"

[[rule]]
hf = "core.h.{layer}.norm_1.weight"
ms = "layers.{layer}.attention_norm.gamma"

[[rule]]
hf = "core.h.{layer}.norm_1_post.weight"
ms = "layers.{layer}.post_attention_norm.gamma"

[[rule]]
hf = "core.h.{layer}.mlp.gate_up"
hf_axes = "[gate: ffn | up: ffn] hidden"
ms = { gate = "layers.{layer}.mlp.gate_proj.weight", up = "layers.{layer}.mlp.up_proj.weight" }
to_layer = "n_dense"

[[rule]]
hf = "core.h.{layer}.moe.{expert}.gate_up"
hf_axes = "hidden [gate: expert_ffn | up: expert_ffn]"
ms = { gate = "layers.{layer}.mlp.experts.gate_proj", up = "layers.{layer}.mlp.experts.up_proj" }
from_layer = "n_dense"

[[rule]]
hf = "core.h.{layer}.moe.{expert}.gain"
ms = "layers.{layer}.mlp.experts.gain"
from_layer = "n_dense"

[[rule]]
hf = "core.h.{layer}.moe.shared"
ms = "layers.{layer}.mlp.shared.up_proj.weight"
from_layer = "n_dense"

[[rule]]
hf = "core.norm.weight"
ms = "final_norm.gamma"

[[rule]]
hf = "head.weight"
ms = "lm_head.weight"
when = "head"

[[drop]]
hf = "core.h.{layer}.attn.mask"
why = "a causal mask"
check = "causal_mask"

[[duplicate]]
hf = "core.wte_again.weight"
of = "core.wte.weight"
"""

CONFIG: dict[str, Any] = {
    "architectures": ["FalcmaForCausalLM"], "model_type": "falcma", "n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS,
    "n_kv_head": KV_HEADS, "head_size": HEAD_DIM, "ffn_size": FFN, "vocab_size": VOCAB, "max_len": 64, "act": "gelu_new",
    "rope_theta": 5e5, "tie_word_embeddings": False, "n_experts": EXPERTS, "top_k": 2, "expert_size": EXPERT_FFN, "shared_size": SHARED,
    "n_dense": DENSE, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def source_tensors() -> Arrays:
    """Random bfloat16 weights under the family's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "core.wte.weight": (VOCAB, HIDDEN), "core.norm.weight": (HIDDEN,), "head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        here = f"core.h.{layer}."
        shapes |= {
            f"{here}attn.qkv.weight": (QKV, HIDDEN), f"{here}attn.qkv.bias": (QKV,),
            f"{here}attn.out.weight": (HEADS * HEAD_DIM, HIDDEN), f"{here}norm_1.weight": (HIDDEN,), f"{here}norm_1_post.weight": (HIDDEN,),
        }  # fmt: skip
        if layer < DENSE:
            shapes[f"{here}mlp.gate_up"] = (2 * FFN, HIDDEN)
            continue
        shapes[f"{here}moe.shared"] = (SHARED, HIDDEN)
        for expert in range(EXPERTS):
            shapes[f"{here}moe.{expert}.gate_up"], shapes[f"{here}moe.{expert}.gain"] = (HIDDEN, 2 * EXPERT_FFN), (HIDDEN,)
    random = np.random.default_rng(7)
    tensors: Arrays = {name: random.normal(0, 0.5, shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    tensors["core.wte_again.weight"] = tensors["core.wte.weight"].copy()
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("falcma") / "model"
    folder.mkdir()
    save_file(source_tensors(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "falcma.toml"
    path.write_text(TABLE, encoding="utf-8")
    return path


def half_split(rows: Array) -> Array:
    """[heads, head_dim, ...] with elements 2i and 2i + 1 of a head rotating together -> i and i + head_dim / 2."""
    halves: Array = np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1)
    return halves


def expected_slices(hf: Arrays, stage: int, rank: int) -> Arrays:
    """A rank's parameters, cut by hand."""

    def part(array: Array, axis: int = 0) -> Array:
        return np.split(array, TP, axis)[rank]

    found: Arrays = {}
    for layer in range(stage * LAYERS // PP, (stage + 1) * LAYERS // PP):
        here, there = f"core.h.{layer}.", f"layers.{layer}."
        for kind in ("weight", "bias"):
            by_group = hf[f"{here}attn.qkv.{kind}"].reshape(KV_HEADS, GROUP + 2, HEAD_DIM, -1)
            shape = (-1, HIDDEN) if kind == "weight" else (-1,)
            q = half_split(by_group[:, :GROUP].reshape(HEADS, HEAD_DIM, -1))
            found[f"{there}attention.q_proj.{kind}"] = part(q).reshape(shape)
            found[f"{there}attention.k_proj.{kind}"] = part(half_split(by_group[:, GROUP])).reshape(shape)
            found[f"{there}attention.v_proj.{kind}"] = part(by_group[:, GROUP + 1]).reshape(shape)
        found[f"{there}attention.o_proj.weight"] = part(hf[f"{here}attn.out.weight"].T, 1)
        found[f"{there}attention_norm.gamma"] = hf[f"{here}norm_1.weight"]
        found[f"{there}post_attention_norm.gamma"] = hf[f"{here}norm_1_post.weight"]
        if layer < DENSE:
            gate, up = np.split(hf[f"{here}mlp.gate_up"], 2)
            found[f"{there}mlp.gate_proj.weight"], found[f"{there}mlp.up_proj.weight"] = part(gate), part(up)
            continue
        experts = [np.split(hf[f"{here}moe.{expert}.gate_up"].T, 2) for expert in range(EXPERTS)]
        found[f"{there}mlp.experts.gate_proj"] = np.stack([part(gate) for gate, _ in experts])
        found[f"{there}mlp.experts.up_proj"] = np.stack([part(up) for _, up in experts])
        found[f"{there}mlp.experts.gain"] = np.stack([hf[f"{here}moe.{expert}.gain"] for expert in range(EXPERTS)])
        found[f"{there}mlp.shared.up_proj.weight"] = part(hf[f"{here}moe.shared"])
    padding = np.zeros((PADDED - VOCAB, HIDDEN), ml_dtypes.bfloat16)
    if stage == 0:
        found["embedding.tokens.embedding_table"] = part(np.concatenate([hf["core.wte.weight"], padding]))
    else:
        found["final_norm.gamma"] = hf["core.norm.weight"]
        found["lm_head.weight"] = part(np.concatenate([hf["head.weight"], padding]))
    return found


def test_the_slices_are_those_cut_by_hand_and_the_folder_comes_back(source: Path, rules: Path, tmp_path: Path) -> None:
    conversion = plan_conversion(source, RankTreeOptions(tp=TP, pp=PP), load_table(rules))
    assert [problem for file in conversion.whole.plan.files for tensor in file.tensors for problem in check_cover(tensor)] == []
    convert(conversion, tmp_path / "slices")
    hf = source_tensors()
    for rank in range(TP * PP):
        slices = load_file(tmp_path / "slices" / f"rank_{rank}" / f"checkpoint_{rank}.safetensors")
        expected = expected_slices(hf, *divmod(rank, TP))
        assert slices.keys() == expected.keys()
        for name, array in expected.items():
            assert np.array_equal(slices[name].view(np.uint16), np.ascontiguousarray(array).view(np.uint16)), (rank, name)
    restore(plan_restoration(tmp_path / "slices", HFOptions()), tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


@pytest.mark.parametrize("options", [("--tp", 2, "--pp", 3, "--layers-per-stage", "1,2,1"), ("--tp", 1, "--format", "ckpt")])
def test_a_user_gives_the_table_once_and_nothing_on_the_way_back(options: tuple[object, ...], source: Path, tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(TABLE, encoding="utf-8")
    done("hf2ms", source, "-o", tmp_path / "slices", "--rules", own, *options)
    own.unlink()
    done("ms2hf", tmp_path / "slices", "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_axes_of_ones_own_are_counted_when_a_tp_does_not_fit(source: Path, rules: Path) -> None:
    with pytest.raises(Refused) as caught:
        plan_conversion(source, RankTreeOptions(tp=4), load_table(rules))
    message = str(caught.value)
    assert f"{EXPERT_FFN} expert feed-forward width cannot be divided among 4" in message
    assert f"{SHARED} shared_ffn cannot be divided among 4" in message
    assert "attention heads" not in message
    assert message.endswith("tp values that work for this model: 1, 2")


def test_experts_of_one_stack_in_two_dtypes_are_refused_until_one_is_chosen(source: Path, rules: Path, tmp_path: Path) -> None:
    tensors = source_tensors()
    for layer in (2, 3):
        tensors[f"core.h.{layer}.moe.1.gate_up"] = tensors[f"core.h.{layer}.moe.1.gate_up"].astype(np.float32)
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with pytest.raises(Refused) as caught:
        plan_conversion(tmp_path / "model", RankTreeOptions(), load_table(rules))
    assert [problem.what for problem in caught.value.problems] == [
        f"layers.{{2..3}}.mlp.experts.{name}_proj is made of tensors of different dtypes" for name in ("gate", "up")
    ]
    assert all("--dtype" in problem.mend for problem in caught.value.problems)
    plan = plan_conversion(tmp_path / "model", RankTreeOptions(dtype="fp32"), load_table(rules)).whole.plan
    assert {tensor.dtype for file in plan.files for tensor in file.tensors} == {"F32"}
