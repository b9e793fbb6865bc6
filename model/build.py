"""From a ModelConfig to a model; a config that the bundled models do not compute is refused."""

from __future__ import annotations

from collections.abc import Iterator

from mindspore import nn

from mappings.errors import Problem, Refused
from model.bert import Bert
from model.config import ModelConfig, Rope
from model.gpt import GPT
from model.precision import FloatType, Precision


def build_model(config: ModelConfig, parameters: FloatType = "float32", compute: FloatType | None = None) -> nn.Cell:
    """The model that `config` describes, in evaluation mode, its parameters NaN until they are loaded (model/load.py).

    `cell.parameters_dict()` holds exactly the canonical names.

    Args:
        parameters: element type of the parameters.
        compute: element type of the activations; that of the parameters unless given.

    Raises:
        Refused: with everything in `config` that the bundled models do not compute.
    """
    problems = list(unsupported(config))
    if problems:
        raise Refused(f"the bundled models do not compute this {config.family} model", problems)
    precision = Precision(parameters, compute or parameters)
    cell = GPT(config, precision) if config.kind == "decoder" else Bert(config, precision)
    cell.set_train(False)
    return cell


def unsupported(config: ModelConfig) -> Iterator[Problem]:
    """What the bundled models do not compute, or what contradicts itself."""
    if config.experts:
        yield Problem("mixture-of-experts layers are converted but not computed", "experts")
    if config.heads % config.kv_heads:
        yield Problem(f"{config.heads} query heads cannot share {config.kv_heads} key/value heads evenly", "kv_heads")
    if config.padded_vocab < config.vocab:
        yield Problem(f"padded vocabulary {config.padded_vocab} is smaller than the vocabulary {config.vocab}", "padded_vocab")
    if (config.norm_position == "pre") != (config.kind == "decoder"):
        yield Problem(
            f"a {config.kind} with {config.norm_position}-norm layers", "norm_position", "decoders are pre-norm, encoders post-norm"
        )
    if (config.rope is not None) != (config.positions == "rope"):
        yield Problem(f"positions are {config.positions!r} and rope is {config.rope}", "rope", "give rope exactly where positions are rope")
    if config.rope is not None:
        yield from _unsupported_rope(config.rope, config.head_dim)
    yield from _unsupported_windows(config)
    yield from _unsupported_heads(config)


def _unsupported_rope(rope: Rope, head_dim: int) -> Iterator[Problem]:
    if rope.style != "half":
        yield Problem(f"rotary style {rope.style!r}", "rope.style", "conversion reorders the rows; the bundled models rotate halves")
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        yield Problem(f"{rope.rotary_dim} rotated elements of {head_dim}", "rope.rotary_dim", "an even number up to head_dim")


def _unsupported_windows(config: ModelConfig) -> Iterator[Problem]:
    if config.sliding_layers and (config.sliding_window is None or config.sliding_window < 1):
        yield Problem(
            f"layers {config.sliding_layers} use a window of {config.sliding_window}", "sliding_window", "a window is 1 token or more"
        )
    if config.sliding_layers and config.kind == "encoder":
        yield Problem("sliding windows in an encoder", "sliding_layers")
    strangers = sorted(set(config.sliding_layers) - set(range(config.layers)))
    if strangers:
        yield Problem(f"layers {strangers} of {config.layers} have a window", "sliding_layers")


def _unsupported_heads(config: ModelConfig) -> Iterator[Problem]:
    if config.kind == "decoder" and (config.pooler or config.mlm_head or config.nsp_head):
        yield Problem("a decoder with an encoder's head", "kind")
    if config.nsp_head and not config.pooler:
        yield Problem("a next-sentence head without the pooler that feeds it", "nsp_head")
    has_head = config.head if config.kind == "decoder" else config.mlm_head
    if config.tied and not has_head:
        yield Problem("a tied head that does not exist", "tied")
