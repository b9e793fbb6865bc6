"""Whether HCCL and MindSpore would take a rank table: every problem of a file in one pass, each with its line.

The rules are those of HCCL's own parser (`topoinfo_ranktableConcise.cc`, `topoinfo_ranktableParser.cc` in the published cann-hccl sources)
and of the user guides (HCCL hcclug_000014, MindSpore tutorials/parallel/rank_table.md), whose errors the findings quote.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from converter.findings import Finding
from converter.rank_table.entries import INVALID, ROOT, DeviceEntry, Entry, Findings, ServerEntry, is_address
from converter.rank_table.located_json import Node, Slip, read
from converter.rank_table.order import check_ranks
from converter.rank_table.super_pods import check_super_pods
from converter.untrusted import opened, quoted
from mappings.errors import refuse

_T = TypeVar("_T")
MAX_BYTES = 8 << 20  # 60,000 devices
MAX_ID = 63  # characters of a server_id: shorter than 64, says the guide
MAX_DEVICE_ID = 15  # 16 devices at most are in one server (Atlas A3)


@dataclass(frozen=True)
class CheckedTable:
    """A file, what is in it as far as it could be understood, and every finding."""

    path: str
    version: str | None
    servers: tuple[ServerEntry, ...]
    findings: tuple[Finding, ...]

    @property
    def ranks(self) -> int:
        return sum(len(server.devices) for server in self.servers)


def check_file(path: Path) -> CheckedTable:
    """Checks a file. Raises Refused if it cannot be read or is larger than 8 MiB."""
    with opened(path) as (descriptor, size):
        if size > MAX_BYTES:
            raise refuse(f"larger than {MAX_BYTES >> 20} MiB", str(path), "this is no rank table")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read()
    findings = Findings(path.name)
    if path.suffix != ".json":
        why = "HCCL logs: path ... is not a valid .json file"
        findings.add("file-name", 1, f"the file is called {quoted(path.name)}", wanted="a name that ends in .json", why=why)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        findings.add("json", line, "bytes that are not UTF-8", wanted="a JSON file in UTF-8", why=NO_JSON)
        return CheckedTable(str(path), None, (), tuple(findings.found))
    version, servers = _check_text(text, findings)
    return CheckedTable(str(path), version, servers, tuple(sorted(findings.found, key=_line)))


NO_JSON = f"{INVALID} Reason:[Invalid ranktable format.]"


def _line(finding: Finding) -> int:
    return int(finding.where.rpartition(":")[2])


def _check_text(text: str, findings: Findings) -> tuple[str | None, tuple[ServerEntry, ...]]:
    document, slips = read(text)
    for slip in slips:
        findings.add("json", slip.line, slip.what, wanted="JSON, without comments", why=NO_JSON, mend=_mend(slip))
    return (None, ()) if document is None else _check_document(document, findings)


def _mend(slip: Slip) -> str:
    return "delete it" if slip.what.startswith("a ") else ""


def _check_document(document: Node, findings: Findings) -> tuple[str | None, tuple[ServerEntry, ...]]:
    root = Entry(document, ROOT, findings)
    if not isinstance(document.value, dict):
        return None, ()
    _check_status(root, findings)
    version = _check_version(root, findings)
    servers = tuple(_server(entry, version, findings) for entry in root.entries("server_list"))
    _check_count(root, len(servers), findings)
    _check_servers(servers, findings)
    _check_device_addresses(servers, findings)
    check_ranks(servers, findings)
    if version == "1.2":
        check_super_pods(root, servers, findings)
    elif root.has("super_pod_list"):
        findings.add(
            "version", root.line_of("super_pod_list"), f"a super_pod_list in a table of version {version}", wanted='"version": "1.2"',
            why="HCCL does not read the super-pods of another version: devices of a super-pod then talk over the slower network",
            severity="warning",
        )  # fmt: skip
    return version, servers


def _check_status(root: Entry, findings: Findings) -> None:
    status = root.text("status")
    if status not in (None, "completed"):
        why = "HCCL waits for the table and gives up. It logs: Load ranktable file[...] timeout"
        findings.add("status", root.line_of("status"), f"status is {quoted(str(status))}", wanted='"status": "completed"', why=why)


def _check_version(root: Entry, findings: Findings) -> str | None:
    version = root.text("version")
    if version not in (None, "1.0", "1.2"):
        wanted = '"1.0", or "1.2" for super-pods'
        findings.add("version", root.line_of("version"), f"version is {quoted(str(version))}", wanted=wanted, why=INVALID)
    return version


def _check_count(root: Entry, servers: int, findings: Findings) -> None:
    count = root.number("server_count")
    if count is not None and servers and count != servers:
        why = f"{INVALID} Reason:[The 'server_count' in ranktable is invalid.]"
        seen = f"server_count is {count}, server_list has {servers} {'entry' if servers == 1 else 'entries'}"
        findings.add("server-count", root.line_of("server_count"), seen, wanted=f'"server_count": "{servers}"', why=why)


def _server(entry: Entry, version: str | None, findings: Findings) -> ServerEntry:
    server_id = entry.text("server_id")
    line = entry.line_of("server_id")
    if server_id is not None and not 0 < len(server_id) <= MAX_ID:
        findings.add("server-id", line, f"a server_id of {len(server_id)} characters", wanted=f"1 to {MAX_ID}", why=INVALID)
    elif server_id is not None and not is_address(server_id):
        why = "MindSpore's guide and older HCCL take the host's IP address; CANN 8 and later take any unique name, so this may be right"
        findings.add(
            "server-id", line, f"server_id is {quoted(server_id)}", wanted="the IP address of the host", why=why, severity="warning"
        )
    devices = tuple(_device(device, version) for device in entry.entries("device"))
    _check_unique_devices(server_id, devices, findings)
    return ServerEntry(line, server_id, entry.address("host_ip", needed=False), devices)


def _device(entry: Entry, version: str | None) -> DeviceEntry:
    for port in ("device_port", "host_port", "backup_device_port"):
        entry.number(port, needed=False, low=1, high=65535)
    entry.address("backup_device_ip", needed=False)
    return DeviceEntry(
        line=entry.line,
        device_id=entry.number("device_id", high=MAX_DEVICE_ID),
        rank_id=entry.number("rank_id"),
        device_ip=entry.address("device_ip", needed=False),
        super_device_id=entry.number("super_device_id", needed=version == "1.2"),
        lines=entry.lines,
    )


def _check_unique_devices(server_id: str | None, devices: tuple[DeviceEntry, ...], findings: Findings) -> None:
    for device, first in _repeated((device, device.device_id) for device in devices):
        findings.add(
            "device-id", device.line_of("device_id"),
            f"device_id {device.device_id} again in server {quoted(server_id or '')}, first on line {first.line_of('device_id')}",
            wanted="the physical number of each device once: N of /dev/davinciN", why="two ranks would open one device",
        )  # fmt: skip


def _check_servers(servers: tuple[ServerEntry, ...], findings: Findings) -> None:
    for server, first in _repeated((server, server.server_id) for server in servers):
        why = f"{INVALID} Reason:[The serverId is used repeatedly.]"
        seen = f"server_id {quoted(server.server_id or '')} again, first on line {first.line}"
        findings.add("server-id", server.line, seen, wanted="one entry for each server", why=why)
    counts = {len(server.devices) for server in servers if server.devices}
    if len(counts) > 1:
        seen = f"servers with {' and '.join(map(str, sorted(counts)))} devices"
        why = "ms-train starts the same number of ranks on each host, and HCCL's hierarchical algorithms want it so"
        findings.add("device-count", servers[0].line, seen, wanted="the same number on each server", why=why, severity="warning")


def _check_device_addresses(servers: tuple[ServerEntry, ...], findings: Findings) -> None:
    devices = [device for server in servers for device in server.devices]
    for device, first in _repeated((device, device.device_ip and ipaddress.ip_address(device.device_ip)) for device in devices):
        why = f"{INVALID} Reason:[The IP is used repeatedly.]"
        seen = f"device_ip {device.device_ip} again, first on line {first.line_of('device_ip')}"
        findings.add(
            "device-ip",
            device.line_of("device_ip"),
            seen,
            wanted="the address of each device's own network port",
            why=why,
            mend=ASK_ADDRESS,
        )
    _check_missing_addresses(servers, findings)
    families = {ipaddress.ip_address(device.device_ip).version for device in devices if device.device_ip}
    if len(families) > 1:
        why = "EI0001: RankIpFamily rank[...] device ip family[...] is not same with others[...]"
        findings.add("device-ip", devices[0].line, "IPv4 and IPv6 device addresses in one table", wanted="one kind", why=why)


ASK_ADDRESS = "on the server: hccn_tool -i DEVICE_ID -ip -g   (or address_N in /etc/hccn.conf)"


def _check_missing_addresses(servers: tuple[ServerEntry, ...], findings: Findings) -> None:
    for device in (device for server in servers for device in server.devices if "device_ip" not in device.lines):
        why = f"{INVALID} Reason:[The 'device_ip' in ranktable is not set or is not a valid ip address.]"
        if len(servers) == 1:
            why += " Within one server HCCL can do without, as long as HCCL_INTRA_ROCE_ENABLE is off."
        findings.add(
            "device-ip", device.line, f"no device_ip for rank {device.rank_id}", wanted='"device_ip": "..."', why=why,
            mend=ASK_ADDRESS, severity="error" if len(servers) > 1 else "warning",
        )  # fmt: skip


def _repeated(items: Iterator[tuple[_T, object]]) -> Iterator[tuple[_T, _T]]:
    """Those whose key was there before, each with the one that had it first. None is no key."""
    first: dict[object, _T] = {}
    for item, key in items:
        if key is not None and first.setdefault(key, item) is not item:
            yield item, first[key]
