"""Transformers' side of a comparison: the folder's own class, on the CPU, in float32, with eager attention.

Modules are caught by hooks in the order of computation, so that a family of which nothing is known here is compared as well.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# MindSpore before torch, as its FAQ asks: on aarch64 the static TLS that libgomp needs is scarce, and the second may find none left.
from model.forward import Outputs, state_names  # isort: skip

import numpy as np
import numpy.typing as npt
import torch
import transformers

from converter.source_model import SourceModel, architecture_of
from mappings.errors import Problem, Refused, refuse
from model.config import ModelConfig
from model.probes import Integers, Probe, Tokenize, inputs_of

Floats = npt.NDArray[np.float32]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")
CANDIDATES = 16  # likeliest tokens of each step of a continuation that are kept


@dataclass(frozen=True)
class Step:
    """One step of a greedy continuation: the likeliest tokens, best first, their logits, and the largest magnitude of all logits."""

    tokens: tuple[int, ...]
    logits: tuple[float, ...]
    scale: float

    @property
    def chosen(self) -> int:
        return self.tokens[0]

    def margin(self, token: int) -> float | None:
        """How far a token's logit lies below the chosen one's; None when it is not among the likeliest."""
        return self.logits[0] - self.logits[self.tokens.index(token)] if token in self.tokens else None


def load_reference(source: SourceModel) -> Any:
    """The model of the folder by the class that its config names. Nothing is fetched and no code of the folder runs.

    Raises Refused when Transformers has no such class or does not find every weight.
    """
    folder, where = source.folder.path, str(source.folder.path / "config.json")
    name = architecture_of(source.folder.config, where)
    model_class: Any = getattr(transformers, name, None)
    if not _is_model_class(model_class):
        raise refuse(f"transformers {transformers.__version__} has no model class {name!r}", where, "use a release that has it")
    options: dict[str, Any] = {"add_pooling_layer": source.config.pooler} if name == "BertModel" else {}
    with _quiet():
        model, report = model_class.from_pretrained(
            str(folder.resolve()), local_files_only=True, trust_remote_code=False, attn_implementation="eager", output_loading_info=True,
            use_safetensors=source.folder.form.name == "safetensors", **_dtype_option(), **options,
        )  # fmt: skip
    lacking = [*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]
    if lacking:
        raise Refused("Transformers does not find every weight", [Problem(key, str(folder)) for key in sorted(lacking)[:20]])
    return model.float().eval()


def _is_model_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, transformers.PreTrainedModel)


def _dtype_option() -> dict[str, Any]:
    """Named `torch_dtype` before transformers 5."""
    return {"dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype": torch.float32}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' progress bars and warnings, and as before afterwards."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def reference_outputs(model: Any, config: ModelConfig, probe: Probe) -> Outputs:
    """Run one probe. Hidden states by the names of `model.forward.state_names`."""
    base = model.base_model
    _forget_lengths(base, config)
    caught: dict[str, Floats] = {}
    with _caught(base, config, caught), torch.no_grad():
        outputs = model(**{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs_of(probe).items()})
    logits = _numpy(outputs.get("logits", outputs.get("prediction_logits")))
    nsp_logits = _numpy(outputs.get("seq_relationship_logits"))
    hidden = {name: caught[name] for name in state_names(config)}
    return Outputs(logits, hidden, caught.get("pooled") if config.pooler else None, nsp_logits)


def _forget_lengths(base: Any, config: ModelConfig) -> None:
    """Transformers' dynamic scaling keeps the frequencies of the longest sequence so far until it sees a short one."""
    if config.rope is not None and config.rope.scaling is not None and config.rope.scaling.kind == "dynamic":
        base.rotary_emb(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))


@contextmanager
def _caught(base: Any, config: ModelConfig, caught: dict[str, Floats]) -> Iterator[None]:
    """Collects what goes into the first layer, what comes out of each, and what the base model returns."""
    layers = _layers_of(base, config)

    def into_first(_module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        caught["embedding"] = _numpy(arguments[0] if arguments else named["hidden_states"])

    def out_of(name: str) -> Callable[..., None]:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            caught[name] = _numpy(output[0] if isinstance(output, tuple) else output)

        return hook

    def out_of_base(_module: Any, _arguments: Any, output: Any) -> None:
        if config.kind == "decoder":
            caught["final_norm"] = _numpy(output[0])
        if output.get("pooler_output") is not None:
            caught["pooled"] = _numpy(output["pooler_output"])

    handles = [layers[0].register_forward_pre_hook(into_first, with_kwargs=True), base.register_forward_hook(out_of_base)]
    handles += [layer.register_forward_hook(out_of(f"layers.{index}")) for index, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers_of(base: Any, config: ModelConfig) -> Any:
    """The outermost list of as many modules as the model has layers."""
    for _, module in base.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.layers:
            return module
    raise refuse(f"{type(base).__name__} has no list of {config.layers} layers", "", "check the number of layers in config.json")


def reference_rotary(model: Any, length: int) -> tuple[Floats, Floats] | None:
    """Cosines and sines of positions 0 .. length-1, each [length, rotary_dim]; None for a model that keeps no `rotary_emb`."""
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    with torch.no_grad():
        cos, sin = rotary(torch.zeros(1, 1, 1), torch.arange(length)[None])
    return _numpy(cos[0]), _numpy(sin[0])


def reference_continuation(model: Any, config: ModelConfig, prompt: Integers, steps: int) -> tuple[Step, ...]:
    """Continue `prompt` [1, seq] with the likeliest token, the whole sequence run again in each step, as `model.generate.greedy` does."""
    _forget_lengths(model.base_model, config)
    sequence, taken = torch.from_numpy(prompt.astype(np.int64)), []
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=sequence, use_cache=False).logits[0, -1]
            best = torch.topk(logits, min(CANDIDATES, logits.numel()))
            step = Step(tuple(best.indices.tolist()), tuple(best.values.tolist()), float(logits.abs().max()))
            taken.append(step)
            sequence = torch.cat([sequence, torch.tensor([[step.chosen]])], dim=1)
            if step.chosen in config.eos_ids:
                break
    return tuple(taken)


def release_memory() -> None:
    """What a model has left behind, before the next one is built."""
    gc.collect()


def read_tokenizer(folder: Path) -> tuple[Tokenize | None, Callable[[Sequence[int]], str] | None, str]:
    """(ids of a text, text of ids, note). (None, None, note) for a folder without a tokenizer, or with one that cannot be read."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None, None, ""
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder.resolve()), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a stranger's tokenizer fails in any way; what is lost is a probe, and the report says so
        return None, None, f"the folder's tokenizer cannot be read: {type(error).__name__}: {str(error)[:200]}"

    def tokenize(text: str) -> list[int]:
        with _quiet():
            return list(tokenizer(text)["input_ids"])

    return tokenize, lambda ids: str(tokenizer.decode(list(ids))), ""


def _numpy(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().numpy().astype(np.float32, copy=True)
