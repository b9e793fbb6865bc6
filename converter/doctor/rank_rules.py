"""Rules on who is who: RANK_ID, DEVICE_ID, visible devices, rank tables, and the variables of other ways to start."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from converter.digits import whole_number
from converter.doctor.ascend_rules import visible_devices
from converter.doctor.rule import Case, Rules, Sight
from converter.doctor.version_rules import fits
from converter.machine.facts import Machine
from converter.rank_table.check import CheckedTable
from converter.rank_table.entries import DeviceEntry, ServerEntry
from converter.untrusted import quoted

RULES = Rules()
NO_DEVICE = "Call aclrtSetDevice failed, ret[107001]. Got device count[8] and device id[9]"
CLUSTER_VARIABLES = ("CM_CHIEF_IP", "CM_CHIEF_PORT", "CM_CHIEF_DEVICE", "CM_WORKER_SIZE", "CM_WORKER_IP")
NUMBERS = ("RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_WORKER_NUM", "MS_NODE_TIMEOUT", "MS_TOPO_TIMEOUT")


def _number(machine: Machine, name: str) -> int | None:
    return whole_number(machine.environment.get(name, ""))


@RULES.rule(
    "env-numbers", "error", source="MindSpore environment variables",
    why="Environment variables RANK_ID should be number; or RuntimeError at the start of the cluster",
)  # fmt: skip
def _numbers(case: Case) -> Iterator[Sight]:
    for name in NUMBERS:
        value = case.machine.environment.get(name)
        if value is not None and _number(case.machine, name) is None:
            yield Sight(f"{name}={quoted(value)}", "a whole number", f"unset {name}", name)


@RULES.rule(
    "rank-beyond-size", "error", source="EI0004 in the HCCL user guide, hcclug_000033",
    why="EI0004: The ranktable or rank is invalid, Reason:[Use a rank ID that exceeds the rank size in the ranktable.]",
)  # fmt: skip
def _rank_beyond_size(case: Case) -> Iterator[Sight]:
    rank, size = _number(case.machine, "RANK_ID"), _number(case.machine, "RANK_SIZE")
    size = case.table.ranks if case.table and case.table.ranks else size
    if rank is not None and size is not None and rank >= size:
        yield Sight(f"RANK_ID={rank} of {size} ranks", f"RANK_ID from 0 to {size - 1}", "unset RANK_ID RANK_SIZE", "RANK_ID")


@RULES.rule("device-id", "error", source="MindSpore FAQ, distributed", why=NO_DEVICE)
def _device_id(case: Case) -> Iterator[Sight]:
    machine, device = case.machine, _number(case.machine, "DEVICE_ID")
    chosen = visible_devices(machine)
    count = len(machine.devices if chosen is None else chosen)
    if device is not None and machine.devices and device >= count:
        yield Sight(f"DEVICE_ID={device} of {count} devices", f"DEVICE_ID from 0 to {count - 1}", "unset DEVICE_ID", "DEVICE_ID")


@RULES.rule("visible-devices", "error", source="CANN environment variable reference: ASCEND_RT_VISIBLE_DEVICES", why=NO_DEVICE)
def _visible_devices(case: Case) -> Iterator[Sight]:
    value = case.machine.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if value is None or not case.machine.devices:
        return
    chosen = visible_devices(case.machine)
    absent = sorted(set(chosen or ()) - set(case.machine.devices))
    if chosen is None or absent or list(chosen) != sorted(set(chosen)):
        wanted = f"some of {','.join(map(str, case.machine.devices))}, rising, each once"
        mend = "export ASCEND_RT_VISIBLE_DEVICES=... or unset it"
        yield Sight(f"ASCEND_RT_VISIBLE_DEVICES={quoted(value)}", wanted, mend, "ASCEND_RT_VISIBLE_DEVICES")


@RULES.rule(
    "rank-table-file", "error", source="MindSpore tutorials/parallel/rank_table.md",
    why="HCCL logs: [Load][File] path ... is not a valid real path",
)  # fmt: skip
def _table_file(case: Case) -> Iterator[Sight]:
    value = case.machine.environment.get("RANK_TABLE_FILE")
    if value is not None and value not in case.machine.existing_files:
        yield Sight(f"RANK_TABLE_FILE={quoted(value)} is no file", "a rank table", "unset RANK_TABLE_FILE", "RANK_TABLE_FILE")


@RULES.rule(
    "rank-table-deprecated", "warning", source="MindFormers 1.2.0 release notes",
    why="MindFormers from 1.2.0 on does not start by rank table any more",
)  # fmt: skip
def _table_deprecated(case: Case) -> Iterator[Sight]:
    version = case.machine.packages.get("mindformers")
    if version is not None and fits(version, ">=1.2.0") and _table_given(case):
        yield Sight(f"a rank table with MindFormers {version}", "msrun", "ms-convert rank-table check FILE   (prints the msrun lines)")


def _table_given(case: Case) -> bool:
    return case.table is not None or "RANK_TABLE_FILE" in case.machine.environment


@RULES.rule(
    "two-ways-to-start", "warning", source="MindSpore tutorials: rank table, dynamic cluster",
    why="the processes wait for a scheduler that nobody starts, or take their ranks from the wrong place",
)  # fmt: skip
def _two_ways(case: Case) -> Iterator[Sight]:
    stray = [name for name in ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT") if name in case.machine.environment]
    if stray and "RANK_TABLE_FILE" in case.machine.environment:
        seen = f"RANK_TABLE_FILE and {', '.join(stray)} are set"
        yield Sight(seen, "a rank table or a dynamic cluster, not both", f"unset {' '.join(stray)}   (or: unset RANK_TABLE_FILE)")


@RULES.rule(
    "cluster-variables", "error", source="envref_07_0050: for TensorFlow, not together with RANK_TABLE_FILE, RANK_ID, RANK_SIZE",
    why="HCCL refuses the communicator: two descriptions of one cluster",
)  # fmt: skip
def _cluster_variables(case: Case) -> Iterator[Sight]:
    environment = case.machine.environment
    own = [name for name in CLUSTER_VARIABLES if name in environment]
    other = [name for name in ("RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE") if name in environment]
    if own and other:
        yield Sight(f"{', '.join(own)} and {', '.join(other)} are set", "one of the two", f"unset {' '.join(own)}")


def _here(case: Case) -> ServerEntry | None:
    """This host's entry in the table."""
    servers = case.table.servers if case.table else ()
    mine = {*case.machine.addresses, case.machine.hostname}
    return next((server for server in servers if server.server_id in mine or server.host_ip in mine), None)


