"""The launcher, with real msrun and ranks that train nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mappings.errors import Refused
from tests.train.configs import config_with
from train.launch import Launch, plan_launch
from train.msrun import run_job
from train.rank_logs import LogTail, last_error

REPOSITORY = Path(__file__).resolve().parents[2]
WRONG_RANK = 1


def planned(tmp_path: Path, behaviour: str, **values: Any) -> Launch:
    """Two ranks, unless told otherwise, that behave so and note what they see in a folder."""
    (tmp_path / "notes").mkdir(exist_ok=True)
    config = config_with(tmp_path, **({"parallel__tp": 2, "launch__log_folder": str(tmp_path / "logs")} | values))
    return plan_launch(config, [str(Path(__file__).with_name("fake_rank.py")), str(tmp_path / "notes"), behaviour])


def noted(tmp_path: Path, name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((tmp_path / "notes" / f"{name}.json").read_text())
    return facts


def everybody(tmp_path: Path) -> list[int]:
    """The process ids of all that was started."""
    return [json.loads(path.read_text())["pid"] for path in (tmp_path / "notes").glob("*.json")]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; the test's own timeout is the limit."""
    while not condition():
        time.sleep(0.05)


@pytest.mark.slow
def test_every_rank_is_started_and_rank_0_is_heard(tmp_path: Path) -> None:
    heard: list[str] = []
    assert run_job(planned(tmp_path, "succeed", parallel__tp=3), heard.append) == 0
    assert heard == ["hello from rank 0", "the end"]
    facts = [noted(tmp_path, f"rank_{rank}") for rank in range(3)]
    assert [fact["RANK_ID"] for fact in facts] == ["0", "1", "2"] and {fact["MS_WORKER_NUM"] for fact in facts} == {"3"}
    assert noted(tmp_path, "scheduler")["MS_SCHED_PORT"] == facts[0]["MS_SCHED_PORT"] != "8118"
    assert not any(map(psutil.pid_exists, everybody(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("raise", ["exit code 1", "RuntimeError: the tensors do not meet", "_go_wrong"]),
        ("refuse", ["exit code 3", "the data is wrong", "what is wrong", "mend it"]),
        ("kill", ["SIGKILL", "want of memory"]),
    ],
)
def test_a_rank_that_fails_is_named_with_its_reason_and_all_others_are_ended(tmp_path: Path, behaviour: str, words: list[str]) -> None:
    with pytest.raises(Refused) as caught:
        run_job(planned(tmp_path, behaviour), lambda line: None)
    assert caught.value.title == f"rank {WRONG_RANK} failed"
    (problem,) = caught.value.problems
    assert all(word in problem.what for word in words), problem.what
    assert problem.where.endswith(f"worker_{WRONG_RANK}.log") and Path(problem.where).exists()
    assert "a line before" not in problem.what and "[WARNING]" not in problem.what
    assert len(everybody(tmp_path)) == 3 and not any(map(psutil.pid_exists, everybody(tmp_path)))


LAUNCHER = """
import sys
from pathlib import Path
from tests.train.test_launch import planned
from train.msrun import run_job
sys.exit(run_job(planned(Path(sys.argv[1]), "sleep")))
"""


def started_launcher(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A launcher in a process of its own, whose ranks are all at work."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=REPOSITORY, start_new_session=True)
    wait_for(lambda: (tmp_path / "notes").exists() and len(list((tmp_path / "notes").glob("*.json"))) == 3)
    return launcher


def saved(tmp_path: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (tmp_path / "notes").glob("saved_*")}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_every_rank_save_and_end(tmp_path: Path, number: signal.Signals) -> None:
    launcher = started_launcher(tmp_path)
    os.killpg(launcher.pid, number)  # as a terminal does
    assert launcher.wait() == 128 + number
    assert saved(tmp_path) == {"saved_0": str(int(signal.SIGTERM)), "saved_1": str(int(signal.SIGTERM))}
    assert not any(map(psutil.pid_exists, everybody(tmp_path)))


@pytest.mark.slow
def test_a_second_signal_ends_every_rank_at_once(tmp_path: Path) -> None:
    launcher = started_launcher(tmp_path)
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait() == 128 + signal.SIGINT
    wait_for(lambda: not any(map(psutil.pid_exists, everybody(tmp_path))))
    assert saved(tmp_path) == {}


@pytest.mark.slow
def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = started_launcher(tmp_path)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: len(saved(tmp_path)) == 2)
    wait_for(lambda: not any(map(psutil.pid_exists, everybody(tmp_path))))


@pytest.mark.slow
def test_msrun_itself_failing_is_told_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="DNS resolution") as caught:
        run_job(replace(planned(tmp_path, "succeed"), master_addr="no-such-host.invalid"))
    assert caught.value.title == "msrun failed"


