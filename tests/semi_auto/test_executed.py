"""The numbers that a compiled graph stands for: computed from MindSpore's dumps of all ranks, they are those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.semi_auto.cases import CASES, Case
from tests.semi_auto.compiling import can_compile, compile_on_stubs
from tests.semi_auto.executing import compiled_steps, part, single_step

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_compile(), reason="needs gcc, nm and the GPU plugin of MindSpore's wheel")]


def check_step(case: Case, folder: Path) -> None:
    """Raises AssertionError where a rank's loss, norm, gradients or weights are not those of one process that has the whole batch."""
    before, one = single_step(case)
    filled = set()
    for rank, shapes, step in compiled_steps(case, before, folder / "graphs"):
        stage = case.layout.coordinates(rank).stage
        if stage == case.pp - 1:
            assert float(step.loss) == pytest.approx(one.loss, rel=1e-5)
        assert step.norm == pytest.approx(one.norm, rel=1e-4)
        for name, moment in step.moments.items():
            if stage and name == "embedding.tokens.embedding_table":  # a share: the first stage has the sum, and the table
                continue
            wanted = part(case, rank, name, one.moments[name], shapes[name])
            np.testing.assert_allclose(moment, wanted, atol=1e-4 * np.abs(one.moments[name]).max() + 1e-8, err_msg=name)
            np.testing.assert_allclose(step.weights[name], part(case, rank, name, one.weights[name], shapes[name]), atol=1e-3, err_msg=name)
            filled.add(name)
    assert filled == before.keys()
    assert one.norm > 0.01


@pytest.mark.parametrize("name", ["gpt2-dp2-tp2", "qwen3-tied-tp2-pp2"])
def test_what_was_compiled_is_the_step_of_one_process(name: str, tmp_path: Path) -> None:
    compile_on_stubs(CASES[name], tmp_path / "job")
    check_step(CASES[name], tmp_path / "job")
