"""A rank's tensors in the names of MindFormers, cut and fused by hand with numpy from Transformers' state dict. No table is used here."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.converter.cut_by_hand import columns, rows

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
HEADS, KV_HEADS = 8, 4


def side_by_side(*parts: Array) -> Array:
    """A rank's own slices, one after the other: the slices were taken before."""
    return np.concatenate(parts)


def by_kv_group(q: Array, k: Array, v: Array, kv_heads: int) -> Array:
    """For each KV head: its query heads, the key, the value."""
    pieces = [part for group in zip(*(np.split(part, kv_heads) for part in (q, k, v)), strict=True) for part in group]
    return np.concatenate(pieces)


def alternating(gate: Array, up: Array) -> Array:
    """Row 0 of gate, row 0 of up, row 1 of gate ..."""
    return np.stack([gate, up], axis=1).reshape(-1, *gate.shape[1:])


def qkv(hf: Arrays, attention: str, kind: str, rank: int, tp: int, contiguous: bool) -> Array:
    q, k, v = (rows(hf[f"{attention}{part}_proj.{kind}"], rank, tp) for part in "qkv")
    return side_by_side(q, k, v) if contiguous else by_kv_group(q, k, v, KV_HEADS // tp)


def gate_up(hf: Arrays, mlp: str, rank: int, tp: int, contiguous: bool) -> Array:
    gate, up = (rows(hf[f"{mlp}{part}_proj.weight"], rank, tp) for part in ("gate", "up"))
    return side_by_side(gate, up) if contiguous else alternating(gate, up)


def mcore(hf: Arrays, layers: int, rank: int, tp: int, version: str) -> Arrays:
    """MindFormers 2.x: a whole model of one stage."""
    attention_contiguous = version in ("2.0-contiguous", "2.0-contiguous-attention")
    mlp_contiguous = version in ("2.0-contiguous", "2.0-contiguous-mlp")
    found = {
        "embedding.word_embeddings.weight": rows(hf["model.embed_tokens.weight"], rank, tp),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        found["output_layer.weight"] = rows(hf["lm_head.weight"], rank, tp)
    for layer in range(layers):
        source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        attention, mlp = f"{source}self_attn.", f"{source}mlp."
        for kind in ("weight", "bias"):
            if f"{attention}q_proj.{kind}" in hf:
                found[f"{target}self_attention.linear_qkv.{kind}"] = qkv(hf, attention, kind, rank, tp, attention_contiguous)
        for norm in ("q", "k"):
            if f"{attention}{norm}_norm.weight" in hf:
                found[f"{target}self_attention.{norm}_layernorm.weight"] = hf[f"{attention}{norm}_norm.weight"]
        found |= {
            f"{target}input_layernorm.weight": hf[f"{source}input_layernorm.weight"],
            f"{target}self_attention.linear_proj.weight": columns(hf[f"{attention}o_proj.weight"], rank, tp),
            f"{target}pre_mlp_layernorm.weight": hf[f"{source}post_attention_layernorm.weight"],
            f"{target}mlp.linear_fc1.weight": gate_up(hf, mlp, rank, tp, mlp_contiguous),
            f"{target}mlp.linear_fc2.weight": columns(hf[f"{mlp}down_proj.weight"], rank, tp),
        }
    return found


def legacy_llama(hf: Arrays, layers: int, rank: int, tp: int, version: str) -> Arrays:
    """MindFormers 1.x: a whole model of one stage."""
    number, fused = version.split("-")[0], version.endswith("-fused")
    found = {
        "model.tok_embeddings.embedding_weight": rows(hf["model.embed_tokens.weight"], rank, tp),
        "model.norm_out.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        found["lm_head.weight"] = rows(hf["lm_head.weight"], rank, tp)
    for layer in range(layers):
        block = f"model.layers.{layer}."
        attention, mlp = f"{block}self_attn.", f"{block}mlp."
        for kind in ("weight", "bias"):
            if f"{attention}q_proj.{kind}" not in hf:
                continue
            if fused:
                found[f"{block}attention.w_qkv.{kind}"] = qkv(hf, attention, kind, rank, tp, number == "1.3")
            else:
                found |= {f"{block}attention.w{part}.{kind}": rows(hf[f"{attention}{part}_proj.{kind}"], rank, tp) for part in "qkv"}
        if fused:
            found[f"{block}feed_forward.w_gate_hidden.weight"] = gate_up(hf, mlp, rank, tp, number == "1.3")
        else:
            found[f"{block}feed_forward.w1.weight"] = rows(hf[f"{mlp}gate_proj.weight"], rank, tp)
            found[f"{block}feed_forward.w3.weight"] = rows(hf[f"{mlp}up_proj.weight"], rank, tp)
        found |= {
            f"{block}attention_norm.weight": hf[f"{block}input_layernorm.weight"],
            f"{block}attention.wo.weight": columns(hf[f"{attention}o_proj.weight"], rank, tp),
            f"{block}ffn_norm.weight": hf[f"{block}post_attention_layernorm.weight"],
            f"{block}feed_forward.w2.weight": columns(hf[f"{mlp}down_proj.weight"], rank, tp),
        }
    return found


def legacy_gpt2(hf: Arrays, layers: int, rank: int, tp: int, version: str) -> Arrays:
    """MindFormers 1.3: q, k and v are turned to [out, in], the other weights stay [in, out]."""
    found = {
        "backbone.embedding.word_embedding.embedding_table": rows(hf["transformer.wte.weight"], rank, tp),
        "backbone.embedding.position_embedding.embedding_table": hf["transformer.wpe.weight"],
        "backbone.layernorm.gamma": hf["transformer.ln_f.weight"],
        "backbone.layernorm.beta": hf["transformer.ln_f.bias"],
    }
    for layer in range(layers):
        source, target = f"transformer.h.{layer}.", f"backbone.blocks.{layer}."
        for number, kind in ((1, "ln_1"), (2, "ln_2")):
            found[f"{target}layernorm{number}.gamma"] = hf[f"{source}{kind}.weight"]
            found[f"{target}layernorm{number}.beta"] = hf[f"{source}{kind}.bias"]
        weights = np.split(hf[f"{source}attn.c_attn.weight"], 3, axis=1)
        biases = np.split(hf[f"{source}attn.c_attn.bias"], 3)
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
            found[f"{target}attention.dense{number}.weight"] = rows(weight.T, rank, tp)
            found[f"{target}attention.dense{number}.bias"] = rows(bias, rank, tp)
        found |= {
            f"{target}attention.projection.weight": rows(hf[f"{source}attn.c_proj.weight"], rank, tp),
            f"{target}attention.projection.bias": hf[f"{source}attn.c_proj.bias"],
            f"{target}output.mapping.weight": columns(hf[f"{source}mlp.c_fc.weight"], rank, tp),
            f"{target}output.mapping.bias": rows(hf[f"{source}mlp.c_fc.bias"], rank, tp),
            f"{target}output.projection.weight": rows(hf[f"{source}mlp.c_proj.weight"], rank, tp),
            f"{target}output.projection.bias": hf[f"{source}mlp.c_proj.bias"],
        }
    return found


def legacy_bert(hf: Arrays, layers: int, rank: int, tp: int, version: str) -> Arrays:
    """MindFormers 1.3: the output projections are turned to [in, out]; layernorm2 is the one after attention."""
    embeddings, after = "bert.embeddings.", "bert.embedding_postprocessor."
    found = {
        "bert.word_embedding.embedding_table": rows(hf[f"{embeddings}word_embeddings.weight"], rank, tp),
        f"{after}full_position_embedding.embedding_table": hf[f"{embeddings}position_embeddings.weight"],
        f"{after}token_type_embedding.embedding_table": hf[f"{embeddings}token_type_embeddings.weight"],
        f"{after}layernorm.gamma": hf[f"{embeddings}LayerNorm.weight"],
        f"{after}layernorm.beta": hf[f"{embeddings}LayerNorm.bias"],
    }
    for layer in range(layers):
        source, target = f"bert.encoder.layer.{layer}.", f"bert.bert_encoder.encoder.blocks.{layer}."
        for number, part in enumerate(("query", "key", "value"), start=1):
            for kind in ("weight", "bias"):
                found[f"{target}attention.dense{number}.{kind}"] = rows(hf[f"{source}attention.self.{part}.{kind}"], rank, tp)
        for number, part in ((2, "attention.output"), (1, "output")):
            found[f"{target}layernorm{number}.gamma"] = hf[f"{source}{part}.LayerNorm.weight"]
            found[f"{target}layernorm{number}.beta"] = hf[f"{source}{part}.LayerNorm.bias"]
        found |= {
            f"{target}attention.projection.weight": rows(hf[f"{source}attention.output.dense.weight"].T, rank, tp),
            f"{target}attention.projection.bias": hf[f"{source}attention.output.dense.bias"],
            f"{target}output.mapping.weight": columns(hf[f"{source}intermediate.dense.weight"].T, rank, tp),
            f"{target}output.mapping.bias": rows(hf[f"{source}intermediate.dense.bias"], rank, tp),
            f"{target}output.projection.weight": rows(hf[f"{source}output.dense.weight"].T, rank, tp),
            f"{target}output.projection.bias": hf[f"{source}output.dense.bias"],
        }
    return found | bert_heads(hf)


def bert_heads(hf: Arrays) -> Arrays:
    """Every rank holds the heads whole."""
    pairs = {
        "bert.dense.weight": "bert.pooler.dense.weight", "bert.dense.bias": "bert.pooler.dense.bias",
        "mlmloss.dense.weight": "cls.predictions.transform.dense.weight", "mlmloss.dense.bias": "cls.predictions.transform.dense.bias",
        "mlmloss.layernorm.gamma": "cls.predictions.transform.LayerNorm.weight",
        "mlmloss.layernorm.beta": "cls.predictions.transform.LayerNorm.bias", "mlmloss.output_bias": "cls.predictions.bias",
        "nsploss.dense.weight": "cls.seq_relationship.weight", "nsploss.dense.bias": "cls.seq_relationship.bias",
    }  # fmt: skip
    return {name: hf[source] for name, source in pairs.items() if source in hf}


MCORE = [f"mindformers@2.0{kind}" for kind in ("", "-contiguous", "-contiguous-attention", "-contiguous-mlp")]
LEGACY = [f"mindformers-legacy@{version}" for version in ("1.3", "1.3-fused", "1.8", "1.8-fused")]
CASES = {
    **{(variant, target): mcore for variant in ("qwen3", "qwen3-tied", "llama-gqa", "qwen2") for target in MCORE},
    **{(variant, target): legacy_llama for variant in ("llama-gqa", "llama-tied", "qwen2") for target in LEGACY},
    ("gpt2", "mindformers-legacy@1.3"): legacy_gpt2,
    ("bert-mlm", "mindformers-legacy@1.3"): legacy_bert,
    ("bert-pretraining", "mindformers-legacy@1.3"): legacy_bert,
}
