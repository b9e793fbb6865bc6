"""Transformers' side of a parity test: which of its tensors is which canonical parameter, and a ModelConfig for each tiny model.

Both are written out by hand, apart from the rule tables, so that a mistake there and a mistake here are two mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from model.config import ModelConfig, Rope, RopeScaling

Floats = npt.NDArray[np.float32]

GPT2 = ModelConfig(
    family="gpt2", kind="decoder", layers=4, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=256, vocab=256, padded_vocab=256,
    max_positions=64, norm="layer_norm", norm_eps=1e-5, activation="gelu_tanh", gated_mlp=False, positions="learned",
    qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
LLAMA = ModelConfig(
    family="llama", kind="decoder", layers=4, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=256, padded_vocab=256,
    max_positions=128, norm="rms_norm", norm_eps=1e-5, activation="silu", gated_mlp=True, rope=Rope(50_000.0, 8),
)  # fmt: skip
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True)
QWEN3 = replace(LLAMA, family="qwen3", head_dim=16, rope=Rope(50_000.0, 16), qk_norm=True)
BERT = ModelConfig(
    family="bert", kind="encoder", layers=4, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=256, padded_vocab=256,
    max_positions=64, norm="layer_norm", norm_eps=1e-6, norm_position="post", activation="gelu", gated_mlp=False, positions="learned",
    qkv_bias=True, output_bias=True, mlp_bias=True, token_types=2,
)  # fmt: skip


def scaled(scaling: RopeScaling, max_positions: int = 128) -> ModelConfig:
    return replace(LLAMA, head_dim=16, max_positions=max_positions, rope=Rope(500.0, 16, scaling=scaling))


CONFIGS: dict[str, ModelConfig] = {
    "gpt2": GPT2,
    "gpt2-no-head": replace(GPT2, head=False, tied=False),
    "gpt2-inner": replace(GPT2, ffn=96, activation="relu"),
    "gpt2-scaled-by-layer": replace(GPT2, ffn=96, scale_by_layer=True),
    "gpt2-uneven-vocab": replace(GPT2, ffn=96, vocab=199, padded_vocab=199),
    "llama": replace(LLAMA, kv_heads=8),
    "llama-no-head": replace(LLAMA, head=False),
    "llama-gqa": LLAMA,
    "llama-gqa-2": replace(LLAMA, kv_heads=2),
    "llama-mqa": replace(LLAMA, kv_heads=1),
    "llama-head-dim": replace(LLAMA, head_dim=16, rope=Rope(50_000.0, 16)),
    "llama-tied": replace(LLAMA, tied=True),
    "llama-bias": replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True),
    "llama-uneven-vocab-tied": replace(LLAMA, vocab=199, padded_vocab=199, tied=True),
    "llama-rope-linear": scaled(RopeScaling("linear", 4.0)),
    "llama-rope-dynamic": scaled(RopeScaling("dynamic", 4.0), max_positions=32),
    "llama-rope-llama3": scaled(
        RopeScaling("llama3", 8.0, original_max_positions=32, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "llama-rope-yarn": scaled(RopeScaling("yarn", 4.0, original_max_positions=32)),
    "llama-rope-yarn-full": scaled(
        RopeScaling(
            "yarn", 4.0, original_max_positions=32, beta_fast=16.0, beta_slow=2.0, mscale=0.9, mscale_all_dim=0.7, truncate=False
        )
    ),
    "mistral": replace(LLAMA, family="mistral"),
    "mistral-sliding": replace(LLAMA, family="mistral", sliding_window=8, sliding_layers=(0, 1, 2, 3)),
    "mistral-head-dim": replace(LLAMA, family="mistral", head_dim=16, rope=Rope(50_000.0, 16)),
    "qwen2": QWEN2,
    "qwen2-tied": replace(QWEN2, tied=True),
    "qwen2-sliding": replace(QWEN2, sliding_window=8, sliding_layers=(2, 3)),
    "qwen3": QWEN3,
    "qwen3-tied": replace(QWEN3, tied=True),
    "qwen3-bias": replace(QWEN3, qkv_bias=True, output_bias=True),
    "bert": replace(BERT, pooler=True),
    "bert-mlm": replace(BERT, mlm_head=True, tied=True),
    "bert-mlm-untied": replace(BERT, mlm_head=True),
    "bert-pretraining": replace(BERT, pooler=True, mlm_head=True, nsp_head=True, tied=True),
}  # fmt: skip
"""By the name of the variant in tests/tiny_models.py."""

GPT2_LAYER = {
    "ln_1.weight": "attention_norm.gamma",
    "ln_1.bias": "attention_norm.beta",
    "attn.c_proj.weight": "attention.o_proj.weight",
    "attn.c_proj.bias": "attention.o_proj.bias",
    "ln_2.weight": "mlp_norm.gamma",
    "ln_2.bias": "mlp_norm.beta",
    "mlp.c_fc.weight": "mlp.up_proj.weight",
    "mlp.c_fc.bias": "mlp.up_proj.bias",
    "mlp.c_proj.weight": "mlp.down_proj.weight",
    "mlp.c_proj.bias": "mlp.down_proj.bias",
}
GPT2_TOP = {
    "wte.weight": "embedding.tokens.embedding_table",
    "wpe.weight": "embedding.positions.embedding_table",
    "ln_f.weight": "final_norm.gamma",
    "ln_f.bias": "final_norm.beta",
}
LLAMA_LAYER = {
    "input_layernorm.weight": "attention_norm.gamma",
    **{f"self_attn.{p}_proj.{kind}": f"attention.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")},
    "self_attn.q_norm.weight": "attention.q_norm.gamma",
    "self_attn.k_norm.weight": "attention.k_norm.gamma",
    "post_attention_layernorm.weight": "mlp_norm.gamma",
    **{f"mlp.{p}_proj.{kind}": f"mlp.{p}_proj.{kind}" for p in ("gate", "up", "down") for kind in ("weight", "bias")},
}
LLAMA_TOP = {
    "embed_tokens.weight": "embedding.tokens.embedding_table",
    "norm.weight": "final_norm.gamma",
    "lm_head.weight": "lm_head.weight",
}
BERT_LAYER = {
    **{f"attention.self.{hf}.{kind}": f"attention.{ms}_proj.{kind}" for hf, ms in (("query", "q"), ("key", "k"), ("value", "v"))
       for kind in ("weight", "bias")},
    "attention.output.dense.weight": "attention.o_proj.weight",
    "attention.output.dense.bias": "attention.o_proj.bias",
    "attention.output.LayerNorm.weight": "attention_norm.gamma",
    "attention.output.LayerNorm.bias": "attention_norm.beta",
    "intermediate.dense.weight": "mlp.up_proj.weight",
    "intermediate.dense.bias": "mlp.up_proj.bias",
    "output.dense.weight": "mlp.down_proj.weight",
    "output.dense.bias": "mlp.down_proj.bias",
    "output.LayerNorm.weight": "mlp_norm.gamma",
    "output.LayerNorm.bias": "mlp_norm.beta",
}  # fmt: skip
BERT_TOP = {
    "embeddings.word_embeddings.weight": "bert.embedding.tokens.embedding_table",
    "embeddings.position_embeddings.weight": "bert.embedding.positions.embedding_table",
    "embeddings.token_type_embeddings.weight": "bert.embedding.token_types.embedding_table",
    "embeddings.LayerNorm.weight": "bert.embedding.norm.gamma",
    "embeddings.LayerNorm.bias": "bert.embedding.norm.beta",
    "pooler.dense.weight": "bert.pooler.weight",
    "pooler.dense.bias": "bert.pooler.bias",
    "cls.predictions.transform.dense.weight": "mlm_head.dense.weight",
    "cls.predictions.transform.dense.bias": "mlm_head.dense.bias",
    "cls.predictions.transform.LayerNorm.weight": "mlm_head.norm.gamma",
    "cls.predictions.transform.LayerNorm.bias": "mlm_head.norm.beta",
    "cls.predictions.decoder.weight": "lm_head.weight",
    "cls.predictions.decoder.bias": "lm_head.bias",
    "cls.seq_relationship.weight": "nsp_head.weight",
    "cls.seq_relationship.bias": "nsp_head.bias",
}
HEADS = {"lm_head.weight", "cls.predictions.decoder.weight"}
UNUSED = {"cls.predictions.bias"}  # the computation reads cls.predictions.decoder.bias


def canonical_arrays(model: torch.nn.Module, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    """The parameters of a Transformers model as (canonical name, array); a tied head is left out."""
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        if full_name in UNUSED or (config.tied and full_name in HEADS):
            continue
        array = parameter.detach().numpy()
        scope, _, rest = full_name.partition(".")
        name = rest if scope in ("transformer", "model", "bert") else full_name
        if config.family == "gpt2":
            yield from _gpt2_arrays(name, array)
        elif config.family == "bert":
            yield _renamed(name, "encoder.layer.", "bert.encoder.layers.", BERT_TOP, BERT_LAYER), array
        else:
            yield _renamed(name, "layers.", "layers.", LLAMA_TOP, LLAMA_LAYER), array


def _renamed(name: str, hf_layers: str, our_layers: str, top: dict[str, str], per_layer: dict[str, str]) -> str:
    if not name.startswith(hf_layers):
        return top[name]
    number, _, rest = name.removeprefix(hf_layers).partition(".")
    return f"{our_layers}{number}.{per_layer[rest]}"


def _gpt2_arrays(name: str, array: Floats) -> Iterator[tuple[str, Floats]]:
    """GPT-2's Conv1D weights are [in, out], and q, k, v are one tensor."""
    fused = name.removesuffix(".weight").removesuffix(".bias")
    transposed = array.T if array.ndim == 2 and name.startswith("h.") else array
    if fused.endswith("attn.c_attn"):
        _, number, _, _, kind = name.split(".")
        for projection, part in zip("qkv", np.split(transposed, 3), strict=True):
            yield f"layers.{number}.attention.{projection}_proj.{kind}", part
    else:
        yield _renamed(name, "h.", "layers.", GPT2_TOP, GPT2_LAYER), transposed


def hidden_states(model: torch.nn.Module, config: ModelConfig, **inputs: Any) -> tuple[dict[str, Floats], Any]:
    """Every hidden state by our name, and the outputs. The last layer's is caught by a hook: Transformers replaces it by the normed one."""
    layers = model.get_submodule(_layers_name(model, config))
    caught: dict[str, Floats] = {}

    def catch(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            caught[f"layers.{layer}"] = (output[0] if isinstance(output, tuple) else output).numpy()

        return hook

    handles = [module.register_forward_hook(catch(layer)) for layer, module in enumerate(layers.children())]
    with torch.no_grad():
        outputs = model(**inputs, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    states = {"embedding": outputs.hidden_states[0].numpy(), **caught}
    if config.kind == "decoder":
        states["final_norm"] = outputs.hidden_states[-1].numpy()
    return states, outputs


def _layers_name(model: torch.nn.Module, config: ModelConfig) -> str:
    base, layers = {"gpt2": ("transformer", "h"), "bert": ("bert", "encoder.layer")}.get(config.family, ("model", "layers"))
    return f"{base}.{layers}" if hasattr(model, base) else layers


def relative_error(got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """||got - wanted|| / ||wanted|| in the Euclidean norm."""
    assert got.shape == wanted.shape
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
