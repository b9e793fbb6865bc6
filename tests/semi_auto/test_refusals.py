"""What the compiled engine cannot do is said before anything is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.semi_auto.cases import LLAMA
from tests.train.configs import config_with
from train.config_checks import check

ASCEND = {"launch__device": "ascend", "train__engine": "semi_auto"}


@pytest.mark.parametrize(
    ("values", "where", "word"),
    [
        ({"train__engine": "semi_auto", "parallel__dp": 2}, "train.engine", "no backend for a CPU"),
        (ASCEND | {"train__mode": "pynative"}, "train.mode", "compiles graphs"),
        (ASCEND | {"precision__compute": "float16"}, "precision.compute", "loss scale"),
        (ASCEND | {"precision__kind": "float16"}, "precision.kind", "loss scale"),
        (ASCEND | {"parallel__dp": 2, "watch__validate_every": 5}, "watch.validate_every", "training step only"),
        (ASCEND | {"parallel__tp": 8}, "parallel.tp", "no replicated heads"),
    ],
)
def test_the_compiled_engine_refuses(values: dict[str, Any], where: str, word: str, tmp_path: Path) -> None:
    found = check(config_with(tmp_path, **values), LLAMA, None)
    assert [(problem.where, word in problem.what) for problem in found] == [(where, True)]
    assert found[0].mend


def test_everything_that_the_compiled_engine_refuses_is_said_at_once(tmp_path: Path) -> None:
    values = {
        "train__engine": "semi_auto", "parallel__tp": 8, "train__mode": "pynative", "precision__kind": "float16",
        "watch__validate_every": 5,
    }  # fmt: skip
    found = check(config_with(tmp_path, **values), LLAMA, None)
    expected = {"train.engine", "train.mode", "precision.kind", "watch.validate_every", "parallel.tp"}
    assert expected == {problem.where for problem in found}


@pytest.mark.parametrize("values", [ASCEND | {"parallel__tp": 4, "parallel__dp": 2}, {"train__engine": "semi_auto"}])
def test_the_compiled_engine_takes(values: dict[str, Any], tmp_path: Path) -> None:
    assert not check(config_with(tmp_path, **values), replace(LLAMA, vocab=256), None)
