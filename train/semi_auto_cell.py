"""The training step as one cell for MindSpore's parallel compiler: loss, gradients, their norm, AdamW.

Written as for a single device with the global batch; strategies (model/shard.py) and stages are what makes it parallel. What follows the
gradients is not cut by strategies: there each rank sees its slices, and the compiler puts in what is missing, which it knows by the marks
that MindSpore's own cells use (`grad_scale` on the squares of the norm, `accu_grads.*` for the sums over micro-batches, clones of a weight
for its optimizer state).
"""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import Parameter, ParameterTuple, Tensor, lazy_inline, nn, ops
from mindspore.parallel.nn import GradAccumulation, Pipeline

from model.ops import on_ascend
from model.stage import DecoderStage
from train.optimizer import AdamWSettings
from train.optimizer_shares import decays

Gradients = tuple[Tensor, ...]


class LossNetwork(nn.Cell):
    """The decoder with its loss: what is repeated for each micro-batch."""

    def __init__(self, decoder: DecoderStage) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, ids: Tensor, labels: Tensor) -> Tensor:
        """ids, labels [batch, seq] int32 -> the summed loss."""
        return self.decoder(ids, labels)


class ReusedLossNetwork(LossNetwork):
    """The same, compiled once for all micro-batches, which only Ascend's backend can."""

    @lazy_inline
    def __init__(self, decoder: DecoderStage) -> None:
        super().__init__(decoder)


def loss_network(decoder: DecoderStage, micro_batches: int, stages: int) -> nn.Cell:
    """The summed loss over the micro-batches of a step, through `stages` pipeline stages."""
    network = ReusedLossNetwork(decoder) if on_ascend() else LossNetwork(decoder)
    if stages > 1:
        return Pipeline(network, micro_batches)
    return GradAccumulation(network, micro_batches) if micro_batches > 1 else network


def set_stages(decoder: DecoderStage, layers_per_stage: tuple[int, ...]) -> None:
    """Give every cell of a whole decoder the pipeline stage that computes it."""
    last = len(layers_per_stage) - 1
    decoder.cast_table = False  # the compiler sends a parameter to another stage, but nothing computed from it outside of a stage
    decoder.embedding.pipeline_stage = 0
    stages = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    for layer, stage in zip(decoder.layers, stages, strict=True):
        layer.pipeline_stage = stage
    for cell in (decoder.final_norm, decoder.lm_head, decoder.cross_entropy):
        cell.pipeline_stage = last


class GradientNorm(nn.Cell):
    """The global norm of gradients. `grad_scale` is the mark by which the compiler finds the sums that other ranks have a share of."""

    def __init__(self) -> None:
        super().__init__()
        self.square = ops.Square()
        self.sum = ops.ReduceSum()
        self.as_vector = ops.ExpandDims().add_prim_attr("grad_scale", True)

    def construct(self, gradients: Gradients) -> Tensor:
        """float32 gradients -> their norm, [1]."""
        squares: tuple[Tensor, ...] = ()
        for gradient in gradients:
            squares += (self.as_vector(self.sum(self.square(gradient), ()), 0),)
        return ops.sqrt(ops.addn(squares))


