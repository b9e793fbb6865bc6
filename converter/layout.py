"""How a model is cut for its ranks: tensor, pipeline and data parallel, and the padded vocabulary."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mappings.composition import Cutting
from mappings.dialect_table import Dialect
from mappings.errors import Problem, Refused
from mappings.expand import Expansion, ParameterOfModel
from mappings.parameters import REPLICATED, Parameter
from model.config import ModelConfig

DEFAULT_VOCAB_MULTIPLE = 128
MAX_RANKS = 1 << 20
MAX_LISTED_TP = 1024


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands. `stage` is its pipeline stage, `data` its data-parallel index, `tensor` its tensor-parallel index."""

    rank: int
    stage: int
    data: int
    tensor: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """tp x pp x dp ranks. Rank order: pipeline outermost, then data, tensor innermost (as MindSpore and MindFormers number them)."""

    tp: int
    pp: int
    dp: int
    layers_per_stage: tuple[int, ...]
    vocab: int
    padded_vocab: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        stage, rest = divmod(rank, self.dp * self.tp)
        data, tensor = divmod(rest, self.tp)
        return Coordinates(rank, stage, data, tensor)

    def rank(self, stage: int, data: int, tensor: int) -> int:
        return (stage * self.dp + data) * self.tp + tensor

    def stage_of_layer(self, layer: int) -> int:
        end = 0
        for stage, count in enumerate(self.layers_per_stage):
            end += count
            if layer < end:
                return stage
        raise IndexError(layer)

    def layers_of(self, stage: int) -> range:
        """The layers of a stage, by their numbers in the whole model."""
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    def stages_of(self, parameter: Parameter, layer: int | None, tied: bool) -> tuple[int, ...]:
        """The stages that hold a parameter: one, or first and last for the embedding of a tied model."""
        if parameter.stage == "layer":
            return (self.stage_of_layer(layer or 0),)
        last = self.pp - 1
        if parameter.role == "embedding" and tied and last > 0:
            return (0, last)
        return (0,) if parameter.stage == "first" else (last,)

    def to_json(self) -> dict[str, Any]:
        return {
            "tp": self.tp, "pp": self.pp, "dp": self.dp, "layers_per_stage": list(self.layers_per_stage),
            "vocab": self.vocab, "padded_vocab": self.padded_vocab, "rank_order": "pp-dp-tp",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slice:
    """What one tensor-parallel rank holds of a parameter: `axis` elements [start, stop) in true coordinates, stored as `length`
    elements (the rest, past the true vocabulary, is padding). `axis` None: all of it. `replicas` ranks in a row hold the same slice.
    """

    axis: int | None
    start: int
    stop: int
    length: int
    replicas: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the slice of a parameter with the true shape `whole`."""
        return whole if self.axis is None else (*whole[: self.axis], self.length, *whole[self.axis + 1 :])

    def padding(self, whole: tuple[int, ...]) -> int:
        """How many of the slice's elements are padding."""
        if self.axis is None:
            return 0
        return (self.length - (self.stop - self.start)) * math.prod(whole[: self.axis] + whole[self.axis + 1 :])


def padded_vocabulary(vocab: int, tp: int, multiple: int | None) -> int:
    """Rows of the padded vocabulary: the true size rounded up to the multiple, the only place where it is computed.

    The default multiple is 1 for tp 1 and otherwise the least common multiple of 128 and tp, so that every power-of-two tp up to 128
    pads alike. Raises Refused for a given multiple that tp does not divide.
    """
    if multiple is None:
        multiple = 1 if tp == 1 else math.lcm(DEFAULT_VOCAB_MULTIPLE, tp)
    if multiple < 1 or multiple % tp:
        raise Refused(
            "the vocabulary cannot be cut",
            [
                Problem(
                    f"--vocab-multiple {multiple} is not divisible by tp {tp}",
                    mend=f"use a multiple of {tp}, {math.lcm(DEFAULT_VOCAB_MULTIPLE, tp)} for example",
                )
            ],
        )
    return math.ceil(vocab / multiple) * multiple


def split_layers(layers: int, pp: int, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Layers of each stage: as given (they must be `pp` positive counts that add up), or as even as possible, earlier stages larger."""
    if given is None:
        if pp > layers:
            raise Refused(
                "the layers cannot be split",
                [Problem(f"{layers} layers cannot fill {pp} pipeline stages", mend=f"use --pp {layers} or less")],
            )
        return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
    problems = []
    if len(given) != pp:
        problems.append(
            Problem(
                f"--layers-per-stage names {len(given)} stages, --pp is {pp}", mend=f"give one count per stage, or say --pp {len(given)}"
            )
        )
    if any(count < 1 for count in given):
        problems.append(Problem("a stage has no layer", mend="give every stage at least one"))
    if sum(given) != layers:
        problems.append(Problem(f"--layers-per-stage adds up to {sum(given)}, the model has {layers} layers", mend="let the counts add up"))
    if problems:
        raise Refused("the layers cannot be split", problems)
    return given


def make_layout(
    config: ModelConfig,
    expansion: Expansion,
    *,
    tp: int,
    pp: int,
    dp: int = 1,
    layers_per_stage: tuple[int, ...] | None = None,
    vocab_multiple: int | None = None,
    dialect: Dialect | None = None,
) -> ParallelLayout:
    """The layout of a model. Raises Refused when it cannot be cut so, with what blocks it and the tp values that would work.

    Some dialects' networks do not pad the vocabulary unless told to, and let no two ranks share a KV head.
    """
    if min(tp, pp, dp) < 1:
        raise Refused("no such layout", [Problem(f"tp {tp}, pp {pp}, dp {dp}", mend="let each be at least 1")])
    if tp * pp * dp > MAX_RANKS:
        raise Refused("too many ranks", [Problem(f"tp {tp} x pp {pp} x dp {dp} is more than {MAX_RANKS}")])
    refusals: list[Refused] = []
    with _collected(refusals):
        _check_tensor_parallel(expansion, tp, dialect is None or dialect.table.shares_kv_heads)
    with _collected(refusals):
        stages = split_layers(config.layers, pp, layers_per_stage)
    with _collected(refusals):
        pads = dialect is None or dialect.table.pads_vocabulary or vocab_multiple is not None
        padded = padded_vocabulary(config.vocab, tp, vocab_multiple) if pads else config.vocab
    if len(refusals) == 1:
        raise refusals[0]
    if refusals:
        raise Refused("the layout does not fit this model", [problem for refusal in refusals for problem in refusal.problems])
    return ParallelLayout(tp, pp, dp, stages, config.vocab, padded)


@contextlib.contextmanager
def _collected(refusals: list[Refused]) -> Iterator[None]:
    """Keep a refusal for later, so that all of them are told at once."""
    try:
        yield
    except Refused as refusal:
        refusals.append(refusal)


AXIS_WORDS = {"heads": "attention heads", "kv_heads": "KV heads", "ffn": "feed-forward width", "expert_ffn": "expert feed-forward width"}


def cut_axes(expansion: Expansion) -> dict[str, int]:
    """The axes of this model that tensor parallelism cuts into equal parts, with their sizes; the vocabulary is padded and always fits."""
    cuts = {item.parameter.cut for item in expansion.parameters.values()} - {REPLICATED, "vocab"}
    return {atom: expansion.sizes[atom] for atom in sorted(cuts)}


def blockers(axes: Mapping[str, int], tp: int, shares_kv_heads: bool = True) -> list[str]:
    """Which of these axes tp does not divide: one phrase each, empty when it divides all.

    Fewer KV heads than tp are no obstacle where they divide it and may be shared: several ranks then hold the same head.
    """
    replicable = {atom for atom, count in axes.items() if shares_kv_heads and atom == "kv_heads" and tp % count == 0}
    return [f"{count} {AXIS_WORDS.get(atom, atom)}" for atom, count in axes.items() if count % tp and atom not in replicable]


def _check_tensor_parallel(expansion: Expansion, tp: int, shares_kv_heads: bool) -> None:
    axes = cut_axes(expansion)
    blocked = blockers(axes, tp, shares_kv_heads)
    if not blocked:
        return
    most = axes.get("heads", max(axes.values()))
    working = [value for value in range(1, min(most, MAX_LISTED_TP) + 1) if not blockers(axes, value, shares_kv_heads)]
    problems = [Problem(f"{count} cannot be divided among {tp} tensor-parallel ranks") for count in blocked]
    problems[-1] = Problem(problems[-1].what, mend=f"tp values that work for this model: {', '.join(map(str, working))}")
    raise Refused(f"--tp {tp} does not fit this model", problems)


def cutting_of(layout: ParallelLayout) -> Cutting:
    """How a dialect's tensors are cut in this layout."""
    return Cutting(layout.tp, layout.padded_vocab != layout.vocab)


def slice_of(parameter: Parameter, shape: tuple[int, ...], sizes: Mapping[str, int], layout: ParallelLayout, tensor_rank: int) -> Slice:
    """What tensor-parallel rank `tensor_rank` holds of a parameter with this true shape."""
    axis = parameter.cut_axis
    if axis is None or (layout.tp == 1 and parameter.cut != "vocab"):
        return Slice(None, 0, 0, 0, layout.tp)
    count = sizes[parameter.cut]
    unit = shape[axis] // count
    if parameter.cut == "vocab":
        rows = layout.padded_vocab // layout.tp
        start = min(tensor_rank * rows, count)
        return Slice(axis, start * unit, min(start + rows, count) * unit, rows * unit, 1)
    replicas = max(1, layout.tp // count)
    ranks = layout.tp // replicas
    length = count // ranks * unit
    start = tensor_rank // replicas * length
    return Slice(axis, start, start + length, length, replicas)


def held_slices(
    parameters: Iterable[ParameterOfModel], sizes: Mapping[str, int], layout: ParallelLayout, place: Coordinates, tied: bool
) -> Iterator[tuple[ParameterOfModel, Slice]]:
    """Those of a model's parameters that the rank at `place` holds, and what it holds of each."""
    for item in parameters:
        if place.stage in layout.stages_of(item.parameter, item.layer, tied):
            yield item, slice_of(item.parameter, item.shape, sizes, layout, place.tensor)


def distinct_slices(
    parameter: Parameter, shape: tuple[int, ...], sizes: Mapping[str, int], layout: ParallelLayout
) -> Iterator[tuple[int, Slice]]:
    """One tensor rank for each different slice: together they hold the parameter exactly once."""
    tensor_rank = 0
    while tensor_rank < layout.tp:
        piece = slice_of(parameter, shape, sizes, layout, tensor_rank)
        yield tensor_rank, piece
        tensor_rank += piece.replicas
