"""AdamW with float32 master weights, its state optionally divided over data-parallel ranks.

Loshchilov & Hutter, arXiv:1711.05101, in PyTorch's form (torch.optim.AdamW): with t the step from 1,

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
    w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w)

MindSpore's fused AdamWeightDecay has no bias correction; it is given a rate, an eps and a decay that put it in:
lr' = lr sqrt(1 - beta2^t) / (1 - beta1^t), eps' = eps sqrt(1 - beta2^t), decay' = decay lr / lr'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from model.parallel import GatherRanks
from train.communication import Group


@dataclass(frozen=True)
class AdamWSettings:
    """The constants of AdamW; `decay` does not apply to norms and biases."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1


def decays(parameter: Parameter) -> bool:
    """Whether weight decay applies: norms and biases, and nothing else, have one axis."""
    return len(parameter.shape) > 1


def divided(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether the state of a parameter is divided over `ranks` data-parallel ranks: along axis 0, where it divides evenly."""
    return ranks > 1 and len(shape) > 0 and shape[0] % ranks == 0


class AdamW(nn.Cell):
    """The update of one rank's parameters.

    States `adam_m.*` and `adam_v.*` are float32. `master.*` are there where the weight itself cannot serve: it is of a 16-bit type, or divided.

    Args:
        parameters: filled already, for the master weights are copies of them.
        masters: float32 values where the parameters are rounded; by name, in the parameter's shape. {}: take the parameters' own.
        data: the data-parallel group, `shard` whether it divides the state.
        data_rank: this rank's index in it.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        settings: AdamWSettings,
        masters: dict[str, np.ndarray],
        data: Group,
        data_rank: int,
        shard: bool,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.settings = settings
        self.weights = ParameterTuple(parameters)
        ranks = data.size if shard else 1
        self.ranks = ranks
        self.parts = tuple(divided(tuple(parameter.shape), ranks) for parameter in parameters)
        self.starts = tuple(parameter.shape[0] // ranks * data_rank if part else 0 for parameter, part in zip(parameters, self.parts))
        self.stops = tuple(
            start + parameter.shape[0] // ranks if part else 0 for parameter, part, start in zip(parameters, self.parts, self.starts)
        )
        self.whole_shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        self.types = tuple(parameter.dtype for parameter in parameters)
        self.copied = tuple(part or parameter.dtype != ms.float32 for parameter, part in zip(parameters, self.parts))
        values = [self._slice(masters.get(parameter.name), parameter, index) for index, parameter in enumerate(parameters)]
        self.targets = ParameterTuple(
            [
                Parameter(Tensor(value), name=f"master.{parameter.name}") if copied else parameter
                for parameter, copied, value in zip(parameters, self.copied, values)
            ]
        )
        self.m = ParameterTuple([self._zeros("adam_m", target, parameter) for target, parameter in zip(self.targets, parameters)])
        self.v = ParameterTuple([self._zeros("adam_v", target, parameter) for target, parameter in zip(self.targets, parameters)])
        self.decayed = tuple(decays(parameter) for parameter in parameters)
        self.update = ops.AdamWeightDecay()
        self.gather = GatherRanks(ranks, data_rank, data.name) if ranks > 1 and any(self.parts) else None
        self.none = Tensor(0.0, ms.float32)
        self.beta1, self.beta2 = Tensor(settings.beta1, ms.float32), Tensor(settings.beta2, ms.float32)

    def _slice(self, master: np.ndarray | None, parameter: Parameter, index: int) -> np.ndarray:
        value = parameter.asnumpy() if master is None and parameter.dtype == ms.float32 else master
        if value is None:
            value = parameter.float().asnumpy()
        if self.parts[index]:
            value = value[self.starts[index] : self.stops[index]]
        return np.ascontiguousarray(value, dtype=np.float32)

    @staticmethod
    def _zeros(kind: str, target: Parameter, parameter: Parameter) -> Parameter:
        return Parameter(Tensor(np.zeros(target.shape, np.float32)), name=f"{kind}.{parameter.name}", requires_grad=False)

    def states(self) -> list[Parameter]:
        """What a checkpoint needs besides the weights."""
        masters = [target for target, copied in zip(self.targets, self.copied) if copied]
        return [*self.m, *self.v, *masters]

    def step(self, gradients: tuple[Tensor, ...], factor: float, learning_rate: float, number: int) -> None:
        """Update with `factor` times these gradients. `number` counts the updates from 1."""
        settings = self.settings
        correction1, correction2 = 1 - settings.beta1**number, math.sqrt(1 - settings.beta2**number)
        scalars = (factor, learning_rate * correction2 / correction1, settings.eps * correction2, settings.decay * correction1 / correction2)
        self(ms.mutable(gradients), *(Tensor(value, ms.float32) for value in scalars))

    def construct(self, gradients: tuple[Tensor, ...], factor: Tensor, rate: Tensor, eps: Tensor, decay: Tensor) -> Tensor:
        """float32 gradients in the order of the parameters, and the corrected scalars."""
        pieces: tuple[Tensor, ...] = ()
        done: tuple[Tensor, ...] = ()
        for index in range(len(self.targets)):
            gradient = gradients[index]
            if self.parts[index]:
                gradient = gradient[self.starts[index] : self.stops[index]]
            target = self.targets[index]
            use = decay if self.decayed[index] else self.none
            updated = self.update(
                target, self.m[index], self.v[index], rate, self.beta1, self.beta2, eps, use, gradient * factor
            )
            if self.parts[index]:
                pieces += (ops.reshape(ops.depend(target, updated), (1, -1)),)
            elif self.copied[index]:
                master = ops.depend(target, updated)
                done += (ops.assign(self.weights[index], ops.cast(master, self.types[index])),)
            else:
                done += (updated[0],)
        if self.gather is not None:
            gathered = self.gather(ops.concat(pieces, 1))
            start = 0
            for index in range(len(self.targets)):
                if self.parts[index]:
                    size = self.targets[index].size
                    value = ops.reshape(gathered[:, start : start + size], self.whole_shapes[index])
                    done += (ops.assign(self.weights[index], ops.cast(value, self.types[index])),)
                    start += size
        return ops.depend(self.none, done)
