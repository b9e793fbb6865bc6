"""The executor when something goes wrong or is asked for: failing disks, changing sources, interruptions, progress, durability."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from converter import open_files
from converter.execute import execute, fill, read_blocks
from converter.plan import Plan, TargetFile
from converter.tensors import FileIdentity
from mappings.errors import Refused
from tests.converter.executing import (
    LAYOUTS,
    Sources,
    check_files,
    contents,
    files_in,
    many_files_plan,
    new_target,
)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_is_refused_with_file_and_mend_and_leaves_only_complete_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    plan, expected = many_files_plan(tmp_path)
    pwrite, written = os.pwrite, [0]

    def failing(descriptor: int, data: memoryview, offset: int) -> int:
        written[0] += len(data)
        if written[0] > plan.nbytes // 2:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, buffer_bytes=4096)
    problem = refused.value.problems[0]
    assert problem.where.endswith(".torn.partial")
    assert os.strerror(code) in problem.what
    assert problem.mend
    assert written[0] < plan.nbytes // 2 + 20 * 4096  # the others stopped too
    for path in files_in(tmp_path / "out"):
        file = next(file for file in plan.files if file.path == path)
        assert contents(tmp_path / "out" / path, file) == {"weight": expected[path, "weight"]}


def test_short_writes_and_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, expected = many_files_plan(tmp_path, 2)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:777]], offset))
    results = execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS)
    check_files(plan, tmp_path / "out", expected, results)


def test_a_truncated_source_is_refused_by_name(tmp_path: Path) -> None:
    plan, _ = many_files_plan(tmp_path, 2)
    source = plan.files[1].tensors[0].copies[0].source
    os.truncate(source.path, source.path.stat().st_size - 1)
    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    assert refused.value.problems[0].where == str(source.path)
    assert "truncated" in refused.value.problems[0].what
    assert files_in(tmp_path / "out") == ["rank_0/a.torn"]


def test_a_missing_source_is_refused_by_name(tmp_path: Path) -> None:
    plan, _ = many_files_plan(tmp_path, 1)
    source = plan.files[0].tensors[0].copies[0].source
    source.path.unlink()
    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    assert refused.value.problems[0].where == str(source.path)
    assert files_in(tmp_path / "out") == []


def test_a_source_that_changes_during_the_run_is_refused_and_its_file_gets_no_name(tmp_path: Path) -> None:
    plan, _ = many_files_plan(tmp_path, 1, 1_000_000)
    source = plan.files[0].tensors[0].copies[0].source

    def touch(done: int) -> None:
        assert done < plan.nbytes or source.path.stat().st_size > plan.nbytes + 100
        with source.path.open("ab") as file:
            file.write(b"more" * 100)

    with pytest.raises(Refused) as refused:
        execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS, on_progress=touch, buffer_bytes=1 << 18)
    assert [problem.where for problem in refused.value.problems] == [str(source.path)]
    assert "changed" in refused.value.title
    assert files_in(tmp_path / "out") == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_source_that_changed_before_it_was_first_opened_is_refused_by_its_name(tmp_path: Path, number: int) -> None:
    sources = Sources(tmp_path)
    files = []
    for name in ("first", "second"):
        stored = sources.add(name, (50_000,), "F32")
        source = replace(stored, identity=FileIdentity.of(stored.path.stat()))
        target = new_target(name, (50_000,), "F32", name)
        target.assign(target.array, source, sources.arrays[name], sources.arrays[name])
        files.append(TargetFile(f"{name}.torn", "torn", (target.tensor,)))
    path = files[number].tensors[0].copies[0].source.path
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(0, path.stat().st_mtime_ns))
    copy.replace(path)  # as long, and as old
    with pytest.raises(Refused, match="changed") as refused:
        execute(Plan(tuple(files)), tmp_path / "out", workers=1, layouts=LAYOUTS)
    assert [problem.where for problem in refused.value.problems] == [str(path)]
    assert files_in(tmp_path / "out") == ["first.torn"][:number]
    for read in (lambda tensor: fill(tensor, np.empty(tensor.shape, np.uint32)), lambda tensor: list(read_blocks(tensor))):
        with pytest.raises(Refused, match="changed"):
            read(files[number].tensors[0])
        read(files[1 - number].tensors[0])


def test_progress_counts_every_byte_and_files_are_complete_when_they_are_reported(tmp_path: Path) -> None:
    plan, expected = many_files_plan(tmp_path)
    progress: list[int] = []
    reported = []

    def done(result: Any) -> None:
        file = next(file for file in plan.files if file.path == result.path)
        assert contents(tmp_path / "out" / result.path, file) == {"weight": expected[result.path, "weight"]}
        reported.append(result.path)

    execute(plan, tmp_path / "out", workers=3, layouts=LAYOUTS, on_progress=progress.append, on_file_done=done)
    assert progress == sorted(progress)
    assert progress[-1] == plan.nbytes
    assert sorted(reported) == [file.path for file in plan.files]


def test_with_durable_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = many_files_plan(tmp_path, 2)
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recording_replace(before: str, after: Path) -> None:
        events.append(("replace", os.fspath(after)))
        replace(before, after)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, durable=True)
    for file in plan.files:
        path = tmp_path / "out" / file.path
        order = [events.index(event) for event in (("fsync", f"{path}.partial"), ("replace", str(path)), ("fsync", str(path.parent)))]
        assert order == sorted(order)


def test_ctrl_c_stops_the_workers_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    plan, expected = many_files_plan(tmp_path, 2, 1_000_000)
    seen: list[int] = []

    def interrupt(done: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, on_progress=interrupt, buffer_bytes=1024)
    assert threading.active_count() == before
    assert seen[-1] < plan.nbytes
    assert all(
        expected[path, "weight"] == contents(tmp_path / "out" / path, file)["weight"]
        for path in files_in(tmp_path / "out")
        for file in plan.files
        if file.path == path
    )
    assert not [path for path in files_in(tmp_path / "out") if path.endswith(".partial")]


@pytest.mark.parametrize("failing", ["on_progress", "on_file_done"])
def test_an_error_of_the_callers_callback_ends_the_run_with_that_error(tmp_path: Path, failing: str) -> None:
    plan, _ = many_files_plan(tmp_path)

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    callbacks: dict[str, Callable[[Any], None]] = {failing: fail}
    with pytest.raises(ZeroDivisionError):
        execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, **callbacks)  # type: ignore[arg-type]


def test_no_more_files_are_open_than_allowed_and_none_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "MOST_OPEN", 8)
    sources = Sources(tmp_path)
    ranks, slices = 20, 30
    stored = [sources.add(f"w{number}", (ranks, 50), "F32") for number in range(slices)]
    files, expected = [], {}
    for rank in range(ranks):
        target = new_target("weight", (slices, 50), "F32", "weight")
        for number, source in enumerate(stored):
            base = sources.arrays[source.name]
            target.assign(target.array[number], source, base[rank], base)
        files.append(TargetFile(f"{rank}.torn", "torn", (target.tensor,)))
        expected[f"{rank}.torn", "weight"] = target.array.tobytes()
    own = len(os.listdir("/proc/self/fd"))
    most = [0]
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        most[0] = max(most[0], len(os.listdir("/proc/self/fd")) - own)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    plan = Plan(tuple(files))
    results = execute(plan, tmp_path / "out", workers=2, layouts=LAYOUTS, buffer_bytes=400)
    check_files(plan, tmp_path / "out", expected, results)
    assert 8 < most[0] <= 2 * 8 + 2
    assert len(os.listdir("/proc/self/fd")) == own


def test_what_a_killed_run_left_is_overwritten_and_links_in_its_place_are_not_followed(tmp_path: Path) -> None:
    plan, expected = many_files_plan(tmp_path, 2)
    (tmp_path / "out" / "rank_0").mkdir(parents=True)
    (tmp_path / "out" / "rank_1").mkdir()
    (tmp_path / "out" / "rank_0" / "a.torn.partial").write_bytes(b"half" * 1_000_000)
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "out" / "rank_1" / "a.torn.partial").symlink_to(precious)
    results = execute(plan, tmp_path / "out", workers=1, layouts=LAYOUTS)
    check_files(plan, tmp_path / "out", expected, results)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("path", ["../a.torn", "/tmp/a.torn", "", "a/../../b.torn"])
def test_a_file_outside_the_output_folder_is_not_written(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="output folder"):
        execute(Plan((TargetFile(path, "torn", ()),)), tmp_path / "out", workers=1, layouts=LAYOUTS)


def test_two_files_of_the_same_path_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="twice"):
        execute(Plan((TargetFile("a", "torn", ()), TargetFile("./a", "torn", ()))), tmp_path / "out", workers=1, layouts=LAYOUTS)


def test_a_written_safetensors_file_is_what_the_library_reads(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    source = sources.add("c_proj", (40, 60), "F32", 1, np.random.default_rng(3).standard_normal((40, 60)).astype(np.float32))
    base = sources.arrays["c_proj"]
    target = new_target("o_proj.weight", (60, 20), "F32", "o")
    target.assign(target.array, source, base.T[:, 20:], base)
    execute(Plan((TargetFile("m.safetensors", "safetensors", (target.tensor,), (("format", "ms"),)),)), tmp_path / "out", workers=1)
    loaded = load_file(tmp_path / "out" / "m.safetensors")
    np.testing.assert_array_equal(loaded["o_proj.weight"].view(np.uint32), base.T[:, 20:])


_KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.converter.executing import LAYOUTS, many_files_plan
from converter.execute import execute
plan, _ = many_files_plan(Path({folder!r}), 8, 400_000)
print("ready", flush=True)
execute(plan, Path({folder!r}) / "out", workers=2, layouts=LAYOUTS, buffer_bytes=1024, on_progress=lambda done: print(done, flush=True))
"""


@pytest.mark.parametrize("progress", [1, 5])
def test_a_killed_run_leaves_no_incomplete_file_with_a_final_name(tmp_path: Path, progress: int) -> None:
    script = _KILLED.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(1 + progress):
            assert process.stdout.readline()
        process.kill()
    plan, expected = many_files_plan(tmp_path, 8, 400_000)
    left = files_in(tmp_path / "out")
    assert [path for path in left if path.endswith(".partial")]
    for file in plan.files:
        if file.path in left:
            assert contents(tmp_path / "out" / file.path, file) == {"weight": expected[file.path, "weight"]}
