"""The Hugging Face models that upstream converts and that `ms-convert` converts: the same values on every machine.

Every element of a model is another number, so a row in the wrong place cannot go unseen: a permutation of 0..n-1 (RandomState, whose stream
numpy has frozen) spread evenly about zero with std 0.5; norms and LayerNorm's gains lie about 2 and overlap with nothing else.
Needs numpy, and safetensors to write: it runs in the environments of MindFormers too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
SPREAD = 0.5
GAIN = 2.0


@dataclass(frozen=True)
class Source:
    """One model: its config.json, and each tensor's name and shape in the order in which the values are dealt out."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    gains: frozenset[str]
    seed: int

    def tensors(self) -> dict[str, Array]:
        """Name -> float32 array, contiguous."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        total = sum(sizes)
        order = np.random.RandomState(self.seed).permutation(total)
        step = np.float32(SPREAD * math.sqrt(3) / total)
        values = (2 * order + 1 - total).astype(np.float32) * step
        parts = np.split(values, np.cumsum(sizes)[:-1])
        return {
            name: np.ascontiguousarray(part.reshape(shape) + np.float32(GAIN) if name in self.gains else part.reshape(shape))
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def write(self, folder: Path) -> Path:
        """Makes `folder` a Hugging Face folder of one safetensors file."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        save_file(self.tensors(), str(folder / "model.safetensors"), metadata={"format": "pt"})
        return folder


_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip


def _decoder_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    rows = {"q": config["num_attention_heads"] * head_dim}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for part, width in rows.items():
            shapes[f"{prefix}self_attn.{part}_proj.weight"] = (width, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{prefix}self_attn.{part}_proj.bias"] = (width,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, rows["q"])
        if config["model_type"] == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    for layer in range(config["n_layer"]):
        prefix = f"transformer.h.{layer}."
        for name, (rows, columns) in {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, 4 * hidden),
            "mlp.c_proj": (4 * hidden, hidden),
        }.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            shapes[f"{prefix}{name}.bias"] = (columns,)
        for name in ("ln_1", "ln_2"):
            shapes[f"{prefix}{name}.weight"] = shapes[f"{prefix}{name}.bias"] = (hidden,)
    shapes["transformer.ln_f.weight"] = shapes["transformer.ln_f.bias"] = (hidden,)
    return shapes


def _source(
    config: Mapping[str, Any], shapes: Callable[[Mapping[str, Any]], dict[str, tuple[int, ...]]], is_gain: Callable[[str], bool], seed: int
) -> Source:
    made = shapes(config)
    return Source(config, made, frozenset(filter(is_gain, made)), seed)


def _decoder(architecture: str, model_type: str, seed: int, **config: Any) -> Source:
    whole = _DECODER | {"architectures": [architecture], "model_type": model_type} | config
    return _source(whole, _decoder_shapes, lambda name: name.endswith("norm.weight"), seed)


def _gpt2(seed: int) -> Source:
    config = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32,
        "vocab_size": 64, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    }  # fmt: skip
    return _source(config, _gpt2_shapes, lambda name: name.endswith((".ln_1.weight", ".ln_2.weight", ".ln_f.weight")), seed)


SOURCES: dict[str, Source] = {
    "llama": _decoder("LlamaForCausalLM", "llama", 7),
    "llama-tied": _decoder("LlamaForCausalLM", "llama", 11, tie_word_embeddings=True),
    "qwen2": _decoder("Qwen2ForCausalLM", "qwen2", 13),
    "qwen3": _decoder("Qwen3ForCausalLM", "qwen3", 17, head_dim=8),
    "gpt2": _gpt2(19),
}
"""Name -> model. Heads 8 with 4 KV heads, so that at tp 2 each rank still has two groups of two queries."""
