"""`ms-convert doctor` as a user calls it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from converter.doctor.display import show_examination
from converter.machine.system import System
from tests.converter.command_line import ms_convert, refused
from tests.converter.fake_machine import FakeMachine, cpu_machine, healthy_machine
from train.machine_check import examine_system

ON_A_CPU = {
    "convert between Hugging Face and MindSpore",
    "verify: compare every bit",
    "verify --forward: run both models",
    "train on this machine's CPU",
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the command look at a made-up machine."""

    def look_at(machine: FakeMachine) -> None:
        system = machine.system
        monkeypatch.setattr("converter.machine.system.System", lambda: system)

    return look_at


def test_without_ascend_it_says_what_is_missing_for_it_and_that_conversion_verification_and_cpu_training_work(
    on: Any, tmp_path: Path
) -> None:
    on(cpu_machine(tmp_path))
    ran = ms_convert("doctor")
    assert ran.code == 0
    assert "Ascend    none on this machine" in ran.out
    for name in ON_A_CPU:
        assert f"  yes  {name}" in ran.out
    assert "  no   train on Ascend; wanted: an NPU (/dev/davinciN); the driver (/usr/local/Ascend/driver); CANN 8.5, 9.0, 9.1" in ran.out


def test_on_the_machine_that_runs_this_the_real_packages_are_found_to_work() -> None:
    ran = ms_convert("doctor", "--json")
    able = {activity["name"] for activity in ran.facts["activities"] if activity["works"]}
    assert able >= ON_A_CPU
    assert ran.code == 0 and ran.facts["errors"] == 0
    assert ran.facts["machine"]["accepted_cann"]


