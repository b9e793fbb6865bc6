"""Whole runs as a user starts them: from slices, in every format and type, and what they do when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter.cli import run as run_command
from tests.tiny_models import save_tiny
from tests.train.corpora import random_texts, save_tokenizer, stored_rows
from tests.train.running import finish, losses, metrics, prepare, settings, start

pytestmark = pytest.mark.slow

UNEVEN = 403
"""Rows of the embedding, which tp 2 must pad."""
FEW = {"train__steps": 4, "checkpoint__every": 2, "optimizer__warmup_steps": 1}
FOUR_RANKS = {"parallel__tp": 2, "parallel__pp": 2}


def ms_convert(*arguments: object, code: int = 0) -> str:
    """Runs a command line in this process. -> what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert run_command([str(argument) for argument in arguments]) == code, out.getvalue()
    return out.getvalue()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and data."""
    folder = tmp_path_factory.mktemp("runs")
    save_tiny(folder / "model", "llama-uneven-vocab-tied", num_hidden_layers=2, vocab_size=UNEVEN)
    save_tokenizer(folder / "tokenizer")
    prepare(folder, random_texts(100))
    return folder


@pytest.fixture(scope="module")
def slices(prepared: Path) -> Path:
    """The model cut for two tensor-parallel ranks and two stages."""
    ms_convert("hf2ms", prepared / "model", "-o", prepared / "slices", "--tp", 2, "--pp", 2)
    return prepared / "slices"


def exported(checkpoint: Path, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a checkpoint's Hugging Face folder."""
    from safetensors.numpy import load_file

    ms_convert("ms2hf", checkpoint, "-o", folder)
    tensors: dict[str, np.ndarray[Any, Any]] = load_file(folder / "model.safetensors")
    return tensors


def same(first: dict[str, np.ndarray[Any, Any]], second: dict[str, np.ndarray[Any, Any]]) -> bool:
    return first.keys() == second.keys() and all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_slices_and_the_folder_that_they_were_cut_from_train_alike_and_ckpt_and_safetensors_checkpoints_hold_the_same(
    prepared: Path, slices: Path
) -> None:
    from_slices = settings(prepared, "from-slices", model__path=slices, checkpoint__format="ckpt", **FEW, **FOUR_RANKS)
    said = finish(start("launch", from_slices, prepared, "--check-start", str(prepared / "model")))
    finish(start("launch", settings(prepared, "from-folder", **FEW, **FOUR_RANKS), prepared))
    assert losses(prepared / "from-slices") == losses(prepared / "from-folder") and len(losses(prepared / "from-slices")) == 4
    name = "checkpoints/step_00000004"
    ckpt = exported(prepared / "from-slices" / name, prepared / "ckpt")
    assert same(ckpt, exported(prepared / "from-folder" / name, prepared / "safetensors"))
    compared = re.search(r"Transformers' ([0-9.]+): relative difference ([0-9.e+-]+)", said)
    assert compared is not None and float(compared[2]) < 1e-5
    guess = float(np.log(UNEVEN))
    assert losses(prepared / "from-slices")[0] > guess, "these weights are random and large"
    assert f"ln({UNEVEN}) = {guess:.4f}" in said and "warning" in said


def test_a_run_resumes_from_ckpt_files_as_if_it_had_not_ended(prepared: Path) -> None:
    import mindspore as ms

    options = settings(prepared, "straight", checkpoint__format="ckpt", **FEW)
    finish(start("run", options, prepared))
    checkpoints = prepared / "straight" / "checkpoints"
    files = [checkpoints / "step_00000004" / name for name in ("rank_0/checkpoint_0.ckpt", "optimizer/rank_0.ckpt")]
    wanted = {path: ms.load_checkpoint(str(path)) for path in files}
    straight = losses(prepared / "straight")
    shutil.rmtree(checkpoints / "step_00000004")
    (checkpoints / "latest").write_text("step_00000002\n")
    assert "resumed from" in finish(start("run", options, prepared, "--resume"))
    assert losses(prepared / "straight") == straight
    for path, tensors in wanted.items():
        found = ms.load_checkpoint(str(path))
        assert tensors.keys() == found.keys()
        assert all(tensors[name].asnumpy().tobytes() == found[name].asnumpy().tobytes() for name in tensors)


@pytest.fixture(scope="module")
def bfloat16(prepared: Path) -> Path:
    """The folder of a run with bfloat16 weights, the profiler, and two checkpoints kept; a killed run had left one half-written."""
    (prepared / "bfloat16" / "checkpoints" / "step_00000001.partial").mkdir(parents=True)
    changes = {
        "precision__kind": "bfloat16", "train__steps": 12, "optimizer__learning_rate": 3e-3, "train__dropout": 0.0,
        "checkpoint__every": 4, "checkpoint__keep": 2,
    }  # fmt: skip
    finish(start("run", settings(prepared, "bfloat16", **changes), prepared, "--profile"))
    return prepared / "bfloat16"


