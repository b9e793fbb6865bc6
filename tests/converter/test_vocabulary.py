"""The three sizes of a vocabulary are printed where they disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from converter.cli import run
from tests.tiny_models import save_tiny


@pytest.mark.parametrize(("ids", "told"), [(300, "ids past the rows have no embedding"), (40, "the tokenizer uses 40 ids")])
def test_a_tokenizer_that_does_not_fit_the_embedding_is_told_with_all_three_sizes(
    ids: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    save_tiny(tmp_path / "model", "llama")
    Tokenizer(WordLevel({f"w{number}": number for number in range(ids)}, unk_token="w0")).save(str(tmp_path / "model/tokenizer.json"))
    rows = json.loads((tmp_path / "model/config.json").read_text())["vocab_size"]
    for command in (["inspect", str(tmp_path / "model")], ["hf2ms", str(tmp_path / "model"), "--dry-run"]):
        assert run(command) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"the embedding has {rows} rows, config.json says {rows}" in shown and told in shown


@pytest.mark.parametrize("text", ["{}", "[]", '{"model": {"vocab": 3}, "added_tokens": [4, {"id": "x"}]}', "no json"])
def test_a_tokenizer_file_of_another_form_is_no_obstacle(text: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    (tmp_path / "model/tokenizer.json").write_text(text)
    assert run(["inspect", str(tmp_path / "model")]) == 0
