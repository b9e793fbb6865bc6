"""The decoder: GPT-2, Llama, Mistral, Qwen2, Qwen3 and whatever else a ModelConfig of kind "decoder" describes."""

from __future__ import annotations

from mindspore import Tensor, nn

from model.config import ModelConfig
from model.embedding import TransformerEmbedding, VocabParallelHead
from model.norms import hidden_norm
from model.precision import Precision
from model.rotary import RotaryEmbedding
from model.transformer import TransformerLayers


class GPT(nn.Cell):
    """Embedding, pre-norm layers with causal attention, final norm, and a head over the vocabulary, tied or not."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.embedding = TransformerEmbedding(config, precision)
        self.rotary = RotaryEmbedding(config) if config.rope is not None else None
        self.layers = TransformerLayers(config, precision)
        self.final_norm = hidden_norm(config, precision)
        self.lm_head = VocabParallelHead(config, has_bias=False, precision=precision) if config.head else None

    def hidden_states(self, ids: Tensor) -> tuple[Tensor, ...]:
        """ids [batch, seq] -> the embedding's output, each layer's and the final norm's: layers + 2 tensors [batch, seq, hidden]."""
        cos, sin = None, None
        if self.rotary is not None:
            cos, sin = self.rotary(ids.shape[1])
        x = self.embedding(ids)
        states: tuple[Tensor, ...] = (x,)
        for layer in self.layers:
            x = layer(x, cos, sin)
            states += (x,)
        return (*states, self.final_norm(x))

    def construct(self, ids: Tensor, all_hidden_states: bool = False) -> Tensor | tuple[Tensor | None, tuple[Tensor, ...]]:
        """Logits of every position.

        Args:
            ids: [batch, seq] integers in [0, vocab). Padding goes on the right, where no token of the sequence sees it.
            all_hidden_states: also return `hidden_states(ids)`.

        Returns:
            [batch, seq, padded_vocab], or (that, hidden states). Without a head, None instead of the logits.
        """
        states = self.hidden_states(ids)
        logits = None
        if self.lm_head is not None:
            logits = self.lm_head(states[-1], self.embedding.tokens.embedding_table)
        if all_hidden_states:
            return logits, states
        return logits
