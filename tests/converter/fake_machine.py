"""A made-up machine below a folder: what an Ascend host has in /usr/local, /etc, /dev, /proc and /sys, with stub tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converter.machine.system import System

OWN, OTHER = "10.0.0.1", "10.0.0.2"
DEVICES = 4
CHECK_VERSION = """
import mindspore.log
class GPUEnvChecker:
    def __init__(self):
        self.version = ["10.1", "11.1"]
class AscendEnvChecker(EnvChecker):
    def __init__(self, library_path):
        self.library_path = library_path
        self.version = {accepted}
        self.v = ""
"""
PACKAGES = {
    "click": "8.1.7", "ml_dtypes": "0.4.0", "numpy": "1.26.4", "packaging": "24.0", "protobuf": "7.34.1", "rich": "13.7.0",
    "safetensors": "0.7.0", "torch": "2.6.0", "transformers": "4.51.0", "xxhash": "3.4.1",
}  # fmt: skip
CONFIG: dict[str, dict[str, Any]] = {
    "model": {"path": "/shared/model"},
    "data": {"path": "/shared/data"},
    "parallel": {"tp": 2, "pp": 2, "dp": 2, "micro_batches": 2},
    "train": {"steps": 10, "global_batch": 8},
    "checkpoint": {"folder": "/shared/checkpoints", "keep": 2},
    "launch": {"device": "ascend", "nnodes": 2, "node_rank": 0, "master_addr": OWN, "master_port": 8118},
}
NPU_HEADER = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
NPU_ROWS = """| {npu}     {name}               | {health}            | 98.1        32                0    / 0             |
| 0                         | 0000:C{npu}:00.0  | 0           0    / 0          3382 / {memory}         |
+===========================+===============+====================================================+
"""
PROCESS_HEADER = """+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""


def device_ip(server: str, device: int) -> str:
    return f"192.168.{server.rpartition('.')[2]}.{100 + device}"


def healthy_table() -> dict[str, Any]:
    """Two servers with four devices each."""
    servers = []
    for index, server in enumerate((OWN, OTHER)):
        devices = [
            {"device_id": str(device), "device_ip": device_ip(server, device), "rank_id": str(index * DEVICES + device)}
            for device in range(DEVICES)
        ]
        servers.append({"server_id": server, "device": devices})
    return {"version": "1.0", "server_count": "2", "server_list": servers, "status": "completed"}


