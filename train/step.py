"""One optimizer step: forward and backward over the micro-batches, sums over ranks, clipping, update, loss scale."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor

from model.loss import IGNORED
from model.precision import FloatType
from model.stage import DecoderStage, build_stage
from train.communication import Groups, GroupSum
from train.gradients import SynchronizedGradients
from train.loss_scale import LossScale
from train.optimizer import AdamW, AdamWSettings
from train.pipeline import MicroBatch, Pipeline
from train.start import Start

Array = np.ndarray[Any, np.dtype[Any]]
Tokens = npt.NDArray[np.int32]
ROUNDING = {"float16": np.float16, "float32": np.float32}


@dataclass(frozen=True)
class StepSettings:
    """What a step depends on besides its batch. `clip_norm` 0 means no clipping, `recompute_every` k that the activations of every
    k-th layer are kept and the others' computed again; 0 keeps all.
    """

    micro_batches: int = 1
    clip_norm: float = 1.0
    adamw: AdamWSettings = field(default_factory=AdamWSettings)
    optimizer_sharding: bool = False
    parameters: FloatType = "float32"
    compute: FloatType = "float32"
    recompute_every: int = 0


@dataclass(frozen=True)
class StepResult:
    """What every rank knows after a step. `loss` is the mean over the tokens of the global batch, before the update; `norm` that of the
    gradient before clipping. `overflow`: the loss scale was too large, and nothing was updated. `finite`: loss and norm are numbers,
    overflow aside; where they are not, `culprits` are the ranks whose own gradients are not. `stop`: some rank was asked to stop.
    """

    loss: float
    norm: float
    tokens: int
    overflow: bool
    finite: bool
    stop: bool
    culprits: tuple[int, ...] = ()


def labels_of(ids: Tokens, mask: Tokens | None) -> tuple[Tokens, Tokens]:
    """Rows of seq + 1 tokens as (ids, labels), both [rows, seq]: each position predicts the next token, and padding is not predicted."""
    labels = ids[:, 1:] if mask is None else np.where(mask[:, 1:] != 0, ids[:, 1:], np.int32(IGNORED))
    return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(labels, dtype=np.int32)


class Trainer:
    """A rank's stage with its optimizer. Every method but `weights` is called by all ranks at once."""

    def __init__(self, start: Start, groups: Groups, settings: StepSettings, scale: LossScale | None = None) -> None:
        self.start, self.groups, self.settings = start, groups, settings
        self.scale = scale or LossScale()
        self.updates = 0
        self.steps = 0
        rank = groups.place.rank
        self.stage = build_stage(start.model, start.stage(rank), groups.tensor_parallel, settings.parameters, settings.compute)
        masters = load_weights(self.stage, start.parameters(rank), settings.parameters)
        for place, layer in enumerate(self.stage.layers):
            if settings.recompute_every and place % settings.recompute_every:
                layer.recompute()
        self.pipeline = Pipeline(self.stage, groups)
        weights = list(self.pipeline.weights)
        counted = start.counted(rank)
        self._synchronize = SynchronizedGradients(self.stage, weights, groups, [weight.name in counted for weight in weights])
        self.optimizer = AdamW(weights, settings.adamw, masters, groups.data, groups.place.data, settings.optimizer_sharding)
        self._sum_world = GroupSum(groups.world)
        self.token = self._agree_on_token()

    def step(self, ids: Tokens, labels: Tokens, learning_rate: float, stop: bool = False) -> StepResult:
        """Train on this data-parallel rank's part of a global batch, [sequences, seq] each.

        The gradient is the mean over all labelled tokens of the global batch, however they are spread over micro-batches and ranks.
        """
        expected = ids.size * self.groups.data.size  # keeps the scaled loss of a micro-batch in float16's range; corrected below
        factor = Tensor(self.scale.scale / expected, ms.float32)
        if self.pipeline.dropout is not None:
            self.pipeline.dropout.begin(self.steps)
        self.steps += 1
        own, loss = self.pipeline.run(self._micro_batches(ids, labels), factor)
        loss, tokens, asked = self._totals(loss, labels, stop)
        correction = expected / (max(tokens, 1) * self.scale.scale)
        gradients, norm_tensor = self._synchronize(ms.mutable(own), Tensor(correction, ms.float32))
        norm = float(norm_tensor.asnumpy())
        overflow = self.scale.may_fall and not math.isfinite(norm) and math.isfinite(loss)
        finite = math.isfinite(loss) and (overflow or math.isfinite(norm))
        self.scale = self.scale.after(overflow)
        if finite and not overflow:
            clip = self.settings.clip_norm
            clipping = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            self.updates += 1
            self.optimizer.step(gradients, correction * clipping, learning_rate, self.updates)
        return StepResult(loss, norm, tokens, overflow, finite, asked, () if finite or overflow else self._culprits(own))

    def evaluate(self, batches: Sequence[tuple[Tokens, Tokens]]) -> float:
        """The mean loss over all labelled tokens of these batches, (ids, labels) of this data-parallel rank each, without dropout."""
        self.stage.set_train(False)
        loss = sum(self.pipeline.loss(self._micro_batches(ids, labels)) for ids, labels in batches)
        self.stage.set_train(True)
        counts = [labels for _, labels in batches]
        total, tokens, _ = self._totals(loss, np.concatenate([labels.reshape(-1) for labels in counts]), False)
        return total if tokens else math.nan

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        self._sum_world(Tensor(0.0, ms.float32)).asnumpy()

    def agree(self, number: int) -> bool:
        """Whether every rank calls this with the same number; False on one rank at least where they do not."""
        digits = base_4096(number)
        return all(self._sum_world(Tensor(np.array(digits, np.float32))).asnumpy() == np.array(digits) * self.groups.world.size)

    def weights(self) -> Mapping[str, Parameter]:
        """The parameters by canonical name."""
        return {weight.name: weight for weight in self.pipeline.weights}

    def _micro_batches(self, ids: Tokens, labels: Tokens) -> list[MicroBatch]:
        count = self.settings.micro_batches
        parts = zip(np.split(ids, count), np.split(labels, count), strict=True)
        return [MicroBatch(Tensor(part, ms.int32), Tensor(target, ms.int32)) for part, target in parts]

    def _culprits(self, gradients: Sequence[Tensor]) -> tuple[int, ...]:
        """The ranks that have a value that is not finite in their own gradients."""
        world, place = self.groups.world, self.groups.place
        flags = np.zeros(world.size, np.float32)
        flags[place.rank] = not all(np.isfinite(gradient.float().asnumpy()).all() for gradient in gradients)
        return tuple(int(rank) for rank in np.flatnonzero(self._sum_world(Tensor(flags)).asnumpy()))

    def _agree_on_token(self) -> int:
        """A random number below 2^20, the same on every rank: two runs with equal settings get different ones."""
        mine = secrets.randbelow(1 << 20) if self.groups.place.rank == 0 else 0
        return int(self._sum_world(Tensor(float(mine), ms.float32)).asnumpy())

    def _totals(self, loss: float, labels: Tokens, stop: bool) -> tuple[float, int, bool]:
        """The mean loss over the labelled tokens of all ranks, their number, and whether any rank was asked to stop.

        Loss and tokens of a data-parallel replica are counted on its last stage's first tensor-parallel rank.
        """
        place = self.groups.place
        counts = self.stage.last and place.tensor == 0
        tokens = int(np.count_nonzero(labels != IGNORED))
        # Tokens in two digits of 2^12, which float32 adds exactly up to 2^12 replicas of 2^24 tokens
        high, low = divmod(tokens, 1 << 12)
        mine = np.array([loss, high, low, 0.0] if counts else [0.0] * 4, np.float32)
        mine[3] = float(stop)
        summed = self._sum_world(Tensor(mine)).asnumpy().astype(np.float64)
        total = int(summed[1]) * (1 << 12) + int(summed[2]) if np.isfinite(summed[1:3]).all() else 0
        return float(summed[0]) / max(total, 1), total, bool(summed[3] > 0)


def base_4096(number: int) -> list[float]:
    """The last four digits, whose sums over up to 4096 ranks float32 holds exactly."""
    return [float(number >> 12 * place & 4095) for place in range(4)]


def load_weights(stage: DecoderStage, arrays: Any, kind: FloatType) -> dict[str, Array]:
    """Fill the stage's parameters, rounding where they are narrower than the source. -> the unrounded float32 values of those that were.

    Raises Refused when names or shapes do not fit (model/load.py).
    """
    import ml_dtypes

    from model.load import load_parameters

    target = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else ROUNDING[kind])
    masters: dict[str, Array] = {}

    def rounded() -> Any:
        for name, array in arrays:
            if array.dtype != target:
                wide = array.astype(np.float32)
                if target != np.float32:
                    masters[name] = wide
                yield name, wide.astype(target)
            else:
                yield name, array

    load_parameters(stage, rounded())
    return masters
