"""The encoder: BERT and whatever else a ModelConfig of kind "encoder" describes."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor, nn, ops

from model.config import ModelConfig
from model.embedding import TransformerEmbedding, VocabParallelHead
from model.linear import Linear
from model.norms import hidden_norm
from model.ops import Tanh, activation
from model.precision import Precision
from model.rotary import RotaryEmbedding
from model.transformer import TransformerLayers


class Encoder(nn.Cell):
    """Post-norm layers whose tokens see each other in both directions."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(config) if config.rope is not None else None
        self.layers = TransformerLayers(config, precision)

    def construct(self, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, ...]:
        """x [batch, seq, hidden], padding [batch, seq] bool -> x and each layer's output: layers + 1 tensors [batch, seq, hidden]."""
        cos, sin = None, None
        if self.rotary is not None:
            cos, sin = self.rotary(x.shape[1])
        states: tuple[Tensor, ...] = (x,)
        for layer in self.layers:
            x = layer(x, cos, sin, padding)
            states += (x,)
        return states


class BertModel(nn.Cell):
    """Embedding and encoder, with the pooler that some checkpoints have: tanh of a linear layer over the first token."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.embedding = TransformerEmbedding(config, precision)
        self.encoder = Encoder(config, precision)
        self.pooler = Linear(config.hidden, config.hidden, True, precision) if config.pooler else None
        self.tanh = Tanh()

    def construct(
        self, ids: Tensor, token_types: Tensor | None = None, padding: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """ids, token_types [batch, seq], padding [batch, seq] bool -> the encoder's states, pooled [batch, hidden] or None."""
        states = self.encoder(self.embedding(ids, token_types), padding)
        pooled = None
        if self.pooler is not None:
            pooled = self.tanh(self.pooler(states[-1][:, 0]))
        return states, pooled


class MaskedLanguageModelHead(nn.Cell):
    """What BERT does to a hidden state before the vocabulary: linear, activation, norm."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.dense = Linear(config.hidden, config.hidden, True, precision)
        self.activation = activation(config.activation)
        self.norm = hidden_norm(config, precision)

    def construct(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] -> [batch, seq, hidden]."""
        return self.norm(self.activation(self.dense(x)))


class Bert(nn.Cell):
    """BERT with the heads that the config names: masked language model, next sentence, both or none."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, precision)
        self.mlm_head = MaskedLanguageModelHead(config, precision) if config.mlm_head else None
        self.lm_head = VocabParallelHead(config, has_bias=True, precision=precision) if config.mlm_head else None
        self.nsp_head = Linear(config.hidden, 2, True, precision) if config.nsp_head else None
        self.equal = ops.Equal()

    def construct(
        self,
        ids: Tensor,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        all_hidden_states: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Everything the model has to say about a batch.

        Args:
            ids: [batch, seq] integers in [0, vocab).
            token_types: [batch, seq] integers in [0, token_types); None means 0.
            attention_mask: [batch, seq], 0 where a token is padding; None means no padding. A row needs at least one token.
            all_hidden_states: return the embedding's output and each layer's, not the last layer's alone.

        Returns:
            (logits [batch, seq, padded_vocab] or None, pooled [batch, hidden] or None, nsp_logits [batch, 2] or None,
            the last hidden state [batch, seq, hidden] or a tuple of layers + 1 of them).
        """
        padding = None
        if attention_mask is not None:
            padding = self.equal(attention_mask, ms.Tensor(0, attention_mask.dtype))
        states, pooled = self.bert(ids, token_types, padding)
        logits, nsp_logits = None, None
        if self.mlm_head is not None and self.lm_head is not None:
            logits = self.lm_head(self.mlm_head(states[-1]), self.bert.embedding.tokens.embedding_table)
        if self.nsp_head is not None:
            nsp_logits = self.nsp_head(pooled)
        return logits, pooled, nsp_logits, states if all_hidden_states else states[-1]
