"""AdamW with float32 master weights, its state optionally divided over data-parallel ranks.

Loshchilov & Hutter, arXiv:1711.05101, in PyTorch's form (torch.optim.AdamW): with t the step from 1,

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
    w = w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w)

MindSpore's fused AdamWeightDecay has no bias correction; it is given a rate, an eps and a decay that put it in:
lr' = lr sqrt(1 - beta2^t) / (1 - beta1^t), eps' = eps sqrt(1 - beta2^t), decay' = decay lr / lr'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from model.parallel import GatherRanks
from train.communication import Group
from train.optimizer_shares import Share, share_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class AdamWSettings:
    """The constants of AdamW; `decay` does not apply to norms and biases."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1


class AdamW(nn.Cell):
    """The update of one rank's parameters.

    States `adam_m.*` and `adam_v.*` are float32. `master.*` are there where the weight itself cannot serve (`Share.copied`).

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
        masters: Mapping[str, Array],
        data: Group,
        data_rank: int,
        shard: bool,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.settings = settings
        self.weights = ParameterTuple(parameters)
        ranks = data.size if shard else 1
        self.shares = tuple(share_of(tuple(parameter.shape), parameter.dtype == ms.float32, ranks, data_rank) for parameter in parameters)
        self.types = tuple(parameter.dtype for parameter in parameters)
        targets = [
            _master(parameter, masters.get(parameter.name), share) if share.copied else parameter
            for parameter, share in zip(parameters, self.shares, strict=True)
        ]
        self.targets = ParameterTuple(targets)
        self.m = ParameterTuple([_zeros("adam_m", target, weight) for target, weight in zip(targets, parameters, strict=True)])
        self.v = ParameterTuple([_zeros("adam_v", target, weight) for target, weight in zip(targets, parameters, strict=True)])
        # Whole shares first: the order in which `construct` returns values. Assigned outside it, as a CPU assigns no bfloat16
        whole = [index for index, share in enumerate(self.shares) if share.copied and not share.divided]
        self.rounded = (*whole, *(index for index, share in enumerate(self.shares) if share.divided))
        self.update = ops.AdamWeightDecay()
        self.gather = GatherRanks(ranks, data_rank, data.name) if any(share.divided for share in self.shares) else None
        self.none = Tensor(0.0, ms.float32)
        self.beta1, self.beta2 = Tensor(settings.beta1, ms.float32), Tensor(settings.beta2, ms.float32)

    def states(self) -> list[Parameter]:
        """What a checkpoint needs besides the weights."""
        masters = [target for target, share in zip(self.targets, self.shares, strict=True) if share.copied]
        return [*self.m, *self.v, *masters]

    def step(self, gradients: tuple[Tensor, ...], factor: float, learning_rate: float, number: int) -> None:
        """Update with `factor` times these gradients. `number` counts the updates from 1."""
        settings = self.settings
        correction1, correction2 = 1 - settings.beta1**number, math.sqrt(1 - settings.beta2**number)
        scalars = (
            factor,
            learning_rate * correction2 / correction1,
            settings.eps * correction2,
            settings.decay * correction1 / correction2,
        )
        values = self(ms.mutable(gradients), *(Tensor(value, ms.float32) for value in scalars))
        for index, value in zip(self.rounded, values[1:], strict=True):
            self.weights[index].set_data(value)

    def construct(self, gradients: tuple[Tensor, ...], factor: Tensor, rate: Tensor, eps: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
        """float32 gradients in the order of the parameters, and the corrected scalars -> a scalar without meaning that waits for the
        updates, and the new weights of `rounded`.
        """
        pieces: tuple[Tensor, ...] = ()
        done: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
        for index in range(len(self.targets)):
            share, target = self.shares[index], self.targets[index]
            gradient = gradients[index][share.start : share.stop] if share.divided else gradients[index]
            used = decay if share.decayed else self.none
            state = (self.m[index], self.v[index])
            updated = self.update(target, *state, rate, self.beta1, self.beta2, eps, used, gradient * factor)
            done += (updated[0],)
            if share.divided:
                pieces += (ops.reshape(ops.depend(target, updated), (1, -1)),)
            elif share.copied:
                values += (ops.cast(ops.depend(target, updated), self.types[index]),)
        if self.gather is not None:
            gathered = self.gather(ops.concat(pieces, 1))
            start = 0
            for index in range(len(self.targets)):
                share, size = self.shares[index], self.targets[index].size
                if share.divided:
                    values += (ops.cast(ops.reshape(gathered[:, start : start + size], share.shape), self.types[index]),)
                    start += size
        return (ops.depend(self.none, done), *values)


def _master(parameter: Parameter, values: Array | None, share: Share) -> Parameter:
    """The master weight of a rank's share: of the values, or else of the parameter itself."""
    whole = parameter.float().asnumpy() if values is None else values
    rows = np.ascontiguousarray(whole[share.start : share.stop] if share.divided else whole, dtype=np.float32)
    return Parameter(Tensor(rows), name=f"master.{parameter.name}")


def _zeros(kind: str, target: Parameter, parameter: Parameter) -> Parameter:
    return Parameter(Tensor(np.zeros(target.shape, np.float32)), name=f"{kind}.{parameter.name}", requires_grad=False)
