"""What MindFormers 1.8's converters make of Llama and Qwen2: `python -m tests.oracle.generate_mindformers_1_8` in its environment.

Llama goes the way of `convert_weight.py` (Transformers to .ckpt, then the fused layout), Qwen2 the way of `auto_trans_ckpt` (safetensors to
safetensors), which is the only one of the two that interleaves the fused biases as the network wants them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.oracle.checkpoints import read_ckpt, record, sliced
from tests.oracle.goldens import Golden, Tensors
from tests.oracle.parallel_compile import compile_network
from tests.oracle.sources import SOURCES

VERSION = "1.8.0"


def main() -> None:
    """Makes four golden outputs."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        separate = _llama(folder)
        _record("llama", "llama-1.8", "convert_pt_to_ms of models/llama/convert_weight.py", separate, folder)
        fused = _llama_fused(folder)
        _record("llama", "llama-1.8-fused", "then convert_to_qkv_concat of models/llama/convert_weight.py", fused, folder)
        route = "convert_hf_safetensors_multiprocess of utils/safetensors with LlamaForCausalLM"
        _record("qwen2", "qwen2-1.8", route, _qwen2(folder, fused=False), folder)
        _record("qwen2", "qwen2-1.8-fused", route + ", qkv_concat", _qwen2(folder, fused=True), folder)


def _record(source: str, name: str, route: str, whole: Tensors, folder: Path) -> None:
    network = name.replace("qwen2", "llama")  # Qwen2 is the Llama network with qkv_has_bias
    strategy = compile_network(network, source, folder / name)
    about = {
        "source": source,
        "mindformers": VERSION,
        "tp1": route,
        "tp2": "cut by ms.transform_checkpoints with the strategy file of MindSpore's compiler for LlamaForCausalLM at model_parallel 2",
    }
    record(name, Golden(whole, sliced(whole, strategy), about))


def _llama(folder: Path) -> Tensors:
    from mindformers.models.llama.convert_weight import convert_pt_to_ms

    source = SOURCES["llama"].write(folder / "llama-hf")
    convert_pt_to_ms(str(source), str(folder / "llama.ckpt"))
    return read_ckpt(folder / "llama.ckpt")


def _llama_fused(folder: Path) -> Tensors:
    from mindformers.models.llama.convert_weight import convert_to_qkv_concat

    config = SOURCES["llama"].config
    sizes = {
        "num_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
    }
    yaml = folder / "llama.yaml"
    yaml.write_text(json.dumps({"model": {"model_config": sizes}}))  # JSON is YAML
    convert_to_qkv_concat(str(folder / "llama.ckpt"), str(folder / "fused.ckpt"), str(yaml))
    return read_ckpt(folder / "fused.ckpt")


def _qwen2(folder: Path, *, fused: bool) -> Tensors:
    from mindformers.models.llama import LlamaForCausalLM
    from mindformers.utils.safetensors.convert_safetensors import convert_hf_safetensors_multiprocess

    from tests.oracle.networks import legacy_llama

    source = SOURCES["qwen2"]
    hf = folder / f"qwen2-hf-{fused}"
    target = folder / f"qwen2-{fused}"
    config: Any = legacy_llama(source.config, 1, fused=fused).config
    convert_hf_safetensors_multiprocess(str(source.write(hf)), str(target), LlamaForCausalLM, config)
    return read_ckpt(target / "model.safetensors")


if __name__ == "__main__":
    main()
