"""Every rule of the doctor, on a made-up machine: a healthy one gives no finding, and each rule broken alone gives its finding alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter.doctor.examine import RULES, Examination
from tests.converter.fake_machine import OTHER, OWN, FakeMachine, cpu_machine, healthy_machine
from train.machine_check import examine_system

Break = Callable[[FakeMachine], object]
CANN = "usr/local/Ascend/cann"


def examined(machine: FakeMachine) -> Examination:
    table = machine.write_table()
    return examine_system(machine.system, None if table is None else str(table), str(machine.write_config()))


def older_machine(root: Path) -> FakeMachine:
    """The same with a MindSpore and a CANN of the time when CANN bounded Python, numpy and protobuf."""
    machine = healthy_machine(root)
    machine.install_cann("8.1.RC1")
    machine.install_mindspore("2.7.0", ("8.1",), "8.1.RC1", ("numpy>=1.20.0", "protobuf>=3.13.0"))
    machine.install("protobuf", "3.20.3")
    machine.install("numpy", "1.24.4")
    return machine


def setting(name: str, value: str, **others: str) -> Break:
    return lambda machine: machine.environment.update({name: value, **others})


def config(table: str, key: str, value: object) -> Break:
    return lambda machine: machine.config[table].update({key: value})


def unset(name: str) -> Break:
    return lambda machine: machine.environment.pop(name)


def package(name: str, version: str) -> Break:
    return lambda machine: machine.install(name, version)


def without(path: str) -> Break:
    def remove(machine: FakeMachine) -> None:
        for found in sorted(machine.root.glob(path), reverse=True):
            found.rmdir() if found.is_dir() else found.unlink()

    return remove


def all_of(*steps: Break) -> Break:
    return lambda machine: [step(machine) for step in steps]


def own_server(machine: FakeMachine) -> dict[str, Any]:
    """This host's entry in the table."""
    assert machine.table is not None
    entry: dict[str, Any] = machine.table["server_list"][0]
    return entry


def no_cann(machine: FakeMachine) -> None:
    shutil.rmtree(machine.root / CANN)
    machine.environment.clear()


def two_canns(machine: FakeMachine) -> None:
    machine.install_mindspore("2.3.0", ("9.1",))
    for name in ("ascend-toolkit", "nnae"):
        machine.write(f"usr/local/Ascend/{name}/set_env.sh")


def one_address_for_two(machine: FakeMachine) -> None:
    machine.write("etc/hccn.conf", "".join(f"address_{n}=192.168.1.{100 + n // 2}\n" for n in range(3)) + "address_3=192.168.1.103\n")
    machine.table = None


def large_run(machine: FakeMachine) -> None:
    machine.config["parallel"] |= {"dp": 64, "tp": 1, "pp": 4, "micro_batches": 4}
    machine.config["train"]["global_batch"] = 256
    machine.config["launch"] |= {"nnodes": 64, "node_timeout": 300}
    machine.table = None


