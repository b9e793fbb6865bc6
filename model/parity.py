"""How far two implementations are apart: per probe, per hidden state, and in what they would say.

All errors compare `b`, the reference (Transformers, float32), with `a`, ours, over the tokens that are not padding:

    relative error      ||a - b|| / ||b||, Euclidean, over the whole tensor
    worst token         the largest ||a_t - b_t|| / ||b_t|| of a token t: a few huge tokens cannot hide the others
    max error           max |a - b| / max |b|
    KL                  sum_v p_b(v) (log p_b(v) - log p_a(v)) of each token, in nats, p = softmax(logits)
    top-1 agreement     the share of tokens for which both have the same likeliest next token
    perplexity          exp(mean of -log p(next token of the probe)), decoders only

Only numpy is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from model.pooling import Pooling, sentence_vectors
from model.probes import Integers, Probe

if TYPE_CHECKING:
    from model.forward import Outputs

Floats = npt.NDArray[np.floating[Any]]

WORST_TOKEN = 10  # the worst token of a tensor may be this much further off than the tensor as a whole
ROWS_AT_ONCE = 64
MAX_DISAGREEMENTS = 20


@dataclass(frozen=True)
class Threshold:
    """What still counts as the same computation. `relative_error` of each state; a token's may be `WORST_TOKEN` times that.

    `top1`: the share of tokens that must agree; a token whose two candidates lie closer in the reference than `relative_error` times the
    largest logit is a tie, and counts as agreeing.
    """

    dtype: str
    relative_error: float
    top1: float
    why: str

    @property
    def worst_token(self) -> float:
        return WORST_TOKEN * self.relative_error


EXACT = "every weight is exact and both sides compute in float32, so that only the order of additions differs"
ROUNDED = "the conversion rounded the weights to {} significant bits; both sides compute in float32"
THRESHOLDS = {
    "float32": Threshold("float32", 1e-4, 1.0, EXACT),
    "float16": Threshold("float16", 1e-2, 0.98, ROUNDED.format(11)),
    "bfloat16": Threshold("bfloat16", 5e-2, 0.90, ROUNDED.format(8)),
}
"""By the type that the weights were rounded to; "float32" where they were not. On SmolLM2 (30 layers) the worst relative errors were 2e-5,
2e-3 and 1e-2; a wrong rule table gives 1e-1 and more.
"""


@dataclass(frozen=True)
class StateError:
    """The error of one tensor: a hidden state, the logits, the pooled output, the sentence vectors."""

    name: str
    relative_error: float
    worst_token: float
    max_error: float

    def within(self, threshold: Threshold) -> bool:
        return self.relative_error <= threshold.relative_error and self.worst_token <= threshold.worst_token


@dataclass(frozen=True)
class Disagreement:
    """A token after which the two would say different things. `margin`: how much larger the reference's choice is, in its own logits."""

    row: int
    position: int
    reference: int
    ours: int
    margin: float
    tie: bool


@dataclass(frozen=True)
class LogitsParity:
    """What both sides would say at each of `tokens` tokens."""

    tokens: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    top1_ties: int
    disagreements: tuple[Disagreement, ...]  # the first few
    perplexity_reference: float | None
    perplexity_ours: float | None

    def within(self, threshold: Threshold) -> bool:
        return self.top1_agreement + self.top1_ties / self.tokens >= threshold.top1 - 1e-12


@dataclass(frozen=True)
class ProbeParity:
    """One probe's outcome; `states` in the order of computation."""

    name: str
    why: str
    shape: tuple[int, int]
    tokens: int
    states: tuple[StateError, ...]
    logits: LogitsParity | None

    def first_divergence(self, threshold: Threshold) -> StateError | None:
        return next((state for state in self.states if not state.within(threshold)), None)

    def within(self, threshold: Threshold) -> bool:
        return self.first_divergence(threshold) is None and (self.logits is None or self.logits.within(threshold))


def compare_outputs(
    probe: Probe, reference: Outputs, ours: Outputs, causal: bool, threshold: Threshold, pooling: Pooling | None = None
) -> ProbeParity:
    """Compare what both sides made of a probe. `causal`: the logits at a token are about the next one."""
    real = probe.real
    states = tuple(state_error(name, a, b) for name, a, b in _pairs(real, reference, ours, pooling))
    logits = None
    if reference.logits is not None and ours.logits is not None:
        logits = compare_logits(probe.ids, real, reference.logits, ours.logits, causal, threshold)
    batch, seq = probe.ids.shape
    return ProbeParity(probe.name, probe.why, (batch, seq), int(real.sum()), states, logits)


