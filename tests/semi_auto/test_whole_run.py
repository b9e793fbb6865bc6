"""`ms-train run` with the compiled engine, as a user starts it, on one CPU rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from converter.ms2hf import HFOptions, plan_restoration, restore
from tests.tiny_models import save_tiny
from tests.train.corpora import random_texts, save_tokenizer
from tests.train.running import finish, losses, prepare, settings, start

pytestmark = pytest.mark.slow


def test_a_run_with_the_compiled_engine_has_the_losses_of_the_other_and_its_checkpoint_is_exported(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama-gqa", num_hidden_layers=2, vocab_size=403)
    save_tokenizer(tmp_path / "tokenizer")
    prepare(tmp_path, random_texts(60))
    runs = {}
    for engine in ("spmd", "semi_auto"):
        options = settings(
            tmp_path, engine, train__engine=engine, train__steps=4, train__dropout=0.0, checkpoint__every=0, optimizer__warmup_steps=0
        )
        finish(start("run", options, tmp_path))
        runs[engine] = losses(tmp_path / engine)
    assert runs["semi_auto"] == pytest.approx(runs["spmd"], rel=1e-4)
    restore(plan_restoration(tmp_path / "semi_auto/checkpoints/step_00000004", HFOptions()), tmp_path / "exported")
    assert (tmp_path / "exported/model.safetensors").is_file()
