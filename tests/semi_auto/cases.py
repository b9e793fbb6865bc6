"""What is compiled for the tests: small models under the layouts that differ for the compiler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from converter.layout import ParallelLayout, make_layout
from mappings.expand import Expansion, expand
from mappings.tables import bundled_table
from model.config import ModelConfig, Rope

GPT2 = ModelConfig(
    family="gpt2", kind="decoder", layers=2, hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=199, padded_vocab=256,
    max_positions=64, norm="layer_norm", norm_eps=1e-5, activation="gelu_tanh", gated_mlp=False, positions="learned",
    qkv_bias=True, output_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
LLAMA = ModelConfig(
    family="llama", kind="decoder", layers=2, hidden=64, heads=8, kv_heads=4, head_dim=16, ffn=96, vocab=256, padded_vocab=256,
    max_positions=128, norm="rms_norm", norm_eps=1e-5, activation="silu", gated_mlp=True, rope=Rope(50_000.0, 16),
)  # fmt: skip
QWEN3_TIED = replace(LLAMA, family="qwen3", qk_norm=True, tied=True)
MODELS = {"gpt2": GPT2, "llama": LLAMA, "qwen3-tied": QWEN3_TIED}
SEQ = 16


@dataclass(frozen=True)
class Case:
    """A model and a layout. `ascend`: as it is built there, with fused operators, activations in bfloat16, and all micro-batches using one
    compiled graph (`lazy_inline`).
    """

    model: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    optimizer_sharding: bool = False
    ascend: bool = False

    @property
    def name(self) -> str:
        words = [f"{key}{value}" for key, value in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if value > 1]
        return "-".join([self.model, *words, *["sharded"] * self.optimizer_sharding, *["ascend"] * self.ascend])

    @property
    def copies(self) -> int:
        """How often the graph has what a micro-batch does."""
        return 1 if self.ascend else self.micro_batches

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model]

    @property
    def expansion(self) -> Expansion:
        return expand(bundled_table(self.config.family), self.config, {}, ())

    @property
    def layout(self) -> ParallelLayout:
        return make_layout(self.config, self.expansion, tp=self.tp, pp=self.pp, dp=self.dp)


CASES = {
    case.name: case
    for model in MODELS
    for case in (
        Case(model, dp=2, tp=2),
        Case(model, dp=2, tp=2, micro_batches=2, optimizer_sharding=True),
        Case(model, tp=2, pp=2, micro_batches=2),
    )
} | {
    case.name: case
    for case in (
        Case("llama", dp=2, tp=2, ascend=True),
        Case("qwen3-tied", dp=2, tp=2, ascend=True),
        Case("llama", tp=2, pp=2, micro_batches=2, ascend=True),
        Case("gpt2", tp=2, pp=2, micro_batches=2, ascend=True),
        Case("llama", tp=4),
    )
}
