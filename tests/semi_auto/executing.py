"""A step of a case twice: by the graphs that MindSpore compiled for its ranks, computed with NumPy, and by one process without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from converter.layout import held_slices, make_layout
from model.loss import IGNORED
from model.ops import causal_bias
from model.rotary import RotaryEmbedding
from tests.semi_auto.cases import SEQ, Case
from tests.semi_auto.compiling import PASS
from tests.semi_auto.graph_dump import Elided, Graph, Node, read_dump
from tests.semi_auto.graph_execution import execute
from train.semi_auto import declare_decoder, training_cell
from train.semi_auto_cell import TrainStep
from train.step import StepSettings

Array = np.ndarray[Any, np.dtype[Any]]
RATE = 1e-2


@dataclass(frozen=True)
class Step:
    """The summed loss, the gradient's norm, and by name the first moments (a tenth of the clipped gradient) and weights after a step."""

    loss: Any
    norm: float
    moments: dict[str, Array]
    weights: dict[str, Array]


def batch(case: Case) -> tuple[Array, Array]:
    """ids and labels [global batch, SEQ] int32; rows have different numbers of labels."""
    random = np.random.default_rng(7)
    shape = (4 * case.micro_batches * case.dp, SEQ)
    ids, labels = (random.integers(0, case.config.vocab, shape, np.int32) for _ in range(2))
    hidden = np.arange(SEQ) >= random.integers(5, SEQ, (shape[0], 1))
    return ids, np.where(hidden, np.int32(IGNORED), labels)


def single_step(case: Case) -> tuple[dict[str, Array], Step]:
    """-> the weights before, whole, and the step of one process, which accumulates nothing."""
    ms.set_context(mode=ms.GRAPH_MODE)
    layout = make_layout(case.config, case.expansion, tp=1, pp=1)
    cell = training_cell(declare_decoder(case.config, layout, StepSettings()), layout, StepSettings())
    random, before = np.random.default_rng(8), {}
    for weight in cell.weights:
        before[weight.name] = (random.standard_normal(weight.shape) * 0.2 + 0.1).astype(np.float32)
        weight.set_data(Tensor(before[weight.name]))
    ids, labels = batch(case)
    prepare(cell, labels)
    loss, norm = cell(Tensor(ids), Tensor(labels))
    moments = {state.name.removeprefix("adam_m."): state.asnumpy() for state in cell.optimizer.m}
    return before, Step(float(loss.asnumpy()), float(norm.asnumpy()[0]), moments, {item.name: item.asnumpy() for item in cell.weights})


def prepare(cell: TrainStep, labels: Array) -> None:
    cell.prepare(1 / np.count_nonzero(labels != IGNORED), RATE, 1)


def part(case: Case, rank: int, name: str, whole: Array, shape: tuple[int, ...]) -> Array:
    """What a rank holds of a parameter: the converter's slice, and of that the optimizer's part where its shape says that there is one."""
    place = case.layout.coordinates(rank)
    slices = held_slices(case.expansion.parameters.values(), case.expansion.sizes, case.layout, place, case.config.tied)
    piece = next(piece for item, piece in slices if item.name == name)
    index = [slice(None)] * whole.ndim
    if piece.axis is not None:
        begin = place.tensor * piece.length  # of the padded whole
        index[piece.axis] = slice(begin, begin + piece.length)
    held = whole[tuple(index)]
    parts = held.shape[0] // shape[0]
    holder = {1: 0, case.dp: place.data, case.dp * case.tp: rank}[parts]
    return held[holder * shape[0] : (holder + 1) * shape[0]]


def compiled_steps(case: Case, before: dict[str, Array], graphs: Path) -> Iterator[tuple[int, dict[str, tuple[int, ...]], Step]]:
    """-> each rank's number, the shapes of what it holds, and its step, whose loss only the last stage has."""
    dumps = [read_dump(next((graphs / f"rank_{rank}").glob(PASS))) for rank in range(case.layout.ranks)]
    ids, labels = batch(case)
    alone = make_layout(case.config, case.expansion, tp=1, pp=1)
    cell = training_cell(declare_decoder(case.config, alone, StepSettings()), alone, StepSettings())
    prepare(cell, labels)
    scalars = {scalar.name: scalar.asnumpy().astype(np.float64) for scalar in (cell.factor, cell.rate, cell.eps, cell.decay)}
    held = []
    for rank, dump in enumerate(dumps):
        data = case.layout.coordinates(rank).data
        mine: dict[str, Array] = {"ids": np.split(ids, case.dp)[data], "labels": np.split(labels, case.dp)[data], **scalars}
        for name, shape in dump.shapes.items():
            if name in before:
                mine[name] = part(case, rank, name, before[name], shape).astype(np.float64)
                assert mine[name].shape == shape, name
            elif name not in mine:
                mine[name] = np.zeros(shape)
        held.append(mine)
    results = execute(dumps, held, [Constants(case, rank, dump) for rank, dump in enumerate(dumps)])
    for rank, (mine, (loss, norm)) in enumerate(zip(held, results, strict=True)):
        names = [name for name in before if f"adam_m.{name}" in mine]
        moments = {name: mine[f"adam_m.{name}"] for name in names}
        yield rank, dumps[rank].shapes, Step(loss, float(norm[0]), moments, {name: mine[name] for name in names})


class Constants:
    """The tensors that a dump leaves out: zeros that sums are set back to, the causal bias, the rows of padding, the rotary tables.

    Bias and tables may have one shape; the operator that takes them says which it is. Of the rotary products cosine's has the query or
    key itself, sine's the two halves joined anew.
    """

    def __init__(self, case: Case, rank: int, graph: Graph) -> None:
        self._operators = {node.number: node.operator for node in graph.nodes}
        self._sines = {node.own for node in graph.nodes if node.own and self._of_sine(node)}
        config, self._dp = case.config, case.dp
        rows = config.padded_vocab // case.tp
        first = case.layout.coordinates(rank).tensor * rows
        self._padding = np.where(np.arange(first, first + rows) >= config.vocab, -1e30, 0.0)
        self._bias = causal_bias(SEQ, None).asnumpy().astype(np.float64)
        self._tables = [table.asnumpy().astype(np.float64) for table in RotaryEmbedding(config)(SEQ)] if config.rope is not None else []

    def __call__(self, node: Node, constant: Elided) -> Array:
        if node.operator == "Assign":
            return np.zeros(constant.shape)
        if node.operator == "Mul":
            table: Array = self._tables[(node.forward or node.own) in self._sines]
            return table
        if node.operator == "RealDiv":  # seen in a graph of few tokens, where the dump has it: the sum over dp of the loss's gradient, 1
            return np.full(constant.shape, float(self._dp))
        found: Array = self._bias if len(constant.shape) == 4 else self._padding
        assert node.operator == "Add" and found.shape == constant.shape
        return found

    def _of_sine(self, node: Node) -> bool:
        return node.operator == "Mul" and isinstance(node.arguments[1], Elided) and self._operators[node.arguments[0].node] == "Concat"
