"""Rules on HCCL: its variables, one rule each, and what must fit together among them."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator
from itertools import pairwise

from packaging.version import Version

from converter.digits import whole_number
from converter.doctor.cann_facts import as_version
from converter.doctor.hccl_variables import KNOWN, VARIABLES, Variable, generation, variable_for
from converter.doctor.rule import Case, Look, Rules, Sight
from converter.machine.facts import Machine
from converter.machine.network import port_ranges
from converter.untrusted import quoted

RULES = Rules()
REFERENCE = "CANN environment variable reference"
DEFAULT_BASE_PORT = 60000
MAX_AIV_TIMEOUT = 1091
DEFAULT_BUFFER = 200  # MB
MEMORY_LEFT = 0.2  # of a device, beside what MindSpore takes at its start


def _look_at(variable: Variable) -> Look:
    def look(case: Case) -> Iterator[Sight]:
        value = case.machine.environment.get(variable.name)
        row = variable_for(variable, generation(case.machine.npus))
        if value is not None and not row.allows(value):
            yield Sight(f"{row.name}={quoted(value)}", row.wanted, f"export {row.name}=... or unset {row.name}", row.name)

    return look


for _variable in VARIABLES:
    RULES.rule(
        f"env-{_variable.name}", "error", source=REFERENCE, why=f"EI0001: Environment variable [{_variable.name}] is invalid.",
    )(_look_at(_variable))  # fmt: skip


@RULES.rule("env-hccl-unknown", "warning", source=REFERENCE, why="no error: HCCL does not read it, and what was meant is not in force")
def _unknown(case: Case) -> Iterator[Sight]:
    for name in sorted(case.machine.environment):
        if name.startswith("HCCL_") and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1)
            yield Sight(f"{name} is set", near[0] if near else "a variable that HCCL knows", f"unset {shlex.quote(name)}", name)


@RULES.rule("hccl-family-alone", "warning", source="envref_07_0076", why="no error: HCCL ignores it, and IPv4 or IPv6 is chosen by chance")
def _family_alone(case: Case) -> Iterator[Sight]:
    if "HCCL_SOCKET_FAMILY" in case.machine.environment and not case.machine.environment.get("HCCL_SOCKET_IFNAME"):
        mend = "export HCCL_SOCKET_IFNAME=eth0 (your interface)"
        yield Sight("HCCL_SOCKET_FAMILY without HCCL_SOCKET_IFNAME", "both", mend, "HCCL_SOCKET_FAMILY")


@RULES.rule(
    "hccl-interface",
    "error",
    source=REFERENCE,
    why="EI0001: Environment variable [HCCL_SOCKET_IFNAME] is invalid, or no host address is found",
)
def _interface(case: Case) -> Iterator[Sight]:
    value = case.machine.environment.get("HCCL_SOCKET_IFNAME")
    if value and case.machine.interfaces and not _matching(value, case.machine.interfaces):
        wanted = f"one of {', '.join(name for name in case.machine.interfaces if name != 'lo')}"
        yield Sight(f"HCCL_SOCKET_IFNAME={quoted(value)} names no interface here", wanted, "ip -brief address", "HCCL_SOCKET_IFNAME")


def _matching(value: str, interfaces: tuple[str, ...]) -> list[str]:
    """Those that HCCL would take: `eth,enp` are beginnings, `=eth0` whole names, `^eth` and `^=eth0` exclude."""
    excluding, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    pieces = [piece for piece in value.split(",") if piece]
    return [name for name in interfaces if any(name == piece if exact else name.startswith(piece) for piece in pieces) is not excluding]


@RULES.rule(
    "hccl-pcie-and-roce", "error", source=REFERENCE,
    why="EI0001: HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE cannot be both configured to 1",
)  # fmt: skip
def _pcie_and_roce(case: Case) -> Iterator[Sight]:
    names = ("HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE")
    if all(case.machine.environment.get(name) == "1" for name in names):
        yield Sight("both are 1", "one of them", f"unset {names[0]}", " ".join(names))


@RULES.rule("hccl-aiv-timeout", "error", source="envref_07_0078", why="EI0001: Environment variable [HCCL_EXEC_TIMEOUT] is invalid.")
def _aiv_timeout(case: Case) -> Iterator[Sight]:
    value = whole_number(case.machine.environment.get("HCCL_EXEC_TIMEOUT", ""))
    aiv = case.machine.environment.get("HCCL_OP_EXPANSION_MODE") == "AIV"
    if aiv and value is not None and value > MAX_AIV_TIMEOUT:
        seen = f"HCCL_EXEC_TIMEOUT={value} with HCCL_OP_EXPANSION_MODE=AIV"
        yield Sight(seen, f"at most {MAX_AIV_TIMEOUT}", f"export HCCL_EXEC_TIMEOUT={MAX_AIV_TIMEOUT}", "HCCL_EXEC_TIMEOUT")


@RULES.rule("hccl-port-range", "error", source="env_config.cc of HCCL", why="EI0001: ... Please check whether the port range is valid.")
def _port_range(case: Case) -> Iterator[Sight]:
    for name in ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"):
        value = case.machine.environment.get(name)
        if value and value != "auto" and not _valid_ranges(value):
            yield Sight(f"{name}={quoted(value)}", "auto, or ranges as in 60000-60050,61000-61050", f"export {name}=auto", name)


def _valid_ranges(value: str) -> bool:
    ranges = sorted(port_ranges(value) or [])
    ordered = all(first[1] < second[0] for first, second in pairwise(ranges))
    return bool(ranges) and ordered and all(1 <= low <= high <= 65535 for low, high in ranges)


def _host_ports(machine: Machine) -> range | None:
    """The ports that HCCL will take on the host: 16, or 32 from CANN 8.5 on (envref_07_0074). None where a range
    variable says it or the base cannot be read."""
    base = whole_number(machine.environment.get("HCCL_IF_BASE_PORT", str(DEFAULT_BASE_PORT)))
    if machine.environment.get("HCCL_HOST_SOCKET_PORT_RANGE") or base is None or not 1024 <= base <= 65520:
        return None
    release = as_version(machine.cann.release or "") if machine.cann else None
    return range(base, base + (16 if release is not None and release < Version("8.5") else 32))


@RULES.rule(
    "hccl-ports-open", "warning", source="envref_07_0074",
    why="now and then, when the kernel has lent one of them to somebody: EJ0003 or EI0019: Failed to bind the IP port",
)  # fmt: skip
def _ports_open(case: Case) -> Iterator[Sight]:
    machine, ports = case.machine, _host_ports(case.machine)
    low, high = machine.ephemeral_ports
    if ports is None or not machine.devices:
        return
    if any(low <= port <= high and not any(a <= port <= b for a, b in machine.reserved_ports) for port in ports):
        span = f"{ports[0]}-{ports[-1]}"
        keep = ",".join([f"{a}-{b}" for a, b in machine.reserved_ports] + [span])
        mend = f"as root: sysctl -w net.ipv4.ip_local_reserved_ports={keep}"
        yield Sight(f"ports {span} are not reserved, and the kernel hands out {low}-{high}", f"{span} reserved", mend)


@RULES.rule(
    "hccl-ports-busy",
    "error",
    source="envref_07_0074",
    why="EJ0003 or EI0019: Failed to bind the IP port. Reason: The IP address and port have been bound already.",
)
def _ports_busy(case: Case) -> Iterator[Sight]:
    ports = _host_ports(case.machine)
    busy = sorted(case.machine.listening.intersection(ports or ()))
    if busy and case.machine.devices:
        mend = f"ss -ltnp sport = :{busy[0]}; or export HCCL_IF_BASE_PORT=..."
        yield Sight(f"something listens on port {', '.join(map(str, busy))}", "free ports for HCCL", mend, "HCCL_IF_BASE_PORT")


@RULES.rule(
    "hccl-buffers", "warning", source="envref_07_0080: each group takes twice HCCL_BUFFSIZE; MindSpore FAQ: it takes 80 % at its start",
    why="Malloc device memory failed, when a communication group is made",
)  # fmt: skip
def _buffers(case: Case) -> Iterator[Sight]:
    value = whole_number(case.machine.environment.get("HCCL_BUFFSIZE", str(DEFAULT_BUFFER)))
    totals = [npu.memory_total for npu in case.machine.npus if npu.memory_total]
    groups = case.run.groups if case.run else 1
    if not totals or value is None:
        return
    needed, left = 2 * value * groups, int(min(totals) * MEMORY_LEFT)
    if needed > left:
        wanted = f"at most {left} MB, a fifth of the device"
        yield Sight(
            f"HCCL's buffers take {needed} MB: 2 x {value} MB x {groups} groups", wanted, "export HCCL_BUFFSIZE=...", "HCCL_BUFFSIZE"
        )


@RULES.rule(
    "env-overflow-mode", "error", source="MindFormers precision guide", why="no error: overflows are judged by the device's own default"
)
def _overflow_mode(case: Case) -> Iterator[Sight]:
    name = "MS_ASCEND_CHECK_OVERFLOW_MODE"
    value = case.machine.environment.get(name)
    if value is not None and value not in ("SATURATION_MODE", "INFNAN_MODE"):
        yield Sight(f"{name}={quoted(value)}", "SATURATION_MODE or INFNAN_MODE", f"export {name}=INFNAN_MODE", name)


@RULES.rule(
    "blocking-launch", "warning", source="MindFormers precision guide: for comparisons only",
    why="no error: every operator is waited for, and training is slow",
)  # fmt: skip
def _blocking(case: Case) -> Iterator[Sight]:
    deterministic = case.machine.environment.get("HCCL_DETERMINISTIC", "false").lower() != "false"
    if case.machine.environment.get("ASCEND_LAUNCH_BLOCKING") == "1" and case.machine.has_ascend and not deterministic:
        seen, wanted = "ASCEND_LAUNCH_BLOCKING=1 without HCCL_DETERMINISTIC", "both to compare runs bit by bit, neither to train"
        yield Sight(seen, wanted, "unset ASCEND_LAUNCH_BLOCKING   (or: export HCCL_DETERMINISTIC=true)", "ASCEND_LAUNCH_BLOCKING")


@RULES.rule(
    "hccl-strict-saturation", "error", source="envref_07_0099: strict works in INF/NaN mode only",
    why="HCCL refuses the collective, or the order of additions is not kept",
)  # fmt: skip
def _strict_saturation(case: Case) -> Iterator[Sight]:
    environment = case.machine.environment
    if (
        environment.get("HCCL_DETERMINISTIC", "").lower() == "strict"
        and environment.get("MS_ASCEND_CHECK_OVERFLOW_MODE") == "SATURATION_MODE"
    ):
        yield Sight("HCCL_DETERMINISTIC=strict in saturation mode", "INF/NaN mode", "export MS_ASCEND_CHECK_OVERFLOW_MODE=INFNAN_MODE")


@RULES.rule(
    "hccl-whitelist",
    "error",
    source=REFERENCE,
    why="EI0001: Environment variable [HCCL_WHITELIST_FILE] is invalid. Please check env config",
)
def _whitelist(case: Case) -> Iterator[Sight]:
    environment = case.machine.environment
    value = environment.get("HCCL_WHITELIST_FILE")
    if environment.get("HCCL_WHITELIST_DISABLE") == "0" and (value is None or value not in case.machine.existing_files):
        seen = "HCCL_WHITELIST_FILE is not set" if value is None else f"HCCL_WHITELIST_FILE={quoted(value)} does not exist"
        yield Sight(seen, "a file, as HCCL_WHITELIST_DISABLE is 0", "unset HCCL_WHITELIST_DISABLE", "HCCL_WHITELIST_FILE")