def _devices_here(case: Case) -> tuple[DeviceEntry, ...]:
    here = _here(case)
    return here.devices if here else ()


def _where(table: CheckedTable | None, line: int) -> str:
    return f"{table.path if table else ''}:{line}"


@RULES.rule(
    "rank-table-not-here", "error", source="MindSpore tutorials/parallel/rank_table.md",
    why="EI0004: The ranktable or rank is invalid, or the other hosts wait for this one until they time out",
)  # fmt: skip
def _not_here(case: Case) -> Iterator[Sight]:
    if case.table and case.table.servers and case.machine.devices and _here(case) is None:
        own = ", ".join(address for address in case.machine.addresses if address not in ("127.0.0.1", "::1")) or case.machine.hostname
        yield Sight("no server of the table is this host", f"a server_id that is one of {own}", where=case.table.path)


@RULES.rule(
    "rank-table-address", "error", source="EJ0004 in the HCCL user guide, hcclug_000042",
    why="EJ0004: the IP address(...) in the ranktable is inconsistent with the IP(...)address of the network adapter, please make sure "
    "they're consistent",
)  # fmt: skip
def _table_address(case: Case) -> Iterator[Sight]:
    for device in _devices_here(case):
        real = case.machine.device_addresses.get(-1 if device.device_id is None else device.device_id)
        if real is not None and device.device_ip is not None and ip_address(device.device_ip) != ip_address(real):
            seen = f"device {device.device_id} has {real}, the table says {device.device_ip}"
            yield Sight(seen, f'"device_ip": "{real}"', "", _where(case.table, device.line_of("device_ip")))


@RULES.rule("rank-table-device", "error", source="HCCL user guide: device_id is the physical number", why=NO_DEVICE)
def _table_device(case: Case) -> Iterator[Sight]:
    """Devices that the table gives this host and that it has not, or that ASCEND_RT_VISIBLE_DEVICES hides."""
    chosen = visible_devices(case.machine)
    for device in _devices_here(case):
        if device.device_id is None or not case.machine.devices:
            continue
        where = _where(case.table, device.line_of("device_id"))
        if device.device_id not in case.machine.devices:
            yield Sight(f"device_id {device.device_id}, and no /dev/davinci{device.device_id}", "a device of this host", "", where)
        elif chosen is not None and set(chosen) <= set(case.machine.devices) and device.device_id not in chosen:
            seen = f"device_id {device.device_id} is not among ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, chosen))}"
            yield Sight(seen, "all devices of the table visible", "unset ASCEND_RT_VISIBLE_DEVICES", where)


@RULES.rule(
    "rank-and-device", "error", source="topoinfo_ranktableConcise.cc of HCCL",
    why="EI0004: The ranktable or rank is invalid, Reason:[The ranktable config devId is inconsistent with the local devId.]",
)  # fmt: skip
def _rank_and_device(case: Case) -> Iterator[Sight]:
    """DEVICE_ID counts visible devices, so it is compared only where all of them are visible."""
    rank, own = _number(case.machine, "RANK_ID"), _number(case.machine, "DEVICE_ID")
    if visible_devices(case.machine) is not None or own is None or own not in case.machine.devices:
        return
    for device in _devices_here(case):
        if rank is not None and device.rank_id == rank and device.device_id in case.machine.devices and device.device_id != own:
            seen = f"RANK_ID={rank} with DEVICE_ID={own}"
            mend = f"export DEVICE_ID={device.device_id}"
            yield Sight(seen, f"DEVICE_ID={device.device_id}, as the table has it", mend, _where(case.table, device.line))
