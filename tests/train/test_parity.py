"""Training on real ranks against PyTorch and Transformers: losses, gradient norms, and the weights that come back through ms2hf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from converter.ms2hf import HFOptions, plan_restoration, restore
from tests.tiny_models import save_tiny, tiny_model
from tests.train.jobs import run_cases
from tests.train.torch_training import train
from tests.train.worker import Case

Tokens = npt.NDArray[np.int32]

pytestmark = pytest.mark.slow

STEPS = 20
BATCH, SEQ = 8, 16
DECAY, CLIP = 0.1, 1.0
RATES = tuple(2e-4 * min(1.0, (step + 1) / 5) * (0.5 + 0.5 * float(np.cos(np.pi * step / STEPS))) for step in range(STEPS))
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2},
    "llama-gqa": {"num_hidden_layers": 2},
    "llama-mqa": {"num_hidden_layers": 2},  # one KV head, replicated under tp 2
    "llama-uneven-vocab-tied": {"num_hidden_layers": 2},  # a padded vocabulary, and a table on the first and the last stage
    "qwen3-tied": {"num_hidden_layers": 2},  # norms of queries and keys
}
TWO_RANKS = {"2x1x1": (2, 1, 1, 1), "1x2x1": (1, 2, 1, 2), "1x1x2": (1, 1, 2, 1)}
FOUR_RANKS = {"2x2x1": (2, 2, 1, 4), "1x2x2": (1, 2, 2, 2)}
ONE_RANK = {"1x1x1": (1, 1, 1, 2)}
LAYOUTS = ONE_RANK | TWO_RANKS | FOUR_RANKS
TRAINED = ["1x1x1", "2x2x1", "1x2x2"]
"""Layouts whose 20 steps and final weights are compared; of the others the first step is."""


class Trained(NamedTuple):
    """What ran: the results of every rank by case, and where the models, rows and checkpoints are."""

    results: Mapping[str, list[Mapping[str, Any]]]
    folder: Path

    def export(self, name: str) -> Path:
        """The checkpoint of a case as a Hugging Face folder."""
        output = self.folder / f"exported-{name}"
        if not output.exists():
            restore(plan_restoration(self.folder / f"saved-{name}" / f"step_{self.steps(name):08}", HFOptions()), output)
        return output

    def steps(self, name: str) -> int:
        return len(self.results[name][0]["losses"])


@pytest.fixture(scope="module")
def rows() -> Tokens:
    return np.random.default_rng(1).integers(0, 199, (STEPS, BATCH, SEQ + 1)).astype(np.int32)


@pytest.fixture(scope="module")
def mask() -> Tokens:
    """Rows padded on the right, most of them in the second half of the batch, so that ranks and micro-batches count differently."""
    lengths = np.random.default_rng(2).integers(3, SEQ + 2, (STEPS, BATCH))
    lengths[:, : BATCH // 2] = SEQ + 1
    return (np.arange(SEQ + 1) < lengths[..., None]).astype(np.int32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, rows: Tokens, mask: Tokens) -> Trained:
    """Every case of this file, in one job for each number of ranks."""
    folder = tmp_path_factory.mktemp("trained")
    np.save(folder / "rows.npy", rows)
    np.save(folder / "mask.npy", mask)
    for variant, overrides in MODELS.items():
        save_tiny(folder / variant, variant, **overrides)
    results: dict[str, list[Mapping[str, Any]]] = {}
    for ranks, layouts in ((1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)):
        found = run_cases(_cases(folder, layouts), folder / f"{ranks}-ranks", ranks)
        for name in found[0]:
            results[name] = [of_rank[name] for of_rank in found]
    return Trained(results, folder)


def _cases(folder: Path, layouts: Mapping[str, tuple[int, int, int, int]]) -> list[Case]:
    cases = []
    for layout, (tp, pp, dp, micro_batches) in layouts.items():
        plain = Case(
            layout, "", str(folder / "rows.npy"), RATES, tp, pp, dp, micro_batches, clip_norm=CLIP, decay=DECAY, optimizer_sharding=dp > 1
        )
        for variant in MODELS:
            name = f"{variant}-{layout}"
            case = replace(plain, name=name, model=str(folder / variant), save=str(folder / f"saved-{name}"))
            cases.append(case if layout in TRAINED else replace(case, learning_rates=RATES[:2]))
        if layout in TRAINED:
            tied = replace(plain, model=str(folder / "llama-uneven-vocab-tied"))
            still = f"still-{layout}"
            whole = replace(tied, optimizer_sharding=False)
            cases.append(replace(whole, name=f"masked-{layout}", mask=str(folder / "mask.npy"), learning_rates=RATES[:4]))
            cases.append(replace(tied, name=still, learning_rates=(0.0, 0.0), save=str(folder / f"saved-{still}")))
    return cases


@pytest.fixture(scope="module")
def reference(rows: Tokens) -> Mapping[str, tuple[Any, list[float], list[float]]]:
    """(model, losses, norms) after the 20 steps in PyTorch."""
    found = {}
    for variant, overrides in MODELS.items():
        model = tiny_model(variant, **overrides)
        found[variant] = (model, *train(model, rows, RATES, decay=DECAY, clip=CLIP))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", MODELS)
def test_the_first_loss_is_transformers_loss_on_every_layout(
    variant: str, layout: str, trained: Trained, reference: Mapping[str, tuple[Any, list[float], list[float]]]
) -> None:
    _, losses, norms = reference[variant]
    for of_rank in trained.results[f"{variant}-{layout}"]:
        assert of_rank["losses"][0] == pytest.approx(losses[0], rel=1e-5)
        assert of_rank["norms"][0] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("layout", TRAINED)
@pytest.mark.parametrize("variant", MODELS)
def test_twenty_steps_have_pytorchs_losses_and_end_with_its_weights(
    variant: str, layout: str, trained: Trained, reference: Mapping[str, tuple[Any, list[float], list[float]]]
) -> None:
    from transformers import AutoModelForCausalLM

    model, losses, _ = reference[variant]
    name = f"{variant}-{layout}"
    np.testing.assert_allclose(trained.results[name][0]["losses"], losses, rtol=1e-4)
    exported = AutoModelForCausalLM.from_pretrained(trained.export(name)).state_dict()
    began = tiny_model(variant, **MODELS[variant]).state_dict()
    for key, wanted in model.state_dict().items():
        got, before = _defined(key, exported[key]), _defined(key, began[key])
        error = (got - _defined(key, wanted)).norm() / _defined(key, wanted).norm()
        moved = (got - before).norm() / before.norm()
        assert error < 1e-4 < moved, f"{key}: off by {error}, moved by {moved}"


def _defined(key: str, tensor: Any) -> Any:
    """Without the bias of GPT-2's keys: it adds the same to all scores of a query, so its gradient is 0 but for rounding, and Adam, which
    divides by the gradient's size, moves it by rounding errors.
    """
    if not key.endswith("attn.c_attn.bias"):
        return tensor
    size = len(tensor) // 3
    return torch.cat((tensor[:size], tensor[2 * size :]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", MODELS)
def test_every_rank_reports_the_same_step(variant: str, layout: str, trained: Trained) -> None:
    first, *others = trained.results[f"{variant}-{layout}"]
    assert all(other["losses"] == first["losses"] and other["norms"] == first["norms"] for other in others)


@pytest.mark.parametrize("layout", TRAINED)
def test_the_loss_is_the_mean_over_all_real_tokens_however_they_are_spread(
    layout: str, trained: Trained, rows: Tokens, mask: Tokens
) -> None:
    model = tiny_model("llama-uneven-vocab-tied", num_hidden_layers=2)
    losses, norms = train(model, rows, RATES[:4], decay=DECAY, clip=CLIP, mask=mask)
    np.testing.assert_allclose(trained.results[f"masked-{layout}"][0]["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(trained.results[f"masked-{layout}"][0]["norms"], norms, rtol=1e-3)


@pytest.mark.parametrize("layout", TRAINED)
def test_a_learning_rate_of_zero_leaves_every_weight_bit_identical(layout: str, trained: Trained) -> None:
    exported = (trained.export(f"still-{layout}") / "model.safetensors").read_bytes()
    assert exported == (trained.folder / "llama-uneven-vocab-tied" / "model.safetensors").read_bytes()
