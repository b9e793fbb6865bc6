"""The part of a decoder that one rank computes: its pipeline stage's layers, and of each its tensor-parallel slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, nn, ops

from mappings.errors import Refused
from model.build import unsupported
from model.config import ModelConfig
from model.embedding import TransformerEmbedding, VocabParallelEmbedding, VocabParallelHead
from model.loss import VocabParallelCrossEntropy
from model.norms import hidden_norm
from model.parallel import SINGLE, TensorParallel, local_config
from model.precision import FloatType, Precision
from model.rotary import RotaryEmbedding
from model.transformer import TransformerLayers


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: its layers by their numbers in the whole model, and whether it is the first or the last (or both)."""

    layers: range
    first: bool = True
    last: bool = True


class HeadTable(nn.Cell):
    """The last stage's copy of the token embedding, which a tied head reads. No token is looked up here."""

    def __init__(self, config: ModelConfig, precision: Precision, parallel: TensorParallel) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(config.padded_vocab, config.hidden, precision, parallel)


class DecoderStage(nn.Cell):
    """One stage of model/gpt.py's decoder under the same canonical names; a single stage computes what GPT does, and then the loss.

    The first stage takes token ids, the others the hidden states of the stage before. The last stage returns the summed loss, the others
    hidden states.
    """

    def __init__(self, config: ModelConfig, stage: Stage, precision: Precision, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        local = local_config(config, parallel.size)
        self.config, self.stage, self.parallel = config, stage, parallel
        self.first, self.last = stage.first, stage.last
        self.compute_type = precision.compute_type
        self.embedding: Any = None
        if stage.first:
            self.embedding = TransformerEmbedding(local, precision, parallel)
        elif stage.last and config.tied:
            self.embedding = HeadTable(local, precision, parallel)
        self.rotary = RotaryEmbedding(config) if config.rope is not None else None
        self.layers = TransformerLayers(local, precision, parallel, stage.layers)
        self.final_norm: Any = hidden_norm(local, precision) if stage.last else None
        self.lm_head: Any = VocabParallelHead(local, has_bias=False, precision=precision, parallel=parallel) if stage.last else None
        self.cross_entropy: Any = VocabParallelCrossEntropy(local, parallel) if stage.last else None
        self.tied = config.tied
        self.cast_table = True  # once for both uses of a tied table; False where they are stages of one compiled graph
        self.cast = ops.Cast()

    def construct(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """The first stage: x [batch, seq] ids; the others: x [batch, seq, hidden]. The last stage needs labels [batch, seq] int32: the
        token that each position is to predict, or IGNORED (model/loss.py).

        Returns:
            The last stage: the sum of the losses of all labels, a float32 scalar. The others: [batch, seq, hidden].
        """
        cos, sin = None, None
        if self.rotary is not None:
            cos, sin = self.rotary(x.shape[1])
        table, cast_table = None, None
        if self.tied and self.last:
            table = self.embedding.tokens.embedding_table
            if self.cast_table:  # else the uses' gradients would be added in the compute type, and a CPU adds no bfloat16
                table = cast_table = self.cast(table, self.compute_type)
        if self.first:
            x = self.embedding(x, None, cast_table)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if not self.last:
            return x
        return self.cross_entropy(self.lm_head(self.final_norm(x), table), labels)


def build_stage(
    config: ModelConfig,
    stage: Stage,
    parallel: TensorParallel = SINGLE,
    parameters: FloatType = "float32",
    compute: FloatType | None = None,
) -> DecoderStage:
    """A rank's part of the decoder that `config` (the whole model's, vocabulary padded for all ranks) describes.

    In training mode, its parameters NaN until they are loaded; `parameters_dict()` holds exactly the canonical names that the catalogue
    gives to this stage, each in the shape of the rank's slice.

    Raises:
        Refused: with everything in `config` that the bundled models do not compute.
    """
    problems = list(unsupported(config))
    if problems:
        raise Refused(f"the bundled models do not compute this {config.family} model", problems)
    cell = DecoderStage(config, stage, Precision(parameters, compute or parameters), parallel)
    cell.set_train(True)
    return cell