def _pairs(real: npt.NDArray[np.bool_], reference: Outputs, ours: Outputs, pooling: Pooling | None) -> Iterator[tuple[str, Floats, Floats]]:
    """(name, ours, reference) of everything that both compute, padding left out, each [tokens or rows, size]."""
    for name, state in reference.hidden.items():
        yield name, ours.hidden[name][real], state[real]
    ends: Mapping[str, tuple[Any, Any]] = {
        "pooled": (ours.pooled, reference.pooled),
        "logits": (ours.logits, reference.logits),
        "nsp_logits": (ours.nsp_logits, reference.nsp_logits),
    }
    for name, (a, b) in ends.items():
        if (a is None) != (b is None):
            raise ValueError(f"only one side has {name}")
        if a is not None:
            places = real if name == "logits" else np.ones(len(a), bool)
            yield name, a[places], b[places]
    if pooling is not None:
        last = next(reversed(reference.hidden))
        yield (
            "sentence_vectors",
            sentence_vectors(ours.hidden[last], real, pooling),
            sentence_vectors(reference.hidden[last], real, pooling),
        )


def state_error(name: str, ours: Floats, reference: Floats) -> StateError:
    """Errors of one tensor [tokens, size]. A value that is not a number, on either side, is an infinite error."""
    if ours.shape != reference.shape:
        raise ValueError(f"{name}: shape {ours.shape} against {reference.shape}")
    if not (np.isfinite(ours).all() and np.isfinite(reference).all()):
        return StateError(name, math.inf, math.inf, math.inf)
    off, size = np.zeros(len(ours)), np.zeros(len(ours))
    largest_off = largest = 0.0
    for rows in _blocks(len(ours)):
        a, b = ours[rows].astype(np.float64), reference[rows].astype(np.float64)
        off[rows], size[rows] = np.square(a - b).sum(axis=1), np.square(b).sum(axis=1)
        largest_off, largest = max(largest_off, float(np.abs(a - b).max())), max(largest, float(np.abs(b).max()))
    worst = max(_ratio(math.sqrt(x), math.sqrt(y)) for x, y in zip(off, size, strict=True))
    return StateError(name, _ratio(math.sqrt(off.sum()), math.sqrt(size.sum())), worst, _ratio(largest_off, largest))


def _ratio(error: float, size: float) -> float:
    return error / size if size else (0.0 if error == 0 else math.inf)


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, min(start + ROWS_AT_ONCE, count)) for start in range(0, count, ROWS_AT_ONCE))


def compare_logits(
    ids: Integers, real: npt.NDArray[np.bool_], reference: Floats, ours: Floats, causal: bool, threshold: Threshold
) -> LogitsParity:
    """ids and real [batch, seq], logits [batch, seq, vocab]."""
    places = np.argwhere(real)
    divergence = np.zeros(len(places))
    disagreements: list[Disagreement] = []
    for rows in _blocks(len(places)):
        b, a = (side[places[rows, 0], places[rows, 1]].astype(np.float64) for side in (reference, ours))
        log_b, log_a = log_softmax(b), log_softmax(a)
        divergence[rows] = (np.exp(log_b) * (log_b - log_a)).sum(axis=1)
        disagreements += _disagreements(places[rows], a, b, threshold)
    return LogitsParity(
        len(places), float(divergence.mean()), float(divergence.max()), 1 - len(disagreements) / len(places),
        sum(item.tie for item in disagreements), tuple(disagreements[:MAX_DISAGREEMENTS]),
        _perplexity(ids, real, reference) if causal else None, _perplexity(ids, real, ours) if causal else None,
    )  # fmt: skip


def log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _disagreements(places: Integers, ours: Floats, reference: Floats, threshold: Threshold) -> Iterator[Disagreement]:
    best, chosen = reference.argmax(axis=1), ours.argmax(axis=1)
    for row in np.flatnonzero(best != chosen):
        margin = float(reference[row, best[row]] - reference[row, chosen[row]])
        tie = is_tie(margin, float(np.abs(reference[row]).max()), threshold)
        yield Disagreement(int(places[row, 0]), int(places[row, 1]), int(best[row]), int(chosen[row]), margin, tie)


def is_tie(margin: float, scale: float, threshold: Threshold) -> bool:
    """Whether two logits lie closer than the error that is allowed them."""
    return margin <= threshold.relative_error * scale


def _perplexity(ids: Integers, real: npt.NDArray[np.bool_], logits: Floats) -> float | None:
    """Of the probe's own tokens, each from those before it; None for a probe of one token."""
    places = np.argwhere(real[:, :-1] & real[:, 1:])
    if not len(places):
        return None
    total = 0.0
    for rows in _blocks(len(places)):
        row, position = places[rows, 0], places[rows, 1]
        log_p = log_softmax(logits[row, position].astype(np.float64))
        total -= float(log_p[np.arange(len(row)), ids[row, position + 1]].sum())
    mean = total / len(places)
    return math.exp(mean) if mean < 700 else math.inf


def worst_by_state(probes: Iterable[ProbeParity]) -> list[tuple[StateError, str]]:
    """For each state, in the order of computation, its worst error by the relative measure and the probe that shows it."""
    worst: dict[str, tuple[StateError, str]] = {}
    for probe in probes:
        for state in probe.states:
            if state.name not in worst or state.relative_error > worst[state.name][0].relative_error:
                worst[state.name] = (state, probe.name)
    return list(worst.values())


def to_facts(value: Any) -> Any:
    """A dataclass, or anything that holds some, as JSON values; a float that is not finite becomes text, since JSON has none."""
    if hasattr(value, "__dataclass_fields__"):
        return to_facts(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_facts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_facts(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
