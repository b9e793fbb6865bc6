"""MindFormers' own networks load what `hf2ms` writes and give Transformers' logits.

`python -m tests.oracle.check_logits NETWORK=MODEL ...` in an environment of MindFormers: NETWORK is a key of `CHECKS`, MODEL a key of
`SOURCES` or a Hugging Face folder. Prints the figures and exits with 1 when one of them is too large or a parameter was not loaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracle.networks import gpt2_1_3, legacy_llama, llama_1_3
from tests.oracle.sources import SOURCES

BATCH, LENGTH = 2, 32
TEXT = Path(__file__).resolve().parents[1] / "data" / "alice.txt"
ALLOWED = 1e-5
"""Largest difference of two logits, relative to the largest logit."""


@dataclass(frozen=True)
class Check:
    """`build(config)` makes upstream's network for `BATCH` sequences of `LENGTH`; `target` is the dialect that it loads."""

    target: str
    build: Callable[[Mapping[str, Any]], Any]


SIZES = {"seq_length": LENGTH, "batch_size": BATCH}
CHECKS = {
    "1.8": Check("mindformers-legacy@1.8", lambda config: legacy_llama(config, 1, fused=False, **SIZES)),
    "1.8-fused": Check("mindformers-legacy@1.8-fused", lambda config: legacy_llama(config, 1, fused=True, **SIZES)),
    "1.3": Check("mindformers-legacy@1.3", lambda config: llama_1_3(config, 1, fused=False, **SIZES)),
    "1.3-fused": Check("mindformers-legacy@1.3-fused", lambda config: llama_1_3(config, 1, fused=True, **SIZES)),
    "gpt2-1.3": Check("mindformers-legacy@1.3", lambda config: gpt2_1_3(config, 1, **SIZES)),
}


def main() -> None:
    """Runs every check of the command line."""
    failed = [given for given in sys.argv[1:] if not _holds(*given.split("=", 1))]
    if failed:
        sys.exit(f"does not hold: {', '.join(failed)}")


def _holds(check: str, model: str) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        folder = SOURCES[model].write(Path(scratch, "hf")) if model in SOURCES else Path(model)
        ranks = Path(scratch, "ranks")
        command = [sys.executable, "-m", "converter.cli", "hf2ms", str(folder), "-o", str(ranks), "--target", CHECKS[check].target]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        config = _with_rope_theta(json.loads((folder / "config.json").read_text()))
        tokens = _tokens(folder, config["vocab_size"])
        # MindSpore first: once Torch has run, MindSpore 2.10 cannot make its first tensor.
        given, left = _of_mindformers(CHECKS[check], config, ranks / "rank_0" / "checkpoint_0.safetensors", tokens)
        wanted = _of_transformers(folder, config, tokens)
    error = float(np.abs(given - wanted).max() / np.abs(wanted).max())
    agree = float((given.argmax(-1) == wanted.argmax(-1)).mean())
    name = model if model in SOURCES else folder.name
    print(f"== {check} {name}: not loaded {left}; relative error {error:.2e}; top-1 {agree:.1%}", flush=True)
    return not left and error <= ALLOWED


def _tokens(folder: Path, vocabulary: int) -> npt.NDArray[np.int32]:
    """[batch, length]: English text where the model has a tokenizer, otherwise random numbers above the special ones."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return np.random.RandomState(3).randint(3, vocabulary, (BATCH, LENGTH)).astype(np.int32)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tokenizer)).encode(TEXT.read_text(encoding="utf-8")).ids
    return np.array(ids[: BATCH * LENGTH], np.int32).reshape(BATCH, LENGTH)


def _with_rope_theta(config: dict[str, Any]) -> dict[str, Any]:
    """Transformers 5 writes rope_parameters, which MindFormers and Transformers 4 do not know."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"only the default rotary embedding is built here, not {rope}")
    return {**config, "rope_theta": rope.get("rope_theta", config.get("rope_theta"))}


def _of_transformers(folder: Path, config: Mapping[str, Any], tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.from_pretrained(folder)
    if config["rope_theta"]:
        described.rope_theta = config["rope_theta"]
    model = AutoModelForCausalLM.from_pretrained(folder, config=described, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.from_numpy(tokens).long()).logits.numpy()
    return logits


def _of_mindformers(check: Check, config: Mapping[str, Any], file: Path, tokens: npt.NDArray[np.int32]) -> tuple[Any, list[str]]:
    """Logits [batch, length, vocabulary], and the names that only the network or only the file has."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    network = check.build(config)
    parameters = ms.load_checkpoint(str(file), format="safetensors")
    not_in_file, not_in_network = ms.load_param_into_net(network, parameters, strict_load=True)
    result = network(ms.Tensor(tokens))
    logits = (result[0] if isinstance(result, tuple) else result).asnumpy().reshape(*tokens.shape, -1)
    return logits, [*not_in_file, *not_in_network]


if __name__ == "__main__":
    main()
