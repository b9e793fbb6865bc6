"""How each operator of a decoder is cut, told to MindSpore's parallel compiler (`shard`): the other use of the one statement of the cut.

Nothing about a weight is decided here. `Mesh.cut` reads from the catalogue (mappings/parameters.toml) which axis of a parameter tensor
parallelism divides; an operator's strategy is that of its weight, with the batch divided over data-parallel ranks, and an activation is
cut as the weight that made it. Outside of the compiler's parallel mode MindSpore ignores strategies.

A strategy has for each input of an operator the number of parts of each of its axes, () for a scalar. An operator without one would be
cut along its first axis over all devices, and the compiler would put in communication to get there and back: so each has one.
Casts and reshapes have none: the compiler gives them that of their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindspore import Parameter, nn, ops

from mappings.errors import Problem, Refused
from mappings.names import number_free
from mappings.parameters import catalogue
from model.attention import GroupedQueryAttention
from model.config import ModelConfig
from model.embedding import TransformerEmbedding, VocabParallelHead
from model.linear import Linear
from model.loss import VocabParallelCrossEntropy
from model.mlp import MLP, GatedMLP, GatedProduct
from model.norms import LayerNorm, RMSNorm
from model.ops import (
    GELU,
    ComposedAttention,
    ComposedRMSNorm,
    ComposedRotary,
    ComposedSwiGLU,
    FusedAttention,
    FusedRMSNorm,
    FusedRotary,
    FusedSwiGLU,
    SiLU,
)
from model.rotary import ApplyRotary
from model.stage import DecoderStage
from model.transformer import TransformerLayer

Cut = tuple[int, ...]

_CATALOGUE = {number_free(name): parameter for name, parameter in catalogue().items()}


@dataclass(frozen=True)
class Mesh:
    """The devices of a pipeline stage: dp x tp, tensor parallelism over neighbours."""

    dp: int
    tp: int

    def cut(self, parameter: Parameter) -> Cut:
        """Into how many parts tensor parallelism divides each axis of a canonical parameter."""
        axis = _CATALOGUE[number_free(parameter.name)].cut_axis
        return tuple(self.tp if index == axis else 1 for index in range(len(parameter.shape)))


def unshardable(config: ModelConfig, tp: int) -> Iterator[Problem]:
    """What the parallel compiler cannot be told to cut, though explicit collectives can."""
    if config.kv_heads % tp:
        what = f"{config.kv_heads} KV heads cannot be divided among {tp} tensor-parallel ranks, and `semi_auto` has no replicated heads"
        yield Problem(what, "parallel.tp", f'use a tp that divides {config.kv_heads}, or engine = "spmd"')


def shard_decoder(cell: DecoderStage, dp: int, tp: int) -> None:
    """Declare the strategy of every operator of a whole decoder with its loss. Raises Refused for what cannot be cut."""
    problems = list(unshardable(cell.config, tp))
    if problems:
        raise Refused("the parallel compiler cannot cut this model so", problems)
    mesh = Mesh(dp, tp)
    hidden = (dp, 1, 1)
    _embedding(cell.embedding, mesh)
    for layer in cell.layers:
        _layer(layer, mesh)
    _norm(cell.final_norm, hidden)
    _head(cell.lm_head, cell.embedding.tokens.embedding_table, mesh)
    _cross_entropy(cell.cross_entropy, (dp, mesh.cut(cell.embedding.tokens.embedding_table)[0]))


def _each(*operators: Any, cut: Cut, inputs: int = 1) -> None:
    """Elementwise operators, all inputs cut alike."""
    for operator in operators:
        operator.shard((cut,) * inputs)


def _scalar(*operators: Any, cut: Cut) -> None:
    """Elementwise operators whose second input is a number."""
    for operator in operators:
        operator.shard((cut, ()))


def _embedding(cell: TransformerEmbedding, mesh: Mesh) -> None:
    cell.tokens.lookup.gather.shard((mesh.cut(cell.tokens.embedding_table), (mesh.dp, 1)), ((mesh.dp, 1, 1),))
    if cell.positions is not None:
        cell.positions.slice.shard((mesh.cut(cell.positions.embedding_table),))
        cell.add_positions.shard(((mesh.dp, 1, 1), (1, 1)))
    _dropout(cell.dropout, (mesh.dp, 1, 1))


def _dropout(cell: nn.Dropout, cut: Cut) -> None:
    if cell.p:
        cell.dropout.shard((cut,))


def _layer(cell: TransformerLayer, mesh: Mesh) -> None:
    hidden = (mesh.dp, 1, 1)
    _norm(cell.attention_norm, hidden)
    _norm(cell.mlp_norm, hidden)
    _dropout(cell.attention_dropout, hidden)
    _dropout(cell.mlp_dropout, hidden)
    _each(cell.add, cut=hidden, inputs=2)
    _attention(cell.attention, mesh)
    _mlp(cell.mlp, mesh)


def _linear(cell: Linear, mesh: Mesh) -> int:
    """-> into how many parts its outputs are cut."""
    outputs, inputs = mesh.cut(cell.weight)
    cell.matmul.shard(((mesh.dp, inputs), (outputs, inputs)))
    if cell.bias is not None:
        cell.add.shard(((mesh.dp, outputs), mesh.cut(cell.bias)))
    return outputs


def _attention(cell: GroupedQueryAttention, mesh: Mesh) -> None:
    heads, key_heads, _ = (_linear(linear, mesh) for linear in (cell.q_proj, cell.k_proj, cell.v_proj))
    _linear(cell.o_proj, mesh)
    assert heads == key_heads, "unshardable says where they are not"
    for norm in (cell.q_norm, cell.k_norm):
        if norm is not None:
            _norm(norm, (mesh.dp, 1, heads, 1))
    _each(cell.heads_first, cut=(mesh.dp, 1, heads, 1))
    by_head = (mesh.dp, heads, 1, 1)
    if cell.rotate is not None:
        _rotary(cell.rotate, by_head)
    _scores(cell.attention, by_head)
    _each(cell.heads_last, cut=by_head)


def _rotary(cell: ApplyRotary, cut: Cut) -> None:
    table = (1, 1, 1, 1)
    _each(cell.join, cut=cut, inputs=2)
    _each(cell.front, cell.back, cut=cut)
    if isinstance(cell.rotary, FusedRotary):
        cell.rotary.rotate.shard((cut, table, table))
        return
    rotary: ComposedRotary = cell.rotary
    _each(rotary.halves, rotary.neg, cut=cut)
    _each(rotary.join, rotary.add, cut=cut, inputs=2)
    rotary.mul.shard((cut, table))


def _scores(cell: ComposedAttention | FusedAttention, cut: Cut) -> None:
    """query, key and value [batch, heads, seq, head_dim] and the scores [batch, heads, seq, seq] are cut alike."""
    if isinstance(cell, FusedAttention):
        cell.flash.shard((cut, cut, cut, (1, 1)))
        return
    _each(cell.score, cell.mix, cut=cut, inputs=2)
    _scalar(cell.mul, cut=cut)
    cell.hide_future.shard((cut, (1, 1, 1, 1)))
    _each(cell.softmax.softmax, cut=cut)
    _dropout(cell.dropout, cut)


def _mlp(cell: MLP | GatedMLP, mesh: Mesh) -> None:
    if isinstance(cell, GatedMLP):
        _linear(cell.gate_proj, mesh)
    cut = (mesh.dp, 1, _linear(cell.up_proj, mesh))
    _linear(cell.down_proj, mesh)
    if isinstance(cell, MLP):
        _activation(cell.activation, cut)
    elif isinstance(cell.product, FusedSwiGLU):
        pair = (*cut[:2], 1, *cut[2:])
        _each(cell.product.stack, cut=cut, inputs=2)
        cell.product.swiglu.shard((pair,))
        _each(cell.product.squeeze, cut=pair)
    else:
        product: ComposedSwiGLU | GatedProduct = cell.product
        _activation(product.silu if isinstance(product, ComposedSwiGLU) else product.activation, cut)
        _each(product.mul, cut=cut, inputs=2)


def _activation(cell: Any, cut: Cut) -> None:
    if isinstance(cell, (ops.GeLU, ops.ReLU)):
        _each(cell, cut=cut)
    elif isinstance(cell, SiLU):
        _each(cell.sigmoid, cut=cut)
        _each(cell.mul, cut=cut, inputs=2)
    else:
        gelu: GELU = cell
        _each(gelu.erf, cut=cut)
        _scalar(gelu.scale, gelu.add, cut=cut)
        _each(gelu.mul, cut=cut, inputs=2)


def _norm(cell: RMSNorm | LayerNorm, cut: Cut) -> None:
    """A norm over the last axis of an activation, which is not cut; nor are gamma and beta."""
    whole = (cut[-1],)
    _scalar(cell.add, cut=whole)
    if isinstance(cell, LayerNorm):
        cell.norm.shard((cut, whole, whole))
    elif isinstance(cell.norm, FusedRMSNorm):
        cell.norm.rms_norm.shard((cut, whole))
    else:
        norm: ComposedRMSNorm = cell.norm
        _each(norm.square, norm.mean, norm.rsqrt, cut=cut)
        _scalar(norm.add, cut=cut)
        _each(norm.scale, cut=cut, inputs=2)
        norm.mul.shard((cut, whole))


def _head(cell: VocabParallelHead, embedding_table: Parameter, mesh: Mesh) -> None:
    rows, hidden = mesh.cut(embedding_table if cell.weight is None else cell.weight)
    cell.matmul.shard(((mesh.dp, hidden), (rows, hidden)))
    if cell.bias is not None:
        cell.add.shard(((mesh.dp, rows), mesh.cut(cell.bias)))


def _cross_entropy(cell: VocabParallelCrossEntropy, cut: Cut) -> None:
    """Logits [tokens, vocab] are cut along both axes, what is left of a row along the first."""
    tokens, rows = cut
    cell.hide_padding.shard((cut, (rows,)))
    _each(cell.max, cell.exp, cell.sum, cut=cut)
    cell.shift.shard((cut, (tokens, 1)))
    cell.pick.shard((cut, (tokens, 1)))
    column = (tokens,)
    _each(cell.log, cell.total, cut=column)
    _each(cell.column, cut=column)
    _each(cell.subtract, cell.mask, cell.without_ignored, cut=column, inputs=2)
    _scalar(cell.has_label, cut=column)
