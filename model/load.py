"""Strict loading. MindSpore's own `load_param_into_net` matches by suffix, casts and reshapes in silence; nothing here goes through it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from mindspore import Parameter, Tensor, nn

from mappings.errors import Problem, Refused

Array = npt.NDArray[Any]

TYPES = {"Float32": np.dtype(np.float32), "Float16": np.dtype(np.float16), "BFloat16": np.dtype(ml_dtypes.bfloat16)}
WIDENING = {(np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)), (np.dtype(np.float16), np.dtype(np.float32))}


def load_parameters(cell: nn.Cell, arrays: Iterable[tuple[str, Array]]) -> None:
    """Set every parameter of `cell` exactly once.

    The arrays are taken one at a time and copied into the parameter's own memory, so a stream costs the memory of one tensor.

    Args:
        arrays: (canonical name, array). The shape must be the parameter's and so must the type, but that bfloat16 and float16, whose values
            float32 all has, are widened to it.

    Raises:
        Refused: with every parameter that was given twice, not at all or wrongly, and every name that is none. The cell is then not to be
            used.
    """
    parameters = cell.parameters_dict()
    problems: list[Problem] = []
    seen: set[str] = set()
    for name, array in arrays:
        problem = _mismatch(name, array, parameters, seen)
        seen.add(name)
        if problem is None:
            _fill(parameters[name], array)
        else:
            problems.append(problem)
    problems += [Problem("not in the checkpoint", name) for name in parameters if name not in seen]
    if problems:
        raise Refused("the checkpoint does not fit the model", problems)


def _mismatch(name: str, array: Array, parameters: dict[str, Parameter], seen: set[str]) -> Problem | None:
    if name not in parameters:
        return Problem("no such parameter in the model", name)
    if name in seen:
        return Problem("in the checkpoint twice", name)
    wanted_shape, wanted = tuple(parameters[name].shape), TYPES[str(parameters[name].dtype)]
    if array.shape != wanted_shape:
        return Problem(f"shape {list(array.shape)}, the model's is {list(wanted_shape)}", name)
    if array.dtype != wanted and (array.dtype, wanted) not in WIDENING:
        return Problem(f"{array.dtype} values for a {wanted} parameter", name, f"build the model with {array.dtype} parameters")
    return None


def _fill(parameter: Parameter, array: Array) -> None:
    """Copy `array` into the parameter. bfloat16 goes by way of float32, which changes no value."""
    wide = np.ascontiguousarray(array, dtype=np.float16 if array.dtype == np.float16 else np.float32)
    parameter.set_data(Tensor(wide, dtype=parameter.dtype))