@dataclass
class FakeMachine:
    """The files below `root`. A test changes them, the fields or the environment, and then asks for the `system`."""

    root: Path
    python: str = "3.11.4"
    hostname: str = "node0"
    environment: dict[str, str] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    free: int = 10**12
    config: dict[str, dict[str, Any]] = field(default_factory=lambda: json.loads(json.dumps(CONFIG)))
    table: dict[str, Any] | None = field(default_factory=healthy_table)
    locked: str = ""

    @property
    def home(self) -> Path:
        return self.root / "home/user"

    @property
    def site(self) -> Path:
        return self.root / "usr/lib/python3/site-packages"

    @property
    def system(self) -> System:
        return System(
            root=self.root,
            environment=self.environment,
            search_path=(str(self.site),),
            folder=self.home,
            python=self.python,
            prefix="/usr",
            architecture="aarch64",
            hostname=self.hostname,
            resolve=lambda name: self.names.get(name, ()),
            free_bytes=lambda _: self.free,
            may_write=lambda path: not self.locked or path != self.root / self.locked,
        )

    def write(self, path: str, text: str = "") -> Path:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        return place

    def write_tool(self, name: str, script: str) -> None:
        self.write(f"usr/local/sbin/{name}", f"#!/bin/sh\n{script}\n").chmod(0o755)

    def install(self, name: str, version: str, **metadata: str | tuple[str, ...]) -> None:
        """A Python package's metadata, in place of another version's."""
        for old in self.site.glob(f"{name}-*.dist-info/METADATA"):
            old.unlink()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        for key, value in metadata.items():
            lines += [f"{key.replace('_', '-')}: {entry}" for entry in ((value,) if isinstance(value, str) else value)]
        self.write(f"{self.site.relative_to(self.root)}/{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")

    def uninstall(self, name: str) -> None:
        for old in self.site.glob(f"{name}-*.dist-info/METADATA"):
            old.unlink()

    def install_mindspore(
        self, version: str = "2.10.0", accepted: tuple[str, ...] | None = ("8.5", "9.0", "9.1"), custom_ops: str = "9.1.0",
        requires: tuple[str, ...] = ("numpy>=1.25.0", "protobuf>=7.34.1", "packaging>=20.0"),
    ) -> None:  # fmt: skip
        self.install("mindspore", version, Requires_Python=">=3.9,<3.13", Requires_Dist=requires)
        package = f"{self.site.relative_to(self.root)}/mindspore"
        source = "" if accepted is None else CHECK_VERSION.format(accepted=list(accepted))
        self.write(f"{package}/run_check/_check_version.py", source)
        self.write(f"{package}/lib/plugin/ascend/custom_ascendc_910b/version.info", f"custom_opp_compiler_version={custom_ops}\n")

    def install_cann(self, version: str = "9.1.0", home: str = "/usr/local/Ascend/cann") -> None:
        """CANN in a folder, and the environment that its set_env.sh makes."""
        self.write(f"{home[1:]}/compiler/version.info", f"Version={version}\nversion_dir=cann\n")
        for folder in ("opp/built-in/op_impl/ai_core/tbe", "lib64", "python/site-packages/te"):
            (self.root / home[1:] / folder).mkdir(parents=True, exist_ok=True)
        self.environment |= {
            "ASCEND_HOME_PATH": home,
            "ASCEND_TOOLKIT_HOME": home,
            "ASCEND_OPP_PATH": f"{home}/opp",
            "LD_LIBRARY_PATH": f"{home}/lib64:/usr/local/Ascend/driver/lib64",
            "PYTHONPATH": f"{home}/python/site-packages:{home}/opp/built-in/op_impl/ai_core/tbe",
        }

    def show_npus(self, health: Mapping[int, str] | None = None, processes: Mapping[int, int] | None = None, name: str = "910B3") -> None:
        """What the stub of npu-smi prints."""
        health, processes = health or {}, processes or {}
        rows = [NPU_ROWS.format(npu=npu, name=name, health=health.get(npu, "OK"), memory=65536) for npu in range(DEVICES)]
        tail = [
            f"| {npu}       0                 | {processes[npu]}         | python                   | 56000                   |"
            if npu in processes
            else f"| No running processes found in NPU {npu}                                                            |"
            for npu in range(DEVICES)
        ]
        self.write("npus.txt", NPU_HEADER + "".join(rows) + PROCESS_HEADER + "\n".join(tail))
        self.write_tool("npu-smi", f"[ \"$1\" = info ] && cat '{self.root}/npus.txt'")

    def show_network(self, health: str = "Success") -> None:
        """What the stub of hccn_tool prints: the health, and no addresses, for those are in hccn.conf."""
        self.write_tool("hccn_tool", f'[ "$3" = -net_health ] && echo "net health status: {health}"')

    def listen_on(self, port: int) -> None:
        self.write("proc/net/tcp", f"  sl  local_address rem_address   st\n   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000\n")

    def write_config(self) -> Path:
        """The config; a key whose value is None is left out."""
        given = {table: {key: value for key, value in keys.items() if value is not None} for table, keys in self.config.items()}
        tables = (
            f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) for table, keys in given.items()
        )
        return self.write("home/user/train.toml", "\n".join(tables))

    def write_table(self) -> Path | None:
        return None if self.table is None else self.write("home/user/rank_table.json", json.dumps(self.table, indent=1))


def healthy_machine(root: Path) -> FakeMachine:
    """An Atlas A2 server with everything as it should be, one of two of a job."""
    machine = FakeMachine(root)
    for name, version in PACKAGES.items():
        machine.install(name, version)
    machine.install_mindspore()
    machine.install_cann()
    machine.write("usr/local/Ascend/driver/version.info", "Version=25.5.0\nascendhal_version=7.35.23\n")
    machine.write("usr/lib64/libgomp.so.1")
    for device in range(DEVICES):
        machine.write(f"dev/davinci{device}")
    machine.write("dev/davinci_manager")
    machine.write("etc/hccn.conf", "".join(f"address_{n}={device_ip(OWN, n)}\nnetmask_{n}=255.255.0.0\n" for n in range(DEVICES)))
    machine.show_npus()
    machine.show_network()
    _write_network(machine)
    machine.write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\nserver:/export /shared nfs4 rw 0 0\n")
    machine.write("shared/model/model.safetensors", "w" * 1000)
    for folder in ("home/user", "shared/data", "shared/checkpoints"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    return machine


def cpu_machine(root: Path) -> FakeMachine:
    """A machine without anything of Ascend's, and a run for its CPU."""
    machine = FakeMachine(root, table=None)
    for name, version in PACKAGES.items():
        machine.install(name, version)
    machine.install_mindspore()
    machine.write("usr/lib64/libgomp.so.1")
    machine.config["launch"] = {"device": "cpu"}
    _write_network(machine)
    machine.write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\n")
    for folder in ("home/user", "shared/model", "shared/data", "shared/checkpoints"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    return machine


def _write_network(machine: FakeMachine) -> None:
    machine.write(
        "proc/net/fib_trie", f"Main:\n        |-- 127.0.0.1\n           /32 host LOCAL\n        |-- {OWN}\n           /32 host LOCAL\n"
    )
    machine.write("proc/sys/net/ipv4/ip_local_reserved_ports", "60000-60031\n")
    machine.write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    machine.listen_on(22)
    for interface in ("eth0", "lo"):
        machine.write(f"sys/class/net/{interface}/address")
    machine.names["node0"] = (OWN,)
