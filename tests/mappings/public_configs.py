"""config.json files as they stand on the hub, in the spelling of the release that wrote them, with facts known from elsewhere.

`parameters` is the number that the hub or the model's paper states; it was not computed with this project.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PublicModel:
    family: str
    architecture: str
    config: dict[str, Any]
    parameters: int
    tensors: tuple[str, ...] = field(default=())


_GPT2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1,
    "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024,
    "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
_LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
    "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
    "vocab_size": 49152,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
_MISTRAL_V03 = _MISTRAL | {
    "attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0", "vocab_size": 32768,
}  # fmt: skip
_NEMO = _MISTRAL_V03 | {
    "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 131072, "num_hidden_layers": 40, "transformers_version": "4.43.0.dev0",
    "vocab_size": 131072,
}  # fmt: skip
_QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_QWEN25_7B = _QWEN25 | {
    "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 152064,
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}  # fmt: skip
_BERT = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
    "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True,
    "vocab_size": 30522,
}  # fmt: skip
_MINILM = _BERT | {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"], "hidden_size": 384, "intermediate_size": 1536,
    "num_hidden_layers": 6, "transformers_version": "4.8.2",
}  # fmt: skip
_BERT_CHINESE = _BERT | {
    "directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128, "pooler_type": "first_token_transform", "vocab_size": 21128,
}  # fmt: skip
_LLAMA2_13B = _LLAMA2 | {
    "_name_or_path": "meta-llama/Llama-2-13b-hf", "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 40,
}  # fmt: skip
_LLAMA2_70B = _LLAMA2 | {
    "_name_or_path": "meta-llama/Llama-2-70b-hf", "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8,
}  # fmt: skip
_LLAMA3 = _LLAMA31 | {
    "eos_token_id": 128001, "max_position_embeddings": 8192, "rope_scaling": None, "transformers_version": "4.40.0.dev0",
}  # fmt: skip
_LLAMA3_70B = _LLAMA3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
_QWEN25_72B = _QWEN25_7B | {
    "hidden_size": 8192, "intermediate_size": 29568, "max_window_layers": 80, "num_attention_heads": 64, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
}  # fmt: skip
_QWEN3_32B = _QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 25600, "max_window_layers": 64, "num_attention_heads": 64, "num_hidden_layers": 64,
}  # fmt: skip
POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")

PUBLIC: dict[str, PublicModel] = {
    "gpt2": PublicModel("gpt2", "GPT2LMHeadModel", _GPT2 | {"n_embd": 768, "n_head": 12, "n_layer": 12}, 124_439_808),
    "gpt2-xl": PublicModel(
        "gpt2", "GPT2LMHeadModel", _GPT2 | {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}, 1_557_611_200
    ),
    "Llama-2-7b": PublicModel("llama", "LlamaForCausalLM", _LLAMA2, 6_738_415_616),
    "Llama-3.1-8B": PublicModel("llama", "LlamaForCausalLM", _LLAMA31, 8_030_261_248),
    "SmolLM2-135M": PublicModel("llama", "LlamaForCausalLM", _SMOLLM2, 134_515_008),
    "Mistral-7B-v0.1": PublicModel("llama", "MistralForCausalLM", _MISTRAL, 7_241_732_096),
    "Mistral-7B-v0.3": PublicModel("llama", "MistralForCausalLM", _MISTRAL_V03, 7_248_023_552),
    "Mistral-Nemo": PublicModel("llama", "MistralForCausalLM", _NEMO, 12_247_782_400),
    "Qwen2.5-0.5B": PublicModel("qwen2", "Qwen2ForCausalLM", _QWEN25, 494_032_768),
    "Qwen2.5-7B": PublicModel("qwen2", "Qwen2ForCausalLM", _QWEN25_7B, 7_615_616_512),
    "Qwen3-0.6B": PublicModel("qwen3", "Qwen3ForCausalLM", _QWEN3, 596_049_920),
    "Qwen3-8B": PublicModel("qwen3", "Qwen3ForCausalLM", _QWEN3_8B, 8_190_735_360),
    "bert-base-uncased": PublicModel("bert", "BertForMaskedLM", _BERT, 110_106_428, (*POOLER, "cls.seq_relationship.weight")),
    "bert-base-chinese": PublicModel("bert", "BertForMaskedLM", _BERT_CHINESE, 102_882_442, (*POOLER, "cls.seq_relationship.weight")),
    "all-MiniLM-L6-v2": PublicModel("bert", "BertModel", _MINILM, 22_713_216, POOLER),
}

LARGER: dict[str, PublicModel] = {
    "gpt2-medium": PublicModel("gpt2", "GPT2LMHeadModel", _GPT2 | {"n_embd": 1024, "n_head": 16, "n_layer": 24}, 354_823_168),
    "gpt2-large": PublicModel("gpt2", "GPT2LMHeadModel", _GPT2 | {"n_embd": 1280, "n_head": 20, "n_layer": 36}, 774_030_080),
    "Llama-2-13b": PublicModel("llama", "LlamaForCausalLM", _LLAMA2_13B, 13_015_864_320),
    "Llama-2-70b": PublicModel("llama", "LlamaForCausalLM", _LLAMA2_70B, 68_976_648_192),
    "Llama-3-8B": PublicModel("llama", "LlamaForCausalLM", _LLAMA3, 8_030_261_248),
    "Llama-3-70B": PublicModel("llama", "LlamaForCausalLM", _LLAMA3_70B, 70_553_706_496),
    "Qwen2.5-72B": PublicModel("qwen2", "Qwen2ForCausalLM", _QWEN25_72B, 72_706_203_648),
    "Qwen3-32B": PublicModel("qwen3", "Qwen3ForCausalLM", _QWEN3_32B, 32_762_123_264),
}
"""More sizes, for what is asked of a config alone."""
