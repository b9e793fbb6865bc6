"""What a run leaves for those who watch it, and that it stops when a value is not finite."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mappings.errors import Refused
from tests.train.configs import config_with
from train import progress
from train.launch_display import LaunchDisplay, step_of
from train.loader import Batch
from train.metrics import METRICS, MetricsFile, Pace, StepMetrics
from train.watch import Watch, profiled

STEP = StepMetrics(step=0, loss=3.25, grad_norm=1.5, learning_rate=2.5e-4, tokens=4096, seconds=2.0, offset=16)
BATCH = Batch(np.arange(12, dtype=np.int32).reshape(3, 4), np.ones((3, 4), np.int32), 48)


def watch_in(tmp_path: Path, rank: int = 0, first_step: int = 0, **values: Any) -> Watch:
    config = config_with(tmp_path, watch__folder=str(tmp_path / "watch"), **({"watch__tensorboard": False} | values))
    return Watch(config, rank, 4, first_step)


def lines_of(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "watch" / METRICS).read_text()
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in text.splitlines()]


def test_each_step_is_a_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    watch.step(STEP)
    watch.step(replace(STEP, step=1, loss_scale=1024.0, skipped=True, grad_norm=math.inf))
    watch.validation(2, 3.5)
    first, second, third = lines_of(tmp_path)
    assert first.items() >= {
        "step": 0, "loss": 3.25, "grad_norm": 1.5, "learning_rate": 2.5e-4, "tokens": 4096, "tokens_per_second": 2048.0, "seconds": 2.0,
        "offset": 16,
    }.items()  # fmt: skip
    assert abs(first["time"] - time.time()) < 3600 and "loss_scale" not in first
    assert second.items() >= {"step": 1, "loss_scale": 1024.0, "skipped": True, "grad_norm": None}.items()
    assert third.items() >= {"step": 2, "validation_loss": 3.5}.items()
    watch.close()
    watch.close()


def test_only_rank_0_writes_and_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = watch_in(tmp_path, rank=2)
    watch.step(STEP)
    watch.validation(1, 2.0)
    watch.note("hello")
    watch.close()
    assert not (tmp_path / "watch").exists() and capsys.readouterr().out == ""


def test_a_log_gets_plain_lines_every_few_steps_and_for_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = watch_in(tmp_path, watch__log_every=4, train__steps=10)
    for step in range(10):
        watch.step(replace(STEP, step=step))
    watch.note("a note")
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["0/10", "4/10", "8/10", "9/10"] and lines[-1] == "a note"
    assert "\x1b" not in out and "\r" not in out
    assert all(word in lines[1] for word in ("loss 3.25000", "lr 2.500e-04", "grad norm 1.5", "2,048 tokens/s", "10.0 s left"))


def test_an_overflow_is_told_and_training_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch_in(tmp_path).step(replace(STEP, grad_norm=math.nan, loss_scale=512.0, skipped=True))
    assert "overflow, skipped  loss scale 512" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"loss": math.nan}, {"loss": -math.inf}, {"grad_norm": math.inf}, {"grad_norm": math.nan}])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_value_that_is_not_finite_stops_with_step_rank_and_batch(tmp_path: Path, rank: int, change: dict[str, Any]) -> None:
    watch = watch_in(tmp_path, rank)
    watch.step(STEP, BATCH)
    with pytest.raises(Refused) as caught:
        watch.step(replace(STEP, step=7, culprits=(1, 2), **change), BATCH)
    watch.close()
    (problem,) = caught.value.problems
    assert "step 7" in caught.value.title and problem.where == f"rank {rank}" and "rank 1, 2 of 4" in problem.what
    path = tmp_path / "watch" / "failed_step_7" / f"rank_{rank}.npz"
    assert str(path) in problem.mend
    with np.load(path) as saved:
        assert np.array_equal(saved["ids"], BATCH.ids) and np.array_equal(saved["mask"], BATCH.ids * 0 + 1)
        assert (saved["step"], saved["offset"]) == (7, 48)
        assert np.array_equal([saved["loss"], saved["grad_norm"]], [change.get("loss", 3.25), change.get("grad_norm", 1.5)], equal_nan=True)
    if rank == 0:
        assert [line["step"] for line in lines_of(tmp_path)] == [0, 7]


def test_a_resumed_run_takes_the_place_of_later_steps_and_of_a_torn_line(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    for step in range(6):
        watch.step(replace(STEP, step=step, loss=1.0))
    watch.close()
    with open(tmp_path / "watch" / METRICS, "a") as file:
        file.write('{"step": 6, "lo')
    resumed = watch_in(tmp_path, first_step=3)
    resumed.step(replace(STEP, step=3, loss=2.0))
    assert [(line["step"], line["loss"]) for line in lines_of(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_resumed_run_keeps_the_validation_of_the_weights_that_it_begins_with(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, first_step=0)
    for step in range(6):
        file.write({"step": step, "loss": 1.0})
        if step % 2:
            file.write({"step": step + 1, "validation_loss": 2.0})
    file.close()
    MetricsFile(tmp_path, first_step=4).close()
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [(line["step"], "loss" in line) for line in lines] == [(0, True), (1, True), (2, False), (2, True), (3, True), (4, False)]


def test_a_new_run_keeps_the_metrics_of_an_older_one(tmp_path: Path) -> None:
    for run in range(3):
        file = MetricsFile(tmp_path, first_step=0)
        file.write({"step": 0, "loss": float(run)})
        file.close()
    texts = {path.name: json.loads(path.read_text())["loss"] for path in tmp_path.iterdir()}
    assert texts == {"metrics.1.jsonl": 0.0, "metrics.2.jsonl": 1.0, "metrics.jsonl": 2.0}


def test_the_time_left_does_not_count_the_step_that_compiles() -> None:
    pace = Pace()
    for seconds in (60.0, 2.0, 2.0, 2.0):
        pace.add(seconds)
    assert pace.left(10) == pytest.approx(20.0)


def test_a_bar_shows_the_newest_step_and_notes_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(force_terminal=True, width=160, record=True)
    monkeypatch.setattr(progress, "console", lambda: terminal)
    bar = progress.Bar(10, first_step=4)
    bar.note("note with [brackets]")
    bar.step(replace(STEP, step=4))
    bar.close()
    shown = terminal.export_text()
    assert "note with [brackets]" in shown and "50%" in shown and "loss 3.25000" in shown and "grad norm 1.5" in shown


def test_the_launcher_draws_its_bar_from_new_metrics_only() -> None:
    facts = {**StepMetrics(3, 1.0, 2.0, 0.1, 10, 1.0, 8, 64.0, True).facts(), "time": 100.0}
    assert step_of(facts, since=100.0) == StepMetrics(3, 1.0, 2.0, 0.1, 10, 1.0, 8, 64.0, True)
    assert step_of(facts, since=100.5) is None
    assert step_of({"step": 3, "validation_loss": 1.0, "time": 200.0}, since=100.0) is None
    not_finite = step_of({**replace(STEP, loss=math.nan).facts(), "time": 200.0}, since=100.0)
    assert not_finite is not None and math.isnan(not_finite.loss)


def test_on_a_terminal_the_launcher_shows_the_log_above_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(force_terminal=True, width=160, record=True)
    monkeypatch.setattr(progress, "console", lambda: terminal)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    config = config_with(tmp_path, watch__folder=str(tmp_path / "watch"), train__steps=4)
    display = LaunchDisplay(config)
    display.line("loading the model")
    display.line("step 1/4  which the bar shows")
    file = MetricsFile(tmp_path / "watch", first_step=0)
    for step in range(2):
        file.write(replace(STEP, step=step, loss=7.5 - step).facts())
        display.poll()
    file.close()
    display.close()
    shown = terminal.export_text()
    assert "loading the model" in shown and "which the bar shows" not in shown and "50%" in shown and "loss 6.50000" in shown


def test_the_launcher_passes_a_log_on_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = LaunchDisplay(config_with(tmp_path))
    display.line("step 1/2 and all")
    display.line("[INFO] DISTRIBUTED(25003,7f6fee7fc6c0,python): [mindspore/ccsrc/cluster/rpc/core/communicator/tcp_client.cc:367] Start")
    display.line("[WARNING] a line of MindSpore that may matter")
    display.poll()
    display.close()
    assert capsys.readouterr().out == "step 1/2 and all\n[WARNING] a line of MindSpore that may matter\n"


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    watch = watch_in(tmp_path, watch__tensorboard=True)
    watch.step(replace(STEP, step=5))
    watch.validation(6, 2.5)
    watch.close()
    found = scalars(tmp_path / "watch" / "tensorboard")
    assert found[("loss", 5)] == 3.25 and found[("grad_norm", 5)] == 1.5 and found[("validation_loss", 6)] == 2.5
    assert found[("tokens_per_second", 5)] == 2048.0 and found[("learning_rate", 5)] == pytest.approx(2.5e-4)


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """The scalars of an event file: TFRecord framing, `tensorflow/core/lib/io/record_writer.h`."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    content, place = path.read_bytes(), 0
    found: dict[tuple[str, int], float] = {}
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        event = Event.FromString(content[place + 12 : place + 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        place += length + 16
    return found


def test_without_profile_nothing_is_wrapped(tmp_path: Path) -> None:
    with profiled(config_with(tmp_path, watch__folder=str(tmp_path / "watch")), 0):
        pass
    assert not (tmp_path / "watch").exists()


PROFILED = """
import sys
import numpy as np
from mindspore import Tensor, ops
from train.watch import profiled
from tests.train.configs import config_with
from pathlib import Path
folder = Path(sys.argv[1])
with profiled(config_with(folder, watch__folder=str(folder / "watch"), watch__profile=True), 3):
    ops.matmul(Tensor(np.ones((64, 64), np.float32)), Tensor(np.ones((64, 64), np.float32))).asnumpy()
"""


@pytest.mark.slow
def test_a_profile_of_each_rank_names_its_operators(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", PROFILED, str(tmp_path)], check=True, capture_output=True, cwd=Path(__file__).parents[2])
    tables = list((tmp_path / "watch" / "profile" / "rank_3").rglob("cpu_op_type_info_*.csv"))
    assert tables and any("MatMul" in table.read_text() for table in tables)
