"""ModelConfig: the one description of a model, for the rule tables, the converter, the bundled model and the trainer.

Plain frozen dataclasses and the standard library only: this module is imported on login nodes that have no framework.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

RopeScalingKind = Literal["linear", "dynamic", "llama3", "yarn"]
RopeStyle = Literal["half", "interleaved"]
NormKind = Literal["layer_norm", "rms_norm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for long contexts.

    The fields carry the names of the HF config (`rope_scaling` / `rope_parameters`); a field that a kind does not use is None.
    Formulas: transformers `modeling_rope_utils.py`.
    """

    kind: RopeScalingKind
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base `theta`, the first `rotary_dim` of each head's elements are rotated.

    `style` is the canonical in-memory order, always "half" (element i rotates with i + rotary_dim/2) for the bundled model: a family
    that stores the interleaved order says so in the axes of its rules, and conversion reorders the rows.
    """

    theta: float
    rotary_dim: int
    style: RopeStyle = "half"
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One transformer, decoder or encoder. Sizes are counts of elements; `vocab` is the true vocabulary (rows of the HF tensor),
    `padded_vocab` what the target holds (equal when nothing was padded).
    """

    family: str
    kind: Literal["decoder", "encoder"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    max_positions: int
    norm: NormKind
    norm_eps: float
    activation: Activation
    gated_mlp: bool
    norm_offset: float = 0.0
    norm_position: Literal["pre", "post"] = "pre"
    positions: Literal["learned", "rope"] = "rope"
    rope: Rope | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head: bool = True  # decoders: an output head over the vocabulary; False for a base class such as LlamaModel
    tied: bool = False  # the head (decoder) or the MLM head's decoder (encoder) shares the token embedding; False where there is no head
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    scale_by_layer: bool = False  # GPT-2's scale_attn_by_inverse_layer_idx: scores of layer i are divided by i + 1
    sliding_window: int | None = None  # a token sees this many positions, itself included: key > query - sliding_window
    sliding_layers: tuple[int, ...] = ()  # the layers that use the window
    token_types: int = 0
    pooler: bool = False
    mlm_head: bool = False
    nsp_head: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: float = 0.02
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def axis_sizes(self) -> dict[str, int]:
        """The size of every logical axis that a parameter's shape may name (true, unpadded, uncut)."""
        return {
            "vocab": self.vocab,
            "hidden": self.hidden,
            "hidden_out": self.hidden,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "group": self.heads // self.kv_heads if self.kv_heads else 0,
            "head_dim": self.head_dim,
            "half_dim": self.head_dim // 2,
            "pair": 2,
            "ffn": self.ffn,
            "positions": self.max_positions,
            "token_types": self.token_types,
            "experts": self.experts,
            "expert_ffn": self.expert_ffn,
            "sentence_classes": 2,
        }

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values from which `from_json` rebuilds an equal config."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`. Raises ValueError for an unknown or missing field."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown model fields: {', '.join(unknown)}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        if values.get("rope"):
            rope = dict(values["rope"])
            if rope.get("scaling"):
                rope["scaling"] = RopeScaling(**rope["scaling"])
            values["rope"] = Rope(**rope)
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error
