"""The numbers of a comparison, against PyTorch's and numpy's own, and what they do with values that are no numbers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.forward import Outputs
from model.forward_parity import ForwardParity
from model.parity import THRESHOLDS, Disagreement, StateError, compare_logits, compare_outputs, state_error, to_facts, worst_by_state
from model.probes import Probe

EXACT = THRESHOLDS["float32"]
generator = np.random.default_rng(0)


def logits_pair(batch: int = 3, seq: int = 40, vocab: int = 37, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    reference = generator.standard_normal((batch, seq, vocab)).astype(np.float32) * 4
    return (
        generator.integers(0, vocab, (batch, seq)),
        reference,
        reference + noise * generator.standard_normal(reference.shape).astype(np.float32),
    )


def test_kl_top1_and_perplexity_are_those_of_pytorch() -> None:
    ids, reference, ours = logits_pair()
    real = np.ones(ids.shape, bool)
    real[1, 25:] = False
    found = compare_logits(ids, real, reference, ours, True, EXACT)
    b, a = (torch.from_numpy(side.astype(np.float64)[real]).log_softmax(dim=1) for side in (reference, ours))
    divergence = torch.nn.functional.kl_div(a, b, log_target=True, reduction="none").sum(dim=1)
    assert found.tokens == real.sum()
    assert found.kl_mean == pytest.approx(float(divergence.mean())) and found.kl_max == pytest.approx(float(divergence.max()))
    assert found.top1_agreement == pytest.approx(float((a.argmax(1) == b.argmax(1)).double().mean()))
    assert 0 < found.top1_agreement < 1 and found.top1_ties == 0
    for side, perplexity in ((reference, found.perplexity_reference), (ours, found.perplexity_ours)):
        losses = [
            torch.nn.functional.cross_entropy(
                torch.from_numpy(side[row, : end - 1]).double(), torch.from_numpy(ids[row, 1:end]), reduction="sum"
            )
            for row, end in ((0, 40), (1, 25), (2, 40))
        ]
        assert perplexity == pytest.approx(float((sum(losses) / (39 + 24 + 39)).exp()))


def test_an_encoder_has_no_perplexity() -> None:
    ids, reference, ours = logits_pair()
    found = compare_logits(ids, np.ones(ids.shape, bool), reference, ours, False, EXACT)
    assert found.perplexity_reference is None and found.perplexity_ours is None


@given(rows=st.integers(1, 200), size=st.integers(1, 20), seed=st.integers(0, 1000))
def test_errors_are_those_of_numpy(rows: int, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    b = random.standard_normal((rows, size))
    a = b + 1e-3 * random.standard_normal((rows, size))
    found = state_error("x", a, b)
    assert found.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert found.worst_token == pytest.approx((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max())
    assert found.max_error == pytest.approx(np.abs(a - b).max() / np.abs(b).max())


def test_a_huge_token_cannot_hide_the_others() -> None:
    """Real models have tokens a thousand times larger than the rest; an error of 1 % elsewhere is lost in the norm of the whole."""
    b = generator.standard_normal((50, 16))
    b[0] *= 1e5
    a = b.copy()
    a[7] *= 1.01
    found = state_error("x", a, b)
    assert found.relative_error < EXACT.relative_error and found.worst_token == pytest.approx(0.01) and not found.within(EXACT)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_number_is_an_infinite_error(value: float, side: int) -> None:
    pair = [generator.standard_normal((4, 4)) for _ in range(2)]
    pair[side][2, 1] = value
    found = state_error("x", pair[0], pair[1])
    assert math.isinf(found.relative_error) and not found.within(EXACT)
    assert json.dumps(to_facts(found), allow_nan=False)


def test_zeros_agree_with_zeros_and_with_nothing_else() -> None:
    zeros = np.zeros((2, 3))
    assert state_error("x", zeros, zeros).relative_error == 0.0
    assert math.isinf(state_error("x", zeros + 1e-9, zeros).relative_error)


def test_a_near_tie_counts_as_agreeing_and_is_told() -> None:
    reference = np.zeros((1, 2, 5), np.float32)
    reference[0, 0, 1], reference[0, 0, 3] = 10.0, 10.0 - 5e-4
    reference[0, 1, 1], reference[0, 1, 3] = 10.0, 9.0
    ours = reference[:, :, [0, 3, 2, 1, 4]]
    found = compare_logits(np.zeros((1, 2), np.int64), np.ones((1, 2), bool), reference, ours, True, EXACT)
    assert found.top1_agreement == 0.0 and found.top1_ties == 1 and not found.within(EXACT)
    first, second = found.disagreements
    assert first == Disagreement(0, 0, 1, 3, first.margin, True) and first.margin == pytest.approx(5e-4, rel=1e-3)
    assert (second.position, second.margin, second.tie) == (1, 1.0, False)


def outputs(errors: dict[str, float]) -> tuple[Outputs, Outputs]:
    reference = {name: generator.standard_normal((1, 4, 8)).astype(np.float32) for name in errors}
    return Outputs(None, reference), Outputs(None, {name: state * (1 + np.float32(errors[name])) for name, state in reference.items()})


def parity(*errors: dict[str, float]) -> ForwardParity:
    probes = []
    for index, wanted in enumerate(errors):
        reference, ours = outputs(wanted)
        probe = Probe(f"probe-{index}", "", np.zeros((1, 4), np.int64))
        probes.append(compare_outputs(probe, reference, ours, True, EXACT))
    return ForwardParity(EXACT, tuple(probes), None, None, (), 0.0, 0.0)


def test_the_first_divergence_is_the_earliest_layer_of_any_probe() -> None:
    found = parity(
        {"embedding": 0.0, "layers.0": 1e-6, "layers.1": 1e-6, "final_norm": 0.5},
        {"embedding": 0.0, "layers.0": 1e-6, "layers.1": 2e-3, "final_norm": 0.1},
        {"embedding": 0.0, "layers.0": 1e-6, "layers.1": 3e-3, "final_norm": 0.1},
    )
    first = found.first_divergence()
    assert first is not None and (first[0], first[1].name) == ("layers.1", "probe-2")
    assert found.to_facts()["first_divergence"]["name"] == "layers.1"
    assert [(state.name, probe) for state, probe in worst_by_state(found.probes)][-1] == ("final_norm", "probe-0")


def test_nothing_diverges_below_the_threshold() -> None:
    assert parity({"embedding": 0.0, "layers.0": 9e-5, "final_norm": 9e-5}).first_divergence() is None
    assert parity({"embedding": 0.0, "layers.0": 1.1e-4}).first_divergence() is not None


def test_padding_is_not_compared() -> None:
    reference, ours = outputs({"embedding": 0.0})
    ours.hidden["embedding"][0, 2:] = 77.0
    mask = np.array([[1, 1, 0, 0]])
    assert compare_outputs(Probe("p", "", np.zeros((1, 4), np.int64), None, mask), reference, ours, False, EXACT).states == (
        StateError("embedding", 0.0, 0.0, 0.0),
    )


def test_a_side_that_lacks_an_output_is_an_error_not_an_agreement() -> None:
    reference, ours = outputs({"embedding": 0.0})
    with pytest.raises(ValueError, match="only one side has pooled"):
        compare_outputs(
            Probe("p", "", np.zeros((1, 4), np.int64)), reference, Outputs(None, ours.hidden, np.ones((1, 8), np.float32)), False, EXACT
        )
