"""ms-train as a user calls it: exit codes, one screen for every error, and what is refused before MindSpore is imported."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import TinyFolder
from tests.train.configs import write_config
from tests.train.corpora import expected_documents, random_texts, save_tokenizer, stored_rows, write_jsonl
from train import run as commands
from train.cli import run_command
from train.config import TrainConfig, load_config

TEXTS = random_texts(60)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def ms_train(*arguments: object) -> Ran:
    """Runs a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command([str(argument) for argument in arguments])
    assert "a defect of" not in err.getvalue(), err.getvalue()
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, a corpus, and a data set made of it."""
    folder = tmp_path_factory.mktemp("corpus")
    save_tokenizer(folder / "tok")
    write_jsonl(folder / "a.jsonl", TEXTS)
    ran = ms_train(
        "prepare-data", "--tokenizer", folder / "tok", "--input", folder / "*.jsonl", "--seq-length", 32, "-o", folder / "data",
        "--workers", 1,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    return folder


@pytest.fixture
def config(tmp_path: Path, corpus: Path, tiny_folder: TinyFolder) -> Path:
    """A config that fits a tiny model and the data set."""
    model = tiny_folder("llama-gqa", vocab_size=400)
    return write_config(
        tmp_path / "config.toml", model__path=str(model), data__path=str(corpus / "data"), launch__log_folder=str(tmp_path / "logs"),
        checkpoint__folder=str(tmp_path / "checkpoints"), watch__folder=str(tmp_path / "watch"), parallel__micro_batches=2,
    )  # fmt: skip


def test_prepare_data_says_what_it_did_and_does_it_once(tmp_path: Path, corpus: Path) -> None:
    tokens = sum(map(len, expected_documents(corpus / "tok", TEXTS)))
    arguments = ("prepare-data", "--tokenizer", corpus / "tok", "--input", corpus / "a.jsonl", "--seq-length", 16, "-o", tmp_path / "data")
    first = ms_train(*arguments, "--workers", 1)
    assert first.code == 0 and f"60 documents, {tokens:,} tokens" in first.out and "done" in first.out
    second = ms_train(*arguments, "--json")
    facts = json.loads(second.out)
    assert second.code == 0 and "finished already" in facts["notes"][0] and facts["index"]["tokens"] == tokens
    assert stored_rows(tmp_path / "data").ids.shape == (facts["index"]["sequences"], 17)


def test_a_text_file_with_separators_and_another_end_token(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "a.txt").write_text("\n<|end|>\n".join(TEXTS[:20]) + "\n", encoding="utf-8")
    ran = ms_train(
        "prepare-data", "--tokenizer", corpus / "tok", "--input", tmp_path / "a.txt", "--seq-length", 64, "-o", tmp_path / "data",
        "--separator", "<|end|>", "--eos-token", "<pad>", "--pad", "--pad-token", "<eos>", "--workers", 1,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    expected = [[*ids[:-1], 1] for ids in expected_documents(corpus / "tok", [f"{text}\n" for text in TEXTS[:20]])]
    rows = stored_rows(tmp_path / "data")
    assert rows.mask is not None
    begun = [row[shown == 1].tolist() for row, shown in zip(rows.ids, rows.mask, strict=True)]
    assert [row for row in begun if len(row) < 65] == [ids[(len(ids) - 2) // 64 * 64 :] for ids in expected if (len(ids) - 1) % 64]
    assert np.all(rows.ids[rows.mask == 0] == 0)


def test_what_cannot_be_prepared_is_refused_in_one_screen(tmp_path: Path, corpus: Path) -> None:
    ran = ms_train(
        "prepare-data", "--tokenizer", corpus / "tok", "--input", tmp_path / "*.txt", "--seq-length", 32, "-o", tmp_path / "data"
    )
    assert ran.code == 1 and ran.err.startswith("refused: the input cannot be used") and not (tmp_path / "data").exists()
    assert ms_train("prepare-data").code == 2


def test_launch_shows_what_it_would_start(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_check_files", lambda config: [])  # there is no checkpoint to resume from
    ran = ms_train("launch", "--tp", 2, "--pp", 2, "--dp", 2, config, "--set", "train.steps=3", "--resume", "--pynative", "--dry-run")
    assert ran.code == 0, ran.err
    assert "8 rank(s)  tp 2 x pp 2 x dp 2" in ran.out
    assert "--worker_num=8 --local_worker_num=8" in ran.out
    passed_on = re.search(r"python3? -m train\.cli run (.*)$", ran.out.strip().splitlines()[-1])
    assert passed_on is not None
    path, *sets = passed_on[1].split(" --set ")
    config_of_ranks = load_config(Path(path), sets)
    assert config_of_ranks.ranks == 8 and config_of_ranks.train.steps == 3
    assert config_of_ranks.checkpoint.resume and config_of_ranks.train.mode == "pynative" and not config_of_ranks.watch.profile


def test_launch_on_several_hosts_wants_to_know_which_one_this_is(config: Path) -> None:
    ran = ms_train("launch", "--tp", 2, "--nnodes", 2, "--master-addr", "10.1.2.3", config, "--dry-run")
    assert ran.code == 1 and "launch.node_rank" in ran.err
    ran = ms_train(
        "launch", "--tp", 2, "--nnodes", 2, "--node-rank", 1, "--master-addr", "10.1.2.3", "--master-port", 9000, config, "--dry-run"
    )  # fmt: skip
    assert ran.code == 0 and "--local_worker_num=1 --node_rank=1 --master_addr=10.1.2.3 --master_port=9000" in ran.out


def test_everything_that_does_not_fit_is_refused_at_once(config: Path, corpus: Path) -> None:
    ran = ms_train(
        "launch", "--tp", 3, "--pp", 4, "--dp", 3, config, "--set", "data.seq_length=300", "--set", "optimizer.warmup_steps=1000",
        "--set", f"data.validation_path={corpus / 'nothing'}",
    )  # fmt: skip
    assert ran.code == 1
    for place in ("parallel.tp", "parallel.micro_batches", "train.global_batch", "data.seq_length", "optimizer.warmup_steps", "nothing"):
        assert place in ran.err, place
    assert len(ran.err.splitlines()) < 40


def test_data_of_another_vocabulary_is_refused(config: Path, tiny_folder: TinyFolder) -> None:
    ran = ms_train("run", config, "--set", f"model.path={tiny_folder('llama-gqa')}")
    assert ran.code == 1 and "the model's vocabulary ends at 255" in ran.err


def test_data_of_another_tokenizer_is_noted(config: Path, corpus: Path, tmp_path: Path, tiny_folder: TinyFolder) -> None:
    assert "another tokenizer" not in ms_train("launch", config, "--dry-run").out  # the model has none
    model = tmp_path / "model"
    shutil.copytree(tiny_folder("llama-gqa", vocab_size=400), model)
    save_tokenizer(model)
    rewritten = json.dumps(json.loads((model / "tokenizer.json").read_text(encoding="utf-8")), indent=1)
    (model / "tokenizer.json").write_text(rewritten, encoding="utf-8")
    assert "another tokenizer" not in ms_train("launch", config, "--dry-run", "--set", f"model.path={model}").out
    other = rewritten.replace('"<pad>"', '"<filler>"')
    (model / "tokenizer.json").write_text(other, encoding="utf-8")
    (model / "tokenizer_config.json").unlink()
    ran = ms_train("launch", config, "--dry-run", "--set", f"model.path={model}")
    assert ran.code == 0 and f"{corpus / 'data'} was prepared with another tokenizer" in ran.out


def test_one_process_is_not_enough_for_two_ranks(config: Path) -> None:
    ran = ms_train("run", config, "--set", "parallel.tp=2")
    assert ran.code == 1 and "= 2 ranks, but 1 runs" in ran.err and "ms-train launch" in ran.err


def test_a_checkpoint_that_is_not_there_or_not_whole_is_refused_before_a_rank_starts(config: Path, tmp_path: Path) -> None:
    ran = ms_train("launch", "--tp", 2, config, "--resume")
    assert ran.code == 1 and "no checkpoint to resume from" in ran.err
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest").write_text("step_00000010\n", encoding="utf-8")
    ran = ms_train("launch", "--tp", 2, config, "--resume")
    assert ran.code == 1 and "step_00000010" in ran.err and "manifest.json" in ran.err
    assert not (tmp_path / "logs").exists()


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """In place of the loop: the configs that it was called with."""
    called: list[TrainConfig] = []

    def run(config: TrainConfig) -> int:
        called.append(config)
        return 5

    loop = types.ModuleType("train.loop")
    vars(loop)["run"] = run
    monkeypatch.setitem(sys.modules, "train.loop", loop)
    return called


def test_run_hands_the_config_to_the_loop_and_returns_its_code(config: Path, trained: list[TrainConfig]) -> None:
    assert ms_train("run", config, "--set", "train.steps=7", "--resume").code == 5
    assert [(one.train.steps, one.checkpoint.resume) for one in trained] == [(7, True)]


def test_run_under_msrun_checks_the_number_of_ranks(config: Path, trained: list[TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "end_with_parent", lambda parent: None)  # it would hold for the process that runs the tests
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    assert ms_train("run", config, "--set", "parallel.tp=4").code == 5 and len(trained) == 1
    refused = ms_train("run", config, "--set", "parallel.tp=2")
    assert refused.code == 1 and "= 2 ranks, but 4 run" in refused.err


@pytest.mark.slow
def test_a_rank_that_refuses_is_shown_by_the_launcher(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "load_checked", lambda path, overrides, ranks: load_config(path, overrides))  # in the launcher only
    monkeypatch.setattr(commands, "notes_on", lambda config: iter(()))
    ran = ms_train("launch", "--tp", 2, config, "--set", "model.path=nowhere")
    assert ran.code == 1 and re.search(r"refused: rank [01] failed", ran.err), ran.err
    assert "nowhere" in ran.err and "exit code 1" in ran.err and "all logs are in" in ran.err


def test_settings_lists_every_key() -> None:
    facts = json.loads(ms_train("settings", "--json").out)
    shown = ms_train("settings").out
    assert len(facts) > 60 and all(fact["key"] in shown and f"[{fact['table']}]" in shown for fact in facts)


def test_help_imports_no_framework() -> None:
    program = (
        "import sys; from train.cli import run_command; code = run_command(['launch', '--help']); "
        "sys.exit(code or bool({'mindspore', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "--node-rank" in ran.stdout


def test_debug_shows_where_a_defect_is(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(commands, "read_model_source", broken)
    with pytest.raises(ZeroDivisionError):
        run_command(["run", str(config), "--debug"])
    out = io.StringIO()
    with contextlib.redirect_stderr(out):
        assert run_command(["run", str(config)]) == 1
    assert "a defect of ms-train: ZeroDivisionError: a mistake of ours" in out.getvalue()
