"""Parameters and ranks' slices as a person cuts them by hand with numpy from Transformers' state dict. No rule table is used here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
VOCAB_MULTIPLE = 128


def rows(array: Array, rank: int, tp: int) -> Array:
    return np.split(array, tp, axis=0)[rank]


def columns(array: Array, rank: int, tp: int) -> Array:
    return np.split(array, tp, axis=1)[rank]


def vocabulary(array: Array, rank: int, tp: int) -> Array:
    """A rank's rows of an embedding or head whose rows are padded with zeros to a multiple of 128 (for tp 1 not at all)."""
    padding = -len(array) % VOCAB_MULTIPLE if tp > 1 else 0
    padded = np.concatenate([array, np.zeros((padding, *array.shape[1:]), array.dtype)])
    return rows(padded, rank, tp)


def kv_rows(array: Array, rank: int, tp: int, kv_heads: int) -> Array:
    """A rank's KV heads; where there are fewer heads than ranks, neighbouring ranks hold the same one."""
    return rows(array, rank, tp) if kv_heads >= tp else rows(array, rank * kv_heads // tp, kv_heads)


def gpt2_layer(hf: Arrays, layer: int, rank: int, tp: int) -> Arrays:
    """Conv1D weights are [in, out]; MindSpore's Dense weights are [out, in]."""
    source, target = f"transformer.h.{layer}.", f"layers.{layer}."
    found = {}
    for norm, name in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
        found[f"{target}{name}.gamma"], found[f"{target}{name}.beta"] = hf[f"{source}{norm}.weight"], hf[f"{source}{norm}.bias"]
    weights = np.split(hf[f"{source}attn.c_attn.weight"], 3, axis=1)
    biases = np.split(hf[f"{source}attn.c_attn.bias"], 3)
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        found[f"{target}attention.{name}_proj.weight"] = rows(weight.T, rank, tp)
        found[f"{target}attention.{name}_proj.bias"] = rows(bias, rank, tp)
    found[f"{target}attention.o_proj.weight"] = columns(hf[f"{source}attn.c_proj.weight"].T, rank, tp)
    found[f"{target}attention.o_proj.bias"] = hf[f"{source}attn.c_proj.bias"]
    found[f"{target}mlp.up_proj.weight"] = rows(hf[f"{source}mlp.c_fc.weight"].T, rank, tp)
    found[f"{target}mlp.up_proj.bias"] = rows(hf[f"{source}mlp.c_fc.bias"], rank, tp)
    found[f"{target}mlp.down_proj.weight"] = columns(hf[f"{source}mlp.c_proj.weight"].T, rank, tp)
    found[f"{target}mlp.down_proj.bias"] = hf[f"{source}mlp.c_proj.bias"]
    return found


def gpt2_first(hf: Arrays, rank: int, tp: int) -> Arrays:
    return {
        "embedding.tokens.embedding_table": vocabulary(hf["transformer.wte.weight"], rank, tp),
        "embedding.positions.embedding_table": hf["transformer.wpe.weight"],
    }


def gpt2_last(hf: Arrays, rank: int, tp: int) -> Arrays:
    """The head is the embedding."""
    return {
        "final_norm.gamma": hf["transformer.ln_f.weight"],
        "final_norm.beta": hf["transformer.ln_f.bias"],
        "embedding.tokens.embedding_table": vocabulary(hf["transformer.wte.weight"], rank, tp),
    }


def llama_layer(kv_heads: int) -> Callable[[Arrays, int, int, int], Arrays]:
    def layer_of(hf: Arrays, layer: int, rank: int, tp: int) -> Arrays:
        source, target = f"model.layers.{layer}.", f"layers.{layer}."
        attention, mlp = f"{source}self_attn.", f"{source}mlp."
        return {
            f"{target}attention_norm.gamma": hf[f"{source}input_layernorm.weight"],
            f"{target}attention.q_proj.weight": rows(hf[f"{attention}q_proj.weight"], rank, tp),
            f"{target}attention.k_proj.weight": kv_rows(hf[f"{attention}k_proj.weight"], rank, tp, kv_heads),
            f"{target}attention.v_proj.weight": kv_rows(hf[f"{attention}v_proj.weight"], rank, tp, kv_heads),
            f"{target}attention.o_proj.weight": columns(hf[f"{attention}o_proj.weight"], rank, tp),
            f"{target}mlp_norm.gamma": hf[f"{source}post_attention_layernorm.weight"],
            f"{target}mlp.gate_proj.weight": rows(hf[f"{mlp}gate_proj.weight"], rank, tp),
            f"{target}mlp.up_proj.weight": rows(hf[f"{mlp}up_proj.weight"], rank, tp),
            f"{target}mlp.down_proj.weight": columns(hf[f"{mlp}down_proj.weight"], rank, tp),
        }

    return layer_of


def llama_first(hf: Arrays, rank: int, tp: int) -> Arrays:
    return {"embedding.tokens.embedding_table": vocabulary(hf["model.embed_tokens.weight"], rank, tp)}


def llama_last(hf: Arrays, rank: int, tp: int) -> Arrays:
    return {"final_norm.gamma": hf["model.norm.weight"], "lm_head.weight": vocabulary(hf["lm_head.weight"], rank, tp)}


def bert_layer(hf: Arrays, layer: int, rank: int, tp: int) -> Arrays:
    source, target = f"bert.encoder.layer.{layer}.", f"bert.encoder.layers.{layer}."
    found = {}
    for name, ms in (("query", "q"), ("key", "k"), ("value", "v")):
        found[f"{target}attention.{ms}_proj.weight"] = rows(hf[f"{source}attention.self.{name}.weight"], rank, tp)
        found[f"{target}attention.{ms}_proj.bias"] = rows(hf[f"{source}attention.self.{name}.bias"], rank, tp)
    found[f"{target}attention.o_proj.weight"] = columns(hf[f"{source}attention.output.dense.weight"], rank, tp)
    found[f"{target}attention.o_proj.bias"] = hf[f"{source}attention.output.dense.bias"]
    found[f"{target}mlp.up_proj.weight"] = rows(hf[f"{source}intermediate.dense.weight"], rank, tp)
    found[f"{target}mlp.up_proj.bias"] = rows(hf[f"{source}intermediate.dense.bias"], rank, tp)
    found[f"{target}mlp.down_proj.weight"] = columns(hf[f"{source}output.dense.weight"], rank, tp)
    found[f"{target}mlp.down_proj.bias"] = hf[f"{source}output.dense.bias"]
    for norm, ms in (("attention.output", "attention_norm"), ("output", "mlp_norm")):
        found[f"{target}{ms}.gamma"] = hf[f"{source}{norm}.LayerNorm.weight"]
        found[f"{target}{ms}.beta"] = hf[f"{source}{norm}.LayerNorm.bias"]
    return found


def bert_first(hf: Arrays, rank: int, tp: int) -> Arrays:
    source, target = "bert.embeddings.", "bert.embedding."
    return {
        f"{target}tokens.embedding_table": vocabulary(hf[f"{source}word_embeddings.weight"], rank, tp),
        f"{target}positions.embedding_table": hf[f"{source}position_embeddings.weight"],
        f"{target}token_types.embedding_table": hf[f"{source}token_type_embeddings.weight"],
        f"{target}norm.gamma": hf[f"{source}LayerNorm.weight"],
        f"{target}norm.beta": hf[f"{source}LayerNorm.bias"],
    }


def bert_last(hf: Arrays, rank: int, tp: int) -> Arrays:
    head = "cls.predictions."
    return {
        "bert.embedding.tokens.embedding_table": vocabulary(hf["bert.embeddings.word_embeddings.weight"], rank, tp),
        "mlm_head.dense.weight": hf[f"{head}transform.dense.weight"],
        "mlm_head.dense.bias": hf[f"{head}transform.dense.bias"],
        "mlm_head.norm.gamma": hf[f"{head}transform.LayerNorm.weight"],
        "mlm_head.norm.beta": hf[f"{head}transform.LayerNorm.bias"],
        "lm_head.bias": vocabulary(hf[f"{head}bias"], rank, tp),
    }


BY_HAND = {
    "gpt2": (gpt2_first, gpt2_layer, gpt2_last),
    "gpt2-uneven-vocab": (gpt2_first, gpt2_layer, gpt2_last),
    "llama-gqa": (llama_first, llama_layer(4), llama_last),
    "llama-gqa-2": (llama_first, llama_layer(2), llama_last),
    "llama-mqa": (llama_first, llama_layer(1), llama_last),
    "llama-head-dim": (llama_first, llama_layer(4), llama_last),
    "llama-uneven-vocab": (llama_first, llama_layer(4), llama_last),
    "bert-mlm": (bert_first, bert_layer, bert_last),
}


def rank_slices(variant: str, hf: Arrays, rank: int, tp: int, stages: Sequence[int]) -> Arrays:
    """What rank `rank` of tp x len(stages) ranks holds, the pipeline outermost; `stages` are the layers of each stage."""
    first, layer_of, last = BY_HAND[variant]
    stage, tensor_rank = divmod(rank, tp)
    begin = sum(stages[:stage])
    found: Arrays = {}
    for layer in range(begin, begin + stages[stage]):
        found |= layer_of(hf, layer, tensor_rank, tp)
    found |= first(hf, tensor_rank, tp) if stage == 0 else {}
    found |= last(hf, tensor_rank, tp) if stage == len(stages) - 1 else {}
    return found
