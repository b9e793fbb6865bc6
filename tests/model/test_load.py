"""Loading is strict: the traps of MindSpore's own loader, and the ways a checkpoint can fail to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from mindspore import Parameter, nn

from mappings.errors import Refused
from model.build import build_model
from model.load import load_parameters
from tests.model.reference import CONFIGS, LLAMA, canonical_arrays
from tests.tiny_models import tiny_model

Arrays = dict[str, npt.NDArray[Any]]


def build(**options: Any) -> nn.Cell:
    return build_model(CONFIGS["llama-tied"], **options)


def arrays() -> Arrays:
    return dict(canonical_arrays(tiny_model("llama-tied"), CONFIGS["llama-tied"]))


def values(parameter: Parameter) -> npt.NDArray[np.float32]:
    result: npt.NDArray[np.float32] = parameter.float().asnumpy()
    return result


def problems(cell: nn.Cell, given: Any) -> list[str]:
    with pytest.raises(Refused) as caught:
        load_parameters(cell, given)
    return [f"{problem.where}: {problem.what}" for problem in caught.value.problems]


def test_every_parameter_holds_its_array_bit_for_bit() -> None:
    cell, given = build(), arrays()
    load_parameters(cell, given.items())
    parameters = cell.parameters_dict()
    assert set(parameters) == set(given)
    for name, array in given.items():
        assert values(parameters[name]).tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_a_parameter_keeps_its_values_when_the_array_is_overwritten() -> None:
    """A stream may reuse one buffer for all tensors."""
    cell, given = build(), arrays()

    def stream() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for name, array in given.items():
            buffer = np.array(array)
            yield name, buffer
            buffer[...] = -1

    load_parameters(cell, stream())
    for name, array in given.items():
        np.testing.assert_array_equal(values(cell.parameters_dict()[name]), array)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_sixteen_bit_values_are_widened_exactly(dtype: Any) -> None:
    cell = build()
    given = {name: array.astype(dtype) for name, array in arrays().items()}
    load_parameters(cell, given.items())
    for name, parameter in cell.parameters_dict().items():
        assert parameter.dtype == ms.float32
        np.testing.assert_array_equal(values(parameter), given[name].astype(np.float32))


def test_bfloat16_parameters_take_bfloat16_values() -> None:
    cell = build(parameters="bfloat16", compute="float32")
    given = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays().items()}
    load_parameters(cell, given.items())
    for name, parameter in cell.parameters_dict().items():
        assert parameter.dtype == ms.bfloat16
        np.testing.assert_array_equal(values(parameter), given[name].astype(np.float32))


def test_nothing_is_narrowed() -> None:
    given = arrays()
    found = problems(build(parameters="float16"), given.items())
    assert len(found) == len(given)
    assert "final_norm.gamma: float32 values for a float16 parameter" in found
    found = problems(build(), [(name, array.astype(np.float64)) for name, array in given.items()])
    assert len(found) == len(given)


def test_all_that_does_not_fit_is_reported_at_once() -> None:
    given = arrays()
    stream = list(given.items())
    wrong = [
        ("layers.0.attention.q_proj.weight", given["layers.0.attention.q_proj.weight"].reshape(64, 64, 1)),
        ("layers.1.mlp.up_proj.weight", given["layers.1.mlp.up_proj.weight"].T),
        ("final_norm.gamma", given["final_norm.gamma"].astype(np.int32)),
        ("adam_m.layers.0.mlp_norm.gamma", given["layers.0.mlp_norm.gamma"]),
        ("gamma", given["layers.0.mlp_norm.gamma"]),
    ]
    replaced = {name for name, _ in wrong}
    missing = "layers.2.mlp.down_proj.weight"
    kept = [(name, array) for name, array in stream if name not in replaced and name != missing]
    assert sorted(problems(build(), [*kept, *wrong, kept[0]])) == sorted(
        [
            "layers.0.attention.q_proj.weight: shape [64, 64, 1], the model's is [64, 64]",
            "layers.1.mlp.up_proj.weight: shape [64, 96], the model's is [96, 64]",
            "final_norm.gamma: int32 values for a float32 parameter",
            "adam_m.layers.0.mlp_norm.gamma: no such parameter in the model",
            "gamma: no such parameter in the model",
            f"{missing}: not in the checkpoint",
            f"{kept[0][0]}: in the checkpoint twice",
        ]
    )


def test_a_parameter_that_was_never_loaded_is_not_a_number() -> None:
    assert all(np.isnan(values(parameter)).all() for parameter in build_model(LLAMA, "bfloat16").get_parameters())
