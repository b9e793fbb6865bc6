"""Hugging Face folders to measure on: a Llama in bfloat16 of a given size, and headers without data of a 671B mixture of experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from converter.safetensors_format import safetensors_layout

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 2048, 16, 8, 5632, 32000
LAYER_BYTES = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS + 3 * HIDDEN * FFN + 2 * HIDDEN)
BLOCK = 16 << 20

Described = tuple[str, str, tuple[int, ...]]


def llama_folder(folder: Path, gigabytes: float, shards: int = 4) -> Path:
    """A Llama folder of about `gigabytes` (decimal) of random bfloat16 weights in `shards` files; made once."""
    if (folder / "config.json").exists():
        return folder
    layers = max(2, round((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / LAYER_BYTES))
    tensors = list(_llama_tensors(layers))
    _write_folder(folder, tensors, shards, _llama_config(layers), data=True)
    return folder


def _llama_config(layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "vocab_size": VOCAB,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _llama_tensors(layers: int) -> Iterator[Described]:
    kv = HIDDEN * KV_HEADS // HEADS
    yield "model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", "BF16", (HIDDEN,)
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv), ("o", HIDDEN)):
            yield f"{prefix}self_attn.{name}_proj.weight", "BF16", (rows, HIDDEN)
        yield prefix + "post_attention_layernorm.weight", "BF16", (HIDDEN,)
        yield prefix + "mlp.gate_proj.weight", "BF16", (FFN, HIDDEN)
        yield prefix + "mlp.up_proj.weight", "BF16", (FFN, HIDDEN)
        yield prefix + "mlp.down_proj.weight", "BF16", (HIDDEN, FFN)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCAB, HIDDEN)


EXPERT_RULES = """
family = "experts"
description = "a mixture of experts of DeepSeek-V3's size, with plain attention"
architectures = ["ManyExpertsForCausalLM"]
prefix = "model."

[config]
kind = { value = "decoder" }
layers = { key = "num_hidden_layers" }
hidden = { key = "hidden_size" }
heads = { key = "num_attention_heads" }
kv_heads = { from = "heads" }
head_dim = { key = "head_dim" }
ffn = { key = "moe_intermediate_size" }
vocab = { key = "vocab_size" }
max_positions = { key = "max_position_embeddings" }
norm = { value = "rms_norm" }
norm_eps = { key = "rms_norm_eps" }
activation = { value = "silu" }
gated_mlp = { value = true }
rope = { reader = "rope" }
tied = { key = "tie_word_embeddings" }
experts = { key = "n_routed_experts" }
experts_per_token = { key = "num_experts_per_tok" }
expert_ffn = { key = "moe_intermediate_size" }

[config.fixed]
model_type = ["many_experts"]

[[rule]]
hf = "model.embed_tokens.weight"
ms = "embedding.tokens.embedding_table"

[[rule]]
hf = "model.layers.{layer}.mlp.router.weight"
ms = "layers.{layer}.mlp.router.weight"

[[rule]]
hf = "model.norm.weight"
ms = "final_norm.gamma"

[[rule]]
hf = "lm_head.weight"
ms = "lm_head.weight"
"""


def _layer_rules() -> str:
    pairs = [(f"self_attn.{name}_proj.weight", f"attention.{name}_proj.weight") for name in "qkvo"]
    pairs += [("input_layernorm.weight", "attention_norm.gamma"), ("post_attention_layernorm.weight", "mlp_norm.gamma")]
    pairs += [(f"mlp.experts.{{expert}}.{name}_proj.weight", f"mlp.experts.{name}_proj") for name in ("gate", "up", "down")]
    return "".join(f'\n[[rule]]\nhf = "model.layers.{{layer}}.{hf}"\nms = "layers.{{layer}}.{ms}"\n' for hf, ms in pairs)


def expert_folder(folder: Path, shards: int = 163) -> tuple[Path, Path]:
    """A folder with the headers of a model of about 671 billion parameters (sparse files, no data), and its rule table."""
    rules = folder.with_suffix(".toml")
    if not (folder / "config.json").exists():
        layers, hidden, heads, head_dim, experts, ffn, vocab = 61, 7168, 128, 64, 256, 2048, 129280
        tensors: list[Described] = [("model.embed_tokens.weight", "BF16", (vocab, hidden))]
        for layer in range(layers):
            prefix = f"model.layers.{layer}."
            tensors += [
                (prefix + "input_layernorm.weight", "BF16", (hidden,)),
                (prefix + "post_attention_layernorm.weight", "BF16", (hidden,)),
            ]
            tensors += [(f"{prefix}self_attn.{name}_proj.weight", "BF16", (heads * head_dim, hidden)) for name in "qkv"]
            tensors += [(f"{prefix}self_attn.o_proj.weight", "BF16", (hidden, heads * head_dim))]
            tensors += [(prefix + "mlp.router.weight", "BF16", (experts, hidden))]
            for expert in range(experts):
                place = f"{prefix}mlp.experts.{expert}."
                tensors += [(f"{place}{name}_proj.weight", "BF16", (ffn, hidden)) for name in ("gate", "up")]
                tensors += [(f"{place}down_proj.weight", "BF16", (hidden, ffn))]
        tensors += [("model.norm.weight", "BF16", (hidden,)), ("lm_head.weight", "BF16", (vocab, hidden))]
        config = {
            "architectures": ["ManyExpertsForCausalLM"], "model_type": "many_experts", "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "head_dim": head_dim, "n_routed_experts": experts, "num_experts_per_tok": 8,
            "moe_intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        }  # fmt: skip
        rules.parent.mkdir(parents=True, exist_ok=True)
        rules.write_text(EXPERT_RULES + _layer_rules())
        _write_folder(folder, tensors, shards, config, data=False)
    return folder, rules


def _write_folder(folder: Path, tensors: list[Described], shards: int, config: dict[str, object], *, data: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    random = np.random.default_rng(0)
    for shard, group in enumerate(np.array_split(np.arange(len(tensors)), shards), start=1):
        name = f"model-{shard:05}-of-{shards:05}.safetensors"
        described = [tensors[int(index)] for index in group]
        layout = safetensors_layout(described, {"format": "pt"})
        weight_map |= {tensor[0]: name for tensor in described}
        with open(folder / name, "wb") as file:
            file.truncate(layout.size)
            for offset, literal in layout.literals:
                file.seek(offset)
                file.write(literal)
            for (extent,) in layout.extents if data else []:
                file.seek(extent.offset)
                for start in range(0, extent.length, BLOCK):
                    file.write(_weights(random, min(BLOCK, extent.length - start)))
    index = {"metadata": {"total_size": sum(2 * int(np.prod(shape)) for _, _, shape in tensors)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def _weights(random: np.random.Generator, nbytes: int) -> bytes:
    """Finite bfloat16 values of either sign between 2^-8 and 2^8."""
    words = random.integers(0, 1 << 16, nbytes // 2, dtype=np.uint16)
    return ((words & 0x87FF) | 0x3C00).astype(np.uint16).tobytes()
