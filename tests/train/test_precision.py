"""16-bit types, recomputed activations and PyNative mode on real ranks, each against float32 in graph mode or against PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tiny_models import save_tiny, tiny_model
from tests.train.jobs import run_cases
from tests.train.torch_training import train
from tests.train.worker import Case

pytestmark = pytest.mark.slow

MODEL = "llama-uneven-vocab-tied"
CHANGES: dict[str, Any] = {"num_hidden_layers": 4}
STEPS, BATCH, SEQ = 14, 4, 16
RATES = (3e-4,) * STEPS
TOO_LARGE = 2.0**16
"""A loss scale with which float16 gradients overflow."""

Results = Mapping[str, list[Mapping[str, Any]]]


@pytest.fixture(scope="module")
def rows() -> np.ndarray[Any, np.dtype[np.int32]]:
    """The same batch in every step, so that the loss falls, and stays where it is when an update is left out."""
    batch = np.random.default_rng(3).integers(0, 199, (1, BATCH, SEQ + 1)).astype(np.int32)
    return np.repeat(batch, STEPS, 0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray[Any, np.dtype[np.int32]]) -> Results:
    """Every case of this file, in one job for each number of ranks."""
    folder = tmp_path_factory.mktemp("precision")
    np.save(folder / "rows.npy", rows)
    save_tiny(folder / "model", MODEL, **CHANGES)
    few = RATES[:3]
    plain = Case("plain", str(folder / "model"), str(folder / "rows.npy"), RATES, micro_batches=2)
    half = replace(plain, parameters="float16", compute="float16", loss_scale=TOO_LARGE)
    one = [
        plain,
        replace(plain, name="bfloat16", parameters="bfloat16"),
        replace(plain, name="recompute", recompute_every=2, learning_rates=few),
        replace(plain, name="pynative", pynative=True, learning_rates=few),
    ]
    two = [
        replace(half, name="float16-2x1x1", tp=2),
        replace(half, name="float16-1x2x1", pp=2),
        replace(half, name="float16-1x1x2", dp=2, optimizer_sharding=True),
        replace(plain, name="bfloat16-1x2x1", pp=2, parameters="bfloat16", learning_rates=RATES[:6]),
        replace(plain, name="recompute-1x2x1", pp=2, recompute_every=2, learning_rates=few),
        replace(plain, name="pynative-2x1x1", tp=2, pynative=True, learning_rates=few),
    ]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for ranks, cases in ((1, one), (2, two)):
        of_ranks = run_cases(cases, folder / f"{ranks}-ranks", ranks)
        found |= {case.name: [of_rank[case.name] for of_rank in of_ranks] for case in cases}
    return found


@pytest.fixture(scope="module")
def torch_losses(rows: np.ndarray[Any, np.dtype[np.int32]]) -> list[float]:
    """PyTorch's in float32."""
    losses, _ = train(tiny_model(MODEL, **CHANGES), rows, RATES, decay=0.1, clip=1.0)
    return losses


def check_rounded(losses: list[float], torch_losses: list[float]) -> None:
    """As in float32, within what rounding to 8 or 11 bits does; later it grows, since Adam magnifies what is small."""
    compared = 6
    np.testing.assert_allclose(losses[:compared], torch_losses[:compared], rtol=2e-2)
    assert torch_losses[compared - 1] < 0.9 * torch_losses[0], "the loss falls by more than the tolerance"


@pytest.mark.parametrize("case", ["bfloat16", "bfloat16-1x2x1"])
def test_bfloat16_weights_with_float32_masters_train_as_pytorch_does_in_float32(
    case: str, results: Results, torch_losses: list[float]
) -> None:
    for of_rank in results[case]:
        check_rounded(of_rank["losses"], torch_losses)
        assert abs(of_rank["losses"][0] / torch_losses[0] - 1) > 1e-4, "nothing was rounded"


@pytest.mark.parametrize("layout", ["2x1x1", "1x2x1", "1x1x2"])
def test_an_overflow_is_skipped_on_all_ranks_alike_and_then_float16_trains_as_float32_does(
    layout: str, results: Results, torch_losses: list[float]
) -> None:
    first, second = results[f"float16-{layout}"]
    assert first["losses"] == second["losses"] and first["overflows"] == second["overflows"] and first["scales"] == second["scales"]
    losses, overflows = first["losses"], first["overflows"]
    assert overflows[0] and not all(overflows[6:])
    assert first["scales"] == [TOO_LARGE / 2 ** sum(overflows[: step + 1]) for step in range(STEPS)]
    assert [losses[step + 1] == losses[step] for step in range(STEPS - 1)] == overflows[:-1], "a skipped update changes no weight"
    check_rounded([losses[0], *(losses[step + 1] for step in range(STEPS - 1) if not overflows[step])], torch_losses)


@pytest.mark.parametrize("case", ["recompute", "recompute-1x2x1", "pynative", "pynative-2x1x1"])
def test_losses_and_gradient_norms_do_not_depend_on_recomputation_and_mode(case: str, results: Results) -> None:
    (plain,) = results["plain"]
    for of_rank in results[case]:
        np.testing.assert_allclose(of_rank["losses"][:3], plain["losses"][:3], rtol=1e-5)
        np.testing.assert_allclose(of_rank["norms"][:3], plain["norms"][:3], rtol=5e-4)