def options_of(launch: Launch) -> dict[str, str]:
    return dict(word[2:].split("=", 1) for word in launch.msrun() if word.startswith("--") and "=" in word)


def test_one_host_gets_a_free_port_and_all_ranks(tmp_path: Path) -> None:
    launch = planned(tmp_path, "succeed", parallel__pp=2, parallel__micro_batches=2)
    options = options_of(launch)
    assert (options["worker_num"], options["local_worker_num"], options["master_addr"]) == ("4", "4", "127.0.0.1")
    assert int(options["master_port"]) >= 1024 and options["join"] == "True"
    assert (launch.first_rank, launch.local_ranks) == (0, 4)


def test_each_of_several_hosts_gets_its_share_of_the_ranks(tmp_path: Path) -> None:
    hosts = {"launch__nnodes": 4, "launch__node_rank": 3, "launch__master_addr": "10.1.2.3", "launch__cluster_timeout": 77}
    launch = planned(tmp_path, "succeed", parallel__tp=8, **hosts)
    options = options_of(launch)
    assert (options["worker_num"], options["local_worker_num"], options["node_rank"]) == ("8", "2", "3")
    assert (options["master_addr"], options["master_port"], options["cluster_time_out"]) == ("10.1.2.3", "8118", "77")
    assert launch.first_rank == 6 and launch.log(6).name == "worker_6.log"


def test_hccl_variables_are_for_ascend_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    values = {"launch__hccl_connect_timeout": 600, "launch__hccl_deterministic": True, "launch__hccl_socket_ifname": "eth0"}
    on_cpu = planned(tmp_path, "succeed", **values).environment
    on_ascend = planned(tmp_path, "succeed", launch__device="ascend", **values).environment
    assert not [name for name in on_cpu if name.startswith("HCCL")] and int(on_cpu["OMP_NUM_THREADS"]) >= 1
    hccl = {name: value for name, value in on_ascend.items() if name.startswith("HCCL")}
    assert hccl == {"HCCL_CONNECT_TIMEOUT": "600", "HCCL_DETERMINISTIC": "true", "HCCL_SOCKET_IFNAME": "eth0"}
    assert "OMP_NUM_THREADS" not in on_ascend


def test_ranks_that_are_busy_or_many_are_not_soon_thought_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timeout(**values: Any) -> str | None:
        return planned(tmp_path, "succeed", **values).environment.get("MS_NODE_TIMEOUT")

    monkeypatch.delenv("MS_NODE_TIMEOUT", raising=False)
    assert timeout(parallel__dp=65, train__global_batch=65, launch__device="ascend") == "900"
    assert timeout() == "600" and timeout(launch__device="ascend") is None and timeout(launch__node_timeout=77) == "77"
    monkeypatch.setenv("MS_NODE_TIMEOUT", "45")
    assert timeout() == "45" and timeout(launch__node_timeout=77) == "77"


def test_an_address_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be resolved"):
        planned(tmp_path, "succeed", launch__master_addr="no-such-host.invalid")


def test_a_port_on_which_somebody_listens_is_refused_on_the_host_of_the_scheduler(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(Refused, match="in use"):
            planned(tmp_path, "succeed", launch__master_port=port)
        other = {"launch__nnodes": 2, "launch__node_rank": 1, "launch__master_addr": "10.1.2.3"}
        assert planned(tmp_path, "succeed", launch__master_port=port, **other).master_port == port
    assert planned(tmp_path, "succeed", launch__master_port=port).master_port == port


def test_a_log_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = LogTail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == ["one"]
    with open(path, "ab") as file:
        file.write("o\ndreié\r\nhalf".encode())
    assert tail.lines() == ["two", "dreié"] and tail.lines() == []
    assert tail.lines(ended=True) == ["half"] and tail.lines(ended=True) == []
    path.with_name("b").write_bytes(b"new\nfile\n")
    os.replace(path.with_name("b"), path)
    assert tail.lines() == ["new", "file"]


TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", []),
        ("only\nlines\n", ["only", "lines"]),
        (f"a\n{TRACEBACK}\n  x\nE: 1\n\n{TRACEBACK}\n  y\nE: 2\n", [TRACEBACK, "  y", "E: 2"]),
        (f"{TRACEBACK}\nE: 1\nrefused: no\n  why\n[INFO] bye\n", ["refused: no", "  why"]),
    ],
)
def test_the_reason_is_the_last_error_of_a_log(tmp_path: Path, log: str, expected: list[str]) -> None:
    (tmp_path / "a.log").write_text(log)
    assert last_error(tmp_path / "a.log") == expected


def test_a_missing_log_has_no_reason(tmp_path: Path) -> None:
    assert last_error(tmp_path / "a.log") == []
