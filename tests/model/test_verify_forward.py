"""The whole path for every variant: a Hugging Face folder to ranks, merged on read into the MindSpore model, against Transformers."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from converter.hf_folder import read_hf_folder
from converter.source_model import understand
from model.forward_parity import parameter_count
from model.probes import Probe, inputs_of, make_probes
from model.reference import read_tokenizer
from tests.conftest import TinyFolder
from tests.converter.test_round_trip import give_both_biases_one_value
from tests.model.verifying import convert, outcome, state, verify
from tests.tiny_models import VARIANTS, save_tiny

LIMIT = 1e-5
LAYOUTS = dict(zip(VARIANTS, cycle([(2, 2), (4, 1), (1, 3), (4, 2), (8, 1), (2, 3)]), strict=False))
"""(tp, pp) of each variant: eight heads and four layers divide by all of them, unevenly by three stages."""
SPECIAL = {"long": "rope-", "window": "sliding", "all-positions": ("gpt2", "bert")}


@pytest.mark.parametrize("variant", LAYOUTS)
def test_the_converted_model_computes_what_transformers_computes(variant: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model", variant, tokenizer=True)
    if variant == "bert-mlm-untied":
        give_both_biases_one_value(source)
    tp, pp = LAYOUTS[variant]
    slices = convert(source, tmp_path / "slices", "--tp", tp, "--pp", pp, "--format", "ckpt" if tp == 4 else "safetensors")
    generates = VARIANTS[variant].model_class.endswith(("CausalLM", "LMHeadModel"))
    facts = verify(source, slices, "--forward", *(("--generate", 8) if generates else ()))
    assert facts["holds"], facts["checks"]
    forward = facts["forward"]
    assert [probe["name"] for probe in forward["probes"] if not probe["holds"]] == []
    heads = [probe["logits"] for probe in forward["probes"] if probe["logits"] is not None]
    assert [logits["top1_agreement"] for logits in heads] == [1.0] * len(heads)
    assert bool(heads) == VARIANTS[variant].model_class.endswith(("LM", "LMHeadModel", "PreTraining"))
    _assert_as_exact_as_float32_allows(source, facts)


def _assert_as_exact_as_float32_allows(source: Path, facts: dict[str, Any]) -> None:
    """Logits (without a head, the last state) within 1e-5, or else within twice Transformers' own distance from its float64 self."""
    names = [item["name"] for item in facts["forward"]["states"]]
    last = next(name for name in ("logits", "final_norm", "layers.3") if name in names)
    errors = {
        probe["name"]: item["relative_error"] for probe in facts["forward"]["probes"] for item in probe["states"] if item["name"] == last
    }
    beyond = {name for name, error in errors.items() if error > LIMIT}
    if beyond:
        own = _own_errors(source, last, beyond)
        assert {name: (errors[name], own[name]) for name in beyond if errors[name] > max(LIMIT, 2 * own[name])} == {}


def _own_errors(source: Path, name: str, wanted: set[str]) -> dict[str, float]:
    """How far Transformers in float32 is from Transformers in float64."""
    model = understand(read_hf_folder(source))
    probes = make_probes(model.config, parameter_count(model), read_tokenizer(source)[0]).probes
    single, double = (_transformers(source).to(dtype) for dtype in (torch.float32, torch.float64))
    errors = {}
    for probe in probes:
        if probe.name in wanted:
            a, b = (_last(net, probe, name) for net in (single, double))
            errors[probe.name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return errors


def _transformers(source: Path) -> Any:
    import transformers

    name = understand(read_hf_folder(source)).folder.config["architectures"][0]
    return getattr(transformers, name).from_pretrained(source, attn_implementation="eager").eval()


def _last(net: Any, probe: Probe, name: str) -> npt.NDArray[Any]:
    inputs = {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in inputs_of(probe).items()}
    with torch.no_grad():
        outputs = net(**inputs)
    tensor = outputs.get("logits", outputs.get("prediction_logits")) if name == "logits" else outputs.last_hidden_state
    array: npt.NDArray[Any] = tensor.numpy()[probe.real]
    return array


@pytest.mark.parametrize(
    ("variant", "probe"),
    [
        ("llama-rope-dynamic", "long"),
        ("llama-rope-yarn", "long"),
        ("mistral-sliding", "window"),
        ("gpt2", "all-positions"),
        ("bert", "padded"),
    ],
)
def test_the_probe_that_a_feature_needs_is_run(variant: str, probe: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder(variant)
    facts = verify(source, convert(source, tmp_path / "slices"), "--forward")
    assert probe in [item["name"] for item in facts["forward"]["probes"]]
    assert any("no tokenizer" in note for note in facts["forward"]["notes"])


def test_a_continuation_that_differs_is_told_with_its_place_and_margin(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    slices = convert(tiny_folder("llama-gqa"), tmp_path / "slices", "--tp", 2)
    facts = verify(tiny_folder("llama-gqa", seed=1), slices, "--generate", 6)
    said = facts["forward"]["continuation"]
    assert not outcome(facts)["generation"] and not outcome(facts)["top-1"]
    first = said["first_difference"]
    assert said["reference"][:first] == said["ours"][:first] and said["reference"][first] != said["ours"][first]
    assert said["margin"] is None or said["margin"] > 0


def test_a_continuation_ends_at_the_end_of_text_on_both_sides(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-gqa")
    slices = convert(source, tmp_path / "slices")
    free = verify(source, slices, "--generate", 6)["forward"]["continuation"]["reference"]
    assert len(set(free)) > 1
    end = free[2]
    ending = save_tiny(tmp_path / "ending", "llama-gqa", eos_token_id=[end])
    said = verify(ending, convert(ending, tmp_path / "again"), "--generate", 6)["forward"]["continuation"]
    assert said["holds"] and said["reference"] == said["ours"] == free[: free.index(end) + 1]


@pytest.mark.slow
def test_smollm2_through_tp_3_and_pp_2_says_the_same(smollm2: Path, tmp_path: Path) -> None:
    facts = verify(smollm2, convert(smollm2, tmp_path / "slices", "--tp", 3, "--pp", 2), "--generate", 32)
    assert facts["holds"], facts["checks"]
    probes = {probe["name"]: probe for probe in facts["forward"]["probes"]}
    assert {"random", "vocabulary-ends", "text-1", "text-3"} <= probes.keys()
    assert all(probe["logits"]["top1_agreement"] == 1.0 for probe in probes.values())
    assert state(facts, "logits")["relative_error"] <= 1e-4
    said = facts["forward"]["continuation"]
    assert said["reference"] == said["ours"] and len(said["ours"]) >= 24 and "Rome" in said["ours_text"]
    assert probes["text-1"]["logits"]["perplexity_ours"] == pytest.approx(probes["text-1"]["logits"]["perplexity_reference"], rel=1e-4)
    assert probes["text-1"]["logits"]["perplexity_ours"] < 100


@pytest.mark.slow
def test_minilm_gives_the_same_sentence_vectors(minilm: Path, tmp_path: Path) -> None:
    facts = verify(minilm, convert(minilm, tmp_path / "slices", "--tp", 4, "--pp", 3), "--forward")
    assert facts["holds"], facts["checks"]
    assert state(facts, "sentence_vectors")["relative_error"] <= 1e-5
    assert state(facts, "layers.5")["relative_error"] <= 1e-4
    assert {"text", "padded", "token-types", "all-positions"} <= {probe["name"] for probe in facts["forward"]["probes"]}
