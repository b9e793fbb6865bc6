"""`ms-train plan` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from converter.cli import run as ms_convert
from mappings.errors import Problem
from tests.conftest import TinyFolder
from tests.mappings.public_configs import LARGER, PUBLIC
from tests.train.test_cli import Ran, ms_train
from train.config import MAX_MICRO_BATCHES, ModelSettings, TrainConfig, load_config
from train.config_checks import check
from train.planning.choices import Wanted, choices, divisors
from train.planning.devices import read_devices
from train.planning.run_shape import Workload
from train.planning.source import read_planned_model

GIB = 1 << 30


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder that has a config.json and nothing else."""
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLIC["Llama-3.1-8B"].config), encoding="utf-8")
    return folder


def plan(model: Path, *arguments: object, devices: int = 8, batch: int = 256) -> Ran:
    return ms_train("plan", "--model", model, "--devices", devices, "--seq-length", 4096, "--global-batch", batch, *arguments)


def layouts(ran: Ran) -> dict[tuple[int, int, int], Any]:
    return {(facts["dp"], facts["tp"], facts["pp"]): facts for facts in json.loads(ran.out)["layouts"]}


def test_every_layout_is_there_the_fastest_that_fits_first(llama: Path) -> None:
    ran = plan(llama, "--json")
    found = layouts(ran)
    assert ran.code == 0 and set(found) == {(8 // tp // pp, tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8}
    assert json.loads(ran.out)["model"]["parameters"] == 8_030_261_248
    ranked = list(found.values())
    fitting = [facts for facts in ranked if facts["feasible"]]
    assert ranked[: len(fitting)] == fitting and 0 < len(fitting) < len(ranked)
    assert [facts["seconds"] for facts in fitting] == sorted(facts["seconds"] for facts in fitting)
    for facts in ranked:
        usable = 0.9 * 64 * GIB
        assert facts["feasible"] == facts["fits"] == (facts["bytes"] <= usable)
        assert facts["bytes"] == max(stage["memory"]["total"] for stage in facts["stages"])
        fits = [variant["seconds"] for variant in facts["variants"] if variant["fits"]]
        assert not fits or facts["seconds"] == pytest.approx(min(fits), abs=1e-6)


def test_a_product_that_is_not_the_number_of_devices_is_told_with_the_numbers(llama: Path) -> None:
    ran = plan(llama, "--dp", 4, "--tp", 2, "--pp", 2)
    assert ran.code == 1 and "dp 4 x tp 2 x pp 2 is 16, not 8" in ran.out and "--devices 16" in ran.out
    ran = plan(llama, "--dp", 3)
    assert ran.code == 1 and "3 does not divide 8 devices" in ran.err
    assert plan(llama, "--dp", 4, "--tp", 2, "--pp", 2, devices=16).code == 0


@pytest.mark.parametrize(
    ("arguments", "devices", "batch", "reason"),
    [
        (("--tp", 3), 3, 256, "32 attention heads cannot be divided among 3 tensor-parallel ranks"),
        (("--tp", 1, "--dp", 1), 64, 256, "32 layers cannot fill 64 pipeline stages"),
        (("--dp", 8), 8, 4, "a global batch of 4 cannot be divided among dp 8"),
        (("--pp", 8), 8, 4, "4 micro-batches cannot fill 8 pipeline stages"),
        (("--pp", 8, "--micro-batch", 64), 8, 256, "4 micro-batches cannot fill 8 pipeline stages"),
        (("--dp", 8, "--device-memory", "32GiB"), 8, 256, "GiB of each device, 28.8 can be had"),
    ],
)
def test_what_cannot_be_is_told_with_its_reason(arguments: tuple[object, ...], devices: int, batch: int, reason: str, llama: Path) -> None:
    ran = plan(llama, *arguments, "--json", devices=devices, batch=batch)
    problems = [problem["what"] for facts in json.loads(ran.out)["layouts"] for problem in facts["problems"]]
    assert ran.code == 1 and any(reason in problem for problem in problems), problems
    assert reason in plan(llama, *arguments, devices=devices, batch=batch).out


@pytest.mark.parametrize("devices", [1, 8, 64])
def test_the_written_config_is_one_that_the_trainer_accepts(devices: int, llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    ran = plan(llama, "--write", file, "--data", 'corpus "a"\\b', "--steps", 77, "--device-memory", "256GiB", devices=devices)
    assert ran.code == 0 and str(file) in ran.out, ran.err
    config, model = load_config(file), read_planned_model(ModelSettings(str(llama)))
    assert check(config, model.config, devices) == []
    (best, *_) = json.loads(plan(llama, "--device-memory", "256GiB", "--json", devices=devices).out)["layouts"]
    parallel = config.parallel
    assert (parallel.dp, parallel.tp, parallel.pp, parallel.micro_batches) == tuple(
        best[key] for key in ("dp", "tp", "pp", "micro_batches")
    )
    assert (parallel.optimizer_sharding, config.train.recompute_every) == (best["optimizer_sharding"], best["recompute_every"])
    assert (config.data.path, config.train.steps, config.compute, config.launch.device) == ('corpus "a"\\b', 77, "bfloat16", "ascend")
    again = plan(llama, "--write", file, "--device-memory", "256GiB", devices=devices)
    assert again.code == 1 and "is there already" in again.err
    assert plan(llama, "--write", file, "--overwrite", "--device-memory", "256GiB", devices=devices).code == 0


def test_nothing_is_written_when_nothing_fits(llama: Path, tmp_path: Path) -> None:
    ran = plan(llama, "--device-memory", "8GiB", "--write", tmp_path / "train.toml")
    assert ran.code == 1 and "no config was written" in ran.err and not (tmp_path / "train.toml").exists()


def test_a_table_of_the_users_own_comes_beside_and_in_place_of_the_bundled_one(llama: Path, tmp_path: Path) -> None:
    table = tmp_path / "devices.toml"
    table.write_text('[mine]\nmemory = "100GB"\ntflops = 626.0\nhost_bandwidth = 196.0\nusable = 0.5\n', encoding="utf-8")
    ran = plan(llama, "--devices-table", table, "--device-type", "mine", "--json")
    device = json.loads(ran.out)["device"]
    assert (device["usable_memory"], device["flops"], device["host_devices"]) == (50_000_000_000, 626e12, 8)
    table.write_text('["910B-64GB"]\nmemory = "much"\ntflops = -1.0\nhost_bandwidth = 1.0\nwarp = 9\n', encoding="utf-8")
    ran = plan(llama, "--devices-table", table)
    assert ran.code == 1 and all(word in ran.err for word in ("tflops", "warp"))
    assert "no device" in plan(llama, "--device-type", "abacus").err
    assert "is no size" in plan(llama, "--device-memory", "64 apples").err


def test_the_needed_utilisation_is_shown(llama: Path) -> None:
    ran = plan(llama, "--tokens-per-second", 20_000, "--json")
    facts = json.loads(ran.out)
    per_token = facts["workload"]["flops_per_token"]
    assert facts["layouts"][0]["utilisation_needed"] == pytest.approx(20_000 * per_token / (8 * 313e12))
    assert "MFU needed" in plan(llama, "--tokens-per-second", 20_000).out


def test_models_that_are_not_trained_are_refused(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC["bert-base-uncased"].config), encoding="utf-8")
    assert "an encoder" in plan(tmp_path / "config.json").err
    assert "no such file or folder" in plan(tmp_path / "nowhere").err
    ran = ms_train("plan", "--model", llama, "--devices", 8, "--seq-length", 200_000, "--global-batch", 8)
    assert ran.code == 1 and "131072 positions" in ran.err


def test_more_recomputation_and_division_need_less_memory_and_no_less_time(llama: Path) -> None:
    variants = layouts(plan(llama, "--json"))[8, 1, 1]["variants"]
    by_way = {(item["micro_batch"], item["recompute_every"], item["optimizer_sharding"]): item for item in variants}
    for (micro_batch, every, sharding), item in by_way.items():
        if every:
            whole = by_way[micro_batch, 0, sharding]
            assert item["activations"] < whole["activations"] and item["seconds"] > whole["seconds"]
        if sharding:
            assert item["optimizer"] < by_way[micro_batch, every, False]["optimizer"]


def test_divisors_are_all_and_in_order() -> None:
    assert divisors(1024) == [1 << power for power in range(11)] and divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_70b_model_fits_on_64_devices_but_not_on_8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGER["Llama-3-70B"].config), encoding="utf-8")
    model = read_planned_model(ModelSettings(str(tmp_path)))
    work = Workload(model.config, 4096, 512)
    device = read_devices()["910B-64GB"]
    assert any(choice.feasible for choice in choices(model, work, device, Wanted(64)))
    assert not any(choice.feasible for choice in choices(model, work, device, Wanted(8)))
    assert any(choice.feasible for choice in choices(model, work, replace(device, memory=1 << 40), Wanted(8)))


