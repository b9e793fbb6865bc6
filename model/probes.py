"""Inputs on which two implementations of a model are compared: chosen so that a mistake in conversion shows in at least one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model.config import ModelConfig

Integers = npt.NDArray[np.int64]
Tokenize = Callable[[str], Sequence[int]]

TOKENS = 48  # of an ordinary probe
PROMPT = "The capital of France is Paris, and the capital of Italy is"
TEXTS = (
    "When the storm had passed, the keeper climbed the tower again and lit the lamp. Far out a ship answered with two short flashes; he "
    "wrote the hour into the book, as his father had done before him, and went back down to his supper.",
    "def mean(values: list[float]) -> float:\n    return sum(values) / len(values)  # fails for an empty list\n",
    "Die Brücke wurde 1894 gebaut. Le pont fut achevé en 1894. 这座桥建于1894年。",
    "Is it raining?",
)
"""Prose, code, other scripts and a short question: lengths differ on purpose, so that a batch of them is padded."""

TOKENS_TIMES_PARAMETERS = 1.5e11  # about 15 s of arithmetic on two cores
SCORE_BYTES = 512 << 20  # of one layer's attention scores
SHORTEST_LIMIT = 64


@dataclass(frozen=True)
class Probe:
    """One batch. `ids` [batch, seq]; `token_types` and `attention_mask` (0 where a token is padding) are like it, for encoders only."""

    name: str
    why: str
    ids: Integers
    token_types: Integers | None = None
    attention_mask: Integers | None = None

    @property
    def real(self) -> npt.NDArray[np.bool_]:
        """[batch, seq]: where a token is not padding."""
        return np.ones(self.ids.shape, bool) if self.attention_mask is None else self.attention_mask != 0


@dataclass(frozen=True)
class Probes:
    """The probes, longest last (a dynamic rotary scaling remembers long sequences), the prompt [1, seq] of a greedy continuation,
    and notes on what could not be probed.
    """

    probes: tuple[Probe, ...]
    prompt: Integers
    notes: tuple[str, ...]


def make_probes(config: ModelConfig, parameters: int, tokenize: Tokenize | None = None, seed: int = 20_240_607) -> Probes:
    """The probes of a model with so many parameters. `tokenize` gives the ids of a text, special tokens included."""
    generator = np.random.default_rng(seed)
    probes = [*_random(config, generator), *_vocabulary_ends(config, generator), *_encoder_inputs(config, generator)]
    notes: list[str] = []
    texts = [_fitting(tokenize(text), config) for text in TEXTS] if tokenize is not None else []
    if tokenize is None:
        notes.append("the folder has no tokenizer: no real text was run")
    elif not all(texts):
        notes.append("the tokenizer gives ids that the vocabulary does not have: no real text was run")
    else:
        probes += _text(config, texts, generator)
    longer, cannot = _long(config, parameters, generator)
    prompt = _fitting(tokenize(PROMPT), config) if tokenize is not None else []
    start = np.array([prompt[:TOKENS]], np.int64) if prompt else probes[0].ids[:1, :16]
    return Probes((*probes, *longer), start, (*notes, *cannot))


def affordable_tokens(config: ModelConfig, parameters: int) -> int:
    """How long a sequence may be that both implementations run in seconds, attention scores held in full."""
    by_arithmetic = int(TOKENS_TIMES_PARAMETERS / max(parameters, 1))
    by_memory = math.isqrt(SCORE_BYTES // (4 * config.heads))
    return max(SHORTEST_LIMIT, min(by_arithmetic, by_memory))


def _longest(config: ModelConfig) -> int | None:
    """Learned positions end somewhere; rotary ones do not."""
    return config.max_positions if config.positions == "learned" else None


def _short(config: ModelConfig) -> int:
    return min(TOKENS, _longest(config) or TOKENS)


def _random(config: ModelConfig, generator: np.random.Generator) -> Iterator[Probe]:
    ids = generator.integers(0, config.vocab, (2, _short(config)))
    yield Probe("random", "random ids without padding", ids)


def _vocabulary_ends(config: ModelConfig, generator: np.random.Generator) -> Iterator[Probe]:
    """0, last, 1, last but one, ... at every fourth place: the rows that a wrong cut or a wrong padding of the vocabulary hits first.

    Not in a row: on SmolLM2 that nonsense amplified rounding a hundredfold, in Transformers against its own float64 as well.
    """
    ids = generator.integers(0, config.vocab, _short(config))
    steps = np.arange(len(ids[::4]))
    ids[::4] = np.where(steps % 2 == 0, steps // 2, config.vocab - 1 - steps // 2) % config.vocab
    yield Probe("vocabulary-ends", "the first and the last ids of the vocabulary among random ones", ids[None])


def _encoder_inputs(config: ModelConfig, generator: np.random.Generator) -> Iterator[Probe]:
    if config.kind != "encoder":
        return
    seq = _short(config)
    ids = generator.integers(0, config.vocab, (3, seq))
    types = generator.integers(0, config.token_types, (3, seq)) if config.token_types > 1 else None
    if types is not None:
        yield Probe("token-types", "random token types", ids, types)
    mask = (np.arange(seq)[None] < np.array([[seq], [max(1, seq // 2)], [1]])).astype(np.int64)
    yield Probe("padded", "rows of different lengths, padded, with an attention mask", ids, types, mask)


def _fitting(ids: Sequence[int], config: ModelConfig) -> list[int]:
    """The ids cut to the positions that there are; nothing when one of them has no row."""
    fitting = [int(number) for number in ids[: _longest(config)]]
    return fitting if all(0 <= number < config.vocab for number in fitting) else []


def _text(config: ModelConfig, texts: Sequence[Sequence[int]], generator: np.random.Generator) -> Iterator[Probe]:
    """Each text alone for a decoder; one padded batch for an encoder."""
    if config.kind == "decoder":
        for index, ids in enumerate(texts):
            yield Probe(f"text-{index + 1}", "real text", np.array([ids], np.int64))
        return
    width = max(map(len, texts))
    pad = config.pad_id if config.pad_id is not None and 0 <= config.pad_id < config.vocab else 0
    ids_of = np.array([[*ids, *[pad] * (width - len(ids))] for ids in texts], np.int64)
    mask = np.array([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts], np.int64)
    yield Probe("text", "real sentences, padded to one length", ids_of, None, mask)


def _long(config: ModelConfig, parameters: int, generator: np.random.Generator) -> tuple[list[Probe], list[str]]:
    """Sequences that pass each limit of the config beyond which the computation changes, or a note that this one cannot."""
    limit = affordable_tokens(config, parameters)
    probes, notes = [], []
    for name, fewest, wanted, what in _bounds(config):
        seq = min(wanted, limit)
        if seq >= fewest:
            probes.append(Probe(name, f"{seq} tokens, {what}", generator.integers(0, config.vocab, (1, seq))))
        else:
            notes.append(f"no sequence of {fewest} tokens was run ({what}): on a CPU this model affords {limit}")
    return sorted(probes, key=lambda probe: probe.ids.shape[1]), notes


def _bounds(config: ModelConfig) -> Iterator[tuple[str, int, int, str]]:
    """(probe, the fewest tokens that show it, the number wanted, what it is)."""
    if config.rope is not None and config.rope.scaling is not None:
        scaling = config.rope.scaling
        original = config.max_positions if scaling.kind == "dynamic" else scaling.original_max_positions or config.max_positions
        wanted = original + max(16, original // 2)
        yield "long", original + 1, wanted, f"beyond the {original} positions that the {scaling.kind} rotary scaling starts from"
    if config.sliding_layers and config.sliding_window is not None:
        window = config.sliding_window
        yield "window", window + 1, window + max(16, window // 2), f"beyond the sliding window of {window}"
    if config.positions == "learned":
        yield "all-positions", config.max_positions, config.max_positions, f"all of the {config.max_positions} learned positions"


def inputs_of(probe: Probe) -> dict[str, Any]:
    """The probe as keyword arguments of a Transformers model, in numpy."""
    inputs = {"input_ids": probe.ids, "token_type_ids": probe.token_types, "attention_mask": probe.attention_mask}
    return {name: array for name, array in inputs.items() if array is not None}
