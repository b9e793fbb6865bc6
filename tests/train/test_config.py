"""The settings of a run: what is read, what is refused, and that everything wrong is said at once."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mappings.errors import Problem, Refused
from model.config import ModelConfig
from tests.conftest import TinyFolder
from tests.train.configs import MINIMAL, config_with, write_config
from train.config import OptimizerSettings, TrainConfig, load_config
from train.config_checks import check, check_data
from train.data_index import DataIndex, ShardRecord
from train.model_source import check_layout, read_model_source
from train.settings import describe

MODEL = ModelConfig(
    family="llama", kind="decoder", layers=6, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=96, vocab=1000, padded_vocab=1000,
    max_positions=128, norm="rms_norm", norm_eps=1e-5, activation="silu", gated_mlp=True,
)  # fmt: skip
INDEX = DataIndex(
    format_version=1, tool_version="0", run="", seq_length=64, packed=True, sequences=50, tokens=3201, documents=9, empty_documents=0,
    left_over_tokens=0, vocabulary=1000, largest_id=999, eos_id=0, pad_id=None, tokenizer="t", vocabulary_digest="", input_files=1,
    input_bytes=1, shards=(ShardRecord("shard_0000.mindrecord", 50, 1, 1, ""),),
)  # fmt: skip


def refused(path: Path, *overrides: str) -> list[Problem]:
    with pytest.raises(Refused) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


def places(problems: list[Problem]) -> set[str]:
    return {problem.where.split(": ")[1] for problem in problems}


def test_a_minimal_file_gives_the_defaults_that_the_settings_state(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    assert (config.model.path, config.data.path, config.train.steps, config.train.global_batch) == ("model", "data", 100, 8)
    assert config.optimizer == OptimizerSettings()
    assert config.train.dropout is None and config.parallel.layers_per_stage is None
    assert (config.ranks, config.rank_batch, config.micro_batch) == (1, 8, 8)


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    config = config_with(
        tmp_path, parallel__layers_per_stage=[2, 4], optimizer__betas=[0.8, 0.99], optimizer__learning_rate=1,
        parallel__optimizer_sharding=True, launch__hccl_socket_ifname="eth0", train__dropout=0.25, precision__kind="float16",
    )  # fmt: skip
    assert config.parallel.layers_per_stage == (2, 4) and config.optimizer.betas == (0.8, 0.99)
    assert config.optimizer.learning_rate == 1.0 and isinstance(config.optimizer.learning_rate, float)
    assert config.parallel.optimizer_sharding is True and config.launch.hccl_socket_ifname == "eth0"
    assert config.train.dropout == 0.25 and config.compute == "float16"


def test_dropout_from_config_is_the_models_own(tmp_path: Path) -> None:
    assert config_with(tmp_path, train__dropout="from config").train.dropout is None


def test_an_override_takes_the_place_of_the_files_value(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.toml", optimizer__learning_rate=1.0)
    config = load_config(path, ["optimizer.learning_rate=1e-4", "data.path=a corpus", 'model.path="m"', "parallel.layers_per_stage=[3, 3]"])
    assert (config.optimizer.learning_rate, config.data.path, config.model.path) == (1e-4, "a corpus", "m")
    assert config.parallel.layers_per_stage == (3, 3)


def test_every_mistake_in_a_file_is_named_in_one_refusal(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        "optimiser.eps = 1\n[model]\npth = 'm'\n[train]\nsteps = '100'\nglobal_batch = 8\nlearning_rate = 1\n[optimizer]\nbetas = [0.9]\n"
        "schedule = 'cosinus'\nweight_decay = -1\n[watch]\ntensorboard = 1\n"
    )
    problems = refused(path)
    assert places(problems) == {
        "optimiser", "model.pth", "model.path", "data.path", "train.steps", "train.learning_rate", "optimizer.betas", "optimizer.schedule",
        "optimizer.weight_decay", "watch.tensorboard",
    }  # fmt: skip
    told = {problem.where.split(": ")[1]: problem for problem in problems}
    assert "optimizer" in told["optimiser"].mend and "path" in told["model.pth"].mend
    assert "[optimizer]" in told["train.learning_rate"].mend
    assert "'100'" in told["train.steps"].what and "cosine, linear, constant" in told["optimizer.schedule"].what
    assert "at least" not in told["optimizer.weight_decay"].what and "from 0 to 1000" in told["optimizer.weight_decay"].what


def test_a_mistake_in_an_override_names_the_override(tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.toml")
    problems = refused(path, "train.steps=0", "train.step=3", "steps=3", "nothing")
    assert {problem.where for problem in problems} == {"--set: train.steps", "--set: train.step", "--set steps=3", "--set nothing"}


@pytest.mark.parametrize("text", ["train = 3", "steps = [", "[train]\nsteps = 1\nsteps = 2", "\x00", "a" * (1 << 20) + " = 1"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert refused(path)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "true", "[1.0]", "1e400", "9" * 400])
def test_what_is_no_finite_number_is_no_learning_rate(tmp_path: Path, value: str) -> None:
    assert places(refused(write_config(tmp_path / "c.toml"), f"optimizer.learning_rate={value}")) == {"optimizer.learning_rate"}


def test_the_settings_command_describes_every_key(tmp_path: Path) -> None:
    described = {(setting.table, setting.key) for setting in describe(TrainConfig)}
    hints = typing.get_type_hints(TrainConfig)
    assert described == {(table, field.name) for table, kind in hints.items() for field in dataclasses.fields(kind)}
    assert all(setting.meaning and setting.kind for setting in describe(TrainConfig))
    assert {f"{setting.table}.{setting.key}" for setting in describe(TrainConfig) if setting.default == "needed"} == set(MINIMAL)


def problems_of(tmp_path: Path, ranks: int | None = None, model: ModelConfig = MODEL, **values: Any) -> set[str]:
    return {problem.where.split(": ")[0] for problem in check(config_with(tmp_path, **values), model, ranks)}


def test_a_config_that_fits_has_no_problem(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "parallel__tp": 2,
        "parallel__pp": 3,
        "parallel__dp": 2,
        "parallel__micro_batches": 4,
        "optimizer__warmup_steps": 10,
    }
    assert problems_of(tmp_path, ranks=12, **values) == set()


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"parallel__tp": 3}, "parallel.tp"),
        ({"parallel__tp": 16}, "parallel.tp"),
        ({"parallel__pp": 7, "parallel__micro_batches": 8}, "parallel.pp"),
        ({"parallel__pp": 2, "parallel__micro_batches": 2, "parallel__layers_per_stage": [3, 4]}, "parallel.layers_per_stage"),
        ({"parallel__pp": 2, "parallel__micro_batches": 2, "parallel__layers_per_stage": [6]}, "parallel.layers_per_stage"),
        ({"parallel__pp": 4, "parallel__micro_batches": 2}, "parallel.micro_batches"),
        ({"parallel__tp": 2, "parallel__vocab_multiple": 3}, "parallel.vocab_multiple"),
        ({"parallel__dp": 3}, "train.global_batch"),
        ({"parallel__dp": 2, "parallel__micro_batches": 3}, "train.global_batch"),
        ({"data__seq_length": 129}, "data.seq_length"),
        ({"optimizer__warmup_steps": 100}, "optimizer.warmup_steps"),
        ({"optimizer__min_learning_rate": 1.0}, "optimizer.min_learning_rate"),
        ({"train__recompute_every": 7}, "train.recompute_every"),
        ({"checkpoint__folder": "model/checkpoints"}, "checkpoint.folder"),
        ({"precision__compute": "bfloat16"}, "precision.compute"),
        ({"precision__compute": "float16", "precision__kind": "bfloat16"}, "precision.compute"),
        ({"launch__nnodes": 2, "parallel__tp": 2, "launch__node_rank": 0}, "launch.master_addr"),
        ({"launch__nnodes": 2, "parallel__tp": 2, "launch__master_addr": "10.0.0.1"}, "launch.node_rank"),
        ({"launch__nnodes": 2, "parallel__tp": 2, "launch__master_addr": "10.0.0.1", "launch__node_rank": 2}, "launch.node_rank"),
        ({"launch__nnodes": 3, "launch__master_addr": "10.0.0.1", "parallel__tp": 2, "launch__node_rank": 0}, "launch.nnodes"),
        ({"launch__hccl_socket_family": "AF_INET"}, "launch.hccl_socket_family"),
        ({"watch__check_start": "nowhere"}, "watch.check_start"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_stands(tmp_path: Path, values: dict[str, Any], where: str) -> None:
    assert problems_of(tmp_path, **values) == {where}


def test_a_new_run_does_not_begin_in_the_checkpoint_folder_of_another(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    given: dict[str, Any] = {"checkpoint__folder": str(tmp_path / "checkpoints"), "watch__folder": str(tmp_path / "watch")}
    assert problems_of(tmp_path, **given) == set()
    (tmp_path / "checkpoints" / "latest").write_text("step_00000010\n")
    assert problems_of(tmp_path, **given) == {"checkpoint.folder"}
    assert problems_of(tmp_path, checkpoint__resume=True, **given) == set()


def test_folders_that_cannot_be_written_are_told_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: real(path, mode) and Path(path).name != "read-only")  # root may write anywhere
    given: dict[str, Any] = {"checkpoint__folder": str(tmp_path / "file" / "a"), "watch__folder": str(tmp_path / "read-only" / "b" / "c")}
    assert problems_of(tmp_path, **given) == {"checkpoint.folder", "watch.folder"}


def test_kv_heads_may_be_replicated(tmp_path: Path) -> None:
    assert problems_of(tmp_path, parallel__tp=8) == set()


def test_all_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "parallel__tp": 3, "parallel__pp": 7, "parallel__dp": 3, "data__seq_length": 1000, "optimizer__warmup_steps": 1000,
    }  # fmt: skip
    assert problems_of(tmp_path, ranks=8, **values) == {
        "parallel", "parallel.tp", "parallel.pp", "parallel.micro_batches", "train.global_batch", "data.seq_length",
        "optimizer.warmup_steps",
    }  # fmt: skip


@pytest.mark.parametrize("change", [{"kind": "encoder"}, {"head": False}, {"experts": 4}])
def test_a_model_that_cannot_be_trained_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    assert problems_of(tmp_path, model=replace(MODEL, **change)) == {"model.path"}


def test_one_process_is_told_to_launch(tmp_path: Path) -> None:
    (problem,) = check(config_with(tmp_path, parallel__tp=2), MODEL, 1)
    assert "= 2 ranks" in problem.what and "ms-train launch" in problem.mend


@pytest.mark.parametrize(
    ("change", "values", "words"),
    [
        ({"largest_id": 1000, "vocabulary": 1001}, {}, "token id 1000"),
        ({"vocabulary": 1001}, {}, "vocabulary of 1001, the model's has 1000"),
        ({"seq_length": 129}, {}, "128 positions"),
        ({}, {"data__seq_length": 32}, "data.seq_length is 32"),
        ({"sequences": 7}, {}, "7 sequences"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], values: dict[str, Any], words: str) -> None:
    (problem,) = check_data(config_with(tmp_path, **values), MODEL, replace(INDEX, **change))
    assert words in problem.what and problem.where == "data.path: data"


def test_data_that_fits_has_no_problem(tmp_path: Path) -> None:
    assert check_data(config_with(tmp_path, data__seq_length=64), MODEL, INDEX) == []


def test_a_hugging_face_folder_and_its_slices_are_the_same_model(tmp_path: Path, tiny_folder: TinyFolder) -> None:
    from converter.hf2ms import RankTreeOptions, convert, plan_conversion

    folder = tiny_folder("llama-gqa", tokenizer=True)
    convert(plan_conversion(folder, RankTreeOptions(tp=2, pp=2)), tmp_path / "slices")
    config = config_with(tmp_path, model__path=str(tmp_path / "slices"), parallel__tp=2, parallel__pp=2, parallel__micro_batches=2)
    source, whole = read_model_source(config.model), read_model_source(replace(config.model, path=str(folder)))
    assert replace(source.config, padded_vocab=whole.config.padded_vocab) == whole.config
    assert whole.layout is None and source.layout is not None and (source.layout.tp, source.layout.pp) == (2, 2)
    assert (source.tokenizer_folder / "tokenizer.json").read_bytes() == (whole.tokenizer_folder / "tokenizer.json").read_bytes()
    assert list(check_layout(source, config.parallel)) == []
    assert list(check_layout(whole, config.parallel)) == []
    (problem,) = check_layout(source, replace(config.parallel, tp=4, pp=1))
    assert "tp 2, the run wants 4" in problem.what and "pp 2, the run wants 1" in problem.what and "--tp 4 --pp 1" in problem.mend
    (problem,) = check_layout(source, replace(config.parallel, layers_per_stage=(1, 3)))
    assert "--layers-per-stage 1,3" in problem.mend
    assert list(check_layout(source, replace(config.parallel, dp=4))) == []


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(Refused):
            read_model_source(config_with(tmp_path, model__path=str(path)).model)


def test_checking_a_config_imports_no_framework(tmp_path: Path) -> None:
    program = "import sys, train.run, train.launch, train.msrun; sys.exit(bool({'mindspore', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_slices_in_other_names_than_the_bundled_models_are_refused(tmp_path: Path, tiny_folder: TinyFolder) -> None:
    from converter.hf2ms import RankTreeOptions, convert, plan_conversion

    convert(plan_conversion(tiny_folder("llama-gqa"), RankTreeOptions(target="mindformers")), tmp_path / "slices")
    with pytest.raises(Refused, match="in the names of mindformers") as caught:
        read_model_source(config_with(tmp_path, model__path=str(tmp_path / "slices")).model)
    assert "translate" in caught.value.problems[0].mend
