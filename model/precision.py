"""Element types of a model, and parameters that no checkpoint has filled yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mindspore as ms
from mindspore import Parameter
from mindspore.common.initializer import Constant, initializer

FloatType = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """What the parameters are stored in, and what the activations are.

    A cell casts its weight to its input's type, so a model may hold bfloat16 parameters and compute in float32 (MindSpore's CPU backend has
    no bfloat16 arithmetic), or hold float32 parameters and compute in bfloat16. Norms and softmax compute in float32 whatever this says.
    """

    parameters: FloatType = "float32"
    compute: FloatType = "float32"

    @property
    def parameter_type(self) -> ms.Type:
        return getattr(ms, self.parameters)

    @property
    def compute_type(self) -> ms.Type:
        return getattr(ms, self.compute)


def unset_parameter(shape: tuple[int, ...], precision: Precision, name: str) -> Parameter:
    """A parameter of NaN: a weight that was never loaded must not look like a weight."""
    return Parameter(initializer(Constant(float("nan")), shape, precision.parameter_type), name=name)
