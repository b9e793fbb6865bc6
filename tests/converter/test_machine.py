"""What is read of a machine, against what the tools and the packages themselves say."""

from __future__ import annotations

import os
import socket
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

from converter.doctor.cann_facts import published_driver
from converter.doctor.hccl_variables import VARIABLES, generation, variable_for
from converter.doctor.version_rules import OWN_NEEDS
from converter.machine.ascend import parse_npus, version_in
from converter.machine.network import listening_ports, own_addresses, port_ranges
from converter.machine.packages import accepted_cann, read_mindspore
from converter.machine.probe import probe
from converter.machine.system import System, run_tool, within
from converter.rank_table.sources import hccn_addresses, printed_address
from tests.converter.command_line import REPOSITORY
from tests.converter.fake_machine import healthy_machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

A3 = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.1                   Version: 25.2.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 166.5       38                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3131 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Warning       | -           37                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          26838/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       1                 | 31415         | python3.11               | 23456                   |
| 0       1                 | 31416         | python3.11               | 23456                   |
+===========================+===============+====================================================+
"""
INFERENCE_CARD = """
| npu-smi 25.2.0                                   Version: 25.2.0                                       |
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 2       310P3                 | OK              | NA           45                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1529 / 44280                            |
+-------------------------------+-----------------+------------------------------------------------------+
"""


def test_npu_smi_of_a_card_with_two_chips_gives_each_chip_its_device_memory_and_processes() -> None:
    first, second = parse_npus(A3)
    assert (first.device, first.name, first.health, first.memory_used, first.memory_total, first.processes) == (
        0, "Ascend910", "OK", 3131, 65536, (),
    )  # fmt: skip
    assert (second.npu, second.chip, second.device, second.health, second.memory_used) == (0, 1, 1, "Warning", 26838)
    assert second.processes == (31415, 31416)


def test_npu_smi_of_an_inference_card_gives_its_only_memory() -> None:
    (npu,) = parse_npus(INFERENCE_CARD)
    assert (npu.device, npu.name, npu.memory_used, npu.memory_total) == (0, "310P3", 1529, 44280)


@pytest.mark.parametrize("text", ["", "Process id", "| a | b |\n" * 50, "\x00\xff| 0 0 |", "| 1 910B3 | OK | 3 |\n"])
def test_output_that_is_no_table_shows_no_npu(text: str) -> None:
    assert parse_npus(text) == ()


def test_the_accepted_cann_releases_are_those_that_the_installed_mindspore_checks() -> None:
    from mindspore.run_check._check_version import AscendEnvChecker

    found = read_mindspore(System())
    assert found is not None and found.accepted_cann is not None
    assert list(found.accepted_cann) == AscendEnvChecker(None).version
    assert found.version == version("mindspore")
    assert "numpy>=1.25.0" in found.requirements


def test_a_port_counts_as_used_while_a_socket_listens_on_it_and_only_then() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert port not in listening_ports(System())
        listener.listen()
        assert port in listening_ports(System())


def test_loopback_is_an_address_of_this_host() -> None:
    assert "127.0.0.1" in own_addresses(System())


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("60000-60015,8118\n", [(60000, 60015), (8118, 8118)]),
        ("", []),
        ("\n", []),
        ("60000-", None),
        ("auto", None),
        ("1-2-3", None),
        ("١", None),
    ],
)
def test_port_ranges_are_read_as_the_kernel_writes_them(text: str, ranges: list[tuple[int, int]] | None) -> None:
    assert port_ranges(text) == ranges


def test_a_tool_that_cannot_start_hangs_or_fails_is_a_failure_and_no_exception(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("converter.machine.system.TOOL_SECONDS", 0.2)
    assert run_tool([str(tmp_path / "absent")]).code == -1
    assert run_tool(["sleep", "60"]).code == -1
    assert run_tool(["sh", "-c", "echo no; exit 3"]).code == 3
    assert (within(5.0, lambda: "here", None), within(0.05, lambda: str(threading.Event().wait(30)), "late")) == ("here", "late")


def test_tools_of_the_environment_come_before_those_of_the_driver(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    assert machine.system.tool("npu-smi") == str(tmp_path / "usr/local/sbin/npu-smi")
    machine.write("opt/tools/npu-smi", "#!/bin/sh\n").chmod(0o755)
    machine.environment["PATH"] = "/opt/tools:relative"
    assert machine.system.tool("npu-smi") == str(tmp_path / "opt/tools/npu-smi")
    assert machine.system.tool("nothing") is None


def test_addresses_are_asked_of_hccn_tool_where_hccn_conf_has_none(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.write("etc/hccn.conf", "address_1=192.168.1.101\n")
    machine.write_tool("hccn_tool", 'echo "ipaddr:192.168.9.$2"; echo "netmask:255.255.255.0"')
    assert probe(machine.system).device_addresses == {0: "192.168.9.0", 1: "192.168.1.101", 2: "192.168.9.2", 3: "192.168.9.3"}


def test_the_driver_is_found_where_it_says_that_it_was_installed(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    machine.write("etc/ascend_install.info", "Driver_Install_Type=full\nDriver_Install_Path_Param=/opt/Ascend\n")
    machine.write("opt/Ascend/driver/version.info", "Version=24.1.RC2\n")
    assert probe(machine.system).driver == "24.1.RC2"


def test_a_folder_that_does_not_exist_yet_lies_on_the_filesystem_above_it(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    disks = probe(machine.system, folders=["/shared/new/folder", "new", "/etc"]).disks
    assert {path: (disk.kind, disk.exists) for path, disk in disks.items()} == {
        "/shared/new/folder": ("nfs4", False), "new": ("ext4", False), "/etc": ("ext4", True),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "kind", "allowed"),
    [
        ("HCCL_CONNECT_TIMEOUT", "120", None, True),
        ("HCCL_CONNECT_TIMEOUT", "7200", None, True),
        ("HCCL_CONNECT_TIMEOUT", "7201", None, False),
        ("HCCL_CONNECT_TIMEOUT", "600s", None, False),
        ("HCCL_CONNECT_TIMEOUT", "٦٠٠", None, False),
        ("HCCL_CONNECT_TIMEOUT", "", None, False),
        ("HCCL_EXEC_TIMEOUT", "2147483647", "A2", True),
        ("HCCL_EXEC_TIMEOUT", "2147483648", "A2", False),
        ("HCCL_EXEC_TIMEOUT", "1836", "first", True),
        ("HCCL_EXEC_TIMEOUT", "1800", "first", False),
        ("HCCL_EXEC_TIMEOUT", "0", "first", False),
        ("HCCL_EXEC_TIMEOUT", "1800", "A3", True),
        ("HCCL_RDMA_TIMEOUT", "20", "A2", True),
        ("HCCL_RDMA_TIMEOUT", "24", "A2", False),
        ("HCCL_RDMA_TIMEOUT", "24", "first", True),
        ("HCCL_RDMA_TC", "132", None, True),
        ("HCCL_RDMA_TC", "256", None, False),
        ("HCCL_IF_IP", "fe80::1", None, True),
        ("HCCL_IF_IP", "10.0.0.256", None, False),
        ("HCCL_DETERMINISTIC", "strict", None, True),
    ],
)
def test_a_variable_is_allowed_what_the_reference_allows_it(name: str, value: str, kind: str | None, allowed: bool) -> None:
    (row,) = (variable for variable in VARIABLES if variable.name == name)
    assert variable_for(row, kind).allows(value) is allowed


def test_the_generation_of_a_device_is_told_by_its_name(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    for name, kind in {"910B3": "A2", "910B4-1": "A2", "Ascend910": "A3", "910ProB": "first", "910A": "first", "310P3": None}.items():
        machine.show_npus(name=name)
        assert generation(probe(machine.system).npus) == kind


@pytest.mark.parametrize(
    ("cann", "driver"), [("8.1.RC1", "25.0.RC1"), ("8.0.0", "24.1.0"), ("8.0.RC2.beta1", "24.1.RC2"), ("9.1.0", None), ("x", None)]
)
def test_the_driver_of_a_cann_is_the_one_that_it_was_published_with(cann: str, driver: str | None) -> None:
    assert published_driver(cann) == driver


def test_what_the_doctor_wants_of_optional_packages_is_what_the_project_depends_on() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    stated = [*project["mindspore"], *project["hf"]]
    assert [f"{name}{wanted}" for name, wanted in OWN_NEEDS.items()] == [line for line in stated if not line.startswith("numpy")]


def test_a_fifo_where_a_file_should_be_is_not_waited_for(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    file = tmp_path / "usr/local/Ascend/cann/compiler/version.info"
    file.unlink()
    os.mkfifo(file)
    found = within(10.0, lambda: probe(machine.system), None)
    assert found is not None and found.cann is not None and found.cann.version is None


def test_names_that_the_system_refuses_are_names_of_nothing(tmp_path: Path) -> None:
    machine = healthy_machine(tmp_path)
    long = "/" + "x" * 5000
    for name in ("ASCEND_HOME_PATH", "RANK_TABLE_FILE", "HCCL_WHITELIST_FILE"):
        machine.environment[name] = long
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        machine.environment[name] = f"{machine.environment.get(name, '')}:{long}"
    found = probe(machine.system, folders=(long,))
    assert found.has_te and found.has_libgomp and not found.existing_files
    assert found.cann is not None and found.cann.home == "/usr/local/Ascend/cann" and not found.disks[long].exists


def test_a_value_stands_on_the_line_of_its_key() -> None:
    """Also what keeps the patterns from looking through all blank lines from each of them."""
    assert version_in("Version=\nversion_dir=8.2\n") is None and version_in("Version = 8.2.RC1\r\n") == "8.2.RC1"
    assert hccn_addresses("address_0=\n192.168.1.1\n\taddress_1 = 192.168.1.2 \r\n") == {1: "192.168.1.2"}
    assert printed_address("ipaddr:\n192.168.1.1") is None and printed_address("\n ipaddr:192.168.1.1\r\n") == "192.168.1.1"


def test_numbers_of_any_length_are_no_defect_of_the_reader() -> None:
    row = f"| {'9' * 5000} 910B3 | OK | 1 |\n| 0 | 0000:C1:00.0 | 0 0 / 0 3382 / {'9' * 5000} |\n"
    assert parse_npus(row) == ()


@pytest.mark.parametrize("source", ["(" * 300, "[" * 10_000 + "]" * 10_000, "\x00", "class AscendEnvChecker: pass"])
def test_a_list_of_cann_versions_that_cannot_be_read_is_none(source: str, tmp_path: Path) -> None:
    file = tmp_path / "_check_version.py"
    file.write_text(source, encoding="utf-8")
    assert accepted_cann(file) is None