def test_a_plan_imports_no_framework(llama: Path) -> None:
    program = (
        "import sys; from train.cli import run_command;"
        f"code = run_command(['plan', '--model', {str(llama)!r}, '--devices', '8', '--seq-length', '4096', '--global-batch', '256']);"
        "print(code, sorted({'mindspore', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_rank_tree_is_planned_as_it_was_cut(tmp_path: Path, tiny_tree: Path) -> None:
    ran = ms_train("plan", "--model", tiny_tree, "--devices", 4, "--seq-length", 64, "--global-batch", 16, "--json")
    found = layouts(ran)
    assert ran.code == 0, ran.err
    assert {layout for layout, facts in found.items() if facts["feasible"]} == {(1, 2, 2)}
    assert all("was cut for tp 2 x pp 2" in facts["problems"][0]["what"] for layout, facts in found.items() if layout != (1, 2, 2))


@pytest.fixture
def tiny_tree(tmp_path: Path, tiny_folder: TinyFolder) -> Path:
    """A rank tree, tp 2 x pp 2."""
    tree = tmp_path / "tree"
    assert ms_convert(["hf2ms", str(tiny_folder("llama-gqa")), "-o", str(tree), "--tp", "2", "--pp", "2"]) == 0
    return tree


@pytest.mark.parametrize("arguments", [("--tokens-per-second", "nan"), ("--tokens-per-second", "inf"), ("--dropout", "nan")])
def test_what_is_no_number_is_refused(arguments: tuple[str, str], llama: Path) -> None:
    ran = plan(llama, *arguments)
    assert ran.code == 2 and f"'{arguments[1]}' is not a number" in ran.err


def written(model: Path, file: Path, *arguments: object, devices: int = 8, batch: int = 256) -> tuple[TrainConfig, list[Problem]]:
    """The config that a plan writes, and what the trainer finds wrong with it."""
    ran = plan(model, "--write", file, "--overwrite", "--device-memory", "1TiB", *arguments, devices=devices, batch=batch)
    assert ran.code == 0, ran.err + ran.out
    config = load_config(file)
    return config, check(config, read_planned_model(ModelSettings(config.model.path, config.model.rules)).config, devices)


def test_a_model_planned_from_inside_its_own_folder_keeps_checkpoints_out_of_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, model in ((llama, "config.json"), (llama, "."), (llama.parent, llama.name)):
        monkeypatch.chdir(folder)
        config, problems = written(Path(model), llama.parent / "train.toml")
        assert problems == []
        assert Path(config.checkpoint.folder).resolve() == llama.parent / "checkpoints"


def test_the_users_own_rule_table_is_named_in_the_written_config(llama: Path, tmp_path: Path) -> None:
    source = json.loads((llama / "config.json").read_text(encoding="utf-8"))
    (llama / "config.json").write_text(json.dumps(source | {"architectures": ["MineForCausalLM"]}), encoding="utf-8")
    table = tmp_path / "mine.toml"
    bundled = files("mappings").joinpath("families/llama.toml").read_text(encoding="utf-8")
    table.write_text(bundled.replace('"LlamaForCausalLM"', '"MineForCausalLM"'), encoding="utf-8")
    config, problems = written(llama, tmp_path / "train.toml", "--rules", table)
    assert config.model.rules == str(table) and problems == []


def test_the_trainers_bound_on_micro_batches_is_kept(llama: Path, tmp_path: Path) -> None:
    config, problems = written(llama, tmp_path / "train.toml", "--pp", 8, "--seq-length", 128, batch=1 << 24)
    assert problems == [] and config.parallel.micro_batches <= MAX_MICRO_BATCHES
    for batch, more in (((1 << 30) - 35, ()), (1 << 24, ("--micro-batch", 1))):  # the first is a prime
        ran = plan(llama, "--dp", 1, "--tp", 8, *more, batch=batch)
        assert ran.code == 1 and f"{batch} sequences of a data-parallel rank are more than 1048576 micro-batches" in ran.out


def test_hosts_share_the_ranks_evenly_and_a_devices_name_stays_a_comment(llama: Path, tmp_path: Path) -> None:
    table = tmp_path / "devices.toml"
    table.write_text('["x\\n[model]"]\nmemory = "2TiB"\ntflops = 1.0\nhost_bandwidth = 1.0\n', encoding="utf-8")
    file = tmp_path / "train.toml"
    config, _ = written(llama, file, "--devices-table", table, "--device-type", "x\n[model]", "--pp", 9, "--dp", 1, devices=9)
    assert config.ranks == 9 and "--nnodes 3 " in file.read_text(encoding="utf-8").splitlines()[0]


def test_a_folder_that_is_not_there_is_told_as_that(llama: Path, tmp_path: Path) -> None:
    ran = plan(llama, "--write", tmp_path / "nowhere" / "train.toml")
    assert ran.code == 1 and "there is no such folder" in ran.err
