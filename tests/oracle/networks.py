"""MindFormers' own networks, built from a Hugging Face config for the CPU: float32, and composed operators instead of Ascend's fused ones.

Each function imports the MindFormers of the environment that it runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.oracle.absent import stand_in_for

Config = Mapping[str, Any]
FLOAT32 = dict.fromkeys(("compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype"), "float32")
GONE_FROM_MINDSPORE = ("mindspore.dataset.transforms.py_transforms", "mindspore.dataset.vision.py_transforms")


def legacy_llama(config: Config, tp: int, *, fused: bool, seq_length: int = 16, batch_size: int = 1) -> Any:
    """`LlamaForCausalLM` of MindFormers 1.x. `fused` is its `qkv_concat`."""
    from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
    from mindformers.modules.transformer.transformer import TransformerOpParallelConfig

    made = LlamaConfig(
        batch_size=batch_size,
        seq_length=seq_length,
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_position_embedding=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        theta=config["rope_theta"],
        tie_word_embeddings=config["tie_word_embeddings"],
        qkv_has_bias=config["model_type"] == "qwen2",
        qkv_concat=fused,
        use_rope_slice=True,
        fused_rms_norm=False,
        use_flash_attention=False,
        parallel_config=TransformerOpParallelConfig(model_parallel=tp, data_parallel=1, vocab_emb_dp=False),
        **FLOAT32,
    )
    return LlamaForCausalLM(made).set_train(False)


def llama_1_3(config: Config, tp: int, *, fused: bool, seq_length: int = 16, batch_size: int = 1) -> Any:
    """`legacy_llama` of MindFormers 1.3.2, on a MindSpore that is newer than it."""
    stand_in_for(*GONE_FROM_MINDSPORE)
    from mindformers.modules.layers import RotaryEmbedding
    from mindspore.ops import operations

    network = legacy_llama(config, tp, fused=fused, seq_length=seq_length, batch_size=batch_size)
    for _, cell in network.cells_and_names():
        if isinstance(cell, RotaryEmbedding):
            cell.cast = operations.Cast()  # it calls Cell.cast, which MindSpore had then
    return network


def gpt2_1_3(config: Config, tp: int, *, seq_length: int = 16, batch_size: int = 1) -> Any:
    """`GPT2LMHeadModel` of MindFormers 1.3.2, on a MindSpore that is newer than it."""
    stand_in_for(*GONE_FROM_MINDSPORE)
    import mindspore as ms
    from mindformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
    from mindformers.modules.transformer.transformer import TransformerOpParallelConfig
    from mindspore.ops import operations

    # The constructor computes a constant with it, and under the parallel compiler no operator can be run.
    operations.Ones.__call__ = lambda self, shape, dtype: ms.Tensor(np.ones(shape, np.float32), dtype)
    made = GPT2Config(
        batch_size=batch_size,
        seq_length=seq_length,
        vocab_size=config["vocab_size"],
        hidden_size=config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        max_position_embeddings=config["n_positions"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        use_flash_attention=False,
        parallel_config=TransformerOpParallelConfig(model_parallel=tp, data_parallel=1, vocab_emb_dp=False),
        **FLOAT32,
    )
    network = GPT2LMHeadModel(made).set_train(False)
    for _, cell in network.cells_and_names():
        if getattr(cell, "dtype", None) == ms.float16:
            cell.dtype = ms.float32  # float16 is written into the code, whatever compute_dtype says
    return network


def qwen3_2_0(config: Config, tp: int, *, seq_length: int = 16) -> Any:
    """`TrainingQwen3ForCausalLM` of MindFormers 2.0, the mcore network; its attribute `template` converts weights."""
    made = qwen3_config_2_0(config, tp, seq_length=seq_length)
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
    from mindformers.parallel_core.training_graph.transformer import utils

    utils.is_legacy_model = lambda: False  # what a run's YAML file says with use_legacy: False
    return TrainingQwen3ForCausalLM(made)


def qwen3_config_2_0(config: Config, tp: int, *, seq_length: int = 16) -> Any:
    """MindFormers 2.0's `Qwen3Config` of a Hugging Face config."""
    stand_in_for("hyper_parallel")
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.modules.transformer.transformer import TransformerOpParallelConfig

    own = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    parallel = {"parallel_config": TransformerOpParallelConfig(model_parallel=tp, data_parallel=1)} if tp > 1 else {}
    dtypes = {f"{name}_dtype": "float32" for name in ("compute", "params", "layernorm_compute", "softmax_compute", "rotary")}
    return Qwen3Config(seq_length=seq_length, use_flash_attention=False, **own, **dtypes, **parallel)


NETWORKS: dict[str, Callable[[Config, int], Any]] = {
    "llama-1.8": lambda config, tp: legacy_llama(config, tp, fused=False),
    "llama-1.8-fused": lambda config, tp: legacy_llama(config, tp, fused=True),
    "llama-1.3": lambda config, tp: llama_1_3(config, tp, fused=False),
    "llama-1.3-fused": lambda config, tp: llama_1_3(config, tp, fused=True),
    "gpt2-1.3": gpt2_1_3,
    "qwen3-2.0": qwen3_2_0,
}