BREAKS: dict[str, Break] = {
    "python-mindspore": lambda machine: setattr(machine, "python", "3.13.1"),
    "mindspore-requirements": package("protobuf", "5.29.0"),
    "numpy-2": package("numpy", "2.1.0"),
    "cann-version": lambda machine: machine.install_cann("9.2.0"),
    "cann-list": lambda machine: machine.install_mindspore(accepted=None),
    "custom-ops-version": lambda machine: machine.install_mindspore(custom_ops="9.0.0"),
    "own-requirements": package("torch", "2.5.1"),
    "safetensors-views": package("safetensors", "0.8.0"),
    "te-stale": package("te", "0.4.0"),
    "mindspore-shadow": lambda machine: machine.write("home/user/mindspore/train.py"),
    "libgomp": without("usr/lib64/libgomp.so.1"),
    "driver-missing": without("usr/local/Ascend/driver/version.info"),
    "devices-missing": without("dev/davinci?"),
    "cann-missing": no_cann,
    "cann-not-set-up": all_of(unset("ASCEND_HOME_PATH"), unset("ASCEND_TOOLKIT_HOME")),
    "cann-version-unknown": without(f"{CANN}/compiler/version.info"),
    "cann-two-homes": setting("ASCEND_TOOLKIT_HOME", "/usr/local/Ascend/ascend-toolkit/8.2"),
    "env-pythonpath": setting("PYTHONPATH", "/usr/local/Ascend/cann/python/site-packages"),
    "env-te": without(f"{CANN}/python/site-packages/te"),
    "env-library-path": setting("LD_LIBRARY_PATH", "/usr/lib:/usr/local/lib64old"),
    "env-opp-path": unset("ASCEND_OPP_PATH"),
    "npu-smi": lambda machine: machine.write_tool("npu-smi", "echo dcmi module initialize failed. ret is -8005; exit 255"),
    "npu-health": lambda machine: machine.show_npus(health={2: "Alarm"}),
    "npu-busy": lambda machine: machine.show_npus(processes={1: 4711}),
    "npu-network": lambda machine: machine.show_network("Receive timeout"),
    "device-address-twice": one_address_for_two,
    "device-address": lambda machine: machine.write(
        "etc/hccn.conf", "address_0=192.168.1.100\naddress_1=192.168.1.101\naddress_2=192.168.1.102\n"
    ),
    "env-numbers": setting("RANK_ID", "three"),
    "rank-beyond-size": setting("RANK_ID", "8"),
    "device-id": setting("DEVICE_ID", "4"),
    "visible-devices": setting("ASCEND_RT_VISIBLE_DEVICES", "3,2,1,0"),
    "rank-table-file": setting("RANK_TABLE_FILE", "/home/user/hccl.json"),
    "mindformers-mindspore": all_of(package("mindformers", "1.3.2"), lambda machine: setattr(machine, "table", None)),
    "rank-table-deprecated": package("mindformers", "1.7.0"),
    "two-ways-to-start": setting("RANK_TABLE_FILE", "rank_table.json", MS_ROLE="MS_WORKER"),
    "cluster-variables": setting("RANK_ID", "1", CM_CHIEF_IP=OWN),
    "rank-table-not-here": lambda machine: own_server(machine).update(server_id="10.0.0.0"),
    "rank-table-address": lambda machine: own_server(machine)["device"][3].update(device_ip="192.168.9.9"),
    "rank-table-device": lambda machine: own_server(machine)["device"][3].update(device_id="7"),
    "rank-and-device": setting("RANK_ID", "2", DEVICE_ID="1"),
    "env-hccl-unknown": setting("HCCL_CONNECT_TIME_OUT", "600"),
    "hccl-family-alone": setting("HCCL_SOCKET_FAMILY", "AF_INET"),
    "hccl-interface": setting("HCCL_SOCKET_IFNAME", "enp,ib"),
    "hccl-pcie-and-roce": setting("HCCL_INTRA_PCIE_ENABLE", "1", HCCL_INTRA_ROCE_ENABLE="1"),
    "hccl-aiv-timeout": setting("HCCL_EXEC_TIMEOUT", "1836", HCCL_OP_EXPANSION_MODE="AIV"),
    "hccl-port-range": setting("HCCL_HOST_SOCKET_PORT_RANGE", "60000-60050,60040-60060"),
    "hccl-ports-open": lambda machine: machine.write("proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60015\n"),
    "hccl-ports-busy": lambda machine: machine.listen_on(60031),
    "hccl-buffers": setting("HCCL_BUFFSIZE", "2000"),
    "env-overflow-mode": setting("MS_ASCEND_CHECK_OVERFLOW_MODE", "INFNAN"),
    "blocking-launch": setting("ASCEND_LAUNCH_BLOCKING", "1"),
    "env-protobuf-cpp": setting("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "cpp"),
    "hccl-strict-saturation": setting("HCCL_DETERMINISTIC", "strict", MS_ASCEND_CHECK_OVERFLOW_MODE="SATURATION_MODE"),
    "hccl-whitelist": setting("HCCL_WHITELIST_DISABLE", "0"),
    "env-HCCL_CONNECT_TIMEOUT": setting("HCCL_CONNECT_TIMEOUT", "119"),
    "env-HCCL_EXEC_TIMEOUT": setting("HCCL_EXEC_TIMEOUT", "-1"),
    "env-HCCL_IF_BASE_PORT": setting("HCCL_IF_BASE_PORT", "65521"),
    "env-HCCL_RDMA_TIMEOUT": setting("HCCL_RDMA_TIMEOUT", "21"),
    "env-HCCL_RDMA_RETRY_CNT": setting("HCCL_RDMA_RETRY_CNT", "8"),
    "env-HCCL_RDMA_TC": setting("HCCL_RDMA_TC", "130"),
    "env-HCCL_RDMA_SL": setting("HCCL_RDMA_SL", "8"),
    "env-HCCL_BUFFSIZE": setting("HCCL_BUFFSIZE", "0"),
    "env-HCCL_INTRA_PCIE_ENABLE": setting("HCCL_INTRA_PCIE_ENABLE", "yes"),
    "env-HCCL_INTRA_ROCE_ENABLE": setting("HCCL_INTRA_ROCE_ENABLE", "2"),
    "env-HCCL_WHITELIST_DISABLE": setting("HCCL_WHITELIST_DISABLE", "true"),
    "env-HCCL_SOCKET_FAMILY": setting("HCCL_SOCKET_FAMILY", "IPv4", HCCL_SOCKET_IFNAME="eth"),
    "env-HCCL_DETERMINISTIC": setting("HCCL_DETERMINISTIC", "1"),
    "env-HCCL_OP_EXPANSION_MODE": setting("HCCL_OP_EXPANSION_MODE", "aicpu"),
    "env-HCCL_IF_IP": setting("HCCL_IF_IP", "eth0"),
    "host-name": lambda machine: setattr(machine, "hostname", "localhost"),
    "scheduler-variables": setting("MS_SCHED_PORT", "80"),
    "run-nodes": config("launch", "nnodes", 3),
    "run-ranks": all_of(config("launch", "nnodes", 1), config("launch", "node_rank", None)),
    "run-table": config("parallel", "dp", 1),
    "run-node-rank": config("launch", "node_rank", None),
    "run-master": config("launch", "master_addr", "nowhere"),
    "run-master-loopback": config("launch", "master_addr", "127.0.1.1"),
    "run-master-elsewhere": config("launch", "master_addr", OTHER),
    "run-port": lambda machine: machine.listen_on(8118),
    "run-node-timeout": large_run,
    "run-reads": config("data", "path", "/shared/corpus"),
    "run-writes": lambda machine: setattr(machine, "locked", "shared/checkpoints"),
    "run-not-shared": config("checkpoint", "folder", "/home/user/checkpoints"),
    "run-disk": lambda machine: setattr(machine, "free", 2999),
}
BREAKS["nnae-and-toolkit"] = two_canns
ALSO = {"nnae-and-toolkit": {"own-requirements"}}
"""The rule is for a MindSpore that is older than what ms-convert works with, which is another finding."""
BREAKS_OF_CPU: dict[str, Break] = {
    "run-device": config("launch", "device", "ascend"),
    "run-master-ipv6": config("launch", "master_addr", "::1"),
}
BREAKS_OF_OLDER: dict[str, Break] = {
    "python-cann": lambda machine: setattr(machine, "python", "3.11.9"),
    "numpy-cann": package("numpy", "1.26.4"),
    "protobuf-cann": package("protobuf", "4.25.1"),
    "driver-version": lambda machine: machine.write("usr/local/Ascend/driver/version.info", "Version=24.1.0\n"),
}
CASES = [
    *((rule, healthy_machine, broken) for rule, broken in BREAKS.items()),
    *((rule, older_machine, broken) for rule, broken in BREAKS_OF_OLDER.items()),
    *((rule, cpu_machine, broken) for rule, broken in BREAKS_OF_CPU.items()),
]


@pytest.mark.parametrize("build", [healthy_machine, older_machine, cpu_machine])
def test_a_healthy_machine_gives_no_finding(build: Callable[[Path], FakeMachine], tmp_path: Path) -> None:
    examination = examined(build(tmp_path))
    assert examination.findings == ()
    able = {activity.name: not activity.missing for activity in examination.activities}
    assert able.pop("train on Ascend") is (build is not cpu_machine)
    assert all(able.values())


@pytest.mark.parametrize(("rule", "build", "broken"), CASES, ids=[case[0] for case in CASES])
def test_a_rule_broken_alone_gives_its_finding_alone(
    rule: str, build: Callable[[Path], FakeMachine], broken: Break, tmp_path: Path
) -> None:  # fmt: skip
    machine = build(tmp_path)
    broken(machine)
    findings = examined(machine).findings
    assert {finding.rule for finding in findings} == {rule} | ALSO.get(rule, set())
    for finding in findings:
        assert finding.seen and finding.wanted and finding.why
        assert str(tmp_path) not in f"{finding.seen} {finding.wanted} {finding.why} {finding.mend}".replace(str(tmp_path / "home/user"), "")


def test_every_rule_is_broken_by_one_of_these_cases_and_has_a_name_of_its_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(case[0] for case in CASES)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.write_table(), machine.write_config()
    before = {path: (os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in tmp_path.rglob("*")}
    examined_again = examine_system(machine.system, str(machine.home / "rank_table.json"), str(machine.home / "train.toml"))
    assert examined_again.findings == ()
    assert {path: (os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in tmp_path.rglob("*")} == before
