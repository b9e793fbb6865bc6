"""Running both implementations on the same probes and comparing them. One model is held at a time; outputs stay as numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converter.source_model import SourceModel
from mappings.errors import refuse
from model.build import build_model
from model.config import ModelConfig
from model.forward import Outputs, forward
from model.generate import greedy
from model.load import load_parameters
from model.parity import ProbeParity, Threshold, compare_outputs, is_tie, to_facts, worst_by_state
from model.pooling import read_pooling
from model.probes import Probes, make_probes
from model.reference import (
    Step,
    load_reference,
    read_tokenizer,
    reference_continuation,
    reference_outputs,
    reference_rotary,
    release_memory,
)
from model.rotary import rotary_tables

MAX_ROTARY_POSITIONS = 1 << 16

Parameters = Callable[[], Iterable[tuple[str, Any]]]
OnStep = Callable[[str], None]


@dataclass(frozen=True)
class RotaryParity:
    """The tables of cosines and sines at positions 0 .. positions-1: cheap, so that they reach positions that no probe affords.

    An angle of p radians in float32 is off by up to p / 2^24, and the sides may round a frequency differently: four times that is allowed.
    """

    positions: int
    max_error: float
    worst_position: int
    holds: bool


@dataclass(frozen=True)
class Continuation:
    """Greedy continuations of one prompt. `first_difference` counts generated tokens from 0; `margin` is how much larger the reference's
    choice is there, in its own logits (None: ours is not among its likeliest). After a tie nothing more can be compared.
    """

    prompt: tuple[int, ...]
    asked: int
    reference: tuple[int, ...]
    ours: tuple[int, ...]
    first_difference: int | None
    margin: float | None
    tie: bool
    prompt_text: str
    reference_text: str
    ours_text: str

    @property
    def holds(self) -> bool:
        return self.first_difference is None or self.tie


@dataclass(frozen=True)
class ForwardParity:
    """Everything that running both models has shown."""

    threshold: Threshold
    probes: tuple[ProbeParity, ...]
    rotary: RotaryParity | None
    continuation: Continuation | None
    notes: tuple[str, ...]
    seconds_reference: float
    seconds_ours: float

    def first_divergence(self) -> tuple[str, ProbeParity] | None:
        """The earliest state, in the order of computation, that is too far off in any probe, and the probe that is furthest off there."""
        order = {state.name: place for probe in self.probes for place, state in enumerate(probe.states)}
        found = [(order[state.name], -state.relative_error, state.name, probe)
                 for probe in self.probes for state in [probe.first_divergence(self.threshold)] if state is not None]  # fmt: skip
        if not found:
            return None
        _, _, name, probe = min(found, key=lambda item: item[:2])
        return name, probe

    def to_facts(self) -> dict[str, Any]:
        """JSON values."""
        first = self.first_divergence()
        divergence = None
        if first is not None:
            state = next(state for state in first[1].states if state.name == first[0])
            divergence = {"probe": first[1].name, **to_facts(state)}
        facts: dict[str, Any] = {
            "threshold": {**to_facts(self.threshold), "worst_token": self.threshold.worst_token},
            "probes": [{**to_facts(probe), "holds": probe.within(self.threshold)} for probe in self.probes],
            "states": [
                {**to_facts(state), "probe": probe, "holds": state.within(self.threshold)} for state, probe in worst_by_state(self.probes)
            ],
            "first_divergence": divergence,
            "rotary": to_facts(self.rotary),
            "continuation": None if self.continuation is None else {**to_facts(self.continuation), "holds": self.continuation.holds},
            "notes": list(self.notes),
            "seconds": {"transformers": round(self.seconds_reference, 3), "mindspore": round(self.seconds_ours, 3)},
        }  # fmt: skip
        return facts


@dataclass(frozen=True)
class _Wanted:
    """What both sides are asked."""

    probes: Probes
    steps: int
    rotary_positions: int
    text_of: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class _Answers:
    """What the reference says."""

    outputs: list[Outputs]
    continuation: tuple[Step, ...]
    rotary: tuple[Any, Any] | None


def compare_models(
    source: SourceModel,
    config: ModelConfig,
    parameters: Parameters,
    threshold: Threshold,
    generate: int = 0,
    on_step: OnStep = lambda _: None,
) -> ForwardParity:
    """Run the folder in Transformers and `parameters` in the bundled model of `config`, and compare.

    Args:
        parameters: gives (canonical name, array) of every parameter, unpadded; called once.
        generate: tokens of a greedy continuation to compare; 0 for none.

    Raises:
        Refused: when one of the two models cannot be built or filled, or a continuation is asked of a model that gives none.
    """
    if generate and (config.kind != "decoder" or not config.head):
        raise refuse("this model does not continue a text: it has no language model head", str(source.folder.path), "leave --generate out")
    tokenize, text_of, note = read_tokenizer(source.folder.path)
    pooling, pooling_note = read_pooling(source.folder.path)
    probes = make_probes(source.config, parameter_count(source), tokenize)
    wanted = _Wanted(probes, generate, _rotary_positions(source.config), text_of or (lambda _: ""))
    started = time.monotonic()
    answers = _ask_reference(source, wanted, on_step)
    between = time.monotonic()
    results, ours = _ask_ours(config, parameters, wanted, answers, threshold, pooling if config.kind == "encoder" else None, on_step)
    continuation = _compare_continuations(wanted, answers.continuation, ours, threshold) if generate else None
    rotary = _compare_rotary(config, answers.rotary)
    notes = [text for text in (*probes.notes, note, pooling_note) if text]
    return ForwardParity(threshold, results, rotary, continuation, tuple(notes), between - started, time.monotonic() - between)


def parameter_count(source: SourceModel) -> int:
    """Elements of everything that is carried."""
    return sum(tensor.elements for name, tensor in source.tensors.items() if name in source.expansion.hf_shapes)


def _rotary_positions(config: ModelConfig) -> int:
    """Past the end of the context that the config states, as far as tables are affordable."""
    if config.rope is None:
        return 0
    scaling = config.rope.scaling
    original = (scaling.original_max_positions or config.max_positions) if scaling is not None else config.max_positions
    return min(max(config.max_positions, original) + 64, MAX_ROTARY_POSITIONS)


def _ask_reference(source: SourceModel, wanted: _Wanted, on_step: OnStep) -> _Answers:
    on_step("Transformers: loading")
    model = load_reference(source)
    outputs = []
    for probe in wanted.probes.probes:
        on_step(f"Transformers: probe {probe.name}, {probe.ids.size} tokens")
        outputs.append(reference_outputs(model, source.config, probe))
    steps: tuple[Step, ...] = ()
    if wanted.steps:
        on_step(f"Transformers: {wanted.steps} tokens of a continuation")
        steps = reference_continuation(model, source.config, wanted.probes.prompt, wanted.steps)
    rotary = reference_rotary(model, wanted.rotary_positions) if wanted.rotary_positions else None
    del model
    release_memory()
    return _Answers(outputs, steps, rotary)


def _ask_ours(
    config: ModelConfig, parameters: Parameters, wanted: _Wanted, answers: _Answers, threshold: Threshold, pooling: Any, on_step: OnStep
) -> tuple[tuple[ProbeParity, ...], tuple[int, ...]]:
    """The comparison of each probe, and the tokens of the continuation."""
    on_step("MindSpore: loading")
    cell = build_model(replace(config, padded_vocab=config.vocab))
    load_parameters(cell, parameters())
    results = []
    for probe, reference in zip(wanted.probes.probes, answers.outputs, strict=True):
        on_step(f"MindSpore: probe {probe.name}, {probe.ids.size} tokens")
        ours = forward(cell, probe.ids, probe.token_types, probe.attention_mask)
        results.append(compare_outputs(probe, reference, ours, config.kind == "decoder", threshold, pooling))
    tokens: tuple[int, ...] = ()
    if wanted.steps:
        on_step(f"MindSpore: {wanted.steps} tokens of a continuation")
        prompt = wanted.probes.prompt
        tokens = tuple(greedy(cell, prompt, wanted.steps, config.eos_ids)[0, prompt.shape[1] :].tolist())
    return tuple(results), tokens


def _compare_continuations(wanted: _Wanted, steps: tuple[Step, ...], ours: tuple[int, ...], threshold: Threshold) -> Continuation:
    prompt, reference = tuple(wanted.probes.prompt[0].tolist()), tuple(step.chosen for step in steps)
    first = next((place for place, (a, b) in enumerate(zip(reference, ours, strict=False)) if a != b), None)
    if first is None and len(reference) != len(ours):
        first = min(len(reference), len(ours))
    margin, tie = None, False
    if first is not None and first < min(len(reference), len(ours)):
        margin = steps[first].margin(ours[first])
        tie = margin is not None and is_tie(margin, steps[first].scale, threshold)
    texts = [wanted.text_of(tokens) for tokens in (prompt, reference, ours)]
    return Continuation(prompt, wanted.steps, reference, ours, first, margin, tie, *texts)


def _compare_rotary(config: ModelConfig, reference: tuple[Any, Any] | None) -> RotaryParity | None:
    if reference is None or config.rope is None:
        return None
    positions = len(reference[0])
    ours = rotary_tables(config.rope, config.max_positions, positions)
    if ours[0].shape != reference[0].shape:
        return RotaryParity(positions, float("inf"), 0, False)
    errors = np.maximum(*(np.abs(a.astype(np.float64) - b).max(axis=1) for a, b in zip(ours, reference, strict=True)))
    allowed = 1e-5 + 4 * np.arange(positions) / 2**24
    worst = int(np.argmax(errors - allowed))
    return RotaryParity(positions, float(errors[worst]), worst, bool((errors <= allowed).all()))
