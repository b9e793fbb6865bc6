"""A run that was killed, stopped or joined by others: what it leaves never looks finished, and the same command finishes it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from converter.output_folder import remove_records
from tests.conftest import TinyFolder
from tests.converter.command_line import assert_same_folder, done, files_of, ms_convert, refused, start
from tests.converter.interrupted import changes, killed, stopped
from tests.tiny_models import save_tiny

MARKERS = {"hf2ms": "manifest.json", "ms2hf": "config.json"}
MAX_KILLS = 3


@dataclass(frozen=True)
class Job:
    """A command, and the folder that it makes when nobody disturbs it."""

    command: str
    source: Path
    options: tuple[object, ...]
    whole: Path

    def into(self, out: Path) -> tuple[object, ...]:
        return self.command, self.source, "-o", out, *self.options


def job(folder: Path, command: str, source: Path, *options: object) -> Job:
    made = Job(command, source, options, folder / f"whole-{command}")
    done(*made.into(made.whole))
    return made


HF2MS = ("--tp", 2, "--pp", 2, "--dp", 2)
JOBS: dict[str, Callable[[Path, Path], Job]] = {
    "safetensors": lambda folder, source: job(folder, "hf2ms", source, *HF2MS),
    "ckpt": lambda folder, source: job(folder, "hf2ms", source, *HF2MS, "--format", "ckpt", "--workers", 1),
    "back": lambda folder, source: job(folder, "ms2hf", job(folder, "hf2ms", source, *HF2MS).whole),
}


@pytest.fixture(params=JOBS)
def a_job(request: pytest.FixtureRequest, tiny_folder: TinyFolder, tmp_path: Path) -> Job:
    return JOBS[request.param](tmp_path, tiny_folder("llama-tied", tokenizer=True, max_shard_size="150KB"))


def check_what_is_left(work: Job, out: Path) -> None:
    """Nothing looks finished that is not; every file with its final name is the one that an undisturbed run writes."""
    left = [name for name in files_of(out) if not name.startswith(".ms-convert/") and not name.endswith(".partial")] if out.exists() else []
    if MARKERS[work.command] in left:
        assert left == files_of(work.whole)
    for name in left:
        assert (out / name).read_bytes() == (work.whole / name).read_bytes(), name


def test_killed_again_and_again_at_any_change_of_a_file_it_comes_to_the_same_end(a_job: Job, tmp_path: Path) -> None:
    total = changes(*a_job.into(tmp_path / "counted"))
    assert_same_folder(a_job.whole, tmp_path / "counted")
    chosen = random.Random(7)
    first = [1, 2, 3, total - 1, *chosen.sample(range(4, total - 1), 4)]
    for number, change in enumerate(first):
        out = tmp_path / f"out-{number}"
        for kill in range(chosen.randint(1, MAX_KILLS)):
            if not killed(change if kill == 0 else chosen.randint(1, 20), *a_job.into(out)) or (out / MARKERS[a_job.command]).exists():
                break
            check_what_is_left(a_job, out)
        done(*a_job.into(out))
        assert_same_folder(a_job.whole, out)


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 MB in 32 ranks: long enough to be struck from outside while it works."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 4000}
    return save_tiny(tmp_path_factory.mktemp("larger") / "model", "llama-gqa", max_shard_size="5MB", **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "options"), [("hf2ms", ("--format", "safetensors")), ("hf2ms", ("--format", "ckpt")), ("ms2hf", ())])
def test_killed_from_outside_at_random_moments_it_comes_to_the_same_end(
    command: str, options: tuple[object, ...], larger_model: Path, tmp_path: Path
) -> None:
    layout = ("--tp", 8, "--pp", 4, "--workers", 1, *options)
    work = job(tmp_path, "hf2ms", larger_model, *layout)
    if command == "ms2hf":
        work = job(tmp_path, "ms2hf", work.whole, "--workers", 1)
    out, chosen, struck = tmp_path / "out", random.Random(11), 0
    for _ in range(5):
        before = len(list(out.glob(".ms-convert/file-*")))
        process = start(*work.into(out))
        wanted = before + chosen.randint(1, 3)
        while process.poll() is None and len(list(out.glob(".ms-convert/file-*"))) < wanted:
            time.sleep(0.001)
        time.sleep(chosen.random() * 0.02)
        process.kill()
        _, err = process.communicate()
        assert "Traceback" not in err
        struck += process.returncode == -signal.SIGKILL
        check_what_is_left(work, out)
        if (out / MARKERS[command]).exists():
            break
    assert struck
    ran = ms_convert(*work.into(out))
    assert ran.code == 0 or "holds a finished conversion" in ran.err
    assert_same_folder(work.whole, out)


def unfinished(source: Path, out: Path, *options: object) -> list[str]:
    """Writes ranks 0 and 1 of four and leaves the run unfinished; returns the finished files."""
    done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, *options, "--ranks", "0-1")
    assert not (out / "manifest.json").exists()
    return [name for name in files_of(out) if name.startswith("rank_")]


def test_a_changed_option_starts_again_and_says_which(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("qwen2"), tmp_path / "out"
    assert len(unfinished(source, out)) == 2
    ran = done("hf2ms", source, "-o", out, "--tp", 4, "--dtype", "bf16")
    assert "starting again" in ran.out and "--dtype: keep -> bf16" in ran.out and "--tp: 2 -> 4" in ran.out
    done("hf2ms", source, "-o", tmp_path / "fresh", "--tp", 4, "--dtype", "bf16")
    assert_same_folder(tmp_path / "fresh", out)


def test_a_changed_source_starts_again_and_says_so(tmp_path: Path) -> None:
    source, out = save_tiny(tmp_path / "model", "qwen2"), tmp_path / "out"
    unfinished(source, out)
    shutil.copy(save_tiny(tmp_path / "other", "qwen2", 1) / "model.safetensors", source)
    ran = done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2)
    assert "source model.safetensors: " in ran.out and "starting again" in ran.out
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


@pytest.mark.parametrize("damage", ["a byte", "half of it", "all of it"])
def test_a_finished_file_that_was_damaged_since_is_written_again(damage: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("qwen2"), tmp_path / "out"
    options = ("--tp", 2, "--pp", 2, "--dp", 2)
    done("hf2ms", source, "-o", tmp_path / "whole", *options)
    done("hf2ms", source, "-o", out, *options, "--ranks", "0-3")
    path = out / "rank_1" / "checkpoint_1.safetensors"
    assert path.samefile(out / "rank_3" / "checkpoint_3.safetensors")
    if damage == "a byte":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        with path.open("r+b") as file:  # in place: the linked rank sees it too
            file.write(data)
    elif damage == "half of it":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    ran = done("hf2ms", source, "-o", out, *options)
    assert damage != "a byte" or "rank_1/checkpoint_1.safetensors is not as it was written: writing it again" in ran.out
    assert "rank_0/checkpoint_0.safetensors is not" not in ran.out
    assert_same_folder(tmp_path / "whole", out)


def test_ranks_written_one_part_after_the_other_complete_the_manifest(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied", tokenizer=True), tmp_path / "out"
    options = ("--tp", 2, "--pp", 2)
    done("hf2ms", source, "-o", tmp_path / "whole", *options)
    first = ms_convert("hf2ms", source, "-o", out, *options, "--ranks", "0-1")
    assert first.code == 0 and "not finished" in first.out and "still to be written: ranks 2-3 " in first.out
    assert not (out / "manifest.json").exists()
    assert "continue" in refused("ms2hf", out, "-o", tmp_path / "back")
    second = done("hf2ms", source, "-o", out, *options, "--ranks", "3")
    assert "not finished" in second.out and "still to be written: rank 2 " in second.out
    facts = done("hf2ms", source, "-o", out, *options, "--ranks", "2,3", "--json").facts
    assert facts["result"]["finished"] and facts["result"]["files_written"] == 1
    assert_same_folder(tmp_path / "whole", out)


def test_data_parallel_ranks_on_their_own_host_get_files_of_their_own(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    for ranks in ("4-7", "2-3", "0-1"):
        done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, "--dp", 2, "--ranks", ranks)
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_two_hosts_with_different_ranks_may_meet_at_any_moment(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source = tiny_folder("llama-tied", tokenizer=True)
    options = ("--tp", 2, "--pp", 2, "--format", "ckpt")
    done("hf2ms", source, "-o", tmp_path / "whole", *options)

    def half(out: Path, ranks: str) -> tuple[object, ...]:
        return "hf2ms", source, "-o", out, *options, "--ranks", ranks

    total = changes(*half(tmp_path / "counted", "0-1"))
    chosen = random.Random(3)
    for number, change in enumerate([1, 2, 3, 4, total - 2, total, *chosen.sample(range(5, total - 2), 4)]):
        out = tmp_path / f"out-{number}"
        first = stopped(change, *half(out, "0-1"))
        second = start(*half(out, "2-3"))
        while second.poll() is None and not (out / ".ms-convert" / "run.json").exists() and change > 2:
            time.sleep(0.001)
        os.kill(first.pid, signal.SIGCONT)
        for process in (first, second):
            _, err = process.communicate(timeout=60)
            assert process.returncode == 0, (change, err)
        assert_same_folder(tmp_path / "whole", out)


def test_a_second_run_for_the_same_ranks_is_refused_and_the_first_goes_on(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    done("hf2ms", source, "-o", tmp_path / "whole", "--tp", 2, "--pp", 2)
    first = stopped(40, "hf2ms", source, "-o", out, "--tp", 2, "--pp", 2)
    for options in ((), ("--ranks", "3"), ("--ranks", "0-1", "--overwrite"), ("--dtype", "bf16"), ("--dtype", "bf16", "--overwrite")):
        assert "another ms-convert is writing here" in refused("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, *options)
    os.kill(first.pid, signal.SIGCONT)
    assert first.communicate(timeout=60) and first.returncode == 0
    assert_same_folder(tmp_path / "whole", out)


def test_a_run_with_other_options_for_other_ranks_does_not_touch_what_is_being_written(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("llama-tied"), tmp_path / "out"
    done("hf2ms", source, "-o", tmp_path / "whole", "--tp", 2, "--pp", 2)
    first = stopped(30, "hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, "--ranks", "0-1")
    message = refused("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, "--ranks", "2-3", "--dtype", "fp16")
    assert "another ms-convert is writing here" in message
    os.kill(first.pid, signal.SIGCONT)
    assert first.communicate(timeout=60) and first.returncode == 0
    done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2)
    assert_same_folder(tmp_path / "whole", out)


def test_a_finished_run_that_is_repeated_says_so_and_writes_nothing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out, back = tiny_folder("bert"), tmp_path / "out", tmp_path / "back"
    done("hf2ms", source, "-o", out, "--tp", 2)
    before = {name: (out / name).stat().st_mtime_ns for name in files_of(out)}
    assert "finished already" in done("hf2ms", source, "-o", out, "--tp", 2).out
    assert before == {name: (out / name).stat().st_mtime_ns for name in files_of(out)}
    done("ms2hf", out, "-o", back)
    assert "holds a finished conversion" in refused("ms2hf", out, "-o", back)
    assert_same_folder(source, back)


@pytest.mark.parametrize("change", ["changed", "is new", "is gone"])
def test_a_finished_run_is_not_called_finished_when_a_side_file_of_the_source_changed(change: str, tmp_path: Path) -> None:
    source, out = save_tiny(tmp_path / "model", "bert", tokenizer=True), tmp_path / "out"
    done("hf2ms", source, "-o", out, "--tp", 2)
    path = source / ("added.json" if change == "is new" else "tokenizer.json")
    if change == "is gone":
        path.unlink()
    else:
        path.write_bytes(b"[]" if change == "is new" else path.read_bytes()[:-1] + b"]")
    assert f"{path.name} {change}" in refused("hf2ms", source, "-o", out, "--tp", 2)
    done("hf2ms", source, "-o", out, "--tp", 2, "--overwrite")
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


@pytest.mark.parametrize("extra", [(), ("--durable",)])
def test_the_manifest_does_not_vouch_for_a_rank_that_changed_since_an_earlier_run(
    extra: tuple[str, ...], tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    source, out = tiny_folder("bert"), tmp_path / "out"
    options = ("--tp", 2, "--pp", 2, *extra)
    done("hf2ms", source, "-o", tmp_path / "whole", *options)
    unfinished(source, out)
    path = out / "rank_1" / "checkpoint_1.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    message = refused("hf2ms", source, "-o", out, *options, "--ranks", "2-3")
    assert "rank_1/checkpoint_1.safetensors: not as it was written" in message and "rank_0/" not in message
    assert not (out / "manifest.json").exists()
    done("hf2ms", source, "-o", out, *options, "--ranks", "1")
    assert_same_folder(tmp_path / "whole", out)


def test_a_host_whose_copy_of_the_model_has_other_times_does_not_remove_the_ranks_of_another(tmp_path: Path) -> None:
    source, out = save_tiny(tmp_path / "model", "bert"), tmp_path / "out"
    copied = shutil.copytree(source, tmp_path / "copy")
    os.utime(copied / "model.safetensors", ns=(0, 10**18))
    options = ("--tp", 2, "--pp", 2)
    unfinished(source, out)
    before = {name: (out / name).read_bytes() for name in files_of(out) if name.startswith("rank_")}
    for extra in (("--ranks", "2-3"), ("--ranks", "1-3"), ("--ranks", "2-3", "--dtype", "bf16")):
        message = refused("hf2ms", copied, "-o", out, *options, *extra)
        assert "source model.safetensors: " in message and "of 2001-09-09 01:46:40" in message and "cp -p" in message
        assert ("--dtype: keep -> bf16" in message) == ("bf16" in extra)
        assert {name: (out / name).read_bytes() for name in files_of(out) if name.startswith("rank_")} == before
    shutil.copystat(source / "model.safetensors", copied / "model.safetensors")
    done("hf2ms", copied, "-o", out, *options, "--ranks", "2-3")
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_killed_while_it_replaces_a_finished_conversion_it_removes_the_rest_of_it(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, old = tiny_folder("bert"), tmp_path / "old"
    done("hf2ms", tiny_folder("gpt2"), "-o", old, "--tp", 4)
    done("hf2ms", source, "-o", tmp_path / "whole", "--tp", 2)
    shutil.copytree(old, tmp_path / "counted")
    command = ("hf2ms", source, "--tp", 2, "--overwrite", "-o")
    total = changes(*command, tmp_path / "counted")
    for change in (4, 5, 6, 8, 10, 14, 20, 30, total - 1):
        out = tmp_path / f"out-{change}"
        shutil.copytree(old, out)
        assert killed(change, *command, out)
        done(*command, out)
        assert_same_folder(tmp_path / "whole", out)


def test_two_hosts_may_remove_the_records_at_the_same_time(tmp_path: Path) -> None:
    progress = tmp_path / ".ms-convert"
    progress.mkdir()
    (progress / "run.json").write_text("{}")
    remove_records(tmp_path)
    remove_records(tmp_path)
    assert not progress.exists()


def test_a_finished_run_that_lost_a_file_is_not_called_finished(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("bert"), tmp_path / "out"
    done("hf2ms", source, "-o", out, "--tp", 2)
    (out / "rank_1" / "checkpoint_1.safetensors").unlink()
    message = refused("hf2ms", source, "-o", out, "--tp", 2)
    assert "rank_1/checkpoint_1.safetensors" in message and "--overwrite" in message
    done("hf2ms", source, "-o", out, "--tp", 2, "--overwrite")
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_what_a_killed_run_had_begun_does_not_count_against_the_room_on_the_disk(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tiny_folder("bert"), tmp_path / "out"
    unfinished(source, out)
    begun = out / "rank_2" / "checkpoint_2.safetensors.partial"
    begun.parent.mkdir()
    begun.write_bytes(bytes(5_000_000))
    usage = shutil.disk_usage(tmp_path)

    def nearly_full(path: object) -> object:
        return usage._replace(free=1_000_000 if not begun.exists() else 0)

    monkeypatch.setattr(shutil, "disk_usage", nearly_full)
    done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"identity": 3}', '{"identity": "x", "options": {}, "more": 1}', "\0" * 100])
def test_a_damaged_record_of_an_unfinished_run_is_no_licence_to_write(content: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("bert"), tmp_path / "out"
    unfinished(source, out)
    (out / ".ms-convert" / "run.json").write_text(content)
    assert "not an unfinished run" in refused("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2)
    assert ms_convert("inspect", out).code == 1
    done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2, "--overwrite")
    done("ms2hf", out, "-o", tmp_path / "back")
    assert_same_folder(source, tmp_path / "back")


def test_a_damaged_record_of_a_file_means_that_the_file_is_written_again(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    source, out = tiny_folder("bert", dtype=torch.bfloat16), tmp_path / "out"
    done("hf2ms", source, "-o", tmp_path / "whole", "--tp", 2, "--pp", 2)
    unfinished(source, out)
    first, second = sorted((out / ".ms-convert").glob("file-*.json"))
    first.write_text(first.read_text()[:-20])
    record = json.loads(second.read_text())
    second.write_text(json.dumps(record | {"path": "../../outside"}))
    done("hf2ms", source, "-o", out, "--tp", 2, "--pp", 2)
    assert_same_folder(tmp_path / "whole", out)


@pytest.mark.parametrize("change", [3, 25, 45])
def test_interrupted_by_the_user_it_says_so_and_the_same_command_continues(change: int, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    work = job(tmp_path, "hf2ms", tiny_folder("llama-tied"), *HF2MS)
    process = stopped(change, *work.into(tmp_path / "out"))
    os.kill(process.pid, signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues" in err and "Traceback" not in err
    check_what_is_left(work, tmp_path / "out")
    assert not list(tmp_path.glob("out/**/*.partial"))
    done(*work.into(tmp_path / "out"))
    assert_same_folder(work.whole, tmp_path / "out")


def test_an_empty_folder_is_a_good_output(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    work = job(tmp_path, "hf2ms", tiny_folder("llama-tied"), *HF2MS)
    (tmp_path / "out").mkdir()
    done(*work.into(tmp_path / "out"))
    assert_same_folder(work.whole, tmp_path / "out")