def test_a_finding_says_what_was_seen_what_is_wanted_the_error_it_would_cause_and_the_mend(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.install_cann("9.2.0")
    on(machine)
    ran = ms_convert("doctor")
    assert ran.code == 1
    assert "error  CANN 9.2.0 in /usr/local/Ascend/cann  cann-version" in ran.out
    assert "wanted  CANN 8.5, 9.0, 9.1 (MindSpore 2.10.0's own list)" in ran.out
    assert "does not match, the version of software package expect one of" in ran.out
    assert "mend    install one of these, and source its set_env.sh" in ran.out
    assert "train on Ascend; wanted: 1 error mended" in ran.out


def test_warnings_do_not_fail_and_contradictions_between_vendors_say_whom_to_follow(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.install_mindspore(accepted=("8.2", "9.0"), custom_ops="9.0.0")
    machine.install_cann("9.0.0")
    on(machine)
    ran = ms_convert("doctor", "--json")
    assert ran.code == 0
    (finding,) = ran.facts["findings"]
    assert (finding["rule"], finding["severity"]) == ("protobuf-cann", "warning")
    assert finding["mend"].startswith("The two vendors contradict each other: MindSpore 2.10.0 wants protobuf>=7.34.1")


def test_a_wish_of_both_vendors_that_can_be_met_is_a_command(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.install_mindspore(custom_ops="9.0.0", requires=("numpy>=1.25.0", "protobuf>=3.13.0"))
    machine.install_cann("9.0.0")
    on(machine)
    (finding,) = ms_convert("doctor", "--json").facts["findings"]
    assert finding["mend"] == "pip install 'protobuf==3.20.*'"


def test_the_table_that_the_environment_names_is_checked_like_one_that_is_given(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    assert machine.table is not None
    machine.table["status"] = "initializing"
    machine.write_table()
    machine.environment["RANK_TABLE_FILE"] = "/home/user/rank_table.json"
    on(machine)
    ran = ms_convert("doctor", "--json")
    assert [finding["rule"] for finding in ran.facts["findings"]] == ["rank-table-status"]
    assert ran.facts["findings"][0]["where"].startswith("rank_table.json:")


def test_the_variables_that_a_config_gives_the_ranks_count_as_those_of_the_shell(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.config["launch"] |= {"hccl_if_base_port": 50000, "hccl_socket_family": "AF_INET6", "hccl_buffsize": 4000}
    machine.table = None
    on(machine)
    findings = ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"]
    assert {finding["rule"] for finding in findings} == {"hccl-ports-open", "hccl-family-alone", "hccl-buffers"}
    assert "50000-50031" in str(findings)


def test_a_value_on_the_command_line_takes_the_place_of_the_configs(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    on(machine)
    ran = ms_convert("doctor", "--config", machine.write_config(), "--set", "launch.master_addr=10.0.0.9", "--json")
    assert [finding["rule"] for finding in ran.facts["findings"]] == ["run-master-elsewhere"]
    assert ms_convert("doctor", "--set", "launch.node_rank=1").code == 2


def test_on_one_host_the_network_of_the_devices_does_not_matter(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.config["launch"] = {"device": "ascend"}
    machine.config["parallel"]["dp"] = 1
    machine.show_network("Receive timeout")
    machine.write("etc/hccn.conf")
    on(machine)
    assert ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"] == []
    assert {finding["rule"] for finding in ms_convert("doctor", "--json").facts["findings"]} == {"npu-network", "device-address"}


def test_of_very_many_findings_a_screen_is_shown_and_the_rest_counted(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"server_list": [1] * 500}), encoding="utf-8")
    ran = ms_convert("rank-table", "check", file)
    assert ran.out.count("rank-table-") == 60 and "and " in ran.out and "--json has them all" in ran.out


def test_a_config_that_cannot_be_used_is_refused_with_all_its_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[model]\npath = "m"\n[launch]\nmaster_port = 80\nhosts = 2\n', encoding="utf-8")
    message = refused("doctor", "--config", file)
    assert "master_port" in message and "hosts" in message and "data.path" in message
    assert "cannot be read" in refused("doctor", "--rank-table", tmp_path / "absent.json")


def test_words_of_the_machine_cannot_drive_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = healthy_machine(tmp_path)
    machine.hostname = "node\x1b[2J[red]"
    machine.environment["HCCL_BUFFSIZE"] = "\x1b]0;x\x07"
    machine.write_tool("npu-smi", "printf '\\033[31mred'; exit 1")
    show_examination(examine_system(machine.system, None, None))
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().out)


def test_neither_mindspore_nor_torch_nor_numpy_is_imported(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    table, config = machine.write_table(), machine.write_config()
    code = (
        "import sys; from converter.cli import run; run(sys.argv[1:]); "
        "print(sorted({'mindspore', 'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "doctor", "--json", "--rank-table", str(table), "--config", str(config)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(ran.stdout)["findings"]
    assert ran.stderr.strip() == "[]"


def test_a_machine_is_read_below_its_root_alone(tmp_path: Path) -> None:
    empty = System(root=tmp_path, environment={}, search_path=(), folder=tmp_path, hostname="", resolve=lambda name: pytest.fail(name))
    examination = examine_system(empty, None, None)
    assert examination.findings == ()
    assert not examination.case.machine.has_ascend and not examination.case.machine.interfaces


def test_commands_that_mend_take_names_as_one_word_of_the_shell(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.config["launch"]["master_addr"] = hostile = "$(touch pwned);x"
    machine.config["checkpoint"]["folder"] = "/home/user/a;reboot"
    machine.environment["HCCL_;reboot"] = "1"
    on(machine)
    findings = ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"]
    words = {finding["rule"]: shlex.split(finding["mend"]) for finding in findings}
    assert words["run-master"] == ["getent", "hosts", hostile]
    assert words["run-not-shared"] == ["df", "-T", "/home/user/a;reboot"]
    assert words["env-hccl-unknown"] == ["unset", "HCCL_;reboot"]


def test_a_models_link_to_nowhere_does_not_stop_the_examination(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    (tmp_path / "shared/model").mkdir(parents=True, exist_ok=True)
    (tmp_path / "shared/model/model.safetensors").unlink(missing_ok=True)
    (tmp_path / "shared/model/model.safetensors").symlink_to("../../blobs/not-downloaded")
    on(machine)
    assert ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"] == []


def test_the_shells_node_timeout_counts_where_the_config_has_none(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.config["parallel"] |= {"dp": 64, "tp": 1, "pp": 4, "micro_batches": 4}
    machine.config["train"]["global_batch"] = 256
    machine.config["launch"]["nnodes"] = 64
    on(machine)
    assert ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"] == []
    machine.environment["MS_NODE_TIMEOUT"] = "300"
    (finding,) = ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"]
    assert (finding["rule"], finding["where"]) == ("run-node-timeout", "MS_NODE_TIMEOUT")


def test_blocking_launches_are_right_where_the_config_compares_runs(on: Any, tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.environment["ASCEND_LAUNCH_BLOCKING"] = "1"
    on(machine)
    assert [f["rule"] for f in ms_convert("doctor", "--json").facts["findings"]] == ["blocking-launch"]
    machine.config["launch"]["hccl_deterministic"] = True
    assert ms_convert("doctor", "--config", machine.write_config(), "--json").facts["findings"] == []