def test_the_newest_checkpoints_stay(bfloat16: Path) -> None:
    names = {path.name for path in (bfloat16 / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert names == {"step_00000008", "step_00000012", "latest"}
    assert (bfloat16 / "checkpoints" / "latest").read_text() == "step_00000012\n"


def test_bfloat16_is_trained_profiled_and_exported(bfloat16: Path, prepared: Path) -> None:
    from safetensors import safe_open

    found = losses(bfloat16)
    assert np.mean(found[-3:]) < 0.96 * np.mean(found[:3])
    checkpoint = bfloat16 / "checkpoints" / "step_00000012"
    with safe_open(checkpoint / "rank_0" / "checkpoint_0.safetensors", "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118 (it is no mapping)
    for tensor in exported(checkpoint, prepared / "bfloat16-hf").values():
        assert tensor.dtype == np.float32 and not np.any(tensor.view(np.uint32) & 0xFFFF), "the folder's type, with bfloat16's values"
    tables = list((bfloat16 / "watch" / "profile" / "rank_0").rglob("*.csv"))
    assert any("MatMul" in table.read_text() for table in tables)


def test_float16_on_two_ranks_finds_its_loss_scale_and_trains(prepared: Path) -> None:
    changes = {"precision__kind": "float16", "precision__loss_scale": 2.0**16, "train__steps": 16, "optimizer__learning_rate": 3e-3}
    finish(start("launch", settings(prepared, "float16", parallel__tp=2, train__dropout=0.0, **changes), prepared))
    found = metrics(prepared / "float16")
    skipped = [facts["skipped"] for facts in found]
    assert 0 < sum(skipped) < 8 and not any(skipped[-8:])
    assert [facts["loss_scale"] for facts in found[: sum(skipped) + 1]] == [2.0 ** (16 - step) for step in range(sum(skipped) + 1)]
    state = json.loads((prepared / "float16" / "checkpoints" / "step_00000016" / "training.json").read_text(encoding="utf-8"))
    assert state["updates"] == 16 - sum(skipped) and state["loss_scale"] == 2.0 ** (16 - sum(skipped))
    assert np.mean(losses(prepared / "float16")[-3:]) < 0.9 * losses(prepared / "float16")[0]


def test_a_start_with_other_weights_is_refused_before_the_first_step(prepared: Path) -> None:
    save_tiny(prepared / "other", "llama-uneven-vocab-tied", seed=1, num_hidden_layers=2, vocab_size=UNEVEN)
    said = finish(start("run", settings(prepared, "other-start", **FEW), prepared, "--check-start", str(prepared / "other")), 1)
    assert "watch.check_start" in said and "these are not the same weights" in said
    assert losses(prepared / "other-start") == []


def new_token(rows: np.ndarray[Any, np.dtype[np.int32]], batch: int) -> tuple[int, int, int]:
    """(step, rank, token): the first token, after step 0, that one of two data-parallel ranks reads and nobody before or beside it."""
    for step in range(1, len(rows) // batch):
        halves = np.split(rows[step * batch : (step + 1) * batch], 2)
        for rank in (1, 0):
            for token in halves[rank][:, :-1].flatten():
                if token not in rows[: step * batch] and token not in halves[1 - rank]:
                    return step, rank, int(token)
    raise AssertionError("every batch has the tokens of the ones before")


def test_a_value_that_is_not_finite_stops_all_ranks_and_names_step_and_rank_and_saves_the_batches(prepared: Path) -> None:
    from safetensors.numpy import load_file, save_file

    model, batch = prepared / "not-finite", 2
    rows = stored_rows(prepared / "data").ids
    step, culprit, token = new_token(rows, batch)
    save_tiny(model, "llama-gqa", num_hidden_layers=2, vocab_size=UNEVEN)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = np.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    changes = {"data__shuffle": False, "parallel__dp": 2, "parallel__micro_batches": 1, "train__global_batch": batch}
    options = settings(prepared, "not-finite-run", model__path=model, train__steps=step + 4, checkpoint__every=0, **changes)
    said = finish(start("launch", options, prepared), 1)
    assert f"training stopped at step {step}" in said and f"not finite on rank {culprit} of 2" in said
    assert re.search(r"rank [01] failed", said)
    for rank, part in enumerate(np.split(rows[step * batch : (step + 1) * batch], 2)):
        with np.load(prepared / "not-finite-run" / "watch" / f"failed_step_{step}" / f"rank_{rank}.npz") as saved:
            assert np.array_equal(saved["ids"], part)
    assert not (prepared / "not-finite-run" / "checkpoints" / "latest").exists()


def test_slices_of_another_layout_are_refused_with_the_commands_that_mend_it(prepared: Path, slices: Path, tmp_path: Path) -> None:
    options = settings(prepared, "cut-anew", model__path=slices, parallel__tp=4)
    said = finish(start("launch", options, prepared, "--dry-run"), 1)
    commands = re.search(r"(ms-convert ms2hf .*?) && (ms-convert hf2ms .*?);", " ".join(said.split()))
    assert commands is not None and "was cut for tp 2, the run wants 4; pp 2, the run wants 1" in said
    for command in commands.groups():
        _, *words = shlex.split(command)
        ms_convert(*(str(tmp_path / word) if word in ("WHOLE", "SLICES") else word for word in words))
    again = settings(prepared, "cut-anew", model__path=tmp_path / "SLICES", parallel__tp=4)
    assert "4 rank(s)" in finish(start("launch", again, prepared, "--dry-run"))


def test_a_rank_file_that_is_missing_is_named_before_any_rank_starts(prepared: Path, slices: Path, tmp_path: Path) -> None:
    shutil.copytree(slices, tmp_path / "slices")
    (tmp_path / "slices" / "rank_2" / "checkpoint_2.safetensors").unlink()
    said = finish(start("launch", settings(prepared, "missing", model__path=tmp_path / "slices", **FOUR_RANKS), prepared), 1)
    assert "rank_2/checkpoint_2.safetensors" in said and not (prepared / "missing").exists()
