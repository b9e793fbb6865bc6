"""The probe inputs: in range for every model, past each limit that changes the computation, and affordable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappings.errors import Refused
from model.config import ModelConfig, Rope, RopeScaling
from model.pooling import Pooling, read_pooling, sentence_vectors
from model.probes import PROMPT, TEXTS, TOKENS, affordable_tokens, make_probes
from tests.model.reference import BERT, CONFIGS, GPT2, LLAMA

SMALL = 1_000_000
BILLIONS = 8_000_000_000


def bytes_of(text: str) -> list[int]:
    """A tokenizer: one id for each byte, below 256."""
    return list(text.encode())


def named(config: ModelConfig, parameters: int = SMALL, tokenizer: bool = True) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {probe.name: probe.ids for probe in make_probes(config, parameters, bytes_of if tokenizer else None).probes}


@pytest.mark.parametrize("variant", CONFIGS)
def test_every_id_has_a_row_and_every_sequence_its_positions(variant: str) -> None:
    config = CONFIGS[variant]
    made = make_probes(config, SMALL, lambda text: [number % config.vocab for number in text.encode()])
    for probe in made.probes:
        assert probe.ids.ndim == 2 and 0 <= probe.ids.min() <= probe.ids.max() < config.vocab
        if config.positions == "learned":
            assert probe.ids.shape[1] <= config.max_positions
        if probe.token_types is not None:
            assert probe.token_types.shape == probe.ids.shape and probe.token_types.max() < config.token_types
        if probe.attention_mask is not None:
            assert config.kind == "encoder" and probe.attention_mask[:, 0].all() and not probe.attention_mask.all()
    assert len({probe.name for probe in made.probes}) == len(made.probes)
    assert made.prompt.shape[0] == 1 and made.prompt.max() < config.vocab


@given(vocab=st.integers(1, 300_000), positions=st.integers(1, 2048))
def test_a_model_of_any_size_has_probes(vocab: int, positions: int) -> None:
    made = make_probes(replace(GPT2, vocab=vocab, max_positions=positions), SMALL)
    for probe in made.probes:
        assert 0 <= probe.ids.min() <= probe.ids.max() < vocab and probe.ids.shape[1] <= positions


def test_the_first_and_the_last_ids_are_among_the_probes() -> None:
    ids = set(named(replace(LLAMA, vocab=50_257))["vocabulary-ends"].ravel().tolist())
    assert {0, 1, 2, 50_254, 50_255, 50_256} <= ids
    assert len(ids) > 30, "and random ones between them"


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (CONFIGS["llama-rope-llama3"], 32),
        (CONFIGS["llama-rope-yarn"], 32),
        (CONFIGS["llama-rope-dynamic"], 32),
        (CONFIGS["llama-rope-linear"], 128),
        (replace(LLAMA, rope=Rope(1e4, 8, scaling=RopeScaling("llama3", 8.0, original_max_positions=2048))), 2048),
    ],
)
def test_scaled_rotary_positions_are_exceeded(config: ModelConfig, limit: int) -> None:
    assert named(config)["long"].shape[1] > limit


def test_the_sliding_window_and_all_learned_positions_are_exceeded() -> None:
    assert named(CONFIGS["mistral-sliding"])["window"].shape[1] > 8
    assert named(replace(GPT2, max_positions=1024))["all-positions"].shape[1] == 1024
    assert named(replace(BERT, max_positions=512))["all-positions"].shape[1] == 512


def test_what_is_not_affordable_is_not_run_and_said() -> None:
    scaling = RopeScaling("llama3", 8.0, original_max_positions=8192)
    config = replace(LLAMA, heads=32, rope=Rope(5e5, 8, scaling=scaling), sliding_window=4096, sliding_layers=(0, 1, 2, 3))
    made = make_probes(config, BILLIONS, bytes_of)
    assert not {"long", "window"} & {probe.name for probe in made.probes}
    assert [note for note in made.notes if "8193 tokens" in note] and [note for note in made.notes if "4097 tokens" in note]
    assert max(probe.ids.shape[1] for probe in made.probes) <= max(
        affordable_tokens(config, BILLIONS), *(len(text.encode()) for text in TEXTS)
    )


def test_the_longest_probe_is_the_last() -> None:
    config = replace(CONFIGS["mistral-sliding"], rope=CONFIGS["llama-rope-yarn"].rope)
    long, window = (named(config)[name].shape[1] for name in ("long", "window"))
    assert [probe.name for probe in make_probes(config, SMALL).probes][-2:] == (["window", "long"] if long > window else ["long", "window"])


def test_real_text_is_run_when_there_is_a_tokenizer() -> None:
    probes = named(LLAMA)
    assert [bytes(probes[f"text-{index + 1}"][0].tolist()).decode() for index in range(len(TEXTS))] == list(TEXTS)
    made = make_probes(LLAMA, SMALL, bytes_of)
    assert bytes(made.prompt[0].tolist()).decode() == PROMPT[:TOKENS]
    assert any("no tokenizer" in note for note in make_probes(LLAMA, SMALL).notes)


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_told() -> None:
    made = make_probes(replace(LLAMA, vocab=100), SMALL, bytes_of)
    assert any("ids that the vocabulary does not have" in note for note in made.notes)
    assert not [probe for probe in made.probes if probe.name.startswith("text")] and made.prompt.max() < 100


def test_an_encoder_gets_sentences_as_one_padded_batch() -> None:
    probe = next(probe for probe in make_probes(replace(BERT, max_positions=512, pad_id=7), SMALL, bytes_of).probes if probe.name == "text")
    assert probe.real.sum(axis=1).tolist() == [len(text.encode()) for text in TEXTS]
    assert (probe.ids[~probe.real] == 7).all()
    assert bytes(probe.ids[3][probe.real[3]].tolist()).decode() == TEXTS[3]


def test_the_same_model_has_the_same_probes_twice() -> None:
    for first, second in zip(make_probes(BERT, SMALL).probes, make_probes(BERT, SMALL).probes, strict=True):
        assert np.array_equal(first.ids, second.ids)


# --- sentence vectors -------------------------------------------------------------------------------------------------------------------


def sentence_folder(
    folder: Path, pooling: str, kinds: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"), path: str = "1_Pooling"
) -> Path:
    folder.mkdir(parents=True)
    modules = [{"path": path if kind == "Pooling" else "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (folder / "modules.json").write_text(str(modules).replace("'", '"'), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(pooling, encoding="utf-8")
    return folder


def test_pooling_is_what_the_folder_asks_for(tmp_path: Path) -> None:
    mean = '{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false, "word_embedding_dimension": 384}'
    assert read_pooling(sentence_folder(tmp_path / "a", mean)) == (Pooling("mean", True), "")
    assert read_pooling(sentence_folder(tmp_path / "b", '{"pooling_mode": "cls"}', ("Transformer", "Pooling"))) == (
        Pooling("cls", False),
        "",
    )
    assert read_pooling(tmp_path) == (None, "")
    pooling, note = read_pooling(sentence_folder(tmp_path / "c", '{"pooling_mode_max_tokens": true}'))
    assert pooling is None and "not compared" in note
    pooling, note = read_pooling(sentence_folder(tmp_path / "d", mean, ("Transformer", "Pooling", "Dense")))
    assert pooling is None and "Dense" in note


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "a/../../b", ""])
def test_a_pooling_module_outside_the_folder_is_not_opened(path: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no folder below it"):
        read_pooling(sentence_folder(tmp_path / "model", "{}", path=path))


def test_sentence_vectors_are_the_mean_over_the_real_tokens() -> None:
    generator = np.random.default_rng(0)
    hidden, real = generator.standard_normal((3, 5, 8)), np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
    vectors = sentence_vectors(hidden, real, Pooling("mean", False))
    for row in range(3):
        np.testing.assert_allclose(vectors[row], np.stack([hidden[row, i] for i in range(5) if real[row, i]]).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(sentence_vectors(hidden, real, Pooling("cls", True)), axis=1), 1.0, rtol=1e-12)
