"""Computing with NumPy, in float64, what the compiled graphs of all ranks say: the numbers that no device computed.

The operators are those of the composed decoders. Each is written from its definition, gradients from the derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.semi_auto.graph_dump import Elided, Graph, Held, Node, Ref

Array = Any
TYPES = {30: np.bool_, 34: np.int32, 43: np.float64, 44: np.float64}
COMMUNICATION = ("AllReduce", "AllGather", "ReduceScatter", "Send", "Receive")
ROOT = np.sqrt(2 / np.pi)


def _axes(axes: Sequence[int]) -> tuple[int, ...] | None:
    return tuple(axes) or None


def _transposed(x: Array, wanted: int) -> Array:
    return x.swapaxes(-1, -2) if wanted else x


def _matmul(x: Array, y: Array, transpose_x: int, transpose_y: int) -> Array:
    return _transposed(x, transpose_x) @ _transposed(y, transpose_y)


def _softmax(x: Array, axes: Sequence[int]) -> Array:
    exponentials = np.exp(x - x.max(axes[0], keepdims=True))
    return exponentials / exponentials.sum(axes[0], keepdims=True)


def _sum_segments(x: Array, rows: Array, count: int) -> Array:
    result = np.zeros((count, x.shape[-1]))
    np.add.at(result, rows.reshape(-1), x.reshape(-1, x.shape[-1]))
    return result


def _scatter(x: Array, axis: int, index: Array, gradient: Array) -> Array:
    assert axis in (1, -1) and x.ndim == 2
    result = np.zeros(x.shape)
    np.add.at(result, (np.arange(len(index))[:, None], index), gradient)
    return result


def _strided(x: Array, begin: Sequence[int], end: Sequence[int], strides: Sequence[int], *masks: int) -> Array:
    assert not any(masks)
    return x[tuple(slice(*piece) for piece in zip(begin, end, strides, strict=True))]


def _unstrided(gradient: Array, shape: Sequence[int], begin: Sequence[int], end: Sequence[int], strides: Sequence[int], *_: int) -> Array:
    result = np.zeros(shape)
    result[tuple(slice(*piece) for piece in zip(begin, end, strides, strict=True))] = gradient
    return result


def _layer_norm(x: Array, gamma: Array, beta: Array, _: int, __: int, epsilon: float) -> tuple[Array, ...]:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gamma + beta, mean, variance


def _layer_norm_grad(x: Array, gradient: Array, variance: Array, mean: Array, gamma: Array, *_: int) -> tuple[Array, ...]:
    root = np.sqrt(variance + 1e-5)
    normed, scaled = (x - mean) / root, gradient * gamma
    inner = scaled - scaled.mean(-1, keepdims=True) - normed * (scaled * normed).mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return inner / root, (gradient * normed).sum(rows), gradient.sum(rows)


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(ROOT * (x + 0.044715 * x**3)))


def _gelu_grad(gradient: Array, x: Array, _: Array) -> Array:
    turned = np.tanh(ROOT * (x + 0.044715 * x**3))
    return gradient * (0.5 * (1 + turned) + 0.5 * x * (1 - turned**2) * ROOT * (1 + 3 * 0.044715 * x**2))


def _assign(target: Array, value: Array, *_: Any) -> Array:
    target[...] = value
    return target


def _assign_add(target: Array, value: Array, *_: Any) -> Array:
    target += value
    return target


def _adam(
    weight: Array, m: Array, v: Array, rate: Array, beta1: float, beta2: float, eps: Array, decay: Array, gradient: Array, *_: Any
) -> tuple[Array, ...]:
    m[...] = beta1 * m + (1 - beta1) * gradient
    v[...] = beta2 * v + (1 - beta2) * gradient**2
    weight -= rate * (m / (np.sqrt(v) + eps) + decay * weight)
    return weight, m, v


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Muls": np.multiply, "Div": np.divide, "RealDiv": np.divide,
    "AddN": lambda values: sum(values[1:], values[0]), "Neg": np.negative, "Square": np.square, "Sqrt": np.sqrt, "Exp": np.exp,
    "Log": np.log, "Reciprocal": np.reciprocal, "Rsqrt": lambda x: 1 / np.sqrt(x), "RsqrtGrad": lambda y, gradient: -0.5 * gradient * y**3,
    "PowTensorScalar": np.power, "Minimum": np.minimum, "ReLU": lambda x: np.maximum(x, 0), "Equal": np.equal, "NotEqual": np.not_equal,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "SigmoidGrad": lambda y, gradient: gradient * y * (1 - y),
    "Cast": lambda x, kind: np.asarray(x).astype(TYPES[kind]), "Reshape": np.reshape, "Transpose": np.transpose, "Tile": np.tile,
    "ExpandDims": np.expand_dims, "MatMul": _matmul, "BatchMatMul": _matmul,
    "ReduceSum": lambda x, axes, keep, *_: np.sum(x, _axes(axes), keepdims=bool(keep)),
    "SumExt": lambda x, axes, keep, *_: np.sum(x, _axes(axes), keepdims=bool(keep)),
    "ReduceMean": lambda x, axes, keep: np.mean(x, _axes(axes), keepdims=bool(keep)),
    "ReduceMax": lambda x, axes, keep: np.max(x, _axes(axes), keepdims=bool(keep)),
    "Softmax": _softmax, "SoftmaxBackward": lambda gradient, y, axis: y * (gradient - (gradient * y).sum(axis, keepdims=True)),
    "Concat": np.concatenate, "Split": lambda x, axis, parts: tuple(np.split(x, parts, axis)),
    "SplitWithSize": lambda x, sizes, axis: tuple(np.split(x, np.cumsum(sizes)[:-1], axis)),
    "StridedSlice": _strided, "StridedSliceGrad": _unstrided, "Gather": lambda x, rows, axis, _: np.take(x, rows, axis),
    "UnsortedSegmentSum": _sum_segments, "GatherD": lambda x, axis, index: np.take_along_axis(x, index, axis), "GatherDGradV2": _scatter,
    "LayerNorm": _layer_norm, "LayerNormGrad": _layer_norm_grad, "GeLU": _gelu, "GeLUGrad": _gelu_grad,
    "Assign": _assign, "AssignAdd": _assign_add, "AdamWeightDecay": _adam,
    "MakeTuple": lambda *values: values, "TupleGetItem": lambda values, index: values[index], "Depend": lambda value, _: value,
    "Load": lambda value, _: np.copy(value), "UpdateState": lambda *_: None,
}  # fmt: skip


Exchange = Generator[tuple[Node, Array], Array, tuple[Array, ...]]
Constant = Callable[[Node, Elided], Array]


def _rank(graph: Graph, held: dict[str, Array], constant: Constant) -> Exchange:
    """One rank's execution, which changes `held`; it gives what it contributes to a collective, or sends, and is sent the result."""
    values: dict[int, Any] = {}

    def value(node: Node, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(value(node, item) for item in argument)
        if isinstance(argument, Ref):
            return values[argument.node]
        if isinstance(argument, Held):
            return held[argument.name]
        return constant(node, argument) if isinstance(argument, Elided) else argument

    for node in graph.nodes:
        arguments = value(node, node.arguments)
        if node.operator in COMMUNICATION:
            values[node.number] = yield node, np.array(arguments[0])
        else:
            values[node.number] = OPERATORS[node.operator](*arguments)
    result: tuple[Array, ...] = values[graph.nodes[-1].number]
    return result


def execute(graphs: Sequence[Graph], held: Sequence[dict[str, Array]], constants: Sequence[Constant]) -> list[Any]:
    """The results of all ranks, by rank.

    `held` are each rank's parameters and inputs by name, and what updates change; `constants` give what the dumps leave out.
    """
    ranks = [_rank(*given) for given in zip(graphs, held, constants, strict=True)]
    results: dict[int, Any] = {}
    waiting: dict[int, tuple[Node, Array]] = {}
    sent: dict[tuple[int, int, str], Array] = {}

    def resume(number: int, value: Array) -> None:
        waiting.pop(number, None)
        try:
            waiting[number] = ranks[number].send(value)
        except StopIteration as end:
            results[number] = end.value

    for number in range(len(ranks)):
        resume(number, None)
    while waiting:
        answered = _answers(waiting, sent)
        assert answered, "ranks wait for each other"
        for number, value in answered.items():
            resume(number, value)
    return [results[number] for number in range(len(ranks))]


def _answers(waiting: Mapping[int, tuple[Node, Array]], sent: dict[tuple[int, int, str], Array]) -> dict[int, Array]:
    """What ranks can go on with. A Send waits for nobody."""
    found: dict[int, Array] = {}
    for rank, (node, array) in waiting.items():
        if node.operator == "Send":
            assert (rank, node.partner, node.tag) not in sent
            sent[rank, node.partner, node.tag] = found[rank] = array
        elif node.operator == "Receive":
            if (node.partner, rank, node.tag) in sent:
                found[rank] = sent.pop((node.partner, rank, node.tag))
        elif all(other in waiting and _same(waiting[other][0], node) for other in node.ranks):
            found[rank] = _collected(rank, node, [waiting[other][1] for other in node.ranks])
    return found


def _same(one: Node, other: Node) -> bool:
    return (one.operator, one.ranks, one.reduction) == (other.operator, other.ranks, other.reduction)


def _collected(rank: int, node: Node, arrays: Sequence[Array]) -> Array:
    if node.operator == "AllGather":
        return np.concatenate(arrays)
    reduced = np.max(arrays, 0) if node.reduction == "max" else np.sum(arrays, 0)
    return np.split(reduced, len(arrays))[node.ranks.index(rank)] if node.operator == "ReduceScatter" else reduced