class CompiledAdamW(nn.Cell):
    """train/optimizer.py's AdamW for weights that are float32 themselves. Its states are clones of them, so both are cut alike."""

    def __init__(self, weights: ParameterTuple, settings: AdamWSettings) -> None:
        super().__init__(auto_prefix=False)
        self.weights = weights
        self.m = weights.clone("adam_m", "zeros")
        self.v = weights.clone("adam_v", "zeros")
        for state in (*self.m, *self.v):
            state.requires_grad = False
        self.decayed = tuple(decays(tuple(weight.shape)) for weight in weights)
        self.update = ops.AdamWeightDecay()
        self.none = Tensor(0.0, ms.float32)
        self.beta1, self.beta2 = Tensor(settings.beta1, ms.float32), Tensor(settings.beta2, ms.float32)

    def construct(self, gradients: Gradients, rate: Tensor, eps: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
        """Gradients and corrected scalars (train/optimizer.py) -> what waits for the updates."""
        done: tuple[Tensor, ...] = ()
        for index in range(len(self.weights)):
            used = decay if self.decayed[index] else self.none
            state = (self.weights[index], self.m[index], self.v[index])
            done += (self.update(*state, rate, self.beta1, self.beta2, eps, used, gradients[index])[0],)
        return done


class TrainStep(nn.Cell):
    """One optimizer step.

    The scalars of a step are parameters, set by `prepare`: an input of the graph would be taken for data, and cut.

    Args:
        network: of `loss_network`.
        accumulates: whether the compiler adds gradients up over several micro-batches; without a parallel mode they are summed when they
            leave the backward pass.
        optimizer_sharding: whether the compiler divides weights and optimizer state over data-parallel ranks. Then a gradient is whole
            when it leaves the backward pass; otherwise the sum of the micro-batches is in `accu_grads.*`.
        elsewhere: weights whose gradient another stage has in full, so that here it has no part in the norm.
    """

    def __init__(
        self,
        network: nn.Cell,
        settings: AdamWSettings,
        clip_norm: float,
        accumulates: bool,
        optimizer_sharding: bool,
        elsewhere: tuple[str, ...] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.settings, self.clip_norm = settings, clip_norm
        self.weights = ParameterTuple(network.trainable_params())
        self.differentiate = ops.value_and_grad(network, None, self.weights)
        self.sums = self.weights.clone("accu_grads", "zeros") if accumulates else None
        self.optimizer_sharding = optimizer_sharding
        self.in_norm = tuple(weight.name not in elsewhere for weight in self.weights)
        self.norm = GradientNorm()
        self.optimizer = CompiledAdamW(self.weights, settings)
        self.factor, self.rate, self.eps, self.decay = (_scalar(name) for name in ("factor", "rate", "eps", "decay"))

    def prepare(self, factor: float, learning_rate: float, number: int) -> None:
        """Set what the next step multiplies gradients by, its learning rate, and its number among the updates, from 1."""
        correction1, correction2 = 1 - self.settings.beta1**number, math.sqrt(1 - self.settings.beta2**number)
        values = (
            factor,
            learning_rate * correction2 / correction1,
            self.settings.eps * correction2,
            self.settings.decay * correction1 / correction2,
        )
        for parameter, value in zip((self.factor, self.rate, self.eps, self.decay), values, strict=True):
            parameter.set_data(Tensor(value, ms.float32))

    def construct(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """ids, labels [batch, seq] int32 of this rank -> the summed loss (on the last stage), and the gradient's norm before clipping."""
        loss, gradients = self.differentiate(ids, labels)
        gradients = self.accumulated(gradients)
        scaled: Gradients = ()
        measured: Gradients = ()
        for index in range(len(self.weights)):
            gradient = gradients[index] * self.factor
            scaled += (gradient,)
            if self.in_norm[index]:
                measured += (gradient,)
        norm = self.norm(measured)
        if self.clip_norm:
            clipping = ops.minimum(self.clip_norm / (norm + 1e-6), 1.0)
            clipped: Gradients = ()
            for gradient in scaled:
                clipped += (gradient * clipping,)
            scaled = clipped
        done = self.optimizer(scaled, self.rate, self.eps, self.decay)
        return ops.depend(loss, done), norm

    def accumulated(self, gradients: Gradients) -> Gradients:
        """The sums over micro-batches. The compiler's are set back to zero, as mindspore.parallel.nn.PipelineGradReducer does."""
        if self.sums is None:
            return gradients
        result: Gradients = ()
        for index in range(len(self.sums)):
            total = ops.depend(self.sums[index], gradients[index])
            value = gradients[index] * 1.0 if self.optimizer_sharding else total * 1.0
            total = ops.depend(total, value)
            result += (ops.depend(value, ops.assign(self.sums[index], ops.zeros_like(total))),)
        return result


def _scalar(name: str) -> Parameter:
    return Parameter(Tensor(0.0, ms.float32), name=f"step.{name}", requires_grad=False, parallel_optimizer=False)
