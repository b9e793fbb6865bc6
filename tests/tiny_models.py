"""Tiny models of every family with large, varied weights, as Hugging Face folders.

Large on purpose: with the usual initialisation (std 0.02) a model with the wrong RoPE layout differs by a third of a percent, and a test of
it passes. Here every weight and bias has std 0.5, every norm is 1 + 0.5 * N(0, 1), and no element is zero.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPREAD = 0.5
SMALLEST = 1e-3
"""No element is closer to zero: it would vanish in half precision, and a zero cannot be told from one that was never written."""


@dataclass(frozen=True)
class Variant:
    """What one tiny model is: Transformers' classes and the arguments of the config."""

    model_class: str
    config_class: str
    config: dict[str, Any]


_BERT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 256,
    "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-6,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 64, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}  # fmt: skip


def _scaled(rope_type: str, **parameters: float | bool) -> dict[str, Any]:
    """Heads of 16, so that the scaling's ramp has eight frequencies to act on, and a context of 128 grown from 32."""
    return {"head_dim": 16, "rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0, **parameters}}


def _gpt2(model_class: str = "GPT2LMHeadModel", **config: Any) -> Variant:
    return Variant(model_class, "GPT2Config", _GPT2 | config)


def _llama(model_class: str = "LlamaForCausalLM", **config: Any) -> Variant:
    return Variant(model_class, "LlamaConfig", _DECODER | config)


def _mistral(**config: Any) -> Variant:
    return Variant("MistralForCausalLM", "MistralConfig", _DECODER | {"sliding_window": None} | config)


def _qwen2(**config: Any) -> Variant:
    return Variant("Qwen2ForCausalLM", "Qwen2Config", _DECODER | config)


def _qwen3(**config: Any) -> Variant:
    return Variant("Qwen3ForCausalLM", "Qwen3Config", _DECODER | {"head_dim": 16} | config)


def _bert(model_class: str = "BertModel", **config: Any) -> Variant:
    return Variant(model_class, "BertConfig", _BERT | config)


VARIANTS: dict[str, Variant] = {
    "gpt2": _gpt2(),
    "gpt2-no-head": _gpt2("GPT2Model"),
    "gpt2-inner": _gpt2(n_inner=96, activation_function="relu"),
    "gpt2-scaled-by-layer": _gpt2(n_inner=96, scale_attn_by_inverse_layer_idx=True),
    "gpt2-uneven-vocab": _gpt2(n_inner=96, vocab_size=199),
    "llama": _llama(num_key_value_heads=8),
    "llama-no-head": _llama("LlamaModel"),
    "llama-gqa": _llama(),
    "llama-gqa-2": _llama(num_key_value_heads=2),
    "llama-mqa": _llama(num_key_value_heads=1),
    "llama-head-dim": _llama(head_dim=16),
    "llama-tied": _llama(tie_word_embeddings=True),
    "llama-bias": _llama(attention_bias=True, mlp_bias=True),
    "llama-uneven-vocab": _llama(vocab_size=199),
    "llama-uneven-vocab-tied": _llama(vocab_size=199, tie_word_embeddings=True),
    "llama-five-layers": _llama(num_hidden_layers=5),
    "llama-many-ends": _llama(eos_token_id=[2, 5, 7], pad_token_id=3),
    "llama-rope-linear": _llama(**_scaled("linear", factor=4.0)),
    "llama-rope-dynamic": _llama(**_scaled("dynamic", factor=4.0), max_position_embeddings=32),
    "llama-rope-llama3": _llama(
        **_scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "llama-rope-yarn": _llama(**_scaled("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-rope-yarn-full": _llama(
        **_scaled(
            "yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=16.0, beta_slow=2.0, mscale=0.9, mscale_all_dim=0.7,
            truncate=False,
        )
    ),
    "mistral": _mistral(),
    "mistral-sliding": _mistral(sliding_window=8),
    "mistral-head-dim": _mistral(head_dim=16),
    "qwen2": _qwen2(),
    "qwen2-tied": _qwen2(tie_word_embeddings=True),
    "qwen2-sliding": _qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen2-uneven-vocab": _qwen2(vocab_size=199),
    "qwen3": _qwen3(),
    "qwen3-tied": _qwen3(tie_word_embeddings=True),
    "qwen3-bias": _qwen3(attention_bias=True),
    "bert": _bert(),
    "bert-uneven-vocab": _bert(vocab_size=199),
    "bert-mlm": _bert("BertForMaskedLM"),
    "bert-mlm-untied": _bert("BertForMaskedLM", tie_word_embeddings=False),
    "bert-pretraining": _bert("BertForPreTraining"),
}  # fmt: skip
"""Heads 8, hidden 64, four layers, at most 1 MB each: tensor parallelism 1, 2, 4 and 8 and pipelines of up to four stages fit."""


def tiny_model(variant: str, seed: int = 0, *, dtype: Any = None, **overrides: Any) -> Any:
    """A Transformers model of the variant, in evaluation mode on the CPU: float32, or `dtype` (torch's).

    `overrides` go to the config (`num_hidden_layers=3`). The same variant, seed and overrides give the same values.
    """
    import transformers

    chosen = VARIANTS[variant]
    config = getattr(transformers, chosen.config_class)(**(chosen.config | overrides))
    model = getattr(transformers, chosen.model_class)(config)
    _fill(model, seed)
    return model.to(dtype).eval() if dtype is not None else model.eval()


def _fill(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            centre = 1.0 if type(module).__name__.endswith("Norm") else 0.0
            for name, parameter in module.named_parameters(recurse=False):
                values = torch.randn(parameter.shape, generator=generator) * SPREAD + (centre if name == "weight" else 0.0)
                parameter.copy_(torch.where(values.abs() < SMALLEST, torch.full_like(values, SMALLEST), values))


def save_tiny(
    folder: Path,
    variant: str,
    seed: int = 0,
    *,
    dtype: Any = None,
    max_shard_size: str = "1GB",
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Saves a tiny model as Transformers does, config.json in the spelling of the installed release, and returns the folder.

    `max_shard_size="100KB"` gives several shards and an index. `tokenizer=True` adds what a real folder has besides: a small tokenizer, a
    README and a sub-folder.
    """
    model = tiny_model(variant, seed, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        _tiny_tokenizer().save_pretrained(folder)
        (folder / "README.md").write_text(f"# {variant}\n\nRandom weights, seed {seed}: «not» a trained model.\n", encoding="utf-8")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}\n', encoding="utf-8")
    return folder


_LINES = [
    "the quick brown fox jumps over the lazy dog",
    "a conversion is a list of strided copies",
    "nothing is lost and nothing is guessed",
    "the capital of France is Paris",
]


def _tiny_tokenizer() -> Any:
    """A byte-pair tokenizer of at most 120 tokens, so that its ids fit every variant's vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>", "<pad>"], show_progress=False)
    tokenizer.train_from_iterator(_LINES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=64
    )


def as_v4_config(folder: Path) -> None:
    """Rewrites config.json as Transformers 4 spelled it: `torch_dtype`, and `rope_theta` + `rope_scaling` in place of `rope_parameters`."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "rope_parameters" in config:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["transformers_version"] = "4.57.1"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def as_pytorch_bin(folder: Path) -> None:
    """Turns the safetensors files of a folder into `pytorch_model*.bin` ones with the same shards, as older releases saved them."""
    import torch
    from safetensors.torch import load_file

    renamed = {path.name: path.name.replace("model", "pytorch_model", 1).removesuffix(".safetensors") + ".bin" for path in _weights(folder)}
    for old, new in renamed.items():
        torch.save(load_file(folder / old), folder / new)
        (folder / old).unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] = {name: renamed[file] for name, file in content["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        index.unlink()


def add_derived_buffers(folder: Path) -> list[str]:
    """Adds the buffers that older releases saved: causal masks, rotary frequencies, position ids. Returns their names.

    For a folder with one safetensors file; ValueError for a model whose rotary frequencies are scaled.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (path,) = _weights(folder)
    tensors = load_file(path)
    kind, buffers = config["model_type"], {}
    if kind == "gpt2":
        prefix = "transformer." if "transformer.wte.weight" in tensors else ""
        mask = torch.ones(config["n_positions"], config["n_positions"], dtype=torch.bool).tril()[None, None]
        for layer in range(config["n_layer"]):
            buffers[f"{prefix}h.{layer}.attn.bias"] = mask.clone()
            buffers[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    elif kind == "bert":
        prefix = "" if "embeddings.word_embeddings.weight" in tensors else "bert."
        buffers[f"{prefix}embeddings.position_ids"] = torch.arange(config["max_position_embeddings"])[None]
    else:
        prefix = "model." if "model.embed_tokens.weight" in tensors else ""
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config["rope_parameters"]
        if rope["rope_type"] != "default":
            raise ValueError(f"the frequencies of {rope['rope_type']!r} are not this simple")
        frequencies = rope["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        for layer in range(config["num_hidden_layers"]):
            buffers[f"{prefix}layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies.clone()
    save_file(tensors | buffers, path, metadata={"format": "pt"})
    return sorted(buffers)


def _weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
