"""Each rank's slices are those that a person cuts by hand with numpy from Transformers' state dict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import TinyFolder
from tests.converter.command_line import done
from tests.converter.cut_by_hand import BY_HAND, Arrays, rank_slices

STAGES = {1: (4,), 2: (3, 1), 3: (1, 1, 2)}


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("variant", BY_HAND)
def test_each_rank_holds_what_numpy_cuts_by_hand(variant: str, tp: int, pp: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder(variant), tmp_path / "slices"
    stages = ",".join(map(str, STAGES[pp]))
    done("hf2ms", source, "-o", out, "--tp", tp, "--pp", pp, "--layers-per-stage", stages)
    hf = load_file(source / "model.safetensors")
    for rank in range(tp * pp):
        check(load_file(out / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"), rank_slices(variant, hf, rank, tp, STAGES[pp]))


def check(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array), name


def test_the_vocabulary_is_padded_to_the_multiple_that_was_asked_for(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-uneven-vocab")
    table = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    for multiple, padded in ((2, 200), (10, 200), (64, 256), (398, 398)):
        out = tmp_path / str(multiple)
        done("hf2ms", source, "-o", out, "--tp", 2, "--vocab-multiple", multiple)
        slices = [load_file(out / f"rank_{rank}/checkpoint_{rank}.safetensors")["embedding.tokens.embedding_table"] for rank in (0, 1)]
        assert [len(part) for part in slices] == [padded // 2, padded // 2]
        whole = np.concatenate(slices)
        assert np.array_equal(whole[:199], table) and not whole[199:].any()
